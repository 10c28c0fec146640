"""Tests of the matrix of pod shapes: its shapes, its kubelet, its judge."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from scrubber.domain.assignment import Pod
from tests.simulation.shapes.kubelet import Container, ShapedPod
from tests.simulation.shapes.matrix import KNOWN, Played, Tally, all_scripts_of, sample
from tests.simulation.shapes.node import ShapedCluster
from tests.simulation.shapes.play import Outcome, play
from tests.simulation.shapes.shape import (
    Box,
    Component,
    Device,
    Kind,
    Policy,
    Restart,
    Script,
    Shape,
    lives_of,
    shapes_of,
)
from tests.simulation.timeline import in_virtual_time

GPU, OTHER, SHARED = "scrubber.dev/gpu", "scrubber.dev/other", "scrubber.dev/gpu.shared"


def shape(written: str) -> Shape:
    return tuple(Box(Kind(each[0]), Device(each[1])) for each in written.split())


async def a_node(happened: Sequence[str] = (), **device_counts: int) -> ShapedCluster:
    names = {"gpu": GPU, "other": OTHER, "shared": SHARED}
    return ShapedCluster({names[each]: count for each, count in device_counts.items()}, lambda _: None, "seed")


async def admitted(cluster: ShapedCluster, written: str, policy: Policy = Policy.ALWAYS) -> ShapedPod:
    allocated = cluster.shaped.allocate(shape(written))
    await cluster.allocated(allocated)
    return cluster.shaped.take(Pod("acme", "train-0", "uid-1"), shape(written), allocated, policy)


@pytest.mark.parametrize(("containers", "count"), [(1, 2), (2, 27), (3, 245), (4, 2025)])
def test_every_pod_shape_is_generated_once(containers: int, count: int) -> None:
    everything = list(shapes_of(containers))
    assert len(set(everything)) == len(everything) == count


def test_script_reads_back_as_written() -> None:
    for script in sample(200, seed=3):
        assert Script.read(str(script)) == script


def test_sample_of_the_matrix_has_every_component_every_size_and_the_known_scripts() -> None:
    scripts = sample(200, seed=2)
    assert {len(each.shape) for each in scripts} >= {1, 2, 3, 4}
    assert {each.restart.component for each in scripts if each.restart} == set(Component)
    assert [str(each) for each in scripts[: len(KNOWN)]] == list(KNOWN)


def test_repeated_play_of_a_script_has_the_same_outcome() -> None:
    script = Script.read("iG s- mS | Always deleted steady | kubelet@9")
    assert play(script) == play(script)


def test_restart_in_the_same_state_is_played_once() -> None:
    plays = [each for each in all_scripts_of(shape("mG")) if each.restart is not None]
    assert len(set(plays)) == len(plays)
    first = [each.life for each in plays if each.restart == Restart(Component.SERVICE, 0)]
    usual = next(lives_of(shape("mG")))
    assert first == [usual, *(each for each in first if (each.tempo, each.pauses) != (usual.tempo, usual.pauses))]


@in_virtual_time
async def test_device_of_an_init_container_is_reused_and_that_of_a_sidecar_is_kept() -> None:
    cluster = await a_node(gpu=2)
    init, side, main = cluster.shaped.allocate(shape("iG sG mG"))
    assert init == side
    assert main[GPU] != side[GPU]


@in_virtual_time
async def test_containers_share_a_device_by_different_shares() -> None:
    cluster = await a_node(shared=1)
    one, other = (each[SHARED][0] for each in cluster.shaped.allocate(shape("mS mS")))
    assert one != other
    assert one.partition("::")[0] == other.partition("::")[0]


@in_virtual_time
async def test_pod_resources_lists_native_sidecars_but_no_ordinary_init_containers() -> None:
    cluster = await a_node(gpu=1, other=1, shared=1)
    await admitted(cluster, "iG sO mS")
    reading = cluster.shaped.reading()
    assert [each.container for each in reading.assignments] == ["c1", "c2"]
    assert [each.container for each in reading.checkpoint_only] == ["c0"]
    await cluster.end()


@in_virtual_time
async def test_refused_container_does_not_delay_others_and_the_sandbox_starts_first() -> None:
    cluster = await a_node(gpu=1)
    pod = await admitted(cluster, "mG m-")
    await cluster.until(lambda: pod.boxes[0].refusals > 0)
    await cluster.run(0.2)
    refused, plain = pod.boxes
    assert (refused.runs, plain.runs) == (0, 1)
    first, *_ = sorted(cluster.process_table.living(pod.uid), key=lambda proc: proc.started)
    assert first.sandbox
    assert len({proc.container for proc in cluster.process_table.living(pod.uid)}) == 2
    await cluster.end()


@in_virtual_time
async def test_sidecars_end_after_the_main_containers_in_reverse_order() -> None:
    happened: list[str] = []
    cluster = await a_node()
    pod = await admitted(cluster, "s- s- m-")
    await cluster.until(lambda: not pod.waits_for)
    cluster.shaped.delete_pod(pod)
    while pod.listed:
        ended = [each.name for each in pod.boxes if each.first and not each.first.alive and each.name not in happened]
        happened += ended
        await cluster.run(0.01)
    assert happened == ["c2", "c1", "c0"]
    await cluster.end()


@in_virtual_time
async def test_pod_with_restart_policy_never_fails_after_a_reboot_and_others_restart() -> None:
    cluster = await a_node()
    pods = [await admitted(cluster, "i- m-", Policy.NEVER), await admitted(cluster, "i- m-", Policy.ALWAYS)]
    cluster.runs = lambda pod, box: cluster.shaped.ended(pod, box, 0) if box.kind is Kind.INIT else None
    await cluster.until(lambda: all(not pod.waits_for for pod in pods))
    cluster.shaped.power_off()
    await cluster.shaped.power_on()
    await cluster.until(lambda: not pods[1].waits_for)
    assert pods[0].failed
    assert [each.runs for each in pods[1].boxes] == [2, 2]
    await cluster.end()


@in_virtual_time
async def test_ungated_container_on_another_pods_memory_is_reported_as_a_breach() -> None:
    class Ungated(ShapedCluster):
        async def _pre_start_of(self, pod: ShapedPod, box: Container, resource: str) -> None:
            return

    cluster = Ungated({GPU: 1}, lambda _: None, "seed")
    pod = await admitted(cluster, "mG")
    await cluster.until(lambda: not pod.waits_for)
    assert any("which holds what" in each for each in cluster.laws.breaches)
    assert any("reads on" in each for each in cluster.laws.breaches)
    await cluster.end()


def test_failures_of_one_kind_are_reported_once_with_the_shortest_script() -> None:
    found, more = Tally(), Tally()
    for line in ("mG m- mG | Always deleted steady | service@3", "mG m- | Always deleted steady | service@7"):
        found.played(Script.read(line), Outcome("subject: c0 never starts: Device GPU-0000 waits"))
    more.played(
        Script.read("mG | Always deleted steady | node@7"), Outcome("subject: c1 never starts: Device GPU-0001 waits")
    )
    more.shapes[1] += 1
    found.add(Played.read(str(Played("mG", "0123abc", more))).tally)
    ((count, script, _),) = found.wrong.values()
    assert (count, script) == (3, "mG | Always deleted steady | node@7")
    assert "1 | 1 | 1" in found.report()
