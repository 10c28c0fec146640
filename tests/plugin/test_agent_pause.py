"""Agents are paused by labels of the node and restored, whatever dies meanwhile and whatever other clients change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.agent_pause import AgentPauser, AgentPauseTimes
from plugin.cluster.client import ApiServerClient
from plugin.cluster.errors import ApiForbidden
from plugin.cluster.pause_labels import PAUSE_LABEL, LeaseName, PauseLabel, parse_pause_labels
from plugin.cluster.port import LeaseState, PauseApi
from plugin.instance_lock import InstanceLock
from plugin.main import PluginSettings, run
from plugin.observers import AgentPauseObserver, NullObserver
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient
from scrubber.domain.errors import InvalidConfiguration, InvalidRequest, Unavailable
from scrubber.emulator.cluster import Answer, ApiRequest, Selection, Silence
from scrubber.emulator.cluster.resources import LEASES
from tests.cluster.operands import OperandsStandIn, holding_process
from tests.cluster.plugin_server import PAUSES_AGENTS, PluginApiServer, answer, failure, kubeconfig
from tests.plugin.test_cluster_plugin import command
from tests.plugin.test_cluster_reporter import Diary
from tests.plugin_collaborators import Bell, FakeKubelet, FakeService, device, snapshot

SENTINEL = "k8saas.nvidia.com/ManagedByNVSentinel"
EXPORTER, DCGM = "nvidia.com/gpu.deploy.dcgm-exporter", "nvidia.com/gpu.deploy.dcgm"
SETTING = f"{SENTINEL}=false,{EXPORTER}=false,{DCGM}=false"
LABELS = parse_pause_labels(SETTING)
LEASE = LeaseName("scrubber-system", "scrubber-agent-pause")
BEFORE = {EXPORTER: "true", DCGM: "true", "zone": "a"}
DURING = {SENTINEL: "false", EXPORTER: "false", DCGM: "false", "zone": "a", PAUSE_LABEL: "pause-1"}
PAUSE = pb.AgentPause(id="pause-1", way="labels", device_ids=["sim-0"])
QUICK = AgentPauseTimes(call=20, renew=60, first_retry=0.01, max_retry=0.05, lock_poll=0.01, restart=60)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvidia.com/gpu.deploy.dcgm", "'nvidia.com/gpu.deploy.dcgm' is not a label with a value"),
        ("a/b/c=false", "'a/b/c=false' is not a label with a value"),
        ("example.com/a=no blanks", "'example.com/a=no blanks' is not a label with a value"),
        ("example.com/a=1,example.com/a=2", "names example.com/a twice"),
        ("example.com/yields=false", "example.com/yields is also in --yield-labels"),
        ("nvidia.com/gpu.deploy.client=false", "can select the pods of the scrub service"),
        ("nvidia.com/gpu.deploy.device-plugin=false", "can select the pods of the scrub service"),
        ("nvidia.com/gpu.deploy.driver=false", "also selects the driver"),
        ("kubernetes.io/os=none", "belongs to Kubernetes or to this plugin"),
        ("scrubber.dev/node=false", "belongs to Kubernetes or to this plugin"),
    ],
)
def test_label_that_must_not_be_changed_for_a_pause_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        parse_pause_labels(text, ("example.com/yields",))


def test_pause_labels_keep_their_order() -> None:
    assert parse_pause_labels(f" {DCGM}=false, {SENTINEL}=false,") == (
        PauseLabel(DCGM, "false"),
        PauseLabel(SENTINEL, "false"),
    )
    assert parse_pause_labels("") == ()


def test_lease_has_a_namespace_and_a_name_or_is_off() -> None:
    assert LeaseName.parse("scrubber-system/scrubber-agent-pause") == LEASE
    assert LeaseName.parse("") is None
    with pytest.raises(InvalidConfiguration, match="'scrubber-agent-pause' is not the name of a Lease"):
        LeaseName.parse("scrubber-agent-pause")


async def test_pause_labels_without_access_to_the_api_server_are_refused_at_start(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    settings = PluginSettings(kubelet_dir=short_tmp, node_name="node-1", pause_labels=LABELS)
    with pytest.raises(InvalidConfiguration, match="--pause-labels needs access to the API server: no credentials"):
        await run(settings)


# -- one instance ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def server() -> AsyncIterator[PluginApiServer]:
    async with PluginApiServer() as running:
        running.add_node("node-1", **BEFORE)
        running.role |= PAUSES_AGENTS
        yield running


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[FakeService]:
    async with FakeService(short_tmp / "s", snapshot(device(0))) as running:
        yield running


class Stage:
    """Instances of the component, on a real socket of a service and a real API server."""

    def __init__(self, server: PluginApiServer, service: FakeService, directory: Path) -> None:
        self.server = server
        self.service = service
        self.diary = Diary()
        self.pausers: list[AgentPauser] = []
        self._directory = directory
        self._login = kubeconfig(directory, server.url)

    def connect(self) -> PauseApi:
        return ApiServerClient(self._login, "node-1", deadline=20)

    @asynccontextmanager
    async def instance(
        self,
        labels: tuple[PauseLabel, ...] = LABELS,
        *,
        lease: LeaseName | None = LEASE,
        times: AgentPauseTimes = QUICK,
        node: str = "node-1",
        connect: Callable[[], PauseApi] | None = None,
        observer: AgentPauseObserver | None = None,
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Run an instance until the end; cancelling its task ends it at once, as SIGKILL does."""
        loop = asyncio.get_running_loop()
        async with PluginClient(self._directory / "s") as client:
            pauses = AgentPauser(
                client,
                connect or self.connect,
                node,
                labels=labels,
                lease=lease,
                times=times,
                lock=InstanceLock(self._directory, "agent-pause"),
                log=self.diary,
                clock=loop.time,
                wall_clock=lambda: 1_900_000_000.0,
                jitter=lambda: 0.5,
                observer=observer,
            )

            self.pausers.append(pauses)

            async def live() -> None:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(pauses.run())
                    async for shown in client.watch_snapshots():
                        pauses.on_snapshot(shown)

            task = asyncio.create_task(live())
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def last_message(self) -> str:
        return self.service.pause_reports[-1].message if self.service.pause_reports else ""

    async def restored(self) -> None:
        """Wait until the pause is over, and check that nothing of it is left."""
        await self.service.bell.until(lambda: self.service.pause is None)
        assert self.server.labels("node-1") == BEFORE
        assert [each["spec"].get("holderIdentity") for each in self.server.leases] in ([], [None])


