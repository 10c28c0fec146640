"""Checks whether a pod's processes can be recognised by their cgroups, and killed there when the pod is over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from scrubber.doctor.files import path_exists, read_bytes
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, unknown_result

__all__ = ["cgroups"]

_MOUNT_HINT = (
    "Mount the node's /sys/fs/cgroup writable where the service runs: in its pod as in "
    "deploy/kubernetes/base; in its systemd unit with ProtectControlGroups=no."
)


def cgroups(node: CheckContext) -> Iterator[CheckResult]:
    """The hierarchy that holds the pods is mounted, can be written, and can kill or freeze what a pod left behind."""
    service = node.service
    if service.paths.cgroups is None and (service.simulated or service.paths.kubelet is not None):
        yield _by_marker(node)
        return
    # Imported here: otherwise every other command would wait for what the adapter loads.
    from scrubber.adapters.cgroups.hierarchy import discover_root, hierarchy_of, sibling_hierarchies
    from scrubber.adapters.cgroups.paths import kubepods_below
    from scrubber.domain.errors import InvalidConfiguration

    serious = CheckLevel.ERROR if service.has_hardware else CheckLevel.WARNING
    try:
        root = node.path(service.paths.cgroups) if service.paths.cgroups else discover_root(node.path("/sys/fs/cgroup"))
        if root is None:
            message = (
                f"There is no cgroup hierarchy below {node.path('/sys/fs/cgroup')}: no process can be "
                "assigned to a pod."
            )
            yield CheckResult(
                "cgroups", serious, message, f"{_MOUNT_HINT} If it is elsewhere: scrubber serve --cgroup-root DIR."
            )
            return
        mounts = read_bytes(node.path("/proc/self/mountinfo"), 8 << 20)
        hierarchy = hierarchy_of(root, mounts)
        others = sibling_hierarchies(hierarchy, mounts)
        pods = kubepods_below(root)
        version = f"v{hierarchy.version}" + (" with other hierarchies" if others else "")
        fixed = [str(each.root) for each in (hierarchy, *others) if os.statvfs(each.root).f_flag & os.ST_RDONLY]
        ends = _kill_method(node, root, hierarchy.version)
    except InvalidConfiguration as error:
        yield CheckResult(
            "cgroups", serious, str(error), "Pass the right directory to scrubber serve with --cgroup-root."
        )
        return
    except OSError as error:
        yield unknown_result("cgroups", "whether the processes of a pod can be determined is unknown", error)
        return
    if fixed:
        message = f"{', '.join(fixed)} cannot be written from here: leftover processes that fork could not be killed."
        yield CheckResult("cgroups", serious, message, _MOUNT_HINT)
        return
    undelegated = [str(each.root) for each in (hierarchy, *others) if each.version == 2 and not each.nsdelegate]
    if undelegated:
        message = (
            f"cgroup v2 at {', '.join(undelegated)} is mounted without nsdelegate: a container that may write "
            "to its cgroups can lift its own limits and move a process into any other cgroup that it sees. "
            "The service would not attribute that process to the pod."
        )
        remedy = (
            "On the node, outside of containers: mount -o remount,nsdelegate DIR, with the mount point of "
            "that cgroup2 file system. systemd sets this option at boot; otherwise add it where the file "
            "system is mounted."
        )
        yield CheckResult("cgroups", serious, message, remedy)
        return
    where = f", pods in {', '.join(str(each.relative_to(root)) for each in pods)}" if pods else ", no pods yet"
    found = f"cgroup {version} at {root}{where}"
    if not ends:
        message = (
            f"{found}; it can neither kill nor freeze a whole cgroup, so leftover processes are killed one by one."
        )
        remedy = (
            "Use Linux 5.14 or newer (cgroup.kill); uname -r shows the version."
            if hierarchy.version == 2
            else "Mount the freezer: mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer, or boot with cgroup v2."
        )
        yield CheckResult("cgroups", CheckLevel.WARNING, message, remedy)
        return
    if (problem := _watch_problem(root)) is not None:
        message = (
            f"{found}; {ends}. The end of a pod cannot be watched: {problem}. Its device is released only when the "
            "kubelet's list lacks the pod, one to two seconds later."
        )
        remedy = (
            "Raise the limit that the message names, for example: sysctl -w fs.inotify.max_user_instances=8192 "
            "fs.inotify.max_user_watches=1048576, and keep it in /etc/sysctl.d. The service tries again every 10 seconds."
        )
        yield CheckResult("cgroups", CheckLevel.WARNING, message, remedy)
        return
    yield CheckResult("cgroups", CheckLevel.OK, f"{found}; {ends}.")


def _watch_problem(root: Path) -> str | None:
    """Return why a cgroup cannot be watched from here; None if it can. This is tried: the limits are the user's."""
    from scrubber.adapters.inotify import Inotify

    try:
        watch = Inotify()
    except OSError as error:
        return error.strerror
    try:
        watch.add(root)
    except OSError as error:
        return error.strerror
    finally:
        watch.close()
    return None


def _by_marker(node: CheckContext) -> CheckResult:
    """Check that the pods here carry environment markers, by which the service assigns processes to pods."""
    # Imported here: otherwise every other command would wait for what the settings load.
    from scrubber.config.settings import EMULATOR_MARKER_FILE

    kubelet = node.path(node.kubelet_dir)
    try:
        has_kubelet, emulated = path_exists(kubelet), path_exists(kubelet / EMULATOR_MARKER_FILE)
    except OSError as error:
        return unknown_result("cgroups", "whether the kubelet is the emulator is unknown", error)
    by = "The service assigns processes to pods by environment markers, not by cgroup"
    if not has_kubelet:
        return CheckResult("cgroups", CheckLevel.OK, f"{by}; there is no kubelet in {kubelet}.")
    if emulated:
        return CheckResult("cgroups", CheckLevel.OK, f"{by}, which the kubelet emulator's containers have.")
    message = (
        f"{by}, but the kubelet in {kubelet} is real: its containers have no markers, so every hand-over "
        "between pods waits for a fixed time instead of for the processes."
    )
    serious = CheckLevel.ERROR if node.service.has_hardware else CheckLevel.WARNING
    return CheckResult("cgroups", serious, message, "Restart the service with --container-identity cgroup (or auto).")


def _kill_method(node: CheckContext, root: Path, version: int) -> str:
    """Return how a whole cgroup is killed here; empty if it cannot be. Raises OSError."""
    if version == 1:
        freezer = node.path("/sys/fs/cgroup/freezer")
        writable = (freezer / "cgroup.procs").exists() and not os.statvfs(freezer).f_flag & os.ST_RDONLY
        return "leftover processes are frozen, then killed" if writable else ""
    # The root cgroup has neither file, on any kernel.
    with os.scandir(root) as entries:
        below = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    if not below:
        return "it contains no cgroup yet that could be killed"
    if any((each / "cgroup.kill").exists() for each in below):
        return "leftover processes are killed with cgroup.kill"
    return (
        "leftover processes are frozen, then killed" if any((each / "cgroup.freeze").exists() for each in below) else ""
    )
