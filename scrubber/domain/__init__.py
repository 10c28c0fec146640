"""Values and pure decisions. Synchronous; the standard library only; no I/O, no clock, no randomness."""
