"""A node with AMD GPUs without hardware: the kernel's files as plain files, and a library in the place of HIP."""
