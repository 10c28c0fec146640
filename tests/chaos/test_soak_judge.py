"""The soak's judge finds every breach that it should find, and none where an action was legitimate."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.judgement import Event, Facts, Message, PodFacts, UnauthorizedProcess, judge, read_facts
from tests.chaos.ledger_tables import monotonic_times

SOAK = 7
HELLO = Message("hello", 10.0, 1, 41, "main", "team-a/p/main", "u", "run-1", ("simgpu0",), {})
CAME = replace(HELLO, what="came", at=10.1, facts={"device": "simgpu0", "strange": "0", "found": "none"})
LEFT = replace(HELLO, what="left", at=20.0)
ENDED = replace(HELLO, what="ended", at=20.1)
CHILD = replace(HELLO, number=2, pid=42, role="child", at=10.3)
CHILD_ENDED = replace(CHILD, what="ended", at=15.0)
WHOLE = [HELLO, CAME, LEFT, ENDED]
PRE_START = Event(9.0, "PreStartContainer", "OK", 0.5, ("gpu-0",), "u", "main")
STARTED = replace(PRE_START, at=9.9, name="ContainerStarted", duration=0.0)
REGISTERED = Event(1.0, "GetDevicePluginOptions", "OK", 0.1, (), "", "")
POD = PodFacts("u", "team-a/p", 8.0, left=21.0)
FACTS = Facts(SOAK, 1.0, 100.0, {"gpu-0": "simgpu0"}, [REGISTERED, PRE_START, STARTED], {"u": POD}, [0.0])


def breaches(messages: Sequence[Message], **facts: Any) -> list[str]:
    return judge(messages, replace(FACTS, **facts)).breaches


def pod(**changes: Any) -> dict[str, PodFacts]:
    return {"u": replace(POD, **changes)}


def test_judge_reports_no_breach_for_an_undisturbed_pod_on_zeroed_memory() -> None:
    verdict = judge(WHOLE, FACTS)
    assert verdict.breaches == []
    assert (verdict.counts["pods started"], verdict.counts["processes with reports"]) == (1, 1)


def test_judge_reports_foreign_bytes_at_a_start() -> None:
    found = replace(CAME, facts={"device": "simgpu0", "strange": "7", "found": b"secret".hex()})
    (breach,) = breaches([HELLO, found, LEFT, ENDED])
    assert "foreign bytes" in breach
    assert "'secret'" in breach


def test_judge_reports_an_ungated_start_unless_a_restarted_kubelet_did_not_know_its_plugin_yet() -> None:
    assert "no gate" in breaches(WHOLE, events=[REGISTERED, STARTED])[0]
    refused = replace(PRE_START, outcome="Unavailable")
    assert "no gate" in breaches(WHOLE, events=[REGISTERED, refused, STARTED])[0]
    assert breaches(WHOLE, events=[REGISTERED, STARTED], kubelet_starts=[0.0, 9.5]) == []
    again = replace(REGISTERED, at=2.0)
    assert "no gate" in breaches(WHOLE, events=[REGISTERED, again, STARTED], kubelet_starts=[0.0, 1.5])[0]


def test_judge_accepts_one_start_per_grant() -> None:
    second = replace(HELLO, number=2, pid=42, run="run-2", at=20.5)
    more = [
        second,
        replace(second, what="came", facts=CAME.facts),
        *(replace(second, what=x) for x in ("left", "ended")),
    ]
    twice = [REGISTERED, PRE_START, STARTED, replace(STARTED, at=20.4)]
    (breach,) = breaches([*WHOLE, *more], events=twice)
    assert "no gate: team-a/p/main (main, PID 42)" in breach


def test_judge_reports_changed_bytes_of_a_tenant_unless_the_kubelet_made_an_ungated_start() -> None:
    damaged = replace(HELLO, what="damaged", at=15.0, facts={"device": "simgpu0", "wrong": "4096", "found": "none"})
    assert "touched memory: 4096 bytes" in breaches([*WHOLE, damaged])[0]
    intruder = replace(HELLO, number=9, pid=49, uid="v", run="run-9", name="team-b/q/main", at=14.0)
    came = replace(intruder, what="came", at=14.1, facts=CAME.facts)
    messages = [*WHOLE, damaged, intruder, came, replace(intruder, what="left"), replace(intruder, what="ended")]
    pods = {**FACTS.pods, "v": replace(POD, uid="v")}
    assert any("touched memory" in each for each in breaches(messages, pods=pods))
    assert breaches(messages, pods=pods, kubelet_starts=[0.0, 13.0]) == []


def test_judge_reports_two_pods_on_one_device() -> None:
    beside = replace(HELLO, what="beside", facts={"device": "simgpu0", "other": "team-b/q/main", "other_pid": "50"})
    assert "two at once" in breaches([*WHOLE, beside])[0]


def test_judge_reports_a_killed_process_of_a_listed_pod_unless_an_operator_requested_that() -> None:
    messages = [HELLO, CAME, ENDED]
    assert "the kubelet still had its pod" in breaches(messages)[0]
    assert breaches(messages, orders=[(41, 19.0)]) == []
    assert breaches(messages, orders=[(41, 20.5)]) != []
    assert breaches(messages, orders=[(41, 5.0)]) != []
    assert breaches(messages, pods=pod(deleted=19.0, grace=0.3)) == []
    assert breaches(messages, pods=pod(deleted=19.0, grace=2.0)) != []


def test_judge_reports_a_force_deleted_pod_killed_within_its_grace_period() -> None:
    messages = [HELLO, CAME, ENDED]
    assert (
        "the first process of its container was not dead" in breaches(messages, pods=pod(forced=19.5, dying_for=9.0))[0]
    )
    assert breaches(messages, pods=pod(forced=19.0, dying_for=9.0)) == []
    assert breaches(messages, pods=pod(forced=19.9, dying_for=0.1)) == []


def test_judge_accepts_a_killed_child_process_with_its_container_or_after_its_pod() -> None:
    messages = [*WHOLE, CHILD, CHILD_ENDED]
    assert "the kubelet still had its pod" in breaches(messages)[0]
    assert breaches([*messages[:-1], replace(CHILD_ENDED, at=20.5)]) == []
    reported_first = [HELLO, CAME, CHILD, replace(CHILD_ENDED, at=19.0), replace(ENDED, at=19.1)]
    assert breaches(reported_first, orders=[(41, 18.9)]) == []
    assert breaches(reported_first, orders=[(41, 19.05)]) != []
    late, early = replace(CHILD_ENDED, at=21.5), replace(CHILD_ENDED, at=20.5)
    assert breaches([*messages[:-1], late], pods=pod(leave_children=True)) == []
    assert breaches([*messages[:-1], early], pods=pod(leave_children=True)) != []


def test_judge_reports_a_killed_process_of_the_node() -> None:
    process = replace(HELLO, role="unauthorized", uid="none", run="none", name="node/unauthorized-1/none", devices=())
    assert "which must not be killed" in breaches([process, replace(process, what="ended", at=12.0)], events=[])[0]


def test_judge_reports_residue_read_by_a_node_process_unless_a_tenant_may_have_started() -> None:
    process = replace(
        HELLO, number=9, pid=49, role="unauthorized", uid="none", run="none", name="node/s/none", devices=()
    )
    found = replace(process, what="came", facts={"device": "simgpu0", "strange": "7", "found": "none"})
    messages = [*WHOLE, process, *(replace(process, what=what) for what in ("left", "ended"))]
    late, soon = replace(found, at=20.5), replace(found, at=10.2)
    assert "foreign bytes" in breaches([*messages, late], unauthorized=[UnauthorizedProcess(49, "simgpu0", 20.4)])[0]
    assert breaches([*messages, soon], unauthorized=[UnauthorizedProcess(49, "simgpu0", 9.9)]) == []


def test_judge_reports_a_signal_that_the_kubelet_did_not_send() -> None:
    signalled = replace(HELLO, what="signalled", at=12.0, facts={"number": "15", "sender": "999"})
    assert "got signal 15 from PID 999" in breaches([*WHOLE, signalled])[0]
    assert breaches([*WHOLE, replace(signalled, facts={"number": "15", "sender": str(SOAK)})]) == []


def test_judge_reports_a_tenant_without_reports() -> None:
    assert "started 1 times and reported 0 times" in breaches([])[0]
    assert breaches([], pods=pod(deleted=9.0)) == []
    assert "did not report what it found" in breaches([HELLO, LEFT, ENDED])[0]
    died = replace(STARTED, name="ContainerDied", outcome="1")
    assert "failed by itself" in breaches(WHOLE, events=[*FACTS.events, died])[0]


def test_judge_reports_a_process_that_is_left_at_the_end() -> None:
    assert breaches([HELLO, CAME]) == ["lives on: team-a/p/main (main, PID 41)"]


def test_judge_reports_breaches_observed_by_the_soak_itself() -> None:
    assert breaches(WHOLE, waited=["pod x"], unsettled=["device 3 is in-use"]) == [
        "waits for ever: pod x",
        "unsettled: device 3 is in-use",
    ]
    assert breaches(WHOLE, exits={"service": [0, -9, 0]}) == []
    assert breaches(WHOLE, exits={"service": [0, 1]}) == ["daemon: service ended 1 times with status 1"]


def test_judge_reports_assignments_that_differ_between_kubelet_and_ledger() -> None:
    assert breaches(WHOLE, assigned={"gpu-0": "u"}, granted={"gpu-0": "team-a/p"}) == []
    assert "accounts" in breaches(WHOLE, assigned={"gpu-0": "u"}, granted={"gpu-0": "team-b/q"})[0]
    assert "accounts" in breaches(WHOLE, assigned={"gpu-0": "u"})[0]
    assert "accounts" in breaches(WHOLE, granted={"gpu-0": "team-a/p"})[0]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Provide a ledger with one device and the grant of ``STARTED``, with the columns that the judge reads."""
    connection = sqlite3.connect(tmp_path / "ledger.db")
    connection.executescript(
        "CREATE TABLE devices (device TEXT, document TEXT);"
        "CREATE TABLE grants (device TEXT, sequence INTEGER, document TEXT);"
        "CREATE TABLE audit (sequence INTEGER, name TEXT);"
    )
    grant = {"at": 109.4, "assignment": {"pod": {"uid": "u"}}, "claim": None}
    clean: dict[str, Any] = {"hygiene": "clean", "health": "healthy", "cause": None, "open_grants": []}
    connection.execute("INSERT INTO grants VALUES ('gpu-0', 1, ?)", [json.dumps(grant)])
    connection.execute("INSERT INTO devices VALUES ('gpu-0', ?)", [json.dumps(clean)])
    connection.commit()
    yield connection
    connection.close()


