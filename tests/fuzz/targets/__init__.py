"""The fuzzing targets, one module for each subject."""
