"""Hygiene: whether the bytes on a device were proved clean. One table; nothing else changes it."""

from __future__ import annotations

from enum import StrEnum

from scrubber.domain.transitions import TransitionTable

__all__ = ["HYGIENE", "Hygiene", "HygieneEvent"]


class Hygiene(StrEnum):
    """Unknown is dirty: there is no fifth state."""

    DIRTY = "dirty"
    SCRUBBING = "scrubbing"
    CLEAN = "clean"
    IN_USE = "in-use"


class HygieneEvent(StrEnum):
    """Everything that can happen to a device's hygiene."""

    SERVICE_STARTED = "service-started"
    ADOPTED = "adopted"
    SCRUB_STARTED = "scrub-started"
    SCRUB_PASSED = "scrub-passed"
    SCRUB_ENDED = "scrub-ended"
    GRANTED = "granted"
    RELEASED = "released"
    TOUCHED = "touched"


_S, _E = Hygiene, HygieneEvent

HYGIENE: TransitionTable[Hygiene, HygieneEvent] = TransitionTable(
    {
        # Whatever happened while nobody watched makes a device dirty; one that a pod has stays that pod's.
        (_S.DIRTY, _E.SERVICE_STARTED): _S.DIRTY,
        (_S.SCRUBBING, _E.SERVICE_STARTED): _S.DIRTY,
        (_S.CLEAN, _E.SERVICE_STARTED): _S.DIRTY,
        (_S.IN_USE, _E.SERVICE_STARTED): _S.DIRTY,
        (_S.DIRTY, _E.ADOPTED): _S.IN_USE,
        # A container that the kubelet started without asking, beside one that it asked about.
        (_S.IN_USE, _E.ADOPTED): _S.IN_USE,
        (_S.DIRTY, _E.SCRUB_STARTED): _S.SCRUBBING,
        (_S.CLEAN, _E.SCRUB_STARTED): _S.SCRUBBING,
        (_S.SCRUBBING, _E.SCRUB_PASSED): _S.CLEAN,
        # Failed, refused, abandoned, timed out: all the same to the bytes.
        (_S.SCRUBBING, _E.SCRUB_ENDED): _S.DIRTY,
        (_S.CLEAN, _E.GRANTED): _S.IN_USE,
        # By a named exception of the policy only (same container on checks, observe mode): see ``scrubber.domain.handover``.
        (_S.DIRTY, _E.GRANTED): _S.IN_USE,
        (_S.IN_USE, _E.GRANTED): _S.IN_USE,
        (_S.IN_USE, _E.RELEASED): _S.DIRTY,
        (_S.CLEAN, _E.TOUCHED): _S.DIRTY,
        (_S.DIRTY, _E.TOUCHED): _S.DIRTY,
        (_S.SCRUBBING, _E.TOUCHED): _S.DIRTY,
    }
)
