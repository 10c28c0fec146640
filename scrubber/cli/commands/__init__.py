"""The commands, one module per subject; each module is loaded when its command runs."""
