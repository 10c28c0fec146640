"""The CDI specification of each prepared claim: what a container gets with the claim's devices.

A claim has a file of its own, and its devices have names of their own, because runtimes cache: a name never means
anything else later. The first CDI id of a device belongs to it alone, because the kubelet shows it in the pod's status.

A container may use one request of a claim only. What lists devices, which are environment variables, is therefore in a CDI
device of the request, whose id the request's first device has besides its own.

Invariants: the same claim, devices and driver give the same bytes. A file appears under its name only when it is
complete, and is never changed under a reader: it is written under another name and renamed. Where two instances of the
driver overlap, one of them at a time adds or removes files (:meth:`ClaimCdiSpecs.exclusive`).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

from plugin.kubelet.devices import AdvertisedDevice
from plugin.logs import Logger
from plugin.nvidia.cdi import CDI_VERSION, ContainerEdits, encode_spec
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import InvalidConfiguration, InvalidRequest, Unavailable
from scrubber.durability import sync_directory, sync_path

__all__ = ["ClaimCdiSpecs", "NvidiaSpecs"]

VISIBLE_DEVICES_VARIABLE = "SCRUBBER_VISIBLE_DEVICES"
MOUNT_OPTIONS = ("rw", "rbind", "rprivate")

_LEFT_BEHIND_SECONDS = 60.0
"""Age of a temporary file; a live instance keeps one for the length of a call at most."""

_LOCK_POLL = 0.02

_UID = re.compile("[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_VENDOR = re.compile("[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")


class NvidiaSpecs(Protocol):
    """Builds specifications of NVIDIA GPUs; :class:`plugin.nvidia.cdi.CdiPublisher`."""

    def build(self, gpus: Sequence[AdvertisedDevice], epoch: str) -> tuple[ContainerEdits, str, str]: ...


class _Staged:
    """A specification that is written under a temporary name; None: the file has this content already."""

    def __init__(
        self,
        cdi_ids: Mapping[tuple[str, str], tuple[str, ...]],
        content: bytes,
        temporary: Path | None,
        path: Path,
    ) -> None:
        self.cdi_ids = cdi_ids
        self._content = content
        self._temporary = temporary
        self._path = path

    def publish(self) -> bool:
        try:
            if self._temporary is None:
                if _content(self._path) == self._content:
                    # The instance that wrote it may have been killed before it did this.
                    sync_directory(self._path.parent)
                    return False
                self._temporary = _write_temporary(self._path, self._content)  # it was removed meanwhile
            os.rename(self._temporary, self._path)
            self._temporary = None
            sync_directory(self._path.parent)
        except OSError as error:
            self.discard()
            raise _not_written(self._path.parent, error) from error
        return True

    def discard(self) -> None:
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.unlink(missing_ok=True)


class ClaimCdiSpecs:
    """The specifications of one driver's claims in ``directory``, where runtimes look for them.

    Args:
        epoch: returns the run of the service that is connected, after which the driver's files are looked for again.

    Attributes:
        nvidia: builds what containers get with NVIDIA GPUs; None: this node has none. May be replaced at any time.
    """

    def __init__(
        self,
        directory: Path,
        driver: str,
        *,
        log: Logger,
        nvidia: NvidiaSpecs | None = None,
        epoch: Callable[[], str] = str,
    ) -> None:
        self._directory = directory
        self._driver = driver
        self.nvidia = nvidia
        self._epoch = epoch
        self._log = log

    @property
    def kind(self) -> str:
        return f"{self._driver}/claim"

    def check(self) -> None:
        """Refuse what cannot work before anything is prepared.

        Raises:
            InvalidConfiguration: a driver name that CDI does not allow, or a directory that is not writable.
        """
        if not _VENDOR.fullmatch(self._driver):
            raise InvalidConfiguration(
                f"{self._driver!r} cannot be the vendor of CDI devices: begin the driver's name with a letter."
            )
        probe = self._directory / f".{self._driver}.probe"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            sync_path(self._directory)
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise InvalidConfiguration(
                f"Cannot write CDI specifications to {self._directory}: {error.strerror}. Make it writable for the driver, "
                "or set another directory with --cdi-dir."
            ) from error

    def stage(
        self, claim_uid: str, devices: Mapping[str, AdvertisedDevice], requests: Mapping[str, Sequence[str]]
    ) -> _Staged:
        """Write the specification of a claim under a temporary name.

        Args:
            devices: by their names in the pool.
            requests: the names of each request's devices.

        Raises:
            Unavailable: it cannot be written; the message names the directory.
            InvalidRequest: a device has nothing that CDI could give a container.
        """
        if not _UID.fullmatch(claim_uid):
            raise InvalidRequest(f"{claim_uid!r} is not the UID of a claim.")
        path = self._path(claim_uid)
        try:
            spec = self._specification(claim_uid, devices, requests)
            content = encode_spec(spec)
            temporary = None if _content(path) == content else _write_temporary(path, content)
        except OSError as error:
            raise _not_written(self._directory, error) from error
        except InvalidConfiguration as error:
            raise Unavailable(str(error), public_message=NO_DRIVER_FILES) from error
        ids = {
            (request, name): (
                f"{self.kind}={_device_name(claim_uid, name)}",
                *((f"{self.kind}={_request_name(claim_uid, request)}",) if name == names[0] else ()),
                *(each.host_path for each in devices[name].access if each.kind is AccessKind.CDI),
            )
            for request, names in requests.items()
            for name in names
        }
        return _Staged(ids, content, temporary, path)

    @asynccontextmanager
    async def exclusive(self, seconds: float) -> AsyncIterator[bool]:
        """Keep other instances of the driver, and other tasks of this one, from adding or removing specifications.

        Yields whether that worked within ``seconds``: a file may be added without it, and none may be removed. The lock ends
        with the process.
        """
        handle = None
        try:
            with suppress(OSError):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                handle = os.open(self._directory / f".{self._driver}-claims.lock", flags, 0o600)
            yield handle is not None and await _lock(handle, seconds)
        finally:
            if handle is not None:
                os.close(handle)

    def remove(self, claim_uid: str) -> None:
        """Remove the specification of a claim; a failure is logged, since its names mean nothing else later."""
        if not _UID.fullmatch(claim_uid):
            return
        try:
            self._path(claim_uid).unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("cdi.claim-not-removed", path=str(self._path(claim_uid)), message=str(error.strerror))

    def has(self, claim_uid: str) -> bool:
        """Return whether a claim may have a specification; True where the directory cannot be read."""
        try:
            self._path(claim_uid).lstat()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def claims(self) -> frozenset[str]:
        """Return the UIDs of all claims with a specification of this driver."""
        prefix = f"{self._driver}-claim_"
        try:
            names = [path.name for path in self._directory.iterdir()]
        except OSError:
            return frozenset()
        return frozenset(
            name.removeprefix(prefix).removesuffix(".json")
            for name in names
            if name.startswith(prefix) and name.endswith(".json")
        )

    def remove_left_behind(self, now: float) -> None:
        """Remove temporary files of killed instances; ``now`` is wall-clock time, as file times are."""
        for path in self._directory.glob(f".{self._driver}-claim_*.tmp"):
            with suppress(OSError):
                if now - path.lstat().st_mtime > _LEFT_BEHIND_SECONDS:
                    path.unlink(missing_ok=True)

    def _path(self, claim_uid: str) -> Path:
        return self._directory / f"{self._driver}-claim_{claim_uid}.json"

    def _specification(
        self, claim_uid: str, devices: Mapping[str, AdvertisedDevice], requests: Mapping[str, Sequence[str]]
    ) -> ContainerEdits:
        edits = {name: _edits(device.access) for name, device in devices.items() if not device.is_nvidia}
        common: ContainerEdits = {}
        version = CDI_VERSION
        gpus = [device for device in devices.values() if device.is_nvidia]
        if gpus:
            if self.nvidia is None:
                raise InvalidConfiguration(
                    f"Device {gpus[0].id} is an NVIDIA GPU, and the driver was started without settings for NVIDIA GPUs."
                )
            built, _, _ = self.nvidia.build(gpus, self._epoch())
            version = built["cdiVersion"]
            names = {device.id: name for name, device in devices.items()}
            edits |= {names[each["name"]]: each["containerEdits"] for each in built["devices"]}
            common = built["containerEdits"]
        lists = {
            request: {"env": _environment(request if len(requests) > 1 else "", [devices[name] for name in names])}
            for request, names in requests.items()
        }
        return {
            "cdiVersion": version,
            "kind": self.kind,
            "devices": [
                *(
                    {"name": _device_name(claim_uid, name), "containerEdits": each}
                    for name, each in sorted(edits.items())
                ),
                *(
                    {"name": _request_name(claim_uid, request), "containerEdits": each}
                    for request, each in sorted(lists.items())
                ),
            ],
            **({"containerEdits": common} if common else {}),
        }


NO_DRIVER_FILES = "The files of the GPU driver were not found on this node. The driver's log contains the cause."


def _device_name(claim_uid: str, name: str) -> str:
    return f"{claim_uid}-{name}"


def _request_name(claim_uid: str, request: str) -> str:
    """Return the name of a request's CDI device. No name of a device in the pool has a dot."""
    return f"{claim_uid}.{request}"


