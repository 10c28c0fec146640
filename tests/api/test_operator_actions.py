"""Operator actions and proofs through the real sockets: actor and reason arrive, and bytes return unchanged."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from scrubber.adapters.signing.ed25519 import EphemeralKey, verify_signature
from scrubber.api import messages
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import AdminClient, PluginClient, ReadClient
from scrubber.api.server import serve
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.domain.agent_pause import AgentPause, LabelChange, PauseOffer, PauseReport, PauseState, PauseWay
from scrubber.domain.baseline import Baseline, baseline_facts
from scrubber.domain.errors import DeviceBusy, DriverTimeout, InvalidRequest, NotReady, Refused, ScrubberError
from scrubber.domain.evidence import Step
from scrubber.domain.node_record import YieldRequester
from scrubber.domain.statement import sign_certificate
from scrubber.engine.views import CertificateStatus, CertificateView, DeviceView, ScrubUpdate
from scrubber.ports.record import AuditHead, AuditLogPage, AuditRow, HistoryQuery
from tests.api.service import CERTIFICATE, FakeNode

RESOURCE = "nvidia.com/gpu"
DEADLINE = 30.0
ACTOR = f"uid:{os.geteuid()}"
ROWS = tuple(
    AuditRow(number, 1000.5, "scrub.finished", "GPU-a0", None, "uid:7", f'{{"n":{number}}}', "00", "ff")
    for number in range(1, 6)
)


class OrderedNode(FakeNode):
    """A node whose resets wait for the test, whose certificates are signed, and whose audit has pages.

    Attributes:
        going: set while a caller follows a reset; ``let_go`` once that caller has disconnected.
        pages: what a reader of the audit gets.
        gives_up: raised after them.
        shown: the values that the last operator who accepted a baseline had been shown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key = EphemeralKey()
        self.going, self.let_go = asyncio.Event(), asyncio.Event()
        self.endless = False
        self.shown: Mapping[str, str] | None = None
        self.pages: list[AuditLogPage] = [AuditLogPage(AuditHead(), AuditHead())]
        self.gives_up: ScrubberError | None = None

    async def reset(self, device: str, reason: str, actor: str) -> AsyncIterator[ScrubUpdate]:
        async for update in super().reset(device, reason, actor):
            yield update
            if self.endless:
                self.going.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.let_go.set()

    async def accept_baseline(
        self, device: str, reason: str, actor: str, expected_facts: Mapping[str, str] | None = None
    ) -> DeviceView:
        self.shown = expected_facts
        return await super().accept_baseline(device, reason, actor, expected_facts)

    async def certificate(self, id: str) -> CertificateView:
        found = await super().certificate(id)
        return replace(
            found,
            certificate=sign_certificate(found.certificate, self.key.key_id, self.key.sign),
            status=CertificateStatus.CONSUMED,
        )

    async def audit(self, after: int) -> AsyncIterator[AuditLogPage]:
        self._note(("audit", after))
        for page in self.pages:
            yield page
        if self.gives_up is not None:
            raise self.gives_up


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[OrderedNode]:
    node = OrderedNode()
    async with serve(node, Sockets(short_tmp / "s"), grace=0):
        yield node


@pytest.fixture
async def read(node: OrderedNode, short_tmp: Path) -> AsyncIterator[ReadClient]:
    async with ReadClient(short_tmp / "s") as client:
        yield client


@pytest.fixture
async def admin(node: OrderedNode, short_tmp: Path) -> AsyncIterator[AdminClient]:
    async with AdminClient(short_tmp / "s") as client:
        yield client


# -- a reset -----------------------------------------------------------------------------------------------------------


async def test_reset_is_followed_to_its_end_with_actor_and_reason(node: OrderedNode, admin: AdminClient) -> None:
    updates = [each async for each in admin.reset("1", " hangs, ticket 4711 ")]
    assert [each.WhichOneof("update") for each in updates] == ["progress", "result"]
    assert updates[0].progress.step == Step.RESET.value
    assert not updates[0].progress.joined
    assert (updates[1].result.scrub.outcome, updates[1].result.device.id) == ("passed", "GPU-a1")
    assert node.requests == [("reset", "GPU-a1", "hangs, ticket 4711", ACTOR)]


