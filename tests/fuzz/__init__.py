"""Coverage-guided fuzzing: one target for each parser and entry point, each with an oracle (docs/contributing/fuzzing.md)."""
