"""The parts of the check, each by itself: what it tries, and what counts as passed."""
