"""Logs, metrics and traces of both daemons: what happened, in a form that other programs read."""
