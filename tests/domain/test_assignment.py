"""Why a reading of the kubelet does not say with certainty which pod has a device."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust

TRAIN = Pod("acme", "train-0", "u-1")


def given(pod: Pod) -> tuple[Assignment, ...]:
    return (Assignment(pod, "main", frozenset({"GPU-a0"})),)


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (KubeletReading(Trust.TRUSTED, given(TRAIN)), ""),
        (KubeletReading(Trust.UNREADABLE, (), given(TRAIN), untrusted_reason="no answer"), "no answer"),
        (KubeletReading(Trust.TRUSTED), "names no pod"),
        (KubeletReading(Trust.TRUSTED, (), given(TRAIN)), "only the kubelet's checkpoint"),
        (KubeletReading(Trust.TRUSTED, given(Pod("acme", "train-0"))), "acme_train-0_UID"),
        (
            KubeletReading(Trust.TRUSTED, given(Pod("acme", "train-0")), given(TRAIN)),
            "acme/train-0 (no UID), acme/train-0 (u-1)",
        ),
    ],
)
def test_uncertainty_about_the_pod_of_a_device_names_its_cause(reading: KubeletReading, expected: str) -> None:
    uncertainty = reading.uncertainty_of("GPU-a0")
    assert expected in uncertainty
    assert bool(uncertainty) == bool(expected)
