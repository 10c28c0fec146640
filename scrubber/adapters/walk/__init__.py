"""Who holds a file or a device: a walk over ``/proc`` by device and inode, or by the number of a device node.

Names are worth nothing here: a container can rename, bind-mount or make up any. The walk runs in a child, it asks no
file system (:mod:`.seeing`), it looks at every thread (:mod:`.look`), and a process that makes it slow costs the answer
about that process alone (:mod:`.rounds`).

A descriptor in flight over a socket, or registered with io_uring and closed, is seen by no walk; nor is one that a process
moves, from a number that is looked at later to one that was looked at before.
"""

from scrubber.adapters.walk.look import Found, has_open, living_since, name_of, start_time
from scrubber.adapters.walk.rounds import Budget, Progress, Relay, Unfinished, Walk, walk
from scrubber.adapters.walk.seeing import File, Nodes, Target

__all__ = [
    "Budget",
    "File",
    "Found",
    "Nodes",
    "Progress",
    "Relay",
    "Target",
    "Unfinished",
    "Walk",
    "has_open",
    "living_since",
    "name_of",
    "start_time",
    "walk",
]
