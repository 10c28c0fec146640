"""Telemetry and settings of a command's devices. Signals are found by comparing snapshots at intervals."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from scrubber.adapters.command.answers import Answer, Verb
from scrubber.adapters.command.conditions import COMMAND_SIGNALS
from scrubber.adapters.command.runner import CommandRunner
from scrubber.adapters.signal_stream import SignalBroadcaster, SignalStream
from scrubber.domain.device import Device
from scrubber.domain.errors import ScrubberError
from scrubber.domain.telemetry import Signal, Snapshot

__all__ = ["CommandSettings", "CommandTelemetry"]

_CONDITION = re.compile(r"[a-z][a-z0-9-]{0,62}")
_SETTING = re.compile(r"[a-z][a-z0-9_]{0,62}")
_ERROR_CODE = re.compile(r"[1-9]\d{0,3}")
_ACTIONS = ("none", "reset", "reboot")


class CommandTelemetry:
    """:class:`scrubber.ports.Telemetry`.

    Args:
        devices: returns the devices as last listed.
        interval: returns the seconds between two snapshots that look for new errors.
    """

    def __init__(
        self, runner: CommandRunner, devices: Callable[[], tuple[Device, ...]], *, interval: Callable[[], float]
    ) -> None:
        self._runner = runner
        self._devices = devices
        self._interval = interval
        self._broadcaster = SignalBroadcaster()
        self._errors: dict[str, Mapping[int, int]] = {}
        self._looked_at: dict[str, float] = {}
        self._poller: asyncio.Task[None] | None = None

    async def snapshot(self, device: Device) -> Snapshot:
        answer = await self._runner.run(Verb.TELEMETRY, device)
        settings, defaults = _settings(answer)
        if not settings and Verb.SETTINGS in self._runner.verbs:
            settings, defaults = _settings(await self._runner.run(Verb.SETTINGS, device))
        found = Snapshot(
            device.id,
            errors=_errors(answer),
            ecc_uncorrected=answer.number("eccUncorrected"),
            temperature_celsius=answer.number("temperatureCelsius", maximum=1000),
            recovery_action=_recovery_action(answer),
            settings=settings,
            defaults=defaults,
            conditions=_conditions(answer),
            counters={
                name: answer.part({name: each}, "counters").required_number(name)
                for name, each in answer.mapping("counters").items()
            },
        )
        self._note(device, found.errors)
        return found

    def signals(self) -> SignalStream:
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), name="telemetry of commands")
        return self._broadcaster.subscribe()

    async def close(self) -> None:
        """End the polls and every stream of signals."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait({self._poller})
        self._broadcaster.close()

    async def _poll(self) -> None:
        while True:
            interval = self._interval()
            oldest = asyncio.get_running_loop().time() - interval
            due = [each for each in self._devices() if self._looked_at.get(each.id, oldest) <= oldest]
            await asyncio.gather(*(self._look(device) for device in due))
            await asyncio.sleep(interval)

    async def _look(self, device: Device) -> None:
        with suppress(ScrubberError):  # the check of the device's health reports it
            self._note(device, _errors(await self._runner.run(Verb.TELEMETRY, device)))

    def _note(self, device: Device, errors: Mapping[int, int]) -> None:
        """Publish a signal for each error that occurred since the last look. A count that fell began again."""
        self._looked_at[device.id] = asyncio.get_running_loop().time()
        before, self._errors[device.id] = self._errors.get(device.id, {}), errors
        new = (code for code, times in errors.items() if times and times != before.get(code, 0))
        prefix = COMMAND_SIGNALS.errors.prefix
        self._broadcaster.publish(Signal(device.id, prefix, code) for code in new)


class CommandSettings:
    """:class:`scrubber.ports.Settings`."""

    def __init__(self, runner: CommandRunner) -> None:
        self._runner = runner

    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        if not {Verb.SETTINGS, Verb.SETTINGS_APPLY} <= self._runner.verbs:
            return {}
        now, _ = _settings(await self._runner.run(Verb.SETTINGS, device))
        wanted = {name: value for name, value in expected.items() if name in now}
        if any(now[name] != value for name, value in wanted.items()):
            await self._runner.run(Verb.SETTINGS_APPLY, device, {"settings": wanted})
            now, _ = _settings(await self._runner.run(Verb.SETTINGS, device))
        return {name: now[name] for name in wanted if name in now}


def _errors(answer: Answer) -> dict[int, int]:
    found: dict[int, int] = {}
    for code, times in answer.mapping("errors").items():
        if not _ERROR_CODE.fullmatch(code):
            raise answer.broken(f"the error code {code!r} is not a number from 1 to 9999")
        found[int(code)] = answer.part({code: times}, "errors").required_number(code)
    return {code: times for code, times in found.items() if times}


def _recovery_action(answer: Answer) -> str | None:
    action = answer.text("recoveryAction", "")
    if action and action not in _ACTIONS:
        raise answer.broken(f"recoveryAction is {action!r}, not one of {', '.join(_ACTIONS)}")
    return action or None


def _conditions(answer: Answer) -> dict[str, str]:
    found = answer.text_mapping("conditions")
    odd = next((name for name in found if not _CONDITION.fullmatch(name)), None)
    if odd is not None:
        raise answer.broken(f"the condition {odd!r} is not of lowercase letters, digits and hyphens")
    return found


def _settings(answer: Answer) -> tuple[dict[str, str], dict[str, str]]:
    """Return current values and defaults; a setting without a default is not the service's to restore."""
    now, defaults = answer.text_mapping("settings"), answer.text_mapping("defaults")
    odd = next((name for name in now if not _SETTING.fullmatch(name)), None)
    if odd is not None:
        raise answer.broken(f"the setting {odd!r} is not of lowercase letters, digits and underscores")
    if defaults.keys() != now.keys():
        raise answer.broken("settings and defaults do not have the same names")
    return now, defaults