@pytest.fixture
def stage(server: PluginApiServer, service: FakeService, short_tmp: Path) -> Stage:
    return Stage(server, service, short_tmp)


async def test_labels_are_changed_in_order_after_the_service_has_recorded_them_and_restored_in_reverse(
    stage: Stage,
) -> None:
    patched: list[dict[str, Any]] = []
    recorded: list[int] = []

    def watch(request: ApiRequest) -> Answer | None:
        if request.operation == "patch nodes":
            patched.append(request.body["metadata"]["labels"])
            recorded.append(len(stage.service.pause.changes if stage.service.pause else ()))
        return None

    stage.server.intercept = watch
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: stage.service.pause_states() == ["planned", "paused"])
        assert stage.server.labels("node-1") == DURING
        (lease,) = stage.server.leases
        assert lease["spec"]["holderIdentity"] == "node-1"
        stage.service.show_pause(None)
        await stage.restored()
    order = [SENTINEL, EXPORTER, DCGM]
    assert [key for each in patched for key in each] == [PAUSE_LABEL, *order, *reversed(order), PAUSE_LABEL]
    assert set(recorded) == {3}
    (planned,) = [each for each in stage.service.pause_reports if each.state == "planned"]
    assert [each.before if each.HasField("before") else None for each in planned.changes] == [None, "true", "true"]
    assert stage.service.pause_states() == ["planned", "paused", "restored"]
    assert stage.diary.logged("agents.paused") == [
        {
            "pause": "pause-1",
            "labels": [f"{SENTINEL}: no label to false", *(f"{key}: true to false" for key in order[1:])],
        }
    ]
    assert stage.diary.logged("agents.restored") == [
        {"pause": "pause-1", "labels": [f"{DCGM}: true", f"{EXPORTER}: true", f"{SENTINEL}: no label"]}
    ]


class Counter(NullObserver):
    """Counts pauses and writes, and rings ``bell`` for each pause."""

    def __init__(self, bell: Bell) -> None:
        self.counted: list[tuple[str, ...]] = []
        self._bell = bell

    def on_agent_pause(self, outcome: str) -> None:
        self.counted.append((outcome,))
        self._bell.ring()

    def on_cluster_write(self, kind: str, ok: bool) -> None:
        self.counted.append((kind, "ok" if ok else "failed"))


