"""Every signal and what follows from it, as data: the table that ``tests/property/test_signals_and_recovery_methods.py`` plays.

A row says how a code comes into the world, what the device is then, which way back its cause names, what opens that way,
and what becomes of the device for as long as nothing does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import DiagnosticsRule, ResetMode, UnauthorizedUseAction
from scrubber.domain.states import Health, RecoveryMethod
from tests.world.world import World

__all__ = ["TABLE", "XID", "Row", "do"]

XID = {kind: 500 + number for number, kind in enumerate(ErrorClass)}
"""A code of each class."""
HEALTHY, SUSPECT, QUARANTINED, CONDEMNED = Health.HEALTHY, Health.SUSPECT, Health.QUARANTINED, Health.CONDEMNED
SCRUB, RESET, WAIT, REBOOT, PERSON = (
    RecoveryMethod.SCRUB,
    RecoveryMethod.RESET,
    RecoveryMethod.WAIT,
    RecoveryMethod.REBOOT,
    RecoveryMethod.OPERATOR,
)

Act = Callable[[World], Awaitable[None] | None]


@dataclass(frozen=True)
class Row:
    """One code.

    Attributes:
        code: of the signals of a backend, or a class of XIDs.
        put: brings it into the world.
        at_once: what the device is as soon as somebody looks.
        way: the way back that the cause names.
        opens: what it takes to return: a ``reset`` that works, the ``condition``'s end, a ``reboot``, a ``person`` who mends
            the device and releases it, or ``calm``: nothing more of the kind is seen. Empty: it never was away.
        meanwhile: what the device is for as long as that does not happen.
        policy: what differs from the usual policy.
    """

    code: str
    put: Act
    at_once: Health
    way: RecoveryMethod
    opens: str
    meanwhile: Health
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> str:
        """The code by which a cause names it."""
        return f"xid-{XID[ErrorClass(self.code)]}" if self.code in {*ErrorClass} else self.code

    @property
    def takes_out(self) -> bool:
        return self.meanwhile in (QUARANTINED, CONDEMNED)


# -- how things come into the world ------------------------------------------------------------------------------------


def says(condition: str) -> Act:
    return lambda world: world.gpu().conditions.update({condition: "as read"})


def has(**facts: object) -> Act:
    def put(world: World) -> None:
        for name, value in facts.items():
            setattr(world.gpu(), name, copy(value))

    return put


def counts(counter: str) -> Act:
    """One more than is on record."""

    async def put(world: World) -> None:
        world.gpu().counters[counter] = 5
        world.signal(0)
        await world.until(lambda: (counter, 5) in world.record().lifetime_counters)
        world.gpu().counters[counter] = 6

    return put


def reports(kind: ErrorClass, **facts: object) -> Act:
    def put(world: World) -> None:
        has(**facts)(world)
        world.gpu().came(XID[kind])

    return put


def scrub_meets(*flaws: str, **facts: object) -> Act:
    """What no look sees: somebody has the device scrubbed."""

    async def put(world: World) -> None:
        has(**facts)(world)
        world.gpu().flaws.update(flaws)
        assert world.service is not None
        await world.service.scrub(world.gpu().id)

    return put


async def scrub_meets_an_eraser_that_hangs(world: World) -> None:
    world.erasers.unkillable = True
    await do(scrub_meets(slow=1e6), world)


async def a_process_cannot_be_ended(world: World) -> None:
    tenant = await world.admit("acme", "train-0")
    assert tenant is not None
    await world.until(lambda: tenant.running and bool(world.matter.holders(world.gpu().id)))
    assert tenant.first is not None
    world.matter.fork(tenant.first).killable = False
    world.kubelet.delete(tenant)


def somebody_uses_it(world: World) -> None:
    world.matter.open(world.matter.start(None, "", "host"), world.gpu().id)


def somebody_writes_its_firmware(world: World) -> None:
    world.gpu().firmware = "vbios-2"
    world.node.devices.inventory_changed.set()


async def do(act: Act, world: World) -> None:
    doing = act(world)
    if doing is not None:
        await doing


TRIED = {
    "diagnostics": DiagnosticsRule(slow_path=DiagnosticLevel.QUICK, min_rates={"Labelled *": {"matrix-product": 1e11}})
}
REQUIRED = {"reset": ResetMode.REQUIRED}
TAKEN_OUT = {"unauthorized_use": UnauthorizedUseAction.QUARANTINE}
CHANGED = {"compute-mode": "exclusive", "power-limit-watts": "400"}
NONE_HERE = "this platform has none"

# -- the table ---------------------------------------------------------------------------------------------------------

# fmt: off
TABLE = (
    # What the driver says while it lasts.
    Row("reset-required", says("reset-required"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("row-remap-pending", says("row-remap-pending"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("row-remap-failure", says("row-remap-failure"), QUARANTINED, PERSON, "operator", QUARANTINED),
    Row("page-retirement-pending", says("page-retirement-pending"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("page-retirement-limit", says("page-retirement-limit"), QUARANTINED, PERSON, "operator", QUARANTINED),
    Row("fabric-failed", says("fabric-failed"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("hw-slowdown", says("hw-slowdown"), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("hw-thermal-slowdown", says("hw-thermal-slowdown"), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("power-brake", says("power-brake"), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("pcie-width", says("pcie-width"), SUSPECT, RESET, "condition", CONDEMNED),
    Row("pcie-generation", says("pcie-generation"), SUSPECT, RESET, "condition", CONDEMNED),
    Row("nvlink-down", says("nvlink-down"), SUSPECT, RESET, "condition", CONDEMNED),
    Row("inforom-corrupt", says("inforom-corrupt"), SUSPECT, PERSON, "operator", QUARANTINED),
    Row("ecc-mode-pending", says("ecc-mode-pending"), SUSPECT, RESET, "reset", CONDEMNED),
    Row("mig-mode-pending", says("mig-mode-pending"), SUSPECT, RESET, "reset", CONDEMNED),
    Row("event-stream-lost", says("event-stream-lost"), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("scrub-on-free-disabled", says("scrub-on-free-disabled"), HEALTHY, PERSON, "", HEALTHY),
    # What else a snapshot shows.
    Row("too-hot", has(celsius=120), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("baseline-mismatch", somebody_writes_its_firmware, SUSPECT, PERSON, "operator", QUARANTINED),
    Row("ecc-uncorrected", has(ecc=3), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("driver-requests-reset", has(recovery="drain-and-reset"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("driver-requests-reboot", has(recovery="reboot"), QUARANTINED, REBOOT, "reboot", QUARANTINED),
    Row("driver-requests-operator", has(recovery="imex"), QUARANTINED, PERSON, "operator", QUARANTINED),
    # Counters that the device itself keeps: that they have grown is seen once.
    Row("lifetime-ecc-uncorrected-aggregate", counts("ecc_uncorrected_aggregate"),
        QUARANTINED, RESET, "reset", CONDEMNED),
    Row("lifetime-remapped-rows-uncorrectable", counts("remapped_rows_uncorrectable"),
        QUARANTINED, RESET, "reset", CONDEMNED),
    Row("lifetime-retired-pages", counts("retired_pages"), SUSPECT, RESET, "calm", HEALTHY),
    # A device that gives no answer, or the wrong one.
    Row("device-fault", has(odd=True), QUARANTINED, PERSON, "operator", QUARANTINED),
    Row("driver-timeout", has(stuck=True), QUARANTINED, WAIT, "condition", QUARANTINED),
    Row("device-lost", has(lost=True), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("device-unreadable", has(nonsense=True), QUARANTINED, WAIT, "condition", QUARANTINED),
    # What a scrub meets.
    Row("diagnostics-failed", scrub_meets("diagnosis-wrong"), QUARANTINED, RESET, "condition", CONDEMNED, TRIED),
    Row("diagnostics-slow", scrub_meets("diagnosis-slow"), QUARANTINED, RESET, "condition", CONDEMNED, TRIED),
    Row("erase-timeout", scrub_meets(slow=20.0), QUARANTINED, SCRUB, "condition", CONDEMNED),
    Row("eraser-unkillable", scrub_meets_an_eraser_that_hangs, QUARANTINED, WAIT, "condition", QUARANTINED),
    Row("untraceable-holder", scrub_meets(ghost=True), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("memory-not-released", scrub_meets("memory-kept"), QUARANTINED, RESET, "condition", CONDEMNED),
    Row("clearing-incomplete", scrub_meets("memory-short"), QUARANTINED, SCRUB, "condition", CONDEMNED),
    Row("on-chip-failed", scrub_meets("on-chip"), QUARANTINED, RESET, "condition", CONDEMNED),
    Row("reset-failed", reports(ErrorClass.RESET, reset_fails="it did not take"),
        QUARANTINED, RESET, "condition", CONDEMNED),
    Row("reset-unavailable", scrub_meets(reset_missing=NONE_HERE), QUARANTINED, PERSON, "operator", QUARANTINED, REQUIRED),
    Row("scrub-timeout", scrub_meets("settings-hang"), QUARANTINED, SCRUB, "condition", CONDEMNED),
    Row("settings-not-restored", scrub_meets("settings-not-restored", settings=CHANGED), QUARANTINED, RESET, "condition", CONDEMNED),
    Row("holder-unkillable", a_process_cannot_be_ended, QUARANTINED, WAIT, "condition", QUARANTINED),
    Row("verification-failed", scrub_meets(wont_clear=True), QUARANTINED, RESET, "condition", CONDEMNED),
    # Use without a grant, where the policy takes the device out for it.
    Row("unauthorized-use", somebody_uses_it, QUARANTINED, WAIT, "condition", QUARANTINED, TAKEN_OUT),
    # XIDs, by their class. One of a soft class is an event: the driver goes on listing it, and the device is well.
    Row("ignore", reports(ErrorClass.IGNORE), HEALTHY, PERSON, "", HEALTHY),
    Row("application", reports(ErrorClass.APPLICATION), HEALTHY, PERSON, "", HEALTHY),
    Row("reset", reports(ErrorClass.RESET), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("reboot", reports(ErrorClass.REBOOT), QUARANTINED, REBOOT, "reboot", QUARANTINED),
    Row("context", reports(ErrorClass.CONTEXT), SUSPECT, PERSON, "calm", HEALTHY),
    Row("repair", reports(ErrorClass.REPAIR), QUARANTINED, PERSON, "operator", QUARANTINED),
    Row("unknown", reports(ErrorClass.UNKNOWN), SUSPECT, PERSON, "calm", HEALTHY),
)
# fmt: on