def change(ledger: sqlite3.Connection, table: str, **changes: Any) -> None:
    (document,) = ledger.execute(f"SELECT document FROM {table}").fetchone()
    ledger.execute(f"UPDATE {table} SET document = ?", [json.dumps({**json.loads(document), **changes})])
    ledger.commit()


def test_judge_reports_a_start_without_a_grant_of_its_own_in_the_ledger(
    tmp_path: Path, ledger: sqlite3.Connection
) -> None:
    where = str(tmp_path / "ledger.db")
    assert breaches(WHOLE, ledger=where) == []
    for changes in ({"at": 111.0}, {"at": 109.4, "assignment": {"pod": {"uid": "v"}}}):
        change(ledger, "grants", **changes)
        assert "no grant says so" in breaches(WHOLE, ledger=where)[0]
    change(ledger, "grants", assignment=None)
    assert breaches(WHOLE, ledger=where) == []
    twice = [*FACTS.events, replace(PRE_START, at=20.2, duration=0.1), replace(STARTED, at=20.4)]
    assert any("no grant says so" in each for each in breaches(WHOLE, ledger=where, events=twice))


def test_judge_reports_a_device_still_granted_or_dirty_at_the_end(tmp_path: Path, ledger: sqlite3.Connection) -> None:
    where = str(tmp_path / "ledger.db")
    change(ledger, "devices", open_grants=[{"sequence": 1}])
    assert "grants open in the end" in breaches(WHOLE, ledger=where)[0]
    change(ledger, "devices", open_grants=[], hygiene="dirty")
    assert "dirty and healthy in the end" in breaches(WHOLE, ledger=where)[0]
    change(ledger, "devices", health="quarantined", cause={"code": "device-lost"})
    assert breaches(WHOLE, ledger=where) == []
    change(ledger, "devices", health="quarantined", cause=None)
    assert breaches(WHOLE, ledger=where) != []


