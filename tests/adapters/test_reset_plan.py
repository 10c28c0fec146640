"""Which GPUs a reset includes and what blocks it, for all generations of GPUs: the plan, from facts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.adapters.nvidia.reset_planner import (
    METHOD,
    DeviceLabel,
    Generation,
    Platform,
    ResetFacts,
    plan_reset,
    reset_targets,
)
from scrubber.domain.telemetry import Holder, HolderKind

FIRST, SECOND, THIRD = DeviceLabel("GPU-1", "0"), DeviceLabel("GPU-2", "1"), DeviceLabel("GPU-3", "2")
PART, OTHER_PART = DeviceLabel("MIG-1", "0:0"), DeviceLabel("MIG-2", "0:1")
TRAIN = Holder(7, 1, HolderKind.PROCESS, "train")

BEFORE_AMPERE = [Generation.UNKNOWN, *(each for each in Generation if 0 < each < Generation.AMPERE)]
FROM_AMPERE_ON = [each for each in Generation if each >= Generation.AMPERE]


def facts(generation: Generation = Generation.HOPPER, **more: object) -> ResetFacts:
    """Return the facts of a GPU without holders, on a node where everything is available."""
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


# --- the scope of a reset


@pytest.mark.parametrize("generation", FROM_AMPERE_ON)
def test_gpu_since_ampere_is_reset_alone_whatever_nvlink_joins(generation: Generation) -> None:
    alone = facts(generation, peers=(SECOND, THIRD), holders={FIRST.id: (), SECOND.id: (TRAIN,)})
    made = plan_reset(alone)
    assert (made.device, made.method, made.unavailable, made.blockers, made.also_reset) == (
        FIRST.id,
        METHOD,
        None,
        (),
        (),
    )
    assert reset_targets(alone) == (FIRST.id,)


@pytest.mark.parametrize("generation", BEFORE_AMPERE)
def test_nvlink_peers_before_ampere_are_reset_together(generation: Generation) -> None:
    linked = facts(generation, peers=(SECOND, THIRD))
    made = plan_reset(linked)
    assert (made.also_reset, made.blockers) == ((SECOND.id, THIRD.id), ())
    assert reset_targets(linked) == (FIRST.id, SECOND.id, THIRD.id)
    assert any("-i GPU-1,GPU-2,GPU-3" in act for act in made.actions)


@pytest.mark.parametrize("generation", BEFORE_AMPERE)
def test_holder_of_a_peer_blocks_the_reset_before_ampere(generation: Generation) -> None:
    made = plan_reset(facts(generation, peers=(SECOND,), holders={FIRST.id: (), SECOND.id: (TRAIN,)}))
    assert made.blockers == ("train (PID 7) holds device 1: it must end first.",)


@pytest.mark.parametrize("generation", BEFORE_AMPERE)
def test_peer_with_unreadable_holders_blocks_the_reset(generation: Generation) -> None:
    (blocker,) = plan_reset(facts(generation, peers=(SECOND,), holders={FIRST.id: ()})).blockers
    assert "cannot be determined" in blocker


@pytest.mark.parametrize("generation", Generation)
def test_gpu_without_nvlink_peers_is_reset_alone(generation: Generation) -> None:
    assert plan_reset(facts(generation)).also_reset == ()


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
def test_unknown_generation_follows_the_most_conservative_rules(word: str | None, generation: Generation) -> None:
    assert Generation.from_driver_name(word) is generation


# --- the driver


def test_no_gpu_is_reset_without_the_driver() -> None:
    (blocker,) = plan_reset(facts(driver_loaded=False)).blockers
    assert blocker.startswith("The driver is not loaded")


# --- Fabric Manager


@pytest.mark.parametrize("generation", Generation)
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("nvswitch", [False, True])
def test_fabric_manager_is_required_only_on_ampere_with_nvswitches(
    generation: Generation, nvswitch: bool, running: bool
) -> None:
    blockers = plan_reset(facts(generation, nvswitch=nvswitch, fabric_manager=running)).blockers
    needed = generation is Generation.AMPERE and nvswitch and not running
    assert [("Fabric Manager" in blocker) for blocker in blockers] == ([True] if needed else [])


# --- MIG


def test_mig_instance_is_never_reset_and_the_plan_names_the_affected_instances() -> None:
    made = plan_reset(instance())
    assert made.also_reset == (OTHER_PART.id,)
    assert made.unavailable is not None
    assert "removes all of the GPU's instances" in made.unavailable
    assert any("recreate them" in act for act in made.actions)
    assert any(f"-i {FIRST.id}" in act for act in made.actions)


def test_other_instance_in_use_blocks_the_manual_reset() -> None:
    made = plan_reset(instance(holders={PART.id: (), OTHER_PART.id: (TRAIN,)}))
    assert made.blockers == ("train (PID 7) holds device 0:1: it must end first.",)


# --- unsupported resets


@pytest.mark.parametrize("platform", Platform)
@pytest.mark.parametrize("has_reset", [False, True])
def test_reset_in_a_virtual_machine_requires_support_by_the_hypervisor(platform: Platform, has_reset: bool) -> None:
    made = plan_reset(facts(platform=platform, has_reset=has_reset))
    possible = platform is Platform.BARE_METAL or (platform is Platform.PASSTHROUGH and has_reset)
    assert (made.unavailable is None) == possible


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"is_root": False}, "root"),
        ({"nvidia_smi": None}, "nvidia-smi is not installed"),
        ({"platform": Platform.VGPU}, "only the host"),
        ({"platform": Platform.PASSTHROUGH, "has_reset": False}, "0000:1b:00.0"),
    ],
)
def test_reason_for_an_unavailable_reset_is_named(more: dict[str, object], word: str) -> None:
    unavailable = plan_reset(facts(**more)).unavailable  # type: ignore[arg-type]
    assert unavailable is not None
    assert unavailable.startswith("Device 0 ")
    assert word in unavailable


# --- holders


@pytest.mark.parametrize(
    ("holder", "message"),
    [
        (TRAIN, "train (PID 7) holds device 0: it must end first."),
        (Holder(7, 1), "An unnamed process (PID 7) holds device 0: it must end first."),
        (
            Holder(8, 1, HolderKind.UNKILLABLE, "stuck"),
            "stuck (PID 8) holds device 0 and cannot be killed: reboot the node.",
        ),
        (
            Holder(9, 1, HolderKind.INFRASTRUCTURE, "nvidia-dcgm.service"),
            (
                "nvidia-dcgm.service (PID 9) holds device 0; it is infrastructure of the node and is not killed: "
                "stop it for the reset."
            ),
        ),
        (
            Holder(10, 1, HolderKind.INFRASTRUCTURE, "nvidia-persistenced.service"),
            "nvidia-persistenced.service (PID 10) holds device 0 although persistence mode is off: stop it for the reset.",
        ),
    ],
)
def test_holder_of_the_device_blocks_the_reset_by_name(holder: Holder, message: str) -> None:
    assert plan_reset(facts(holders={FIRST.id: (holder,)})).blockers == (message,)


@pytest.mark.parametrize("name", ["nvidia-persistenced.service", "/usr/bin/nvidia-persistenced", "nvidia-persiste"])
def test_persistence_daemon_is_no_blocker_while_persistence_mode_can_be_disabled(name: str) -> None:
    daemon = Holder(10, 1, HolderKind.INFRASTRUCTURE, name)
    made = plan_reset(facts(persistence_enabled=frozenset({FIRST.id}), holders={FIRST.id: (daemon,)}))
    assert made.blockers == ()


def test_process_named_like_the_persistence_daemon_is_a_blocker() -> None:
    impostor = Holder(10, 1, HolderKind.PROCESS, "nvidia-persistenced")
    assert plan_reset(facts(persistence_enabled=frozenset({FIRST.id}), holders={FIRST.id: (impostor,)})).blockers


def test_untraceable_holder_does_not_block_a_reset() -> None:
    assert plan_reset(facts(holders={FIRST.id: (Holder(0, 0, HolderKind.UNTRACEABLE),)})).blockers == ()


def test_gpu_with_unreadable_holders_may_be_reset_because_nvidia_smi_refuses_when_in_use() -> None:
    assert plan_reset(facts(holders={FIRST.id: None})).blockers == ()


def test_running_eraser_blocks_the_reset() -> None:
    (blocker,) = plan_reset(facts(Generation.VOLTA, peers=(SECOND,), erasers={SECOND.id: 99})).blockers
    assert blocker == "Device 1 is being cleared (PID 99): wait until that has ended."


# --- the actions


def test_persistence_mode_is_disabled_before_the_reset_and_enabled_again_afterwards() -> None:
    on = plan_reset(facts(persistence_enabled=frozenset({FIRST.id}))).actions
    off, reset, back = (
        next(number for number, act in enumerate(on) if word in act)
        for word in ("Disable persistence", "--gpu-reset", "Enable persistence")
    )
    assert off < reset < back
    assert not any("ersistence mode" in act for act in plan_reset(facts()).actions)


def test_plan_closes_every_own_handle_before_the_reset() -> None:
    acts = plan_reset(facts()).actions
    reset = next(number for number, act in enumerate(acts) if "--gpu-reset" in act)
    assert all(any(word in act for act in acts[:reset]) for word in ("Stop watching", "own handles"))
    assert "describes it again" in acts[-1]
