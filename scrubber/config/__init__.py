"""Converts an administrator's input to domain values: policy files and the service's settings."""
