"""The container runtime's side of CDI: it reads the specifications in its directory for the device ids that it gets.

Promise: a specification with an unknown field or a malformed one is not loaded, a device that no specification or more
than one names is refused as containerd refuses it, and nothing is cached. Hooks are checked and not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plugin.api import deviceplugin_pb2 as api


class CdiUnresolvable(Exception):
    """The runtime cannot create the container: some devices are not in any specification that it could load."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _DeviceNode(_Strict):
    path: str
    host_path: str = Field("", alias="hostPath")
    type: str = ""
    major: int = 0
    minor: int = 0
    file_mode: int = Field(0, alias="fileMode")
    permissions: str = ""
    uid: int = 0
    gid: int = 0


class _Mount(_Strict):
    host_path: str = Field(alias="hostPath")
    container_path: str = Field(alias="containerPath")
    options: list[str] = []
    type: str = ""


class _Hook(_Strict):
    hook_name: str = Field(alias="hookName")
    path: str
    args: list[str] = []
    env: list[str] = []
    timeout: int = 0


class _Edits(_Strict):
    env: list[str] = []
    device_nodes: list[_DeviceNode] = Field([], alias="deviceNodes")
    mounts: list[_Mount] = []
    hooks: list[_Hook] = []
    additional_gids: list[int] = Field([], alias="additionalGids")


class _Device(_Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$")
    annotations: dict[str, str] = {}
    edits: _Edits = Field(alias="containerEdits")


class _Spec(_Strict):
    version: str = Field(alias="cdiVersion", pattern=r"^\d+\.\d+\.\d+$")
    kind: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*/[A-Za-z][A-Za-z0-9_-]*$")
    annotations: dict[str, str] = {}
    devices: list[_Device] = Field(min_length=1)
    edits: _Edits = Field(_Edits(), alias="containerEdits")


@dataclass(slots=True)
class CdiEdits:
    """What specifications add to a container."""

    env: dict[str, str] = field(default_factory=dict)
    mounts: list[api.Mount] = field(default_factory=list)
    devices: list[api.DeviceSpec] = field(default_factory=list)

    def add(self, edits: _Edits) -> None:
        self.env.update(dict(each.split("=", 1) for each in edits.env if "=" in each))
        self.mounts += [
            api.Mount(host_path=each.host_path, container_path=each.container_path) for each in edits.mounts
        ]
        self.devices += [
            api.DeviceSpec(
                host_path=each.host_path or each.path, container_path=each.path, permissions=each.permissions
            )
            for each in edits.device_nodes
        ]


class CdiRegistry:
    """The specifications in ``directory``, as ``/var/run/cdi``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def clear(self) -> None:
        """Remove every specification: the directory does not outlive a boot."""
        for path in self._paths():
            path.unlink()

    def edits(self, ids: Iterable[str]) -> CdiEdits:
        """Return the edits of the devices; those of a specification come once, before its devices.

        Raises:
            CdiUnresolvable: a device is not in exactly one specification.
        """
        specs = list(self._load())
        merged = CdiEdits()
        used: list[_Spec] = []
        missing: list[str] = []
        for name in dict.fromkeys(ids):
            found = [(spec, each) for spec in specs for each in spec.devices if f"{spec.kind}={each.name}" == name]
            if len(found) != 1:
                missing.append(name)
                continue
            ((spec, device),) = found
            if not any(spec is each for each in used):
                used.append(spec)
                merged.add(spec.edits)
            merged.add(device.edits)
        if missing:
            raise CdiUnresolvable(f"failed to inject CDI devices: unresolvable CDI devices {', '.join(missing)}")
        return merged

    def _load(self) -> Iterator[_Spec]:
        for path in self._paths():
            try:
                text = path.read_text()
                content: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
                yield _Spec.model_validate(content)
            except (OSError, ValueError, yaml.YAMLError, ValidationError):
                continue  # as the runtime: it logs an error, and the devices of the file do not exist

    def _paths(self) -> Sequence[Path]:
        if not self.directory.is_dir():
            return ()
        return sorted(path for path in self.directory.iterdir() if path.suffix in (".json", ".yaml"))
