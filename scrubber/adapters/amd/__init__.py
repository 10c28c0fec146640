"""AMD Instinct GPUs and partitions of them, from the files of the kernel's driver; memory is cleared through HIP."""