async def test_pauses_and_their_writes_are_counted(stage: Stage) -> None:
    observer = Counter(stage.service.bell)
    counted = observer.counted
    async with stage.instance(observer=observer):
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: ("paused",) in counted)
        stage.service.show_pause(None)
        await stage.service.bell.until(lambda: ("restored",) in counted)
    # Taken, and renewed before the first change; released.
    lease, label = ("lease", "ok"), ("label", "ok")
    assert counted == [lease, lease, *[label] * 4, ("paused",), *[label] * 4, lease, ("restored",)]


async def test_pause_is_counted_and_logged_once_although_the_service_reacts_before_it_answers_the_reports(
    stage: Stage,
) -> None:
    observer = Counter(stage.service.bell)

    async def react(report: pb.AgentPauseReport) -> None:
        if report.state == "paused":
            stage.service.show_pause(None)
        if report.state == "restored":
            stage.service.show(snapshot(device(0)))
        if report.state in {"paused", "restored"}:
            await asyncio.Event().wait()

    stage.service.on_pause_report = react
    async with stage.instance(observer=observer):
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: ("restored",) in observer.counted)
        await stage.service.bell.until(lambda: stage.service.pause_reports[-1].state == "")  # of the next goal
    assert [each for each in observer.counted if len(each) == 1] == [("paused",), ("restored",)]
    assert [len(stage.diary.logged(each)) for each in ("agents.paused", "agents.restored")] == [1, 1]


async def test_offer_lists_each_action_and_is_repeated_to_a_service_that_starts(stage: Stage) -> None:
    async with stage.instance():
        await stage.service.bell.until(lambda: len(stage.service.pause_reports) == 1)
        stage.service.show(snapshot(device(0), epoch="second"))
        await stage.service.bell.until(lambda: len(stage.service.pause_reports) == 2)
    for report in stage.service.pause_reports:
        (offer,) = report.offers
        assert (offer.way, report.pause_id, report.state) == ("labels", "", "")
        assert list(offer.actions) == [
            "take the Lease scrubber-system/scrubber-agent-pause, so that one node at a time does this",
            f'set the node label {SENTINEL} to "false"',
            f'set the node label {EXPORTER} to "false", if it is "true"',
            f'set the node label {DCGM} to "false", if it is "true"',
        ]


async def test_plugin_without_pause_labels_withdraws_what_an_earlier_one_offered_and_requests_nothing(
    stage: Stage,
) -> None:
    async with stage.instance(labels=()):
        await stage.service.bell.until(lambda: len(stage.service.pause_reports) == 1)
        assert list(stage.service.pause_reports[0].offers) == []
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: stage.service.pause_states()[:1] == ["failed"])
    assert stage.service.pause_reports[1].message == "The plugin has no --pause-labels."
    assert stage.server.labels("node-1") == BEFORE


async def test_plugin_without_pause_labels_restores_what_an_earlier_one_changed(stage: Stage) -> None:
    stage.server.set_labels("node-1", {DCGM: "false", PAUSE_LABEL: "pause-1"})
    pause = pb.AgentPause(id="pause-1", way="labels", ending=True)
    pause.changes.add(key=DCGM, before="true", during="false")
    stage.service.show_pause(pause)
    async with stage.instance(labels=()):
        await stage.restored()


async def test_deploy_labels_that_another_client_has_paused_are_no_agents_to_pause(stage: Stage) -> None:
    stage.server.set_labels("node-1", {EXPORTER: "false", DCGM: None})
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: stage.service.pause_states() == ["failed"])
        assert "so they pause no agent" in stage.service.pause_reports[-1].message
        await stage.service.bell.until(lambda: stage.service.pause is not None and stage.service.pause.ending)
    assert stage.server.log.of("patch nodes") == []


async def test_plan_that_the_service_refuses_is_not_carried_out(stage: Stage) -> None:
    refused: list[str] = []

    async def refuse(report: pb.AgentPauseReport) -> None:
        if report.state == "planned":
            refused.append(report.pause_id)
            stage.service.bell.ring()
            raise InvalidRequest("The pause pause-1 is ending.")

    stage.service.on_pause_report = refuse
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: len(refused) > 1)
        stage.service.show_pause(None)
        await stage.restored()
    assert stage.server.log.of("patch nodes") == []


