"""The answers of a command: what each exit status means, and how an answer is read.

Guarantee: a program that misbehaves is reported as a broken command, never as a faulty device and never as a result. An
absent number stays absent; no number is rounded or made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from scrubber.adapters.children.message import Message
from scrubber.domain.errors import (
    BrokenCommand,
    DeviceBusy,
    DeviceFault,
    DeviceLost,
    DriverTimeout,
    Unavailable,
    Unreadable,
)

__all__ = ["API_VERSION", "REQUIRED_VERBS", "Answer", "Verb", "read_answer"]

API_VERSION = "backend.scrubber.dev/v1"
"""Version of the protocol, in every request and every answer."""


class Verb(StrEnum):
    """What a command is asked to do."""

    CAPABILITIES = "capabilities"
    INVENTORY = "inventory"
    HOLDERS = "holders"
    TELEMETRY = "telemetry"
    SETTINGS = "settings"
    SETTINGS_APPLY = "settings-apply"
    ERASE = "erase"
    RESET_PLAN = "reset-plan"
    RESET = "reset"
    DIAGNOSE = "diagnose"


REQUIRED_VERBS = frozenset({Verb.CAPABILITIES, Verb.INVENTORY, Verb.TELEMETRY, Verb.ERASE})
"""Verbs without which no device can be listed, checked and cleared."""

_OK, _FAULT, _HELD, _AWAY, _UNSUPPORTED = 0, 10, 11, 12, 13
_FAULTS: Mapping[str, type[DeviceFault]] = {"lost": DeviceLost, "timeout": DriverTimeout, "failed": Unreadable}
_LONGEST_TEXT = 500


@dataclass(frozen=True, slots=True)
class Answer:
    """The object that a command printed.

    Attributes:
        command: the command and its verb, for messages.
        values: the object.
        seconds: how long the command ran.
        where: what precedes a key in messages, where the object is part of an answer, such as ``devices[0].``.
    """

    command: str
    values: Message
    seconds: float
    where: str = ""

    def broken(self, message: str) -> BrokenCommand:
        """Return the error that this answer is invalid: ``message`` completes "its answer is invalid:".

        The message may contain keys of the answer; characters that a terminal acts on are escaped.
        """
        shown = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in message
        )
        return BrokenCommand(f"{self.command} is broken: its answer is invalid: {shown}.")

    def number(self, key: str, *, maximum: int = 1 << 62) -> int | None:
        """Return a count; None where it is absent.

        Raises:
            BrokenCommand: it is not a non-negative integer.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
            raise self.broken(f"{self.where}{key} is {_shown(value)}, not a whole number from 0 to {maximum}")
        return value

    def required_number(self, key: str) -> int:
        value = self.number(key)
        if value is None:
            raise self.broken(f"{self.where}{key} is missing")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text of one line; ``default`` where it is absent, if there is one.

        Raises:
            BrokenCommand: it is missing, empty, too long or not a text.
        """
        name = f"{self.where}{key}"
        if key not in self.values and default is None:
            raise self.broken(f"{name} is missing")
        value = self.values.get(key, default)
        if isinstance(value, int | float):
            raise self.broken(f"{name} is {_shown(value)}, not a string; quote it")
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not value.isprintable():
            raise self.broken(f"{name} is {_shown(value)}, not a line of at most {_LONGEST_TEXT} characters")
        if not value and value != default:
            raise self.broken(f"{name} is empty")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; empty where it is absent."""
        return tuple(
            Answer(self.command, {name: each}, 0.0, self.where).text(name)
            for name, each in ((f"{key}[{at}]", each) for at, each in enumerate(self.objects(key)))
        )

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.broken(f"{self.where}{key} is {_shown(value)}, not true or false")
        return value

    def mapping(self, key: str) -> dict[str, object]:
        """Return an object; empty where it is absent."""
        value = self.values.get(key, {})
        if not isinstance(value, dict) or len(value) > _LONGEST_TEXT:
            raise self.broken(f"{self.where}{key} is {_shown(value)}, not an object")
        return value

    def text_mapping(self, key: str) -> dict[str, str]:
        """Return an object whose values are texts; empty where it is absent."""
        return {
            name: Answer(self.command, {f"{key}.{name}": each}, 0.0, self.where).text(f"{key}.{name}", "")
            for name, each in self.mapping(key).items()
        }

    def objects(self, key: str) -> list[object]:
        """Return a list; empty where it is absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or len(value) > 4096:
            raise self.broken(f"{self.where}{key} is {_shown(value)}, not a list")
        return value

    def part(self, value: object, where: str) -> Answer:
        """Return an object inside the answer, named ``where`` in messages."""
        if not isinstance(value, dict):
            raise self.broken(f"{self.where}{where} is {_shown(value)}, not an object")
        return Answer(self.command, value, self.seconds, f"{self.where}{where}.")


def read_answer(program: str, verb: Verb, request_id: str, result: Message) -> Answer:
    """Return the answer in the ``result`` of a supervisor.

    Raises:
        DeviceLost, DriverTimeout, Unreadable: the command reports a fault of the device (exit status 10).
        DeviceBusy: the command reports that the device is held (11).
        Unavailable: the command cannot answer now (12).
        BrokenCommand: anything else; no device is at fault.
    """
    command = f"{program} {verb}"
    log = str(result.get("log") or "")
    logged = f" It logged: {log.splitlines()[-1][:_LONGEST_TEXT]}" if log else ""
    broken, status, found = str(result.get("broken") or ""), result.get("status"), result.get("answer")
    if broken:
        raise BrokenCommand(f"{command} is broken: {broken}.{logged}")
    if status not in (_OK, _FAULT, _HELD, _AWAY):
        raise BrokenCommand(f"{command} is broken: {_status_text(verb, status)}.{logged}")
    if not isinstance(found, dict):
        raise BrokenCommand(f"{command} is broken: it printed no JSON object.{logged}")
    seconds = result.get("seconds")
    answer = Answer(command, found, seconds if isinstance(seconds, float) else 0.0)
    if found.get("apiVersion") != API_VERSION or found.get("kind") != "Response":
        raise answer.broken(f'apiVersion must be "{API_VERSION}" and kind "Response"')
    if found.get("id") != request_id:
        raise answer.broken(f"id is {_shown(found.get('id'))}, not that of the request")
    if status == _OK:
        return answer
    message = f"{answer.text('message')} (reported by {command})"
    if status == _HELD:
        raise DeviceBusy(message)
    if status == _AWAY:
        raise Unavailable(message)
    if "code" not in found:
        raise answer.broken(f"code is missing; it is one of {', '.join(_FAULTS)}")
    code = answer.text("code")
    if code not in _FAULTS:
        raise answer.broken(f"code is {_shown(code)}, not one of {', '.join(_FAULTS)}")
    raise _FAULTS[code](message)


def _status_text(verb: Verb, status: object) -> str:
    if status == _UNSUPPORTED:
        why = f"every program must support {verb}" if verb in REQUIRED_VERBS else "its capabilities list the verb"
        return f"it exited with status {_UNSUPPORTED} (verb not supported), but {why}"
    if isinstance(status, int) and status < 0:
        return f"it was ended by signal {-status}"
    return f"it exited with status {status}, which means nothing in the protocol"


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