@pytest.mark.parametrize(
    "refusal",
    [
        DeviceBusy("Device 0 (GPU-a0) is in use by team-a/trainer: wait until that has ended."),
        Refused("Device GPU-a0 cannot be reset here: it is a virtual machine."),
        DriverTimeout("The driver did not answer."),
    ],
)
async def test_refused_reset_gives_the_operator_the_reason(
    refusal: ScrubberError, node: OrderedNode, admin: AdminClient
) -> None:
    node.failure = refusal
    with pytest.raises(type(refusal)) as raised:
        await anext(admin.reset("0", "hangs"))
    assert str(raised.value) == str(refusal)


async def test_caller_that_stops_following_releases_its_subscription_at_once(
    node: OrderedNode, admin: AdminClient
) -> None:
    node.endless = True
    async with asyncio.timeout(DEADLINE), aclosing(admin.reset("0", "hangs")) as updates:
        await anext(updates)
        await node.going.wait()
    async with asyncio.timeout(DEADLINE):
        await node.let_go.wait()


@pytest.mark.parametrize("act", ["reset", "accept"])
@pytest.mark.parametrize(
    ("device", "reason", "why"),
    [
        ("0", "", "A reason is required"),
        ("0", " \n", "A reason is required"),
        ("0", "x" * 501, "501 characters"),
        ("9", "why", "this node has: 0"),
        ("", "why", "No device"),
        ("GPU-", "why", "use a longer one"),
    ],
)
async def test_incomplete_operator_action_never_reaches_the_engine(
    act: str, device: str, reason: str, why: str, node: OrderedNode, admin: AdminClient
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await (anext(admin.reset(device, reason)) if act == "reset" else admin.accept_baseline(device, reason))
    assert node.requests == []


@pytest.mark.parametrize("method", ["Reset", "AcceptBaseline"])
@pytest.mark.parametrize("purpose", [Purpose.READ, Purpose.PLUGIN])
async def test_operator_actions_are_accepted_on_the_admin_socket_alone(
    purpose: Purpose, method: str, node: OrderedNode, short_tmp: Path
) -> None:
    request = pb.ResetRequest(device="0", reason="why").SerializeToString()
    async with grpc.aio.insecure_channel(grpc_target(Sockets(short_tmp / "s").path(purpose))) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/scrubber.v1.Admin/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(request, timeout=DEADLINE)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert node.requests == []


# -- a baseline --------------------------------------------------------------------------------------------------------


async def test_baseline_acceptance_records_actor_and_reason_and_returns_the_device(
    node: OrderedNode, admin: AdminClient
) -> None:
    of = node.view().devices[0].device
    await node.show(
        d0=replace(node.record(0), baseline=Baseline(baseline_facts(of), at=900.0, actor=ACTOR, reason="new"))
    )
    accepted = (await admin.accept_baseline("0", " new VBIOS ")).device
    assert node.requests == [("accept-baseline", "GPU-a0", "new VBIOS", ACTOR)]
    assert (accepted.id, accepted.baseline.actor, accepted.baseline.reason) == ("GPU-a0", ACTOR, "new")
    assert [(each.name, each.expected, each.actual) for each in accepted.baseline.facts] == [
        ("model", of.model, of.model),
    ]


@pytest.mark.parametrize("shown", [None, {"model": "One", "vbios": "96.00.89"}])
async def test_baseline_facts_shown_to_the_operator_are_sent_with_the_acceptance(
    shown: dict[str, str] | None, node: OrderedNode, admin: AdminClient
) -> None:
    await admin.accept_baseline("0", "new VBIOS", shown)
    assert node.shown == (shown or {})


async def test_baseline_acceptance_for_an_unresponsive_device_is_refused_with_the_cause(
    node: OrderedNode, admin: AdminClient
) -> None:
    node.failure = DriverTimeout("The driver did not answer.")
    with pytest.raises(DriverTimeout, match="did not answer"):
        await admin.accept_baseline("0", "new VBIOS")


# -- certificates ------------------------------------------------------------------------------------------------------


async def test_exported_certificate_contains_the_signed_bytes_and_verifies(node: OrderedNode, read: ReadClient) -> None:
    exported = await read.certificate(CERTIFICATE.id)
    assert verify_signature(node.key.public_key, exported.payload, exported.certificate.signature)
    assert not verify_signature(EphemeralKey().public_key, exported.payload, exported.certificate.signature)
    assert (exported.certificate.id, exported.certificate.key_id, exported.status) == (
        CERTIFICATE.id,
        node.key.key_id,
        "consumed",
    )


@pytest.mark.parametrize(("name", "why"), [("", "A certificate id is required"), ("cert-x", "no certificate cert-x")])
async def test_unknown_certificate_is_an_error(name: str, why: str, read: ReadClient) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await read.certificate(name)


# -- the audit log ---------------------------------------------------------------------------------------------------


async def test_audit_is_read_page_by_page_as_stored(node: OrderedNode, read: ReadClient) -> None:
    node.pages = [
        AuditLogPage(AuditHead(), AuditHead(5, "ff"), ROWS[:3]),
        AuditLogPage(AuditHead(), AuditHead(5, "ff"), ROWS[3:]),
    ]
    pages = [page async for page in read.audit_pages()]
    assert [(page.pruned.sequence, page.head.sequence, page.head.hash) for page in pages] == [(0, 5, "ff")] * 2
    rows = [row for page in pages for row in page.rows]
    assert [(row.sequence, row.fields) for row in rows] == [(each.sequence, each.fields) for each in ROWS]
    assert node.requests == [("audit", 0)]


async def test_empty_audit_is_one_page_with_its_heads(read: ReadClient) -> None:
    (page,) = [page async for page in read.audit_pages()]
    assert (page.pruned, page.head, list(page.rows)) == (pb.AuditHead(), pb.AuditHead(), [])


async def test_start_row_of_an_audit_read_reaches_the_engine(node: OrderedNode, read: ReadClient) -> None:
    _ = [page async for page in read.audit_pages(41)]
    assert node.requests == [("audit", 41)]


async def test_audit_rows_pruned_during_a_read_are_reported_not_skipped(node: OrderedNode, read: ReadClient) -> None:
    node.pages = [AuditLogPage(AuditHead(), AuditHead(5, "ff"), ROWS[:3])]
    node.gives_up = NotReady("Rows were given up while they were read: ask again.")
    with pytest.raises(NotReady, match="ask again"):
        _ = [page async for page in read.audit_pages()]


async def test_history_is_filtered_by_tenant_and_outcome(node: OrderedNode, read: ReadClient) -> None:
    await read.history("0", tenant="team-a", outcome="failed")
    assert node.requests == [HistoryQuery("GPU-a0", None, 101, "team-a", "failed")], (
        "one more, to know whether there is"
    )


# -- the running service -----------------------------------------------------------------------------------------------


async def test_service_info_contains_the_service_pid(read: ReadClient) -> None:
    assert (await read.service_info()).pid == os.getpid()


async def test_older_service_without_a_method_reports_the_missing_method(node: OrderedNode, short_tmp: Path) -> None:
    """What a newer command receives: the status code distinguishes it from a service that is unavailable."""
    async with grpc.aio.insecure_channel(grpc_target(Sockets(short_tmp / "s").path(Purpose.READ))) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/scrubber.v1.Read/GetTheMoon")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"", timeout=DEADLINE)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "Unknown method" in str(refused.value.details())


async def test_yield_and_resume_arrive_with_reason_and_actor_and_report_what_remains(short_tmp: Path) -> None:
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s"), grace=0), AdminClient(short_tmp / "s") as operator:
        async with PluginClient(short_tmp / "s") as plugin:
            await plugin.set_yield(RESOURCE, "label is paused", timeout=DEADLINE)
            answer = await operator.yield_node("driver upgrade")
            assert [(each.requester, each.actor, each.reason) for each in answer.requests] == [
                ("plugin", f"plugin of {RESOURCE}", "label is paused"),
                ("operator", ACTOR, "driver upgrade"),
            ]
            left = await operator.resume_node("done")
            assert [each.requester for each in left.requests] == ["plugin"]
            await plugin.set_yield(RESOURCE, "", timeout=DEADLINE)
        async with ReadClient(short_tmp / "s") as reader:
            assert not (await reader.service_info()).HasField("node_yield")


async def test_operator_can_end_the_request_of_the_plugin_to_yield_the_node(short_tmp: Path) -> None:
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s"), grace=0), AdminClient(short_tmp / "s") as operator:
        await node.yields.request(YieldRequester.PLUGIN, "label is paused", "plugin of a")
        assert not (await operator.resume_node("the label was forgotten", all_requests=True)).requests
        assert node.requests[-1] == ("resume", "operator", "the label was forgotten", ACTOR, True)


async def test_reason_of_the_plugin_that_is_too_long_for_the_audit_log_is_refused(short_tmp: Path) -> None:
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s"), grace=0), PluginClient(short_tmp / "s") as plugin:
        with pytest.raises(InvalidRequest, match="at most 500"):
            await plugin.set_yield(RESOURCE, "x" * 501, timeout=DEADLINE)
        assert not node.yields.record.is_yielded


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 321])
async def test_plugin_that_requests_a_yield_without_a_usable_name_is_refused(short_tmp: Path, name: str) -> None:
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s"), grace=0), PluginClient(short_tmp / "s") as plugin:
        with pytest.raises(InvalidRequest, match="1 to 320 printable characters"):
            await plugin.set_yield(name, "label is paused", timeout=DEADLINE)
        assert not node.yields.record.is_yielded


