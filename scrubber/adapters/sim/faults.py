"""The faults of a simulated device: everything that NVIDIA's driver can report about a real one, as values.

Promises: a reset clears what a reset clears on a real GPU and nothing else. Lifetime counters of the device change only
by explicit requests, and outlast resets and :meth:`Faults.without`. Values that no reader could process further are
rejected when they are read, wherever they come from. The driver's child imports this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from scrubber.domain.errors import InvalidRequest, Unreadable

__all__ = [
    "ABSENT",
    "CONDITIONS",
    "CONDITION_CODES",
    "MAX_XID",
    "RECOVERY_ACTIONS",
    "Faults",
    "is_firmware_version",
    "parse_conditions",
    "parse_counters",
]

CONDITIONS = (
    "xid",
    "ecc",
    "lost",
    "stuck",
    "slow-clear",
    "wont-clear",
    "reset",
    "driver-absent",
    "ghost",
    "unkillable",
    "temperature",
    "recovery",
    "condition",
    "firmware",
)
"""What can be cleared, by name; ``condition`` is every code of :attr:`Faults.conditions`, and each can be named too."""

_LIFTED_BY_RESET = frozenset(
    {
        "ecc-mode-pending",
        "fabric-failed",
        "mig-mode-pending",
        "page-retirement-pending",
        "reset-required",
        "row-remap-pending",
    }
)
CONDITION_CODES = _LIFTED_BY_RESET | {
    "event-stream-lost",
    "hw-slowdown",
    "hw-thermal-slowdown",
    "inforom-corrupt",
    "nvlink-down",
    "page-retirement-limit",
    "pcie-generation",
    "pcie-width",
    "power-brake",
    "row-remap-failure",
    "scrub-on-free-disabled",
}
"""Conditions that NVIDIA's backend reports. A driver may report others: they are accepted, and outlast a reset."""

MAX_XID = 9999
"""The highest XID that a policy can name; those of NVIDIA's driver have three digits."""

ABSENT = "absent"
"""Value of the driver's recovery action where the driver is too old to report one."""

RECOVERY_ACTIONS = (
    "none",
    "reset",
    "reboot",
    "drain-p2p",
    "drain-and-reset",
    "imex",
    "bus-reset",
    "system-reboot",
    ABSENT,
)
_RECOVERED_BY_RESET = frozenset({"reset", "drain-and-reset", "bus-reset"})

_Key = TypeVar("_Key", int, str)

