"""Cost of a scrub on a GPU, measured by ``make gpu-check`` against the best rates of the same GPU in the same run."""
