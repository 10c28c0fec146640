"""Takes what is common to all GPUs from NVIDIA's own CDI specification, where the container toolkit has generated one.

``nvidia-cdi-refresh.service`` of the toolkit writes it after each change of the driver. It knows the hooks of its own
version, and files that a newer driver brings. Invariants: device nodes come from the scrub service alone, because a
specification that is older than a device would name another tenant's GPU; and a specification of another driver, or
with a file that does not exist, is not used, because no container could start with it.

Source: the output of ``nvidia-ctk cdi generate`` 1.20, and the Container Device Interface.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from plugin.logs import Logger
from plugin.nvidia.driver_files import HOST_ROOT, DriverFiles, DriverRoot
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["ToolkitSpec"]

SPEC_FILES = ("nvidia.yaml", "nvidia.json")
KIND = "nvidia.com/gpu"
SHARED_BY_TENANTS = ("nvidia-persistenced/socket", "tmp/nvidia-mps")
"""Ends of the paths that containers must not share; the reasons are in :mod:`plugin.nvidia.driver_files`."""

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_State = tuple[tuple[str, int, int, int], DriverFiles]


class ToolkitSpec:
    """NVIDIA's specification in ``directory``, read again when it changes.

    Args:
        disabled_hooks: hooks that are left out; ``all``: all of them.
        sockets: whether containers get sockets of the driver's daemons.
    """

    def __init__(
        self, directory: Path, *, root: DriverRoot, disabled_hooks: Collection[str], sockets: bool, log: Logger
    ) -> None:
        self._paths = [directory / name for name in SPEC_FILES]
        self._root = root
        self._disabled_hooks = disabled_hooks
        self._sockets = sockets
        self._log = log
        self._known: tuple[_State, tuple[str, dict[str, Any]] | None] | None = None

    def common_edits(self, files: DriverFiles) -> tuple[str, dict[str, Any]] | None:
        """Return the CDI version and the edits for every container, without device nodes; None: use our own.

        Args:
            files: of the running driver.
        """
        found = next(((path, state) for path in self._paths if (state := _state_of(path))), None)
        if found is None:
            self._known = None
            return None
        path, state = found
        if self._known is None or self._known[0] != (state, files):
            self._known = ((state, files), self._read(path, files))
        return self._with_sockets(self._known[1])

    def _read(self, path: Path, files: DriverFiles) -> tuple[str, dict[str, Any]] | None:
        try:
            return self._parse(path, files)
        except _Unusable as error:
            self._log.info("cdi.toolkit-spec-unused", path=str(path), message=f"{path} {error}.")
            return None

    def _parse(self, path: Path, files: DriverFiles) -> tuple[str, dict[str, Any]]:
        spec = _load(path)
        version, edits = spec.get("cdiVersion"), spec.get("containerEdits")
        if spec.get("kind") != KIND or not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise _Unusable(f"is not a specification of {KIND}")
        if not isinstance(edits, dict):
            raise _Unusable("has no edits for all devices")
        mounts = [each for each in _tables(edits, "mounts") if not _is_shared(each)]
        if f"libcuda.so.{files.version}" not in {_host_path(each).name for each in mounts}:
            raise _Unusable(f"is not for the running driver {files.version}. Run nvidia-ctk cdi generate")
        if elsewhere := [each for each in mounts if not _host_path(each).is_relative_to(self._root.host)]:
            raise _Unusable(f"names {_host_path(elsewhere[0])}, and the driver is in {self._root.host}")
        hooks = [each for each in _tables(edits, "hooks") if not self._is_disabled(each)]
        needed = [_host_path(each) for each in mounts if not _is_socket(each)]
        for path_ in (*needed, *(PurePosixPath(str(each.get("path"))) for each in hooks)):
            if self._exists(path_) is False:
                raise _Unusable(f"names {path_}, which does not exist. Run nvidia-ctk cdi generate")
        common = {key: value for key, value in edits.items() if key not in ("deviceNodes", "hooks", "mounts", "env")}
        environment = [each for each in _texts(edits, "env") if not each.startswith("NVIDIA_VISIBLE_DEVICES=")]
        common |= {"env": ["NVIDIA_VISIBLE_DEVICES=void", *environment], "mounts": mounts}
        return version, common | ({"hooks": hooks} if hooks else {})

    def _with_sockets(self, found: tuple[str, dict[str, Any]] | None) -> tuple[str, dict[str, Any]] | None:
        """Return the edits with those sockets that exist now; a mount of a missing one would keep containers away."""
        if found is None:
            return None
        version, edits = found
        kept = [
            each
            for each in edits["mounts"]
            if not _is_socket(each) or (self._sockets and self._exists(_host_path(each)))
        ]
        return version, {**edits, "mounts": kept}

    def _is_disabled(self, hook: Mapping[str, Any]) -> bool:
        return "all" in self._disabled_hooks or any(word in self._disabled_hooks for word in _texts(hook, "args"))

    def _exists(self, path: PurePosixPath) -> bool | None:
        """Return whether a file of the host exists; None if this process cannot see its directory."""
        if not path.is_relative_to(self._root.host):
            return None
        below = path.relative_to(self._root.host)
        top = self._root.local_path / below.parts[0] if below.parts else self._root.local_path
        if self._root.host == HOST_ROOT and not top.exists():
            return None  # only parts of the host are mounted
        try:
            return (self._root.local_path / below).exists()
        except OSError:  # such as a name that is too long
            return False


class _Unusable(Exception):
    """The specification is not used; the text completes a sentence that begins with its path."""


def _state_of(path: Path) -> tuple[str, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns


def _load(path: Path) -> Mapping[str, Any]:
    from scrubber.config.yaml_document import parse_yaml, read_regular_file  # most nodes have no such file

    try:
        value = parse_yaml(read_regular_file(path, "a CDI specification"), str(path), bundled=True).value
    except InvalidConfiguration as error:
        raise _Unusable(f"cannot be used: {str(error).rstrip('.')}") from error
    except OSError as error:
        raise _Unusable(f"cannot be read: {os.strerror(error.errno or 0)}") from error
    return value if isinstance(value, dict) else {}


def _tables(edits: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = edits.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _Unusable(f"has {key} that are not a list of mappings")
    return value


def _texts(edits: Mapping[str, Any], key: str) -> list[str]:
    value = edits.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _Unusable(f"has {key} that are not a list of words")
    return value


def _host_path(mount: Mapping[str, Any]) -> PurePosixPath:
    return PurePosixPath(str(mount.get("hostPath")))


def _is_shared(mount: Mapping[str, Any]) -> bool:
    return str(_host_path(mount)).endswith(SHARED_BY_TENANTS)


def _is_socket(mount: Mapping[str, Any]) -> bool:
    return _host_path(mount).name == "socket"
