"""A process in a frozen cgroup."""

from pathlib import Path

from tests.attacks.tools import Place, in_background, say, stay

TRIES = (
    "outlives its container in a process in a cgroup below the container's own that it froze (where it may write it)"
)
HOLDS = "the process is ended before another pod gets the device, which is clean then"
THREATS = ("B13", "W5", "D1")


def attack(place: Place) -> None:
    place.open_device()
    pid = in_background(lambda: None)
    own = next(line[4:] for line in Path("/proc/self/cgroup").read_text().split("\n") if line.startswith("0::"))
    mounts = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
    inner = next(each for each in mounts if (each / "cgroup.controllers").exists()) / own / "inner"
    try:
        inner.mkdir()
        (inner / "cgroup.procs").write_text(str(pid))
        (inner / "cgroup.freeze").write_text("1")
    except OSError as error:
        say(ready=True, frozen=False, why=str(error))
    else:
        say(ready=True, frozen=True)
    stay()
