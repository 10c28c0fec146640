"""The parts of the check, one module each: what it tests, and what counts as passed."""