async def test_role_that_forbids_the_change_is_a_failure_with_the_api_servers_message(stage: Stage) -> None:
    stage.server.intercept = lambda request: (
        failure(403, "Forbidden", "nodes is forbidden") if request.operation == "patch nodes" else None
    )
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "failed" in stage.service.pause_states())
        assert "403: nodes is forbidden" in next(
            each.message for each in stage.service.pause_reports if each.state == "failed"
        )
        await stage.restored()


async def test_restore_waits_for_an_api_server_that_is_away_and_reports_why(stage: Stage) -> None:
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        await stage.server.stop()
        stage.service.show_pause(None)
        await stage.service.bell.until(lambda: "request to the API server failed" in stage.last_message())
        assert stage.service.pause_reports[-1].state == ""
        await stage.server.start()
        await stage.restored()


async def test_service_that_is_away_delays_the_pause_and_no_label_is_changed_before_it_has_recorded_the_plan(
    stage: Stage,
) -> None:
    async def away(report: pb.AgentPauseReport) -> None:
        if report.state == "planned" and len(stage.diary.logged("agents.pause-waiting")) < 1:
            raise Unavailable("away")
        if report.state == "planned":
            assert stage.server.labels("node-1") == BEFORE

    stage.service.on_pause_report = away
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: stage.service.pause_states() == ["planned", "paused"])
        stage.service.show_pause(None)
        await stage.restored()


async def test_labels_are_restored_if_the_service_has_lost_its_ledger(stage: Stage) -> None:
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        stage.service.show(snapshot(device(0), epoch="second"))
        await stage.server.until(lambda: stage.server.labels("node-1") == BEFORE)


async def test_labels_are_restored_if_the_service_stays_away_and_changed_again_if_it_returns(stage: Stage) -> None:
    times = replace(QUICK, abandon=0.01)
    async with stage.instance(times=times) as task:
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        await stage.service.stop()
        await asyncio.wait({task})  # the stream of snapshots has ended
        stage.pausers[-1].on_snapshot(None)
        async with asyncio.TaskGroup() as tasks:
            alone = tasks.create_task(stage.pausers[-1].run())
            await stage.server.until(lambda: stage.server.labels("node-1") == BEFORE)
            alone.cancel()
        assert stage.diary.logged("agents.pause-abandoned") == [{"pause": "pause-1"}]
    await stage.service.start()
    async with stage.instance():
        await stage.server.until(lambda: stage.server.labels("node-1") == DURING)
        stage.service.show_pause(None)
        await stage.restored()


async def test_unknown_pause_is_reported_and_its_labels_are_left_to_an_operator(stage: Stage) -> None:
    stage.server.set_labels("node-1", {DCGM: "false", PAUSE_LABEL: "pause-0"})
    async with stage.instance():
        await stage.diary.bell.until(lambda: bool(stage.diary.logged("agents.pause-orphaned")))
    assert stage.diary.logged("agents.pause-orphaned") == [{"pause": "pause-0", "labels": [DCGM]}]
    assert stage.server.labels("node-1")[DCGM] == "false"


async def test_label_of_a_pause_that_changed_nothing_is_removed(stage: Stage) -> None:
    stage.server.set_labels("node-1", {PAUSE_LABEL: "pause-0"})
    async with stage.instance():
        await stage.server.until(lambda: stage.server.labels("node-1") == BEFORE)


async def test_label_that_another_client_changes_during_the_pause_stays_and_is_named(stage: Stage) -> None:
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        stage.server.set_labels("node-1", {DCGM: "paused-for-driver-upgrade"})
        stage.service.show_pause(None)
        await stage.service.bell.until(lambda: stage.service.pause is None)
    assert stage.server.labels("node-1") == BEFORE | {DCGM: "paused-for-driver-upgrade"}
    assert f"Another client has changed the node label {DCGM} meanwhile" in stage.service.pause_reports[-1].message
    (restored,) = stage.diary.logged("agents.restored")
    assert restored["labels"] == [f"{EXPORTER}: true", f"{SENTINEL}: no label"]


