"""Whether a pod's processes can be told by their cgroups, and ended there when the pod is over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from scrubber.doctor.finding import Check, Level, Node, unseen
from scrubber.doctor.looking import present, read_bytes

__all__ = ["cgroups"]

_MOUNT_IT = (
    "Mount the node's /sys/fs/cgroup writable where the service runs: in its pod as deploy/kubernetes/base does; as a unit "
    "ProtectControlGroups=no."
)


def cgroups(node: Node) -> Iterator[Check]:
    """The hierarchy that holds the pods is mounted, can be written, and can kill or freeze what a pod left behind."""
    said = node.service
    if said.places.cgroups is None and (said.simulated or said.places.kubelet is not None):
        yield _by_marker(node)
        return
    # Imported here: every other command would wait for what the adapter loads.
    from scrubber.adapters.containers.hierarchy import beside, discover_root, hierarchy_of
    from scrubber.adapters.containers.paths import kubepods_below
    from scrubber.domain.errors import BadConfiguration

    serious = Level.ERROR if said.has_hardware else Level.WARNING
    try:
        root = node.path(said.places.cgroups) if said.places.cgroups else discover_root(node.path("/sys/fs/cgroup"))
        if root is None:
            sentence = f"No cgroup hierarchy is below {node.path('/sys/fs/cgroup')}: no process is known as a pod's."
            yield Check(
                "cgroups", serious, sentence, f"{_MOUNT_IT} If it is elsewhere: scrubber serve --cgroup-root DIR."
            )
            return
        mounts = read_bytes(node.path("/proc/self/mountinfo"), 8 << 20)
        hierarchy = hierarchy_of(root, mounts)
        others = beside(hierarchy, mounts)
        pods = kubepods_below(root)
        version = f"v{hierarchy.version}" + (" beside others" if others else "")
        fixed = [str(each.root) for each in (hierarchy, *others) if os.statvfs(each.root).f_flag & os.ST_RDONLY]
        ends = _what_ends(node, root, hierarchy.version)
    except BadConfiguration as error:
        yield Check("cgroups", serious, str(error), "Give scrubber serve the right directory with --cgroup-root.")
        return
    except OSError as error:
        yield unseen("cgroups", "whether a pod's processes can be told was not seen", error)
        return
    if fixed:
        sentence = f"{', '.join(fixed)} cannot be written from here: leftovers that fork could not be ended."
        yield Check("cgroups", serious, sentence, _MOUNT_IT)
        return
    undelegated = [str(each.root) for each in (hierarchy, *others) if each.version == 2 and not each.nsdelegate]
    if undelegated:
        sentence = (
            f"cgroup v2 at {', '.join(undelegated)} is mounted without nsdelegate: a container that may write to its cgroups "
            "can lift its own limits and move a process into any other cgroup that it sees. The service would not know that "
            "process as the pod's."
        )
        remedy = (
            "On the node, outside of containers: mount -o remount,nsdelegate DIR, with the mount point of that cgroup2 file "
            "system. systemd mounts it so at boot; elsewhere add the option to what mounts it."
        )
        yield Check("cgroups", serious, sentence, remedy)
        return
    where = f", pods in {', '.join(str(each.relative_to(root)) for each in pods)}" if pods else ", no pod yet"
    found = f"cgroup {version} at {root}{where}"
    if not ends:
        sentence = f"{found}; it can neither kill nor freeze a whole cgroup, so leftovers are ended one by one."
        remedy = (
            "uname -r: use Linux 5.14 or newer (cgroup.kill)."
            if hierarchy.version == 2
            else "Mount the freezer: mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer, or boot with cgroup v2."
        )
        yield Check("cgroups", Level.WARNING, sentence, remedy)
        return
    yield Check("cgroups", Level.OK, f"{found}; {ends}.")


def _by_marker(node: Node) -> Check:
    """Whether environment markers, by which the service assigns processes to pods, are what the pods here carry."""
    # Imported here: every other command would wait for what the settings load.
    from scrubber.config.settings import EMULATED

    kubelet = node.path(node.kubelet_dir)
    try:
        there, emulated = present(kubelet), present(kubelet / EMULATED)
    except OSError as error:
        return unseen("cgroups", "whether the kubelet is the emulator was not seen", error)
    by = "The service assigns processes to pods by environment markers, not by cgroup"
    if not there:
        return Check("cgroups", Level.OK, f"{by}; there is no kubelet in {kubelet}.")
    if emulated:
        return Check("cgroups", Level.OK, f"{by}, as the kubelet emulator's containers carry them.")
    sentence = (
        f"{by}, and the kubelet in {kubelet} is real: its containers carry no markers, so every hand-over between pods waits "
        "for a time to pass instead of for the processes."
    )
    serious = Level.ERROR if node.service.has_hardware else Level.WARNING
    return Check("cgroups", serious, sentence, "Restart the service with --containers cgroup (or auto).")


def _what_ends(node: Node, root: Path, version: int) -> str:
    """How a whole cgroup is ended here; empty: not at all. Raises OSError."""
    if version == 1:
        freezer = node.path("/sys/fs/cgroup/freezer")
        writable = (freezer / "cgroup.procs").exists() and not os.statvfs(freezer).f_flag & os.ST_RDONLY
        return "leftovers are frozen, then ended" if writable else ""
    # The top has neither file, whatever the kernel.
    with os.scandir(root) as entries:
        below = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    if not below:
        return "nothing is in it yet that could be ended"
    if any((each / "cgroup.kill").exists() for each in below):
        return "leftovers are ended by cgroup.kill"
    return "leftovers are frozen, then ended" if any((each / "cgroup.freeze").exists() for each in below) else ""
