"""Every signal and what follows from it, as data: the table that ``tests/property/test_signals_and_recovery_methods.py`` plays.

A row states what causes a code, the device's health afterwards, the recovery method that its cause names, the condition
of its return, and the device's health until that condition is met.
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
from tests.simulation.cluster import SimulatedCluster

__all__ = ["TABLE", "XID", "Row", "do"]

XID = {kind: 500 + number for number, kind in enumerate(ErrorClass)}
"""A code of each class."""
HEALTHY, SUSPECT, QUARANTINED, CONDEMNED = Health.HEALTHY, Health.SUSPECT, Health.QUARANTINED, Health.CONDEMNED
SCRUB, RESET, WAIT, REBOOT, OPERATOR = (
    RecoveryMethod.SCRUB,
    RecoveryMethod.RESET,
    RecoveryMethod.WAIT,
    RecoveryMethod.REBOOT,
    RecoveryMethod.OPERATOR,
)

Act = Callable[[SimulatedCluster], Awaitable[None] | None]


@dataclass(frozen=True)
class Row:
    """One code.

    Attributes:
        code: of the signals of a backend, or a class of XIDs.
        put: causes it.
        at_once: the device's health after the next check.
        way: the recovery method that the cause names.
        opens: what it takes to return: a ``reset`` that works, the ``condition``'s end, a ``reboot``, an ``operator`` who
            repairs the device and releases it, or ``calm``: nothing more of the kind is seen. Empty: it never was away.
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
    def cause_code(self) -> str:
        """The code by which a cause names it."""
        return f"xid-{XID[ErrorClass(self.code)]}" if self.code in {*ErrorClass} else self.code

    @property
    def takes_out(self) -> bool:
        return self.meanwhile in (QUARANTINED, CONDEMNED)


# -- how faults are caused --------------------------------------------------------------------------------------------


def reports_condition(condition: str) -> Act:
    return lambda cluster: cluster.gpu().conditions.update({condition: "as read"})


def has(**facts: object) -> Act:
    def put(cluster: SimulatedCluster) -> None:
        for name, value in facts.items():
            setattr(cluster.gpu(), name, copy(value))

    return put


def counts(counter: str) -> Act:
    """One more than is on record."""

    async def put(cluster: SimulatedCluster) -> None:
        cluster.gpu().counters[counter] = 5
        cluster.signal(0)
        await cluster.until(lambda: (counter, 5) in cluster.record().lifetime_counters)
        cluster.gpu().counters[counter] = 6

    return put


def reports(kind: ErrorClass, **facts: object) -> Act:
    def put(cluster: SimulatedCluster) -> None:
        has(**facts)(cluster)
        cluster.gpu().report_xid(XID[kind])

    return put


def scrub_meets(*flaws: str, **facts: object) -> Act:
    """A fault that no check detects: an operator has the device scrubbed."""

    async def put(cluster: SimulatedCluster) -> None:
        has(**facts)(cluster)
        cluster.gpu().flaws.update(flaws)
        assert cluster.service is not None
        await cluster.service.scrub(cluster.gpu().id)

    return put


async def scrub_meets_an_eraser_that_hangs(cluster: SimulatedCluster) -> None:
    cluster.erasers.unkillable = True
    await do(scrub_meets(slow=1e6), cluster)


async def a_process_cannot_be_ended(cluster: SimulatedCluster) -> None:
    tenant = await cluster.admit("acme", "train-0")
    assert tenant is not None
    await cluster.until(lambda: tenant.running and bool(cluster.process_table.holders(cluster.gpu().id)))
    assert tenant.first is not None
    cluster.process_table.fork(tenant.first).killable = False
    cluster.kubelet.delete(tenant)


def host_process_uses_it(cluster: SimulatedCluster) -> None:
    cluster.process_table.open(cluster.process_table.start(None, "", "host"), cluster.gpu().id)


def firmware_changes(cluster: SimulatedCluster) -> None:
    cluster.gpu().firmware = "vbios-2"
    cluster.node.devices.inventory_changed.set()


