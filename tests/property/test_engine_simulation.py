"""The invariants of the design, in a simulated cluster in which everything fails in every order.

Pods come, run, restart, complete, are deleted with grace or by force and live on; they leave children behind and write
their label into every byte. The kubelet restarts and reports wrong lists, devices fail, operators quarantine and
release, the ledger fills up, and the service is killed at any of its writes while its erasers continue. The laws of
``tests/simulation/laws.py`` check every step. At the end all faults are repaired, and then every pod that can start has to
start.

A plot is drawn from a seed by weights, because relevant states need long plots in which most pods get as far as
running. A failure is reported as the shortest plot that still shows it, in a form that can become a separate test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from tests.depth import depth
from tests.simulation.scenario import DEVICES, POLICIES, Plot, Step, play_plot, shortest

PARTS = 8
MOMENTS = (0.0, 0.004, 0.06, 0.4, 1.1, 3.0, 3.0, 9.0, 35.0)
"""Seconds after an act, from within a scrub's first lines to beyond every grace period."""
NAMESPACES = ("acme-space", "acme-space", "umbrella-space")
FAULTS = (
    *("xid-31", "xid-79", "xid-95", "xid-95", "xid-154", "stuck", "lost", "wont_clear", "slow", "ghost"),
    *("reset_fails", "reset_missing", "settings", "settings", "hot", "holders"),
)
CHILDREN = ("none", "none", "holds", "lets-go")

Draw = Callable[[Random], dict[str, Any]]


def _some(**choices: tuple[object, ...] | range) -> Draw:
    """Draw one value of each choice."""
    return lambda random: {name: random.choice(among) for name, among in choices.items()}


ACTS: Mapping[str, tuple[int, Draw]] = {
    "a_pod_is_admitted": (
        6,
        _some(
            namespace=NAMESPACES,
            name=("web-0", "train-1"),
            device_count=(1, 1, 2),
            kind=("plain", "plain", "init", "late", "slow"),
        ),
    ),
    "a_pod_follows_another": (
        3,
        _some(namespace=NAMESPACES, device_count=(1, 2), writes=(True, False), lives_on=(0.5, 4.0, 60.0)),
    ),
    "a_pod_writes_everywhere": (3, _some(choice=range(6))),
    "a_container_exits": (
        4,
        _some(choice=range(6), again=(True, False), writes=(True, False), child=CHILDREN),
    ),
    "a_pod_is_deleted": (3, _some(choice=range(6), lives_on=(None, 0.5, 5.0, 60.0), child=CHILDREN)),
    "a_child_exits_by_itself": (1, _some(choice=range(6))),
    "the_kubelet_gives_up_a_call_and_asks_again": (2, _some(choice=range(6))),
    "the_kubelet_can_be_trusted_or_not": (2, _some(trust=("trusted", "trusted", "unreadable", "empty-after-restart"))),
    "the_end_of_containers_is_observed_or_not": (1, _some(observed=(True, False))),
    "a_device_fails": (2, _some(number=range(DEVICES), fault=FAULTS, reported=(True, False))),
    "a_device_leaves_the_node_or_comes_back": (
        2,
        _some(number=range(DEVICES), present=(True, False, False), notified=(True, True, False)),
    ),
    "a_device_is_well_again": (1, _some(number=range(DEVICES))),
    "the_machine_fails": (1, _some(choice=range(6), what=("unreadable-pod", "unkillable", "erasers", "disk"))),
    "a_process_of_the_host_looks_at_a_device": (1, _some(number=range(DEVICES), opens=(True, False))),
    "a_host_process_writes_on_a_device": (1, _some(number=range(DEVICES), stays=(0.0, 2.5, 20.0))),
    "the_kubelet_starts_again": (1, _some()),
    "an_operator_acts": (2, _some(number=range(DEVICES), action=("out", "back", "back", "slow", "fast"))),
    "the_service_ends": (2, _some(away=(0.1, 0.1, 15.0), how=("kill", "kill", "stop", "reboot"))),
    "the_service_will_be_killed_at_a_write": (2, _some(writes=range(1, 7), durable=(True, False))),
}
"""Each act with its weight, and what is drawn for it."""


def draw(seed: int) -> tuple[str, Plot]:
    """Draw a policy and a plot. Some acts are omitted from each plot, so that others get further."""
    random = Random(seed)
    policy = random.choice(("default", "default", *POLICIES))
    left_out = set(random.sample(sorted(ACTS), random.randint(0, 9))) - {"a_pod_is_admitted"}
    acts = [act for act in ACTS if act not in left_out]
    chosen = random.choices(acts, [ACTS[act][0] for act in acts], k=random.choice((8, 15, 30, 50)))
    return policy, tuple(Step(act, ACTS[act][1](random), random.choice(MOMENTS)) for act in chosen)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_invariant_is_violated_by_any_sequence_of_events_and_every_pod_starts_in_the_end(part: int) -> None:
    for seed in range(part * 1_000_000, part * 1_000_000 + depth().stories // PARTS):
        policy, plot = draw(seed)
        wrong = play_plot(policy, plot)
        if wrong is not None:
            story = "\n".join(f"    {step}" for step in shortest(policy, plot))
            pytest.fail(f"seed {seed}, policy {policy}: {wrong}\n{story}", pytrace=False)
