"""What a scrub costs on a GPU, measured by ``make gpu-check`` beside what the same GPU can do at best in the same run."""