async def do(act: Act, cluster: SimulatedCluster) -> None:
    doing = act(cluster)
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
    # What the driver reports while it lasts.
    Row("reset-required", reports_condition("reset-required"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("row-remap-pending", reports_condition("row-remap-pending"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("row-remap-failure", reports_condition("row-remap-failure"), QUARANTINED, OPERATOR, "operator", QUARANTINED),
    Row("page-retirement-pending", reports_condition("page-retirement-pending"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("page-retirement-limit", reports_condition("page-retirement-limit"), QUARANTINED, OPERATOR, "operator", QUARANTINED),
    Row("fabric-failed", reports_condition("fabric-failed"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("hw-slowdown", reports_condition("hw-slowdown"), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("hw-thermal-slowdown", reports_condition("hw-thermal-slowdown"), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("power-brake", reports_condition("power-brake"), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("pcie-width", reports_condition("pcie-width"), SUSPECT, RESET, "condition", CONDEMNED),
    Row("pcie-generation", reports_condition("pcie-generation"), SUSPECT, RESET, "condition", CONDEMNED),
    Row("nvlink-down", reports_condition("nvlink-down"), SUSPECT, RESET, "condition", CONDEMNED),
    Row("inforom-corrupt", reports_condition("inforom-corrupt"), SUSPECT, OPERATOR, "operator", QUARANTINED),
    Row("ecc-mode-pending", reports_condition("ecc-mode-pending"), SUSPECT, RESET, "reset", CONDEMNED),
    Row("mig-mode-pending", reports_condition("mig-mode-pending"), SUSPECT, RESET, "reset", CONDEMNED),
    Row("event-stream-lost", reports_condition("event-stream-lost"), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("command-broken", reports_condition("command-broken"), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("scrub-on-free-disabled", reports_condition("scrub-on-free-disabled"), HEALTHY, OPERATOR, "", HEALTHY),
    # What else a snapshot shows.
    Row("too-hot", has(celsius=120), SUSPECT, WAIT, "condition", QUARANTINED),
    Row("baseline-mismatch", firmware_changes, SUSPECT, OPERATOR, "operator", QUARANTINED),
    Row("ecc-uncorrected", has(ecc=3), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("driver-requests-reset", has(recovery="drain-and-reset"), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("driver-requests-reboot", has(recovery="reboot"), QUARANTINED, REBOOT, "reboot", QUARANTINED),
    Row("driver-requests-operator", has(recovery="imex"), QUARANTINED, OPERATOR, "operator", QUARANTINED),
    # Counters that the device itself keeps: that they have grown is seen once.
    Row("lifetime-ecc-uncorrected-aggregate", counts("ecc_uncorrected_aggregate"),
        QUARANTINED, RESET, "reset", CONDEMNED),
    Row("lifetime-remapped-rows-uncorrectable", counts("remapped_rows_uncorrectable"),
        QUARANTINED, RESET, "reset", CONDEMNED),
    Row("lifetime-retired-pages", counts("retired_pages"), SUSPECT, RESET, "calm", HEALTHY),
    # A device that gives no answer, or the wrong one.
    Row("device-fault", has(odd=True), QUARANTINED, OPERATOR, "operator", QUARANTINED),
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
    Row("reset-unavailable", scrub_meets(reset_missing=NONE_HERE), QUARANTINED, OPERATOR, "operator", QUARANTINED, REQUIRED),
    Row("scrub-timeout", scrub_meets("settings-hang"), QUARANTINED, SCRUB, "condition", CONDEMNED),
    Row("settings-not-restored", scrub_meets("settings-not-restored", settings=CHANGED), QUARANTINED, RESET, "condition", CONDEMNED),
    Row("holder-unkillable", a_process_cannot_be_ended, QUARANTINED, WAIT, "condition", QUARANTINED),
    Row("verification-failed", scrub_meets(wont_clear=True), QUARANTINED, RESET, "condition", CONDEMNED),
    # Use without a grant, where the policy takes the device out for it.
    Row("unauthorized-use", host_process_uses_it, QUARANTINED, WAIT, "condition", QUARANTINED, TAKEN_OUT),
    # XIDs, by their class. One of a soft class is an event: the driver continues to list it, and the device is healthy.
    Row("ignore", reports(ErrorClass.IGNORE), HEALTHY, OPERATOR, "", HEALTHY),
    Row("application", reports(ErrorClass.APPLICATION), HEALTHY, OPERATOR, "", HEALTHY),
    Row("reset", reports(ErrorClass.RESET), QUARANTINED, RESET, "reset", CONDEMNED),
    Row("reboot", reports(ErrorClass.REBOOT), QUARANTINED, REBOOT, "reboot", QUARANTINED),
    Row("context", reports(ErrorClass.CONTEXT), SUSPECT, OPERATOR, "calm", HEALTHY),
    Row("repair", reports(ErrorClass.REPAIR), QUARANTINED, OPERATOR, "operator", QUARANTINED),
    Row("unknown", reports(ErrorClass.UNKNOWN), SUSPECT, OPERATOR, "calm", HEALTHY),
)
# fmt: on
