"""A stand-in for the API server, as far as the plugin uses it."""
