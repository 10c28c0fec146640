"""The invariants of the design with resource claims, in a simulated cluster in which everything fails in every order.

Claims are prepared, shared and released, pods with and without claims follow each other on the same devices, tenants are
deleted by force and compute on, the kubelet forgets what is prepared, and whole claims, the driver is killed or updated while it answers, and
the service is killed at any of its writes. The laws of ``tests/simulation/laws.py`` check every step; at the end every pod that
can start has to start, and every claim whose pods are gone has to be released.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from tests.depth import depth
from tests.property.test_engine_simulation import ACTS as ACTS_OF_PODS
from tests.property.test_engine_simulation import NAMESPACES, Draw, _some
from tests.simulation.scenario import POLICIES, Plot, Step, play_plot, shortest

PARTS = 4
MOMENTS = (0.0, 0.004, 0.06, 0.4, 1.1, 3.0, 3.0, 9.0, 35.0)

ACTS: Mapping[str, tuple[int, Draw]] = {
    **ACTS_OF_PODS,
    "a_pod_is_admitted": (2, ACTS_OF_PODS["a_pod_is_admitted"][1]),
    "a_claim_is_allocated": (
        8,
        _some(
            namespace=NAMESPACES, name=("claim-a", "claim-b"), device_count=(1, 1, 2), kind=("plain", "plain", "late")
        ),
    ),
    "a_claim_follows_another": (
        4,
        _some(namespace=NAMESPACES, choice=range(6), writes=(True, False), lives_on=(0.5, 4.0, 60.0)),
    ),
    "a_claim_is_forgotten": (
        3,
        _some(choice=range(6), writes=(True, False), lives_on=(0.0, 4.0, 60.0), again=(True, False)),
    ),
    "a_claim_is_refused_beside_another": (
        3,
        _some(namespace=NAMESPACES, name=("both-a", "both-b"), seconds=(4.0, 30.0), fails=(True, False)),
    ),
    "a_pod_shares_a_claim": (3, _some(choice=range(6), name=("share-a", "share-b"), late=(0.0, 0.0, 3.0))),
    "the_driver_reports_pods": (2, _some(choice=range(6))),
    "a_pod_is_deleted": (5, ACTS_OF_PODS["a_pod_is_deleted"][1]),
    "the_kubelet_starts_again": (2, _some()),
    "the_driver_ends": (2, _some(away=(0.2, 3.0, 40.0))),
    "the_driver_is_updated": (2, _some()),
    "the_cdi_files_are_lost": (1, _some(away=(0.2, 3.0))),
    "every_process_is_killed": (2, _some(away=(0.2, 3.0, 20.0))),
    "the_service_ends": (3, ACTS_OF_PODS["the_service_ends"][1]),
    "the_service_will_be_killed_at_a_write": (3, ACTS_OF_PODS["the_service_will_be_killed_at_a_write"][1]),
}
"""Each act with its weight, and what is drawn for it."""


def draw(seed: int) -> tuple[str, Plot]:
    """Draw a policy and a plot. Some acts are omitted from each plot, so that others get further."""
    random = Random(f"claims {seed}")
    policy = random.choice(("default", "default", *POLICIES))
    left_out = set(random.sample(sorted(ACTS), random.randint(0, 11))) - {"a_claim_is_allocated"}
    acts = [act for act in ACTS if act not in left_out]
    chosen = random.choices(acts, [ACTS[act][0] for act in acts], k=random.choice((8, 15, 30, 50)))
    return policy, tuple(Step(act, ACTS[act][1](random), random.choice(MOMENTS)) for act in chosen)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_invariant_is_violated_by_any_sequence_of_events_with_claims(part: int) -> None:
    for seed in range(part * 1_000_000, part * 1_000_000 + depth().claim_stories // PARTS):
        policy, plot = draw(seed)
        wrong = play_plot(policy, plot)
        if wrong is not None:
            story = "\n".join(f"    {step}" for step in shortest(policy, plot))
            pytest.fail(f"seed {seed}, policy {policy}: {wrong}\n{story}", pytrace=False)


WRITES = range(1, 17)
"""Up to beyond the last write of the story below."""


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("writes", WRITES)
def test_service_killed_at_any_write_of_two_claims_violates_no_invariant(writes: int, durable: bool) -> None:
    """A claim of two devices is shared, deleted by force, followed by another one, and that is released."""
    story = (
        Step("the_kubelet_can_be_trusted_or_not", {"trust": "trusted"}, 9.0),  # every device is clean
        Step("the_service_will_be_killed_at_a_write", {"writes": writes, "durable": durable}, 0.0),
        Step(
            "a_claim_is_allocated",
            {"namespace": "acme-space", "name": "claim-a", "device_count": 2, "kind": "plain"},
            3.0,
        ),
        Step("a_pod_shares_a_claim", {"choice": 0, "name": "share-a", "late": 0.0}, 3.0),
        Step("a_pod_writes_everywhere", {"choice": 0}, 0.0),
        Step("a_pod_is_deleted", {"choice": 1, "lives_on": None, "child": "none"}, 1.1),
        Step(
            "a_claim_follows_another",
            {"namespace": "umbrella-space", "choice": 0, "writes": True, "lives_on": 4.0},
            9.0,
        ),
        Step("a_pod_is_deleted", {"choice": 0, "lives_on": None, "child": "holds"}, 35.0),
    )
    assert play_plot("default", story) is None


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("writes", WRITES)
def test_service_killed_at_any_write_while_a_prepared_device_fails_before_its_pod_starts_violates_no_invariant(
    writes: int, durable: bool
) -> None:
    story = (
        Step("the_kubelet_can_be_trusted_or_not", {"trust": "trusted"}, 9.0),  # every device is clean
        Step("the_service_will_be_killed_at_a_write", {"writes": writes, "durable": durable}, 0.0),
        Step(
            "a_claim_is_refused_beside_another",
            {"namespace": "acme-space", "name": "claim-a", "seconds": 30.0, "fails": True},
            35.0,
        ),
    )
    assert play_plot("default", story) is None


@pytest.mark.parametrize("late", [0.0, 3.0])
def test_pod_that_joins_a_claim_between_two_attempts_to_release_it_starts(late: float) -> None:
    """The kubelet then drops the former pod without a call. ``late``: its volume delays a pod that is reported before that."""
    story = [
        Step(
            "a_claim_is_allocated",
            {"namespace": "acme-space", "name": "claim-a", "device_count": 1, "kind": "plain"},
            9.0,
        ),
        Step("a_pod_is_deleted", {"choice": 0, "lives_on": None, "child": "holds"}, 2.2 if late else 0.0),
    ]
    story.insert(1 if late else 2, Step("a_pod_shares_a_claim", {"choice": 0, "name": "share-a", "late": late}, 1.1))
    story.append(Step("the_driver_reports_pods", {"choice": 0}, 3.0))
    assert play_plot("strict", tuple(story)) is None


def test_pod_of_a_forgotten_claim_that_gets_another_device_does_not_keep_the_former_one() -> None:
    """The claim's former pod is over when the driver reports the new one, so the former device has only that one on record."""
    story = (
        Step(
            "a_claim_is_allocated",
            {"namespace": "acme-space", "name": "claim-a", "device_count": 1, "kind": "plain"},
            9.0,
        ),
        Step("the_driver_ends", {"away": 40.0}, 0.0),
        Step("a_claim_is_forgotten", {"choice": 0, "writes": True, "lives_on": 0.0, "again": True}, 9.0),
        Step("the_driver_reports_pods", {"choice": 0}, 35.0),
        Step(
            "a_claim_is_allocated",
            {"namespace": "acme-space", "name": "claim-b", "device_count": 1, "kind": "plain"},
            9.0,
        ),
    )
    assert play_plot("default", story) is None