def test_judge_reports_lost_grants(tmp_path: Path, ledger: sqlite3.Connection) -> None:
    ledger.execute("UPDATE grants SET sequence = 2")
    ledger.commit()
    assert "without a gap" in breaches(WHOLE, ledger=str(tmp_path / "ledger.db"))[0]


def test_facts_file_reads_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    everything = replace(
        FACTS,
        unauthorized=[UnauthorizedProcess(1, "simgpu0", 2.0)],
        orders=[(41, 5.0)],
        waited=["x"],
        unsettled=[],
        clock_steps=[(5.0, 60.0)],
    )
    path.write_text(json.dumps(asdict(everything)))
    assert read_facts(path) == everything


def test_judge_reports_rows_that_the_audit_log_has_lost(tmp_path: Path, ledger: sqlite3.Connection) -> None:
    where = str(tmp_path / "ledger.db")
    ledger.executemany("INSERT INTO audit VALUES (?, 'scrub.finished')", [(4,), (5,), (7,)])
    ledger.commit()
    assert breaches(WHOLE, ledger=where) == ["ledger: rows of the audit log are missing"]


def test_judge_finds_the_grant_of_a_start_although_the_clock_was_set_before_it(
    tmp_path: Path, ledger: sqlite3.Connection
) -> None:
    where = str(tmp_path / "ledger.db")
    steps = [(3.0, 7200.0), (9.2, -3600.0), (11.0, 0.0)]
    change(ledger, "grants", at=109.4 - 3600.0)
    assert breaches(WHOLE, ledger=where, clock_steps=steps) == []
    change(ledger, "grants", at=112.0)
    assert "no grant says so" in breaches(WHOLE, ledger=where, clock_steps=steps)[0]


