"""What applies to NVIDIA GPUs only: the settings of NVIDIA's device plugin, a CDI specification, what containers get."""
