"""Output formats: tables and messages for people, versioned JSON for scripts."""
