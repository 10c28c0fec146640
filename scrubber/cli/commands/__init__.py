"""The commands, one subject a module; each module is loaded when its command runs."""
