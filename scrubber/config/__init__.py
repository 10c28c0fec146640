"""Where bytes from an administrator become domain values: policy files and the service's settings."""