def _edits(access: Sequence[Access]) -> ContainerEdits:
    """Return what one device adds to a container, as its backend requests; everything is read-write."""
    edits: ContainerEdits = {}
    for each in access:
        if each.kind is AccessKind.DEVICE_NODE:
            node = {"path": each.container_path, "permissions": "rw"}
            if each.host_path != each.container_path:
                node["hostPath"] = each.host_path
            edits.setdefault("deviceNodes", []).append(node)
        elif each.kind is AccessKind.MOUNT:
            edits.setdefault("mounts", []).append(
                {"hostPath": each.host_path, "containerPath": each.container_path, "options": list(MOUNT_OPTIONS)}
            )
    # A device needs at least one edit of its own.
    return edits or {"env": ["SCRUBBER_CLAIM=1"]}


def _environment(request: str, devices: Collection[AdvertisedDevice]) -> list[str]:
    """Return the variables of all devices of a request: a runtime would keep only the last one of each name.

    For the same reason a container that uses several requests needs a variable for each of them.

    Args:
        request: its name where the claim has several; empty otherwise.
    """
    values: dict[str, list[str]] = {VISIBLE_DEVICES_VARIABLE: sorted(device.id for device in devices)}
    for device in sorted(devices, key=lambda each: each.id):
        for each in device.access:
            if each.kind is AccessKind.ENVIRONMENT:
                values.setdefault(each.container_path, []).append(each.host_path)
    if request:
        own = re.sub("[^A-Z0-9]", "_", request.upper())
        values[f"{VISIBLE_DEVICES_VARIABLE}_{own}"] = values[VISIBLE_DEVICES_VARIABLE]
    return [f"{name}={','.join(dict.fromkeys(found))}" for name, found in sorted(values.items())]


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write_temporary(path: Path, content: bytes) -> Path:
    """Write ``content`` durably beside ``path``; return its path. Runtimes read names that end in .json or .yaml only."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o644), "wb") as out:
            os.fchmod(out.fileno(), 0o644)  # regardless of the umask: the runtime need not be root
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


async def _lock(handle: int, seconds: float) -> bool:
    """Lock an open file; return whether that worked within ``seconds``."""
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(seconds):
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_POLL)
                else:
                    return True
    return False


def _not_written(directory: Path, error: OSError) -> Unavailable:
    message = f"The claim's CDI specification cannot be written to {directory} on this node: {error.strerror}."
    return Unavailable(message, public_message=message)
