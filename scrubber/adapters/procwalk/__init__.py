"""Who holds a file or a device: a walk over ``/proc`` by device and inode, or by the number of a device node.

Names are worth nothing here: a container can rename, bind-mount or make up any. The walk runs in a child, it asks no
file system (:mod:`.match`), it looks at every thread (:mod:`.process`), and a process that makes it slow costs the answer
about that process alone (:mod:`.scheduler`).

A descriptor in flight over a socket, or registered with io_uring and closed, is seen by no walk; nor is one that a process
moves, from a number that is looked at later to one that was looked at before.
"""

from scrubber.adapters.procwalk.match import DeviceNodeTarget, FileTarget, Target
from scrubber.adapters.procwalk.process import ProcessMatch, has_open, live_start_time, process_name, start_time
from scrubber.adapters.procwalk.scheduler import (
    Budget,
    ChurningGroup,
    UnfinishedProcess,
    WalkProgress,
    WalkResult,
    walk,
)

__all__ = [
    "Budget",
    "ChurningGroup",
    "DeviceNodeTarget",
    "FileTarget",
    "ProcessMatch",
    "Target",
    "UnfinishedProcess",
    "WalkProgress",
    "WalkResult",
    "has_open",
    "live_start_time",
    "process_name",
    "start_time",
    "walk",
]