async def test_writes_of_others_between_our_requests_are_no_obstacle(stage: Stage) -> None:
    def interfere(request: ApiRequest) -> Answer | None:
        if request.operation == "patch nodes" and len(stage.server.log.of("patch nodes")) % 2 == 0:
            node = stage.server.labels("node-1")
            stage.server.set_labels("node-1", {"zone": "a" if node["zone"] == "b" else "b"})
        return None

    stage.server.intercept = interfere
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        stage.server.intercept = lambda _: None
        stage.server.set_labels("node-1", {"zone": "a"})
        assert stage.server.labels("node-1") == DURING
        stage.service.show_pause(None)
        await stage.restored()


# -- one node at a time ------------------------------------------------------------------------------------------------


def held(holder: str, renewed: datetime | None = None) -> dict[str, Any]:
    moment = (renewed or datetime(2030, 3, 17, tzinfo=UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": LEASE.name, "namespace": LEASE.namespace, "labels": {"a": "b"}},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 60, "renewTime": moment, "leaseTransitions": 3},
    }


KEY = LEASE.namespace, LEASE.name


async def test_pause_waits_until_another_node_has_released_the_lease_and_reports_which(stage: Stage) -> None:
    stage.server.replace(LEASES, held("node-2"))
    times = AgentPauseTimes(call=20, renew=0.01, first_retry=0.01, lock_poll=0.01)
    async with stage.instance(times=times):
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "node-2 has it, and pauses its own agents" in stage.last_message())
        assert stage.server.labels("node-1") == BEFORE
        stage.server.api.patch(LEASES, LEASE.name, {"spec": {"holderIdentity": None}}, LEASE.namespace)
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        (lease,) = stage.server.leases
        assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("node-1", 4)
        assert lease["metadata"]["labels"] == {"a": "b"}
        stage.service.show_pause(None)
        await stage.restored()


async def test_holder_of_a_lease_is_reported_on_one_printable_line(stage: Stage) -> None:
    stage.server.replace(LEASES, held("node-2\x1b[2J\n" + "x" * 1000))
    times = AgentPauseTimes(call=20, renew=0.01, first_retry=0.01, lock_poll=0.01)
    async with stage.instance(times=times):
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "has it, and pauses its own agents" in stage.last_message())
        assert r"node-2\x1b[2J xxx" in stage.last_message()
        assert stage.last_message().isprintable()
        assert len(stage.last_message()) < 500
        stage.server.api.patch(LEASES, LEASE.name, {"spec": {"holderIdentity": None}}, LEASE.namespace)
        stage.service.show_pause(None)
        await stage.restored()


@pytest.mark.parametrize("seconds", [-5, 0])
async def test_lease_of_another_node_without_a_duration_is_taken_after_this_nodes_own(
    stage: Stage, seconds: int
) -> None:
    from plugin.cluster.pause_lease import PauseLease

    now = [100.0]
    api = stage.connect()
    lease = PauseLease(LEASE, "node-1", seconds=60, clock=lambda: now[0], wall_clock=lambda: 1_900_000_000.0)
    found = held("node-2")
    found["spec"]["leaseDurationSeconds"] = seconds
    stage.server.intercept = lambda request: answer(found) if request.http.method == "GET" else None
    assert await lease.acquire(api) == "node-2"
    now[0] += 60
    assert await lease.acquire(api) == "node-2"
    await api.close()


async def test_lease_of_a_node_that_died_is_taken_after_it_was_not_renewed_for_its_duration(stage: Stage) -> None:
    """By this node's own clock: the holder's may be wrong by hours."""
    from plugin.cluster.pause_lease import PauseLease

    now = [100.0]
    api = stage.connect()
    lease = PauseLease(LEASE, "node-1", seconds=60, clock=lambda: now[0], wall_clock=lambda: 1_900_000_000.0)
    stage.server.replace(LEASES, held("node-2", datetime(2020, 1, 1, tzinfo=UTC)))
    assert await lease.acquire(api) == "node-2"
    now[0] += 50
    stage.server.replace(LEASES, held("node-2", datetime(2020, 1, 1, 0, 0, 50, 1, tzinfo=UTC)))
    assert await lease.acquire(api) == "node-2"
    now[0] += 60
    assert await lease.acquire(api) == "node-2"
    now[0] += 1
    assert await lease.acquire(api) == ""
    assert stage.server.leases[0]["spec"]["holderIdentity"] == "node-1"
    await lease.release(api)
    assert (await api.get_lease(*KEY)).holder == ""
    await api.close()


