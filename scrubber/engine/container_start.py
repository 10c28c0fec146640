"""Which container started on a grant: the first that is created in the pod after the grant.

The kubelet starts the containers of a pod one after another, so between the answer to ``PreStartContainer`` and the
container that it was asked for nothing else of the pod is created, unless that start fails. So the pod's logs, which the
runtime opens by the container's name, have to name a container that has the device; otherwise nothing is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from scrubber.domain.assignment import Pod, started_container
from scrubber.domain.errors import ScrubberError
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController

__all__ = ["PendingStart", "record_started_container", "watch_start"]

_LONGEST = 60.0
"""Seconds after a grant in which its container is looked for; the image is there before ``PreStartContainer`` is called."""
_LOG_PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between looks at the pod's logs once its container is there: runtimes differ in which of them comes first."""


@dataclass(frozen=True, slots=True)
class PendingStart:
    """A container that is about to start in ``pod``.

    Attributes:
        created: gets the name of the first container that is created; it has to be cancelled if nobody follows it.
        starts_before: how often each container of the pod had been started.
    """

    pod: Pod
    created: asyncio.Future[str]
    starts_before: Mapping[str, int]


def watch_start(pod: Pod, *, dependencies: Dependencies) -> PendingStart | None:
    """Watch ``pod`` from now on; None where the start of a container could not be told. To be called before the grant."""
    before = dependencies.assignments.container_starts(pod)
    created = None if before is None or pod.uid is None else dependencies.containers.watch_first_container(pod)
    return None if before is None or created is None else PendingStart(pod, created, before)


async def record_started_container(
    start: PendingStart, controllers: Sequence[DeviceController], *, dependencies: Dependencies
) -> None:
    """Wait for the container that starts on the last grant of ``controllers``, and put it on record."""
    granted = [
        (controller, last) for controller in controllers if (last := controller.state.record.last_grant) is not None
    ]
    try:
        async with dependencies.clock.timeout(_LONGEST):
            await asyncio.wait({start.created})
    except TimeoutError:
        return
    finally:
        start.created.cancel()
    if start.created.cancelled():
        return
    at = dependencies.clock.wall()
    container = await _name(start, dependencies)
    for controller, grant in granted:
        named = controller.pods.reading.all_assignments(controller.id)
        if container is None or not any((each.pod, each.container) == (start.pod, container) for each in named):
            continue
        controller.pods.note_container_created(start.pod, at)
        changed = grant.assignment is not None and container != grant.assignment.container
        # Without it the next start of the pod looks at holders only.
        with suppress(ScrubberError):
            await controller.occupancy.record_started_container(
                grant.sequence, start.created.result(), container if changed else None
            )


async def _name(start: PendingStart, dependencies: Dependencies) -> str | None:
    for pause in _LOG_PAUSES:
        await dependencies.clock.sleep(pause)
        starts = dependencies.assignments.container_starts(start.pod)
        container = None if starts is None else started_container(start.starts_before, starts)
        if container is not None:
            return container
    return None
