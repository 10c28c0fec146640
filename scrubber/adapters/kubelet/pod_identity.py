"""The identity of a pod, from what the kubelet records: its namespace and name, and its service account.

The kubelet creates a directory ``<namespace>_<name>_<uid>`` for the logs of each pod, which needs no credentials to
read. With the pod's UID, which the kernel reports for each of its processes, that determines the namespace.

The kubelet also writes the token that it received for the pod into a projected volume; the payload contains pod,
namespace and account. The signature is not verified: no key of the API server is on the node, and the kubelet owns the
file. However, the author of a pod can also define projected volumes, with a file of that name and any content. So a
token counts only in a pod with exactly the namespace, name and UID for which the kubelet created a log directory. What
an author can then claim falsely is only another account of a namespace in which they may start pods, and they could
have requested any of those anyway.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Callable
from pathlib import Path

from scrubber.adapters.kubelet.pod_logs import PodLogs, read_pod_logs
from scrubber.adapters.kubelet.strict_json import parse_json
from scrubber.domain.assignment import KubeletReading, Pod
from scrubber.domain.infrastructure import PodIdentity

__all__ = ["PodIdentities", "parse_account"]

_PROJECTED = Path("volumes", "kubernetes.io~projected")
_TOKEN = "token"
_MAX_BYTES = 64 * 1024
_MAX_VOLUMES = 64


class PodIdentities:
    """The identities of this node's pods.

    Args:
        kubelet_dir: the kubelet's directory (``/var/lib/kubelet``). Where its ``pods`` cannot be read, no pod has a
            token.
        pod_logs: directory in which the kubelet creates a directory for the logs of each pod.
        may_run: returns whether a pod with this UID may still have processes.
        reading: returns the newest list of the kubelet.
        monotonic: returns the time in seconds, on the clock of the readings.
    """

    def __init__(
        self,
        kubelet_dir: Path,
        pod_logs: Path,
        *,
        may_run: Callable[[str], bool],
        reading: Callable[[], KubeletReading],
        monotonic: Callable[[], float],
    ) -> None:
        self._pods = kubelet_dir / "pods"
        self._pod_logs = pod_logs
        self._may_run = may_run
        self._reading = reading
        self._monotonic = monotonic
        self._first_seen: dict[str, float] = {}

    def name_of(self, pod_uid: str) -> tuple[str, str] | None:
        """Return namespace and name of the pod for display; None when no log directory or several name it."""
        return read_pod_logs(self._pod_logs).names.get(pod_uid)

    def find(self, pod_uid: str) -> PodIdentity | None:
        """Return the identity of the pod with this UID.

        None when no log directory names it, when anything contradicts that directory (another pod of the same name
        that may still run, or a trusted list of the kubelet without the pod), and when the pod has tokens that are
        malformed, disagree or belong to another pod.
        """
        if not pod_uid or "/" in pod_uid or pod_uid in (".", ".."):
            return None
        logs = read_pod_logs(self._pod_logs)
        name = logs.names.get(pod_uid)
        if name is None or self._is_absent(Pod(*name, pod_uid), logs):
            return None
        # The kubelet removes the logs of a replaced pod up to a minute after its end.
        if any(self._may_run(uid) for uid in logs.uids[name] - {pod_uid}):
            return None
        tokens = _tokens(self._pods / pod_uid / _PROJECTED)
        accounts = {parse_account(token, pod_uid, name) for token in tokens}
        if not accounts:
            return PodIdentity(*name, pod_uid)
        account = accounts.pop()
        return None if accounts or account is None else PodIdentity(*name, pod_uid, account)

    def _is_absent(self, pod: Pod, logs: PodLogs) -> bool:
        """Whether a trusted list that is newer than our first look at the pod lacks it."""
        assert pod.uid is not None
        self._first_seen = {uid: at for uid, at in self._first_seen.items() if uid in logs.names}
        since, reading = self._first_seen.setdefault(pod.uid, self._monotonic()), self._reading()
        return reading.started_at > since and reading.proves_absent(pod)


def parse_account(token: bytes, pod_uid: str, pod: tuple[str, str]) -> str | None:
    """Return the name of the service account in ``token``.

    Args:
        pod: namespace and name, as recorded by the kubelet. A token of another pod yields None.
    """
    parts = token.strip(b" \t\r\n").split(b".")
    if len(parts) != 3:
        return None
    try:
        text = base64.urlsafe_b64decode(parts[1] + b"=" * (-len(parts[1]) % 4))
        claims = parse_json(text).member("kubernetes.io")
        owner = claims.member("pod")
        found = (owner.member("uid").text(), claims.member("namespace").text(), owner.member("name").text())
        account = claims.member("serviceaccount").member("name").text()
    except ValueError:  # no base64, no JSON, or another shape
        return None
    return account if found == (pod_uid, *pod) else None


def _tokens(volumes: Path) -> list[bytes]:
    """Return the content of the files called ``token``; one that cannot be read completely counts as an empty token."""
    try:
        names = sorted(os.listdir(volumes))[:_MAX_VOLUMES]
    except OSError:
        return []
    return [found for name in names if (found := _token(volumes / name)) is not None]


def _token(volume: Path) -> bytes | None:
    """Return the token in ``volume``: None when there is none, empty when it must not be read.

    The kubelet updates a volume by replacing a symlink in it, so symlinks are followed, but never out of the volume.
    """
    if not os.path.lexists(volume / _TOKEN):
        return None
    try:
        place = (volume / _TOKEN).resolve(strict=True)
        if not place.is_relative_to(volume.resolve(strict=True)) or volume.is_symlink():
            return b""
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError):  # removed meanwhile, or a symlink loop
        return b""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            return b""
        return os.read(descriptor, _MAX_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
