"""The ``scrubber`` command: for people and for their scripts.

It decides nothing and touches no device: it asks the service through :mod:`scrubber.api.client`. Data goes to standard
output, everything else to standard error, and the exit code says what happened (:mod:`scrubber.cli.exit_codes`).
"""
