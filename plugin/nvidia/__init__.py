"""What applies only to NVIDIA GPUs: settings of NVIDIA's device plugin, CDI specification, container injection."""
