"""The ``scrubber`` command, for people and for scripts.

It makes no decisions and touches no device: it sends requests to the service through :mod:`scrubber.api.client`. Data
goes to standard output, everything else to standard error, and the exit code reports the outcome
(:mod:`scrubber.cli.exit_codes`).
"""
