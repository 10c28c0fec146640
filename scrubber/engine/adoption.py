"""Adoption: a grant for a pod that has a device already, given by nobody who asked us."""

from __future__ import annotations

from scrubber.domain.assignment import Assignment, Process
from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.record import Grant
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.keeper import Keeper

__all__ = ["adopt"]


async def adopt(
    keeper: Keeper, assignment: Assignment, baseline: tuple[Process, ...], *, dependencies: Dependencies
) -> None:
    """Leave the device with the pod of ``assignment``; it is scrubbed once that is over.

    Args:
        baseline: what is presumed to be the pod's sandbox.
    """
    await keeper.adopt(
        Grant(
            0,
            assignment,
            HandOver.UNKNOWN,
            dependencies.clock.wall(),
            dependencies.identity.boot,
            basis=Basis.ADOPTED,
            baseline=baseline,
        )
    )
