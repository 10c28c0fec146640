"""What the signals of commands' devices mean; it loads nothing of a command's runs, because every backend's table is read."""

from __future__ import annotations

from scrubber.domain.health.signal_table import COMMON_SIGNALS, ErrorCodeFormat, SignalTable

__all__ = ["COMMAND_SIGNALS"]

COMMAND_SIGNALS = SignalTable(COMMON_SIGNALS.classifications, ErrorCodeFormat(only_by_policy=True))
"""The signals of commands' devices. What an error code means only the administrator can know."""
