"""When a daemon resolves its NVIDIA settings again: at SIGHUP, and when the driver may have moved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from plugin.logs import Logger
from plugin.nvidia.settings import NvidiaPluginSettings, NvidiaSettingsSource
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["SettingsReload"]


class SettingsReload:
    """Waits for a reason to resolve the settings again, resolves them, and logs an error once.

    Args:
        source: None where the settings cannot change.
        hangup: set to resolve all of them.
        driver_interval: seconds between checks of where the driver is.
        wake: further events that end :meth:`wait`.
    """

    def __init__(
        self,
        source: NvidiaSettingsSource | None,
        log: Logger,
        *,
        hangup: asyncio.Event,
        driver_interval: float,
        wake: Sequence[asyncio.Event] = (),
    ) -> None:
        self._source = source
        self._log = log
        self._hangup = hangup
        self._interval = driver_interval if source is not None and source.follows_driver else None
        self._events = (hangup, *wake)
        self._last_error = ""

    async def wait(self) -> bool:
        """Return at an event, or when the driver is to be looked for; whether all settings are to be resolved."""
        waits = [asyncio.ensure_future(each.wait()) for each in self._events]
        try:
            await asyncio.wait(waits, timeout=self._interval, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        requested = self._hangup.is_set()
        self._hangup.clear()
        return requested

    def resolve(self, settings: NvidiaPluginSettings, *, everything: bool) -> NvidiaPluginSettings:
        """Return what :meth:`NvidiaSettingsSource.resolve_again` returns; ``settings`` where they cannot change.

        Raises:
            InvalidConfiguration: the settings cannot be used; the ones in use stay.
        """
        return settings if self._source is None else self._source.resolve_again(settings, everything=everything)

    def log_rejected(self, error: InvalidConfiguration, *, requested: bool) -> None:
        """Log an error once, and again at each request."""
        if requested or str(error) != self._last_error:
            self._log.error("settings.rejected", message=str(error))
        self._last_error = str(error)

    def note_accepted(self) -> None:
        """Note that the settings can be used: the same error is logged again."""
        self._last_error = ""
