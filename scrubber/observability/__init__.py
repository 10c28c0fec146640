"""Logs, metrics and traces of both daemons."""