async def test_lease_is_acquired_by_one_of_two_nodes_only(stage: Stage) -> None:
    api = stage.connect()
    await api.create_lease(*KEY, LeaseState("", 60, None))
    found = await api.get_lease(*KEY)
    await api.update_lease(*KEY, LeaseState("node-1", 60, datetime.now(UTC), 0, found.resource_version))
    with pytest.raises(Exception, match="409"):
        await api.update_lease(*KEY, LeaseState("node-2", 60, datetime.now(UTC), 0, found.resource_version))
    assert (await api.get_lease(*KEY)).holder == "node-1"
    await api.close()


async def test_lease_is_renewed_for_as_long_as_the_pause_lasts_and_its_loss_is_logged(stage: Stage) -> None:
    times = AgentPauseTimes(call=20, renew=0.01, first_retry=0.01, lock_poll=0.01)
    async with stage.instance(times=times):
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        renewed = len(stage.server.log.of("patch leases"))
        await stage.server.until(lambda: len(stage.server.log.of("patch leases")) > renewed + 2)
        stage.server.replace(LEASES, held("node-2"))
        await stage.diary.bell.until(lambda: bool(stage.diary.logged("agents.lease-lost", holder="node-2")))
        stage.service.show_pause(None)
        await stage.service.bell.until(lambda: stage.service.pause is None)
    assert stage.server.labels("node-1") == BEFORE
    assert stage.server.leases[0]["spec"]["holderIdentity"] == "node-2"


