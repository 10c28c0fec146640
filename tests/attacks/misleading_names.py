"""Names with line breaks, escape sequences and forged lines of /proc."""

import ctypes
import os
from functools import partial
from pathlib import Path

from tests.attacks.tools import LIBC, Place, in_background, say, stay

TRIES = (
    "outlives its container in processes and cgroups whose names contain line ends, escape sequences and lines of /proc"
)
HOLDS = "the processes are ended before another pod gets the device, which is clean then; no name is taken for something else"
THREATS = ("D16", "W5", "W7")

COMMANDS = (b"a) S 1 1 (", b"x\nNSpid:\t1", b"\x1b[2J\x1b]0;x\x07", b"\xff\xfe\x85", b"kubelet", b"nvidia-persist")
CGROUPS = (b"\x0c0::/system.slice/nvidia-persistenced.service", b"\xc2\x850::/init.scope", b"\xff\x1b[2J", b"kubepods")
PR_SET_NAME = 15


def attack(place: Place) -> None:
    place.open_device()
    pids = []
    for command in COMMANDS:
        rename = partial(LIBC.prctl, PR_SET_NAME, ctypes.c_char_p(command), 0, 0, 0)
        pids.append(in_background(rename))
    own = next(line[4:] for line in Path("/proc/self/cgroup").read_text().split("\n") if line.startswith("0::"))
    mounts = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
    base = os.fsencode(next(each for each in mounts if (each / "cgroup.controllers").exists()) / own)
    made = 0
    try:
        for name, pid in zip(CGROUPS, pids, strict=False):
            os.mkdir(base + b"/" + name)
            Path(os.fsdecode(base + b"/" + name), "cgroup.procs").write_text(str(pid))
            made += 1
    except OSError:
        pass
    say(ready=True, cgroups=made)
    stay()
