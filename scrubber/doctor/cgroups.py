"""Checks whether a pod's processes can be recognised by their cgroups, and killed there when the pod is over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from scrubber.doctor.files import path_exists, read_bytes
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, unknown_result

__all__ = ["cgroups"]

_MOUNT_HINT = (
    "Mount the node's /sys/fs/cgroup writable where the service runs: in its pod as deploy/kubernetes/base does; as a unit "
    "ProtectControlGroups=no."
)


def cgroups(node: CheckContext) -> Iterator[CheckResult]:
    """The hierarchy that holds the pods is mounted, can be written, and can kill or freeze what a pod left behind."""
    said = node.service
    if said.paths.cgroups is None and (said.simulated or said.paths.kubelet is not None):
        yield _by_marker(node)
        return
    # Imported here: otherwise every other command would wait for what the adapter loads.
    from scrubber.adapters.cgroups.hierarchy import discover_root, hierarchy_of, sibling_hierarchies
    from scrubber.adapters.cgroups.paths import kubepods_below
    from scrubber.domain.errors import InvalidConfiguration

    serious = CheckLevel.ERROR if said.has_hardware else CheckLevel.WARNING
    try:
        root = node.path(said.paths.cgroups) if said.paths.cgroups else discover_root(node.path("/sys/fs/cgroup"))
        if root is None:
            message = f"No cgroup hierarchy is below {node.path('/sys/fs/cgroup')}: no process is known as a pod's."
            yield CheckResult(
                "cgroups", serious, message, f"{_MOUNT_HINT} If it is elsewhere: scrubber serve --cgroup-root DIR."
            )
            return
        mounts = read_bytes(node.path("/proc/self/mountinfo"), 8 << 20)
        hierarchy = hierarchy_of(root, mounts)
        others = sibling_hierarchies(hierarchy, mounts)
        pods = kubepods_below(root)
        version = f"v{hierarchy.version}" + (" beside others" if others else "")
        fixed = [str(each.root) for each in (hierarchy, *others) if os.statvfs(each.root).f_flag & os.ST_RDONLY]
        ends = _kill_method(node, root, hierarchy.version)
    except InvalidConfiguration as error:
        yield CheckResult("cgroups", serious, str(error), "Give scrubber serve the right directory with --cgroup-root.")
        return
    except OSError as error:
        yield unknown_result("cgroups", "whether a pod's processes can be told was not seen", error)
        return
    if fixed:
        message = f"{', '.join(fixed)} cannot be written from here: leftovers that fork could not be ended."
        yield CheckResult("cgroups", serious, message, _MOUNT_HINT)
        return
    undelegated = [str(each.root) for each in (hierarchy, *others) if each.version == 2 and not each.nsdelegate]
    if undelegated:
        message = (
            f"cgroup v2 at {', '.join(undelegated)} is mounted without nsdelegate: a container that may write to its cgroups "
            "can lift its own limits and move a process into any other cgroup that it sees. The service would not know that "
            "process as the pod's."
        )
        remedy = (
            "On the node, outside of containers: mount -o remount,nsdelegate DIR, with the mount point of that cgroup2 file "
            "system. systemd mounts it so at boot; elsewhere add the option to what mounts it."
        )
        yield CheckResult("cgroups", serious, message, remedy)
        return
    where = f", pods in {', '.join(str(each.relative_to(root)) for each in pods)}" if pods else ", no pod yet"
    found = f"cgroup {version} at {root}{where}"
    if not ends:
        message = f"{found}; it can neither kill nor freeze a whole cgroup, so leftovers are ended one by one."
        remedy = (
            "uname -r: use Linux 5.14 or newer (cgroup.kill)."
            if hierarchy.version == 2
            else "Mount the freezer: mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer, or boot with cgroup v2."
        )
        yield CheckResult("cgroups", CheckLevel.WARNING, message, remedy)
        return
    yield CheckResult("cgroups", CheckLevel.OK, f"{found}; {ends}.")


def _by_marker(node: CheckContext) -> CheckResult:
    """Check that the pods here carry environment markers, by which the service assigns processes to pods."""
    # Imported here: otherwise every other command would wait for what the settings load.
    from scrubber.config.settings import EMULATOR_MARKER_FILE

    kubelet = node.path(node.kubelet_dir)
    try:
        there, emulated = path_exists(kubelet), path_exists(kubelet / EMULATOR_MARKER_FILE)
    except OSError as error:
        return unknown_result("cgroups", "whether the kubelet is the emulator was not seen", error)
    by = "The service assigns processes to pods by environment markers, not by cgroup"
    if not there:
        return CheckResult("cgroups", CheckLevel.OK, f"{by}; there is no kubelet in {kubelet}.")
    if emulated:
        return CheckResult("cgroups", CheckLevel.OK, f"{by}, as the kubelet emulator's containers carry them.")
    message = (
        f"{by}, and the kubelet in {kubelet} is real: its containers carry no markers, so every hand-over between pods waits "
        "for a time to pass instead of for the processes."
    )
    serious = CheckLevel.ERROR if node.service.has_hardware else CheckLevel.WARNING
    return CheckResult("cgroups", serious, message, "Restart the service with --container-identity cgroup (or auto).")


def _kill_method(node: CheckContext, root: Path, version: int) -> str:
    """Return how a whole cgroup is killed here; empty if it cannot be. Raises OSError."""
    if version == 1:
        freezer = node.path("/sys/fs/cgroup/freezer")
        writable = (freezer / "cgroup.procs").exists() and not os.statvfs(freezer).f_flag & os.ST_RDONLY
        return "leftovers are frozen, then ended" if writable else ""
    # The root cgroup has neither file, on any kernel.
    with os.scandir(root) as entries:
        below = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    if not below:
        return "nothing is in it yet that could be ended"
    if any((each / "cgroup.kill").exists() for each in below):
        return "leftovers are ended by cgroup.kill"
    return "leftovers are frozen, then ended" if any((each / "cgroup.freeze").exists() for each in below) else ""