_FAULT_ATTRIBUTES = {"xid": "active_xids", "reset": "reset_fails", "condition": "conditions"}
_DEFAULT_TEMPERATURE = 41
_DEFAULT_FIRMWARE = "sim-vbios-1"
_MAX_WORD_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with a device; by default nothing.

    Attributes:
        xid_counts: XID → how often it was raised since the node was created; never decreases.
        active_xids: XID → how often it was raised since it was last cleared.
        ecc: uncorrected ECC errors.
        lost: the device fell off the bus: every request is answered with that.
        stuck: no request about it is ever answered.
        slow_clear: minimum seconds for clearing all of its memory; 0 for full speed.
        wont_clear: bytes that were cleared reappear before they are verified.
        reset_fails: a reset is tried and fails.
        ghost: it is reported as held, and no process can be found.
        unkillable: its holders cannot be killed.
        temperature: in degrees Celsius.
        recovery: the recovery action that the driver requests, one of :data:`RECOVERY_ACTIONS`.
        conditions: further lasting conditions that the driver reports: code → what was read (``pcie-width`` → ``x8 of
            x16``).
        counters: lifetime counters of the device, by name (``retired_pages``).
        firmware: the version of its VBIOS. Only :meth:`without` restores the default.
    """

    xid_counts: Mapping[int, int] = field(default_factory=dict)
    active_xids: Mapping[int, int] = field(default_factory=dict)
    ecc: int = 0
    lost: bool = False
    stuck: bool = False
    slow_clear: float = 0.0
    wont_clear: bool = False
    reset_fails: bool = False
    ghost: bool = False
    unkillable: bool = False
    temperature: int = _DEFAULT_TEMPERATURE
    recovery: str = "none"
    conditions: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    firmware: str = _DEFAULT_FIRMWARE

    def with_xid(self, code: int) -> Faults:
        """Return the faults with one more occurrence of XID ``code``, active."""
        once = {code: 1}
        return replace(
            self, xid_counts=_sum_counts(self.xid_counts, once), active_xids=_sum_counts(self.active_xids, once)
        )

    def after_reset(self) -> Faults:
        """Return the faults that a successful reset leaves.

        It clears XIDs, volatile ECC errors, untraceable use, the driver's request for a reset, and the conditions that
        wait for one. Heat, links, broken rows, and a request for more than a reset stay.
        """
        return replace(
            self,
            active_xids={},
            ecc=0,
            recovery="none" if self.recovery in _RECOVERED_BY_RESET else self.recovery,
            ghost=False,
            conditions={code: read for code, read in self.conditions.items() if code not in _LIFTED_BY_RESET},
        )

    def after_reboot(self) -> Faults:
        """Return the faults that a reboot of the node leaves.

        It clears what a reset clears, and faults of which a driver or a process was the cause.
        """
        new_driver = ABSENT if self.recovery == ABSENT else "none"
        return replace(self.after_reset(), recovery=new_driver, lost=False, stuck=False, unkillable=False)

    def without(self, conditions: Iterable[str]) -> Faults:
        """Clear ``conditions`` (names of :data:`CONDITIONS`, or codes of the device's conditions).

        Counts of the past stay.
        """
        defaults = Faults()
        lifted: dict[str, object] = {"conditions": self.conditions}
        codes: set[str] = set()
        for name in conditions:
            if name not in CONDITIONS:
                codes.add(name)
            elif name != "driver-absent":  # the node's, in its own file
                attribute = _FAULT_ATTRIBUTES.get(name, name.replace("-", "_"))
                lifted[attribute] = getattr(defaults, attribute)
        kept = replace(self, **lifted)  # type: ignore[arg-type]
        return replace(kept, conditions={code: read for code, read in kept.conditions.items() if code not in codes})

    def combined_with(self, parent: Faults) -> Faults:
        """Return the faults of an instance: its own and those of its GPU, ``parent``."""
        return Faults(
            xid_counts=_sum_counts(self.xid_counts, parent.xid_counts),
            active_xids=_sum_counts(self.active_xids, parent.active_xids),
            ecc=self.ecc + parent.ecc,
            lost=self.lost or parent.lost,
            stuck=self.stuck or parent.stuck,
            slow_clear=max(self.slow_clear, parent.slow_clear),
            wont_clear=self.wont_clear or parent.wont_clear,
            reset_fails=self.reset_fails or parent.reset_fails,
            ghost=self.ghost or parent.ghost,
            unkillable=self.unkillable or parent.unkillable,
            temperature=max(self.temperature, parent.temperature),
            recovery=max(self.recovery, parent.recovery, key=_recovery_rank),
            conditions={**parent.conditions, **self.conditions},
            counters=_sum_counts(self.counters, parent.counters),
            firmware=parent.firmware,
        )

    def to_json(self) -> dict[str, object]:
        document = {name: getattr(self, name) for name in _PLAIN}
        document["xids"] = {
            str(code): {"seen": seen, "active": self.active_xids.get(code, 0)}
            for code, seen in sorted(self.xid_counts.items())
        }
        return {**document, "conditions": dict(self.conditions), "counters": dict(self.counters)}

    @classmethod
    def from_json(cls, document: Mapping[str, object], where: str) -> Faults:
        """Return the faults in ``document``; absent keys mean that nothing is wrong.

        Raises:
            Unreadable: a value has the wrong type or is out of range; ``where`` names the file.
        """
        values = {name: document[name] for name in _PLAIN if name in document}
        for name, value in values.items():
            if not isinstance(value, _PLAIN[name]) or (isinstance(value, bool) and _PLAIN[name] is not bool):
                raise Unreadable(f"{where}: {name!r} is invalid ({value!r}).")
            if name in _RANGES and not _RANGES[name][0] <= value <= _RANGES[name][1]:  # type: ignore[operator]
                lowest, highest = _RANGES[name]
                raise Unreadable(f"{where}: {name!r} is out of range ({lowest:g} to {highest:g}).")
        if values.get("recovery", "none") not in RECOVERY_ACTIONS:
            raise Unreadable(f"{where}: 'recovery' must be one of {', '.join(RECOVERY_ACTIONS)}.")
        if "firmware" in values and not is_firmware_version(values["firmware"]):
            raise Unreadable(f"{where}: 'firmware' is invalid ({values['firmware']!r}).")
        seen, active = _xids(document.get("xids", {}), where)
        try:
            conditions = parse_conditions(document.get("conditions", {}))
            counters = parse_counters(document.get("counters", {}))
        except InvalidRequest as error:
            raise Unreadable(f"{where}: {error}") from error
        return cls(xid_counts=seen, active_xids=active, conditions=conditions, counters=counters, **values)  # type: ignore[arg-type]


_PLAIN: Mapping[str, type | tuple[type, ...]] = {
    "ecc": int,
    "lost": bool,
    "stuck": bool,
    "slow_clear": (int, float),
    "wont_clear": bool,
    "reset_fails": bool,
    "ghost": bool,
    "unkillable": bool,
    "temperature": int,
    "recovery": str,
    "firmware": str,
}

_MAX_COUNT = 1 << 53
_RANGES: Mapping[str, tuple[float, float]] = {
    "ecc": (0, _MAX_COUNT),
    "slow_clear": (0, 3600),
    "temperature": (-273, 10_000),
}
"""The valid range of such a number; values outside would not even fit into the ledger."""

_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_COUNTER = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
_XID = re.compile(r"[1-9][0-9]{0,8}")
_FIRMWARE = re.compile(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*")
_MAX_READING_LENGTH = 200


def parse_conditions(document: object) -> dict[str, str]:
    """Parse ``document`` as codes, each with what was read.

    Raises:
        InvalidRequest: a code or a reading is invalid.
    """
    if not isinstance(document, Mapping):
        raise InvalidRequest("'conditions' must be an object of strings.")
    for code, read in document.items():
        if not _is_word(_CODE, code):
            raise InvalidRequest(
                f"{code!r} is not a condition code: use lowercase letters, digits and hyphens, such as pcie-width."
            )
        if code in CONDITIONS or code.startswith("xid-"):
            raise InvalidRequest(f"{code!r} is a separate fault, not a condition code.")
        if not isinstance(read, str) or len(read) > _MAX_READING_LENGTH or not read.isprintable():
            raise InvalidRequest(
                f"The reading of {code!r} must be a single-line string of at most {_MAX_READING_LENGTH} characters."
            )
    return dict(document)


def is_firmware_version(word: object) -> bool:
    """Whether ``word`` is a valid firmware version."""
    return _is_word(_FIRMWARE, word)


def parse_counters(document: object) -> dict[str, int]:
    """Parse ``document`` as counters by name.

    Raises:
        InvalidRequest: a name or a number is invalid.
    """
    if not isinstance(document, Mapping):
        raise InvalidRequest("'counters' must be an object of numbers.")
    for name, value in document.items():
        if not _is_word(_COUNTER, name):
            raise InvalidRequest(
                f"{name!r} is not a counter name: use lowercase letters, digits and underscores, such as retired_pages."
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
            raise InvalidRequest(f"{name!r} must be from 0 to {_MAX_COUNT}, not {value!r}.")
    return dict(document)


def _is_word(pattern: re.Pattern[str], word: object) -> bool:
    return isinstance(word, str) and len(word) <= _MAX_WORD_LENGTH and pattern.fullmatch(word) is not None


def _xids(document: object, where: str) -> tuple[dict[int, int], dict[int, int]]:
    """Return how often each XID was seen, and how often each active one was raised since it was last cleared."""
    if not isinstance(document, dict):
        raise Unreadable(f"{where}: 'xids' is invalid.")
    seen: dict[int, int] = {}
    active: dict[int, int] = {}
    for code, counts in document.items():
        times, active_times = (counts.get("seen"), counts.get("active")) if isinstance(counts, dict) else (None, None)
        if not (_XID.fullmatch(code) and type(times) is int and type(active_times) is int):
            raise Unreadable(f"{where}: 'xids' is invalid.")
        if not (int(code) <= MAX_XID and 1 <= times <= _MAX_COUNT and 0 <= active_times <= times):
            raise Unreadable(f"{where}: 'xids' contains a number that is out of range.")
        seen[int(code)] = times
        if active_times:
            active[int(code)] = active_times
    return seen, active


def _recovery_rank(recovery: str) -> int:
    """Rank a value of :data:`RECOVERY_ACTIONS`: any request is above "absent", which is above "none".

    A missing value does not mean that all is well.
    """
    return ("none", ABSENT).index(recovery) if recovery in ("none", ABSENT) else 2


def _sum_counts(one: Mapping[_Key, int], other: Mapping[_Key, int]) -> dict[_Key, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