def test_time_of_a_wrong_clock_is_not_taken_for_one_before_the_soak() -> None:
    clock = [(5.0, 100.0), (9.2, -100.0), (11.0, 100.0)]
    assert monotonic_times([106.0, -90.5, 111.5], clock) == pytest.approx([6.0, 9.5, 11.5])


def test_judge_requires_the_grant_of_its_claim_for_a_start_with_a_claim(
    tmp_path: Path, ledger: sqlite3.Connection
) -> None:
    prepared = Event(9.0, "NodePrepareResources", "OK", 0.5, ("claim-1",), "u", "")
    facts: dict[str, Any] = {
        "with_claims": True,
        "events": [prepared, replace(STARTED, devices=())],
        "ledger": str(tmp_path / "ledger.db"),
    }
    change(ledger, "grants", assignment=None, claim={"uid": "claim-1"})
    assert breaches(WHOLE, **facts) == []
    assert "no gate" in breaches(WHOLE, **{**facts, "events": [replace(prepared, outcome="Unavailable")]})[0]
    change(ledger, "grants", claim={"uid": "claim-2"})
    assert "no grant says so" in breaches(WHOLE, **facts)[0]


def test_judge_accepts_a_daemon_that_ended_itself_only_with_a_message_about_a_shortage() -> None:
    assert breaches(WHOLE, exits={"service": [-9, 1, 2]}, explained={"service": 2}) == []
    unexplained = breaches(WHOLE, exits={"service": [1, 2]}, explained={"service": 1})
    assert unexplained == ["daemon: service ended 1 times with status 1", "daemon: service ended 1 times with status 2"]
    assert breaches(WHOLE, exits={"service": [-11]}) != []
    assert breaches(WHOLE, exits={"service": [-11]}, without_memory=1) == []
