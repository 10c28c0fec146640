"""Discovery of the processes that hold a file or a device: a walk over ``/proc`` by inode or by device node number.

Names prove nothing here: a container can rename, bind-mount or invent any name. The walk runs in a child process,
queries no file system (:mod:`.match`), and inspects every thread (:mod:`.process`). A process that slows it down costs
only the answer about that process (:mod:`.scheduler`).

No walk sees a descriptor in flight over a socket, or one registered with io_uring and then closed. Neither does it see
a descriptor that a process moves from a number not inspected yet to one already inspected.
"""

from scrubber.adapters.procwalk.confinement import Reach
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
    "Reach",
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
