"""How answers are written: tables and sentences for people, versioned JSON for scripts."""