async def test_report_about_a_pause_of_agents_arrives_without_ways_that_are_not_known(short_tmp: Path) -> None:
    node = FakeNode()
    report = pb.AgentPauseReport(
        offers=[pb.PauseOffer(way="labels", actions=["set a=false"]), pb.PauseOffer(way="sorcery")],
        pause_id="pause-1",
        changes=[pb.LabelChange(key="a", before="true", during="false"), pb.LabelChange(key="b", during="false")],
        state="planned",
        message="m" * 600,
    )
    async with serve(node, Sockets(short_tmp / "s"), grace=0), PluginClient(short_tmp / "s") as plugin:
        await plugin.report_agent_pause(report, timeout=DEADLINE)
    assert node.requests == [
        PauseReport(
            (PauseOffer(PauseWay.LABELS, ("set a=false",)),),
            "pause-1",
            PauseState.PLANNED,
            (LabelChange("a", "true", "false"), LabelChange("b", None, "false")),
            "m" * 500,
        )
    ]


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (pb.AgentPauseReport(state="done"), "Unknown state"),
        (pb.AgentPauseReport(changes=[pb.LabelChange(key=f"k{n}") for n in range(65)]), "at most 64 labels"),
        (pb.AgentPauseReport(changes=[pb.LabelChange(key="")]), "no label of a node"),
        (pb.AgentPauseReport(changes=[pb.LabelChange(key="k", during="v" * 64)]), "no label of a node"),
        (pb.AgentPauseReport(offers=[pb.PauseOffer(way="labels")] * 17), "At most 16 ways"),
    ],
)
async def test_report_about_a_pause_that_no_label_of_a_node_can_have_is_refused(
    short_tmp: Path, report: pb.AgentPauseReport, why: str
) -> None:
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s"), grace=0), PluginClient(short_tmp / "s") as plugin:
        with pytest.raises(InvalidRequest, match=why):
            await plugin.report_agent_pause(report, timeout=DEADLINE)
    assert node.requests == []


def test_plugin_sees_the_pause_that_it_carries_out_and_no_other() -> None:
    pause = AgentPause("pause-1", PauseWay.LABELS, ("GPU-a0",), 1000.5, True, (LabelChange("a", None, "false"),))
    view = replace(FakeNode().view(), agent_pause=pause)
    shown = messages.snapshot_message(view).agent_pause
    assert (shown.id, shown.way, list(shown.device_ids), shown.ending, shown.since) == (
        "pause-1",
        "labels",
        ["GPU-a0"],
        True,
        1000.5,
    )
    (change,) = shown.changes
    assert (change.key, change.HasField("before"), change.during) == ("a", False, "false")
    assert messages.snapshot_key(view) != messages.snapshot_key(replace(view, agent_pause=None))
    own = replace(view, agent_pause=replace(pause, way=PauseWay.BACKEND))
    assert not messages.snapshot_message(own).HasField("agent_pause")
    assert messages.snapshot_key(own) == messages.snapshot_key(replace(view, agent_pause=None))
