"""Values and pure decisions. Synchronous; standard library only; no I/O, no clock, no randomness."""
