"""The product's decisions and records in every state that a small node can reach: a part of ``python -m tests.model``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.model.broken import BROKEN
from tests.model.node import Node, Product
from tests.model.search import search

ENGINE = Path(__file__).parents[2] / "scrubber/engine"

STEPS: Mapping[str, str] = {
    "grant.py GrantRequest._grant.store_and_apply": "grant",
    "device/scrubs.py Scrubs.start.store_and_begin": "scrub",
    "device/scrubs.py Scrubs._conclude": "conclude",
    "device/scrubs.py Scrubs.resolve": "resolve",
    "device/occupancy.py Occupancy.release": "release",
    "device/occupancy.py Occupancy.adopt": "check",
    "device/occupancy.py Occupancy.record_started_container": "note",
    "device/health.py DeviceHealth.report": "fault",
    "loops/reconcile.py reconcile": "service",
}
"""Each place where the engine writes to the ledger, and the step of the model that represents it."""
OTHERS: Mapping[str, str] = {
    "device/state.py DeviceState.commit.store_and_apply": "does it for the others",
    "device/occupancy.py Occupancy._commit_or_mark_gap": "does it for the others",
    "loops/reconcile.py _adopt_if_used": "only an audit row",
    "loops/reconcile.py _add_device": "a device that appears: as at a start of the service",
    "loops/policy.py _record_event": "only an audit row",
    "breaker.py watch_breaker": "only an audit row",
    "device/scrubs.py Scrubs.record_check": "only the record of a check",
    "device/occupancy.py Occupancy.record_grant_pod": "the model's kubelet names the pod of each grant at once",
    "device/occupancy.py Occupancy.void_certificate": "use without a grant, of which the model's pods are not capable",
    "device/occupancy.py Occupancy.void_for_unauthorized_use": "the same",
    "device/occupancy.py Occupancy.keep_out_of_use": "a reset of a peer",
    "device/occupancy.py Occupancy.release_claims": "claims: tests/property/test_claims.py has each of their crash points",
    "claims.py DriverlessClaims.unprepare": "claims",
    "claims.py NodeClaims._change.store_and_apply": "claims",
    "device/reset_gate.py ResetGate.require_attempts_left": "limits on how often a device recovers in a day",
    "device/health.py DeviceHealth._forget_errors": "counters of errors",
    "device/health.py DeviceHealth.accept_baseline": "operators",
    "device/health.py DeviceHealth.break_glass": "operators",
    "device/health.py DeviceHealth.end_expired_break_glass": "operators",
    "device/health.py DeviceHealth.quarantine": "operators",
    "device/health.py DeviceHealth.unquarantine": "operators",
    "yielding.py YieldControl._commit": "the record of the node, not of a device",
    **{
        f"agent_pauses.py AgentPauses.{name}": "the pause of the node's agents, not the record of a device"
        for name in ("_commit", "_note_external_reset", "_note_failure", "commit_start")
    },
}
"""The others → why the model does without them."""

_WRITES = frozenset({"commit", "commit_start", "_commit_or_mark_gap"})


def _writes(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = names
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside = (*names, child.name)
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in _WRITES:
            yield ".".join(names)
        yield from _writes(child, inside)


def test_every_write_of_the_engine_is_a_step_of_the_model_or_has_a_reason_not_to_be() -> None:
    found = {
        f"{path.relative_to(ENGINE)} {name}"
        for path in ENGINE.rglob("*.py")
        for name in _writes(ast.parse(path.read_text()), ())
    }
    assert found == {*STEPS, *OTHERS}


def test_shared_device_is_safe_and_every_start_comes_to_an_end() -> None:
    """One device, two pods with a restart each, one fault or lost write, and crashes anywhere: all states."""
    report = search(Node(wants=(1, 1), devices=1, restarts=1, faults=1))
    assert not report.problem
    assert report.complete
    beginnings = [re.match("[a-z]+|[0-9] [a-z]+", step) for step in report.steps]
    assert all(beginnings)
    words = {each[0] for each in beginnings if each}
    assert {*STEPS.values(), "kill", "crash", "refuse"} <= words
    bases = {basis for step in report.steps for basis in re.findall(r"\((.*)\)", step)}
    assert bases == {"certificate", "same-container"}


def test_start_on_two_devices_is_safe_beside_another_pod() -> None:
    report = search(Node(wants=(2, 1), devices=2, restarts=0, faults=0), most=10_000)
    assert not report.problem
    assert report.states >= 10_000


@pytest.mark.parametrize("defect", BROKEN)
def test_search_detects_a_broken_variant(defect: str) -> None:
    what, product = BROKEN[defect]
    report = search(Node(wants=(1, 1), devices=1, restarts=0, faults=1, product=product))
    assert report.problem.startswith(what), report.problem


def test_broken_variants_differ_from_the_product() -> None:
    assert all(product != Product() for _, product in BROKEN.values())
