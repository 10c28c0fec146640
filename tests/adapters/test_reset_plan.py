"""What a reset takes with it and what is in its way, over the generations of GPUs: the plan, from facts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.adapters.nvidia.resetplan import METHOD, Generation, Named, Platform, ResetFacts, plan, targets
from scrubber.domain.telemetry import Holder, HolderKind

FIRST, SECOND, THIRD = Named("GPU-1", "0"), Named("GPU-2", "1"), Named("GPU-3", "2")
PART, OTHER_PART = Named("MIG-1", "0:0"), Named("MIG-2", "0:1")
TRAIN = Holder(7, 1, HolderKind.PROCESS, "train")

BEFORE_AMPERE = [Generation.UNKNOWN, *(each for each in Generation if 0 < each < Generation.AMPERE)]
FROM_AMPERE_ON = [each for each in Generation if each >= Generation.AMPERE]


def facts(generation: Generation = Generation.HOPPER, **more: object) -> ResetFacts:
    """A GPU that nobody holds, on a node where everything is there."""
    made = ResetFacts(
        device=FIRST,
        gpu=FIRST.id,
        pci_address="0000:1b:00.0",
        generation=generation,
        holders={each.id: () for each in (FIRST, SECOND, THIRD)},
    )
    return replace(made, **more)  # type: ignore[arg-type]


def instance(**more: object) -> ResetFacts:
    holders = {PART.id: (), OTHER_PART.id: ()}
    return replace(facts(device=PART, siblings=(OTHER_PART,), holders=holders), **more)  # type: ignore[arg-type]


# --- how far a reset reaches


@pytest.mark.parametrize("generation", FROM_AMPERE_ON)
def test_from_ampere_on_a_gpu_is_reset_by_itself_whatever_nvlink_joins_it_with(generation: Generation) -> None:
    alone = facts(generation, peers=(SECOND, THIRD), holders={FIRST.id: (), SECOND.id: (TRAIN,)})
    made = plan(alone)
    assert (made.device, made.method, made.unavailable, made.blockers, made.together) == (
        FIRST.id,
        METHOD,
        None,
        (),
        (),
    )
    assert targets(alone) == (FIRST.id,)


@pytest.mark.parametrize("generation", BEFORE_AMPERE)
def test_before_ampere_nvlink_peers_are_reset_together(generation: Generation) -> None:
    linked = facts(generation, peers=(SECOND, THIRD))
    made = plan(linked)
    assert (made.together, made.blockers) == ((SECOND.id, THIRD.id), ())
    assert targets(linked) == (FIRST.id, SECOND.id, THIRD.id)
    assert any("-i GPU-1,GPU-2,GPU-3" in act for act in made.acts)


@pytest.mark.parametrize("generation", BEFORE_AMPERE)
def test_before_ampere_whoever_holds_a_peer_blocks_the_reset(generation: Generation) -> None:
    made = plan(facts(generation, peers=(SECOND,), holders={FIRST.id: (), SECOND.id: (TRAIN,)}))
    assert made.blockers == ("train (PID 7) holds device 1: it has to end first.",)


@pytest.mark.parametrize("generation", BEFORE_AMPERE)
def test_a_peer_whose_holders_cannot_be_told_blocks_the_reset(generation: Generation) -> None:
    (blocker,) = plan(facts(generation, peers=(SECOND,), holders={FIRST.id: ()})).blockers
    assert "cannot be told" in blocker


@pytest.mark.parametrize("generation", Generation)
def test_a_gpu_that_nvlink_joins_with_nobody_is_reset_by_itself(generation: Generation) -> None:
    assert plan(facts(generation)).together == ()


@pytest.mark.parametrize(
    ("word", "generation"),
    [
        ("ampere", Generation.AMPERE),
        ("Hopper", Generation.HOPPER),
        ("volta", Generation.VOLTA),
        ("unknown-99", Generation.UNKNOWN),
        (None, Generation.UNKNOWN),
    ],
)
def test_a_generation_that_is_not_known_falls_under_the_most_careful_rules(
    word: str | None, generation: Generation
) -> None:
    assert Generation.named(word) is generation


# --- the driver


def test_without_the_driver_nothing_is_reset() -> None:
    (blocker,) = plan(facts(loaded=False)).blockers
    assert blocker.startswith("The driver is not loaded")


# --- Fabric Manager


@pytest.mark.parametrize("generation", Generation)
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("nvswitch", [False, True])
def test_fabric_manager_is_needed_on_ampere_with_switches_and_nowhere_else(
    generation: Generation, nvswitch: bool, running: bool
) -> None:
    blockers = plan(facts(generation, nvswitch=nvswitch, fabric_manager=running)).blockers
    needed = generation is Generation.AMPERE and nvswitch and not running
    assert [("Fabric Manager" in blocker) for blocker in blockers] == ([True] if needed else [])


# --- MIG


def test_an_instance_is_never_reset_by_this_service_and_the_plan_names_all_that_would_go_with_it() -> None:
    made = plan(instance())
    assert made.together == (OTHER_PART.id,)
    assert made.unavailable is not None
    assert "ends all of the GPU's instances" in made.unavailable
    assert any("make them anew" in act for act in made.acts)
    assert any(f"-i {FIRST.id}" in act for act in made.acts)


def test_another_instance_that_is_in_use_blocks_besides() -> None:
    made = plan(instance(holders={PART.id: (), OTHER_PART.id: (TRAIN,)}))
    assert made.blockers == ("train (PID 7) holds device 0:1: it has to end first.",)


# --- where there is no reset


@pytest.mark.parametrize("platform", Platform)
@pytest.mark.parametrize("has_reset", [False, True])
def test_in_a_virtual_machine_there_is_a_reset_only_where_the_hypervisor_offers_one(
    platform: Platform, has_reset: bool
) -> None:
    made = plan(facts(platform=platform, has_reset=has_reset))
    possible = platform is Platform.BARE_METAL or (platform is Platform.PASSTHROUGH and has_reset)
    assert (made.unavailable is None) == possible


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"root": False}, "root"),
        ({"program": None}, "nvidia-smi is not installed"),
        ({"platform": Platform.VGPU}, "only the host"),
        ({"platform": Platform.PASSTHROUGH, "has_reset": False}, "0000:1b:00.0"),
    ],
)
def test_what_makes_a_reset_impossible_is_said_in_a_sentence_that_names_it(more: dict[str, object], word: str) -> None:
    unavailable = plan(facts(**more)).unavailable  # type: ignore[arg-type]
    assert unavailable is not None
    assert unavailable.startswith("Device 0 ")
    assert word in unavailable


# --- holders


@pytest.mark.parametrize(
    ("holder", "sentence"),
    [
        (TRAIN, "train (PID 7) holds device 0: it has to end first."),
        (Holder(7, 1), "A process without a name (PID 7) holds device 0: it has to end first."),
        (
            Holder(8, 1, HolderKind.UNKILLABLE, "stuck"),
            "stuck (PID 8) holds device 0 and cannot be ended: reboot the node.",
        ),
        (
            Holder(9, 1, HolderKind.INFRASTRUCTURE, "nvidia-dcgm.service"),
            "nvidia-dcgm.service (PID 9) holds device 0; the node's own, so it is not ended: stop it for the reset.",
        ),
        (
            Holder(10, 1, HolderKind.INFRASTRUCTURE, "nvidia-persistenced.service"),
            "nvidia-persistenced.service (PID 10) holds device 0 although persistence mode is off: stop it for the reset.",
        ),
    ],
)
def test_whoever_holds_the_device_blocks_by_name(holder: Holder, sentence: str) -> None:
    assert plan(facts(holders={FIRST.id: (holder,)})).blockers == (sentence,)


@pytest.mark.parametrize("name", ["nvidia-persistenced.service", "/usr/bin/nvidia-persistenced", "nvidia-persiste"])
def test_the_persistence_daemon_is_no_obstacle_while_it_can_be_told_to_let_go(name: str) -> None:
    daemon = Holder(10, 1, HolderKind.INFRASTRUCTURE, name)
    made = plan(facts(persistent=frozenset({FIRST.id}), holders={FIRST.id: (daemon,)}))
    assert made.blockers == ()


def test_a_process_that_calls_itself_the_persistence_daemon_is_a_process() -> None:
    impostor = Holder(10, 1, HolderKind.PROCESS, "nvidia-persistenced")
    assert plan(facts(persistent=frozenset({FIRST.id}), holders={FIRST.id: (impostor,)})).blockers


def test_a_ghost_is_what_a_reset_is_for() -> None:
    assert plan(facts(holders={FIRST.id: (Holder(0, 0, HolderKind.GHOST),)})).blockers == ()


def test_a_gpu_that_cannot_say_who_holds_it_may_be_reset_because_nvidia_smi_refuses_by_itself() -> None:
    assert plan(facts(holders={FIRST.id: None})).blockers == ()


def test_an_eraser_at_work_is_never_reset_under() -> None:
    (blocker,) = plan(facts(Generation.VOLTA, peers=(SECOND,), erasers={SECOND.id: 99})).blockers
    assert blocker == "Device 1 is being cleared (PID 99): wait until that is over."


# --- the acts


def test_persistence_mode_goes_off_before_the_reset_and_on_after_it_where_it_was_on() -> None:
    on = plan(facts(persistent=frozenset({FIRST.id}))).acts
    off, reset, back = (
        next(number for number, act in enumerate(on) if word in act) for word in ("off", "--gpu-reset", "on again")
    )
    assert off < reset < back
    assert not any("ersistence mode" in act for act in plan(facts()).acts)


def test_every_handle_of_ours_is_closed_before_the_reset() -> None:
    acts = plan(facts()).acts
    reset = next(number for number, act in enumerate(acts) if "--gpu-reset" in act)
    assert all(any(word in act for act in acts[:reset]) for word in ("Stop watching", "own handles"))
    assert "describes it again" in acts[-1]