async def test_without_a_lease_none_is_requested(stage: Stage) -> None:
    stage.server.role -= PAUSES_AGENTS
    async with stage.instance(lease=None):
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        stage.service.show_pause(None)
        await stage.restored()
    assert stage.server.leases == []


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True], ids=["before the request takes effect", "before its response"])
@pytest.mark.parametrize("ends", [False, True], ids=["the pause goes on", "the pause has ended"])
async def test_instance_that_dies_at_any_request_is_followed_by_one_that_restores_everything(
    stage: Stage, applied: bool, ends: bool
) -> None:
    """At each request of a pause and its end in turn; the last round has no request left to die at."""
    for number in range(100):
        stage.server.log.requests.clear()
        stage.server.api.delete_collection(LEASES, Selection())
        stage.service.pause_reports.clear()
        dying = asyncio.Event()

        def die(request: ApiRequest, number: int = number, dying: asyncio.Event = dying) -> Answer | None:
            if len(stage.server.log.requests) != number or dying.is_set():
                return None
            dying.set()
            return Silence.LOSE if applied else Silence.HANG

        async with stage.instance() as first:
            await stage.service.bell.until(lambda: len(stage.service.pause_reports) == 1)
            await stage.server.until(lambda: bool(stage.server.log.requests))  # the search for leftovers
            stage.server.log.requests.clear()
            stage.server.intercept = die
            stage.service.show_pause(PAUSE)
            waiting = asyncio.create_task(dying.wait())
            lives = asyncio.create_task(_through(stage))
            await asyncio.wait({waiting, lives}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            lives.cancel()
            await asyncio.gather(waiting, lives, return_exceptions=True)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        stage.server.intercept = lambda _: None
        if not dying.is_set():
            assert number > 12, "every request was tried"
            return
        if ends and stage.service.pause is not None:
            stage.service.show_pause(None)
        async with stage.instance():
            if not ends and stage.service.pause is not None and not stage.service.pause.ending:
                await stage.service.bell.until(lambda: stage.server.labels("node-1") == DURING)
                await stage.service.bell.until(lambda: stage.service.pause_states()[-1] == "paused")
                stage.service.show_pause(None)
            await stage.restored()
    raise AssertionError("it never got through")


async def _through(stage: Stage) -> None:
    await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
    stage.service.show_pause(None)
    await stage.service.bell.until(lambda: stage.service.pause is None)


async def test_second_instance_acts_only_when_the_first_one_has_ended(stage: Stage) -> None:
    async with stage.instance() as first:
        stage.service.show_pause(PAUSE)
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        async with stage.instance():
            await stage.diary.bell.until(lambda: bool(stage.diary.logged("agents.standby")))
            before = len(stage.server.log.requests)
            assert stage.service.pause_states() == ["planned", "paused"]
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert len(stage.server.log.requests) == before
            await stage.service.bell.until(lambda: stage.service.pause_states() == ["planned", "paused", "paused"])
            stage.service.show_pause(None)
            await stage.restored()


async def test_plugin_without_pause_labels_keeps_no_other_plugin_of_the_node_from_offering_them(stage: Stage) -> None:
    async with stage.instance(labels=()):
        await stage.service.bell.until(lambda: bool(stage.service.pause_reports))
        async with stage.instance():
            await stage.service.bell.until(lambda: bool(stage.service.pause_reports[-1].offers))
            stage.service.show_pause(PAUSE)
            await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
            stage.service.show_pause(None)
            await stage.restored()


async def test_plugin_that_cannot_restore_leaves_it_to_another_one_of_the_node(stage: Stage) -> None:
    def refuse() -> PauseApi:
        raise ApiForbidden("The plugin has no access to the API server: no credentials were found.")

    stage.server.set_labels("node-1", {DCGM: "false", PAUSE_LABEL: "pause-1"})
    pause = pb.AgentPause(id="pause-1", way="labels", ending=True)
    pause.changes.add(key=DCGM, before="true", during="false")
    stage.service.show_pause(pause)
    async with stage.instance(labels=(), connect=refuse):
        await stage.service.bell.until(lambda: bool(stage.service.pause_reports))
        async with stage.instance():
            await stage.restored()


async def test_pause_goes_on_after_an_unexpected_error(stage: Stage) -> None:
    failures = [RuntimeError("a defect")]

    def fail_once() -> PauseApi:
        if failures:
            raise failures.pop()
        return stage.connect()

    stage.service.show_pause(PAUSE)
    async with stage.instance(connect=fail_once, times=replace(QUICK, restart=0.01)):
        await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
        assert len(stage.diary.logged("agents.failed")) == 1
        stage.service.show_pause(None)
        await stage.restored()


async def test_instance_without_credentials_says_that_it_cannot_restore(stage: Stage) -> None:
    def refuse() -> PauseApi:
        raise ApiForbidden("The plugin has no access to the API server: no credentials were found.")

    pause = pb.AgentPause(id="pause-1", way="labels", ending=True)
    pause.changes.add(key=DCGM, before="true", during="false")
    stage.service.show_pause(pause)
    async with stage.instance(labels=(), connect=refuse):
        await stage.service.bell.until(lambda: bool(stage.service.pause_reports))
    assert "no credentials were found" in stage.service.pause_reports[-1].message
    assert stage.service.pause_states() == []


# -- processes ---------------------------------------------------------------------------------------------------------


async def test_operands_end_for_the_reset_and_return_although_the_plugin_is_killed_meanwhile(
    stage: Stage, short_tmp: Path
) -> None:
    credentials = {"KUBECONFIG": str(kubeconfig(short_tmp, stage.server.url).path)}
    (short_tmp / "node").touch()
    operands = [holding_process(key, [str(short_tmp / "node")]) for key in (EXPORTER, DCGM)]
    flags = ("--pause-labels", SETTING)
    async with FakeKubelet(short_tmp), OperandsStandIn(stage.server, "node-1", *operands) as running:
        async with command(short_tmp, credentials, *flags) as plugin:
            await stage.service.bell.until(lambda: bool(stage.service.pause_reports))
            # It dies between the two deploy labels.
            stage.server.intercept = lambda request: (
                Silence.HANG if DCGM in request.body.get("metadata", {}).get("labels", {}) else None
            )
            stage.service.show_pause(PAUSE)
            await running.until(DCGM)
            plugin.process.kill()
            await plugin.process.wait()
        stage.server.intercept = lambda _: None
        async with command(short_tmp, credentials, *flags) as plugin:
            await running.until()
            await stage.service.bell.until(lambda: "paused" in stage.service.pause_states())
            plugin.process.kill()
            await plugin.process.wait()
        stage.service.show_pause(None)
        async with command(short_tmp, credentials, *flags) as plugin:
            await running.until(EXPORTER, DCGM)
            await stage.service.bell.until(lambda: stage.service.pause is None)
            assert (await plugin.stops())[0] == 0
        assert running.log[-2:] == [f"+{DCGM}", f"+{EXPORTER}"]
