"""Determines which container started on a grant: the first one created in the pod after the grant.

The kubelet starts the containers of a pod one after another. So between the answer to ``PreStartContainer`` and the
creation of the container it was called for, nothing else of the pod is created, unless that start fails. To detect a
failed start, the pod's log files, which the runtime opens by the container's name, must name a container that has the
device; otherwise nothing is recorded.
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
"""Seconds after a grant to wait for its container; the image is present before ``PreStartContainer`` is called."""
_LOG_PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses in seconds between reads of the pod's logs once its container exists: in some runtimes the log comes later."""


@dataclass(frozen=True, slots=True)
class PendingStart:
    """A container that is about to start in ``pod``.

    Attributes:
        created: receives the name of the first container that is created; must be cancelled if it is not awaited.
        starts_before: how often each container of the pod had been started.
    """

    pod: Pod
    created: asyncio.Future[str]
    starts_before: Mapping[str, int]


# See docs/decisions/0009-restarts-within-a-pod.md.
def watch_start(pod: Pod, *, dependencies: Dependencies) -> PendingStart | None:
    """Watch ``pod`` from now on; None where a container start cannot be observed. Must be called before the grant."""
    before = dependencies.assignments.container_starts(pod)
    created = None if before is None or pod.uid is None else dependencies.pod_cgroups.watch_first_container(pod)
    return None if before is None or created is None else PendingStart(pod, created, before)


async def record_started_container(
    start: PendingStart, controllers: Sequence[DeviceController], *, dependencies: Dependencies
) -> None:
    """Wait for the container that starts on the last grant of ``controllers``, and record it."""
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
        # Without this record the next start of the pod considers holders only.
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
