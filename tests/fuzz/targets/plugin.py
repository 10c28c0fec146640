"""What the plugin and the DRA driver read: a vendor's answers, claims of the API server, files of NVIDIA's tools."""

from __future__ import annotations

import io
import json
import tempfile
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf.message import DecodeError

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.dra.claims import ClaimIdentity, awaited_devices, claim_pods, read_claim
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.kubelet.server import HEALTHY
from plugin.logs import create_logger
from plugin.nvidia.driver_files import DriverFiles, DriverRoot
from plugin.nvidia.driver_ready import parse_driver_ready
from plugin.nvidia.settings import read_config_file
from plugin.nvidia.toolkit_spec import ToolkitSpec
from plugin.upstream.allocate_response import DevicePaths, referenced_devices
from plugin.upstream.device_ids import DeviceIds, DeviceNames, resolve_lists
from plugin.upstream.device_list import VendorReport, build_entries
from scrubber.domain.errors import InvalidConfiguration, InvalidRequest
from tests.fuzz.loop import on_close
from tests.fuzz.structure import EDIT_SEEDS, EDITS, json_input, text_input
from tests.fuzz.target import SLOW_GOAL, target

_CLAIM_WORDS = (b'"results"', b'"driver"', b'"pool"', b'"reservedFor"', b'"adminAccess":true', b'"shareID"')
_DRIVER, _POOL = "gpu.scrubber.dev", "node-1"
_CLAIM: dict[str, Any] = {
    "metadata": {"namespace": "team-a", "name": "claim", "uid": "uid-1", "annotations": {"a": "b"}},
    "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}},
    "status": {
        "allocation": {
            "devices": {
                "results": [
                    {
                        "request": "gpu/first",
                        "driver": _DRIVER,
                        "pool": _POOL,
                        "device": "gpu-0",
                        "bindingConditions": ["Ready"],
                    },
                    {"request": "other", "driver": "other.example", "pool": "x", "device": "y"},
                ],
                "config": [{"source": "FromClass", "opaque": {"driver": "other.example", "parameters": {"a": 1}}}],
            }
        },
        "reservedFor": [{"resource": "pods", "name": "train", "uid": "pod-1"}],
        "devices": [
            {"driver": _DRIVER, "pool": _POOL, "device": "gpu-0", "conditions": [{"type": "Ready", "status": "False"}]}
        ],
    },
}
_REF = ClaimIdentity("team-a", "claim", "uid-1")


@target(
    "resource-claim",
    parser="resource claims, as the API server sends them",
    covers=("plugin.dra.claims",),
    oracle="a claim is refused with a message that names it, or it is the requested one, and every device in it is "
    "allocated by this driver from this node's pool",
    seeds=(*EDIT_SEEDS, json.dumps(_CLAIM).encode(), *(b"\0" + bytes((place, 0, 3)) for place in range(36))),
    words=_CLAIM_WORDS,
)
def resource_claim(data: bytes) -> bool:
    try:
        found: Any = json.loads(json_input(data, _CLAIM))
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    results = _results(found)
    accepted = False
    try:
        claim = read_claim(_REF, found, _DRIVER, _POOL)
    except InvalidRequest as error:
        assert str(error).startswith("Claim team-a/claim "), error
    else:
        accepted = True
        assert found["metadata"]["uid"] == _REF.uid
        assert claim.devices
        for each in claim.devices:
            assert any(
                (one.get("driver"), one.get("pool"), one.get("device")) == (_DRIVER, _POOL, each.name)
                for one in results
            )
    try:
        pods = claim_pods(_REF, found)
        ref, devices = awaited_devices(found, _DRIVER, _POOL, ready="Ready", failed="Failed")
    except InvalidRequest as error:
        assert "cannot be read" in str(error), error
        return accepted
    assert (pods is None) == (ref.uid != _REF.uid)
    assert all(any(one.get("device") == each.name for one in results) for each in devices)
    return accepted


def _results(claim: Any) -> list[Any]:
    try:
        return [each for each in claim["status"]["allocation"]["devices"]["results"] if isinstance(each, dict)]
    except (LookupError, TypeError):
        return []


_IDS = DeviceIds(
    (
        DeviceNames("GPU-1", "0", pci="0000:3b:00.0", nodes=frozenset({"nvidia0"})),
        DeviceNames("GPU-2", "1", pci="00000000:AF:00.0", nodes=frozenset({"nvidia1"})),
        DeviceNames("MIG-1", "2:0", parent="GPU-3"),
    )
)
_PATHS = DevicePaths({"GPU-1": frozenset({"/dev/nvidia0"}), "GPU-2": frozenset({"/dev/nvidia1"})}, _IDS)
_OFFERS = {
    "GPU-1": AdvertisedDevice("GPU-1", "0", ServiceVerdict.ADVERTISED, healthy=True),
    "GPU-2": AdvertisedDevice("GPU-2", "1", ServiceVerdict.WITHHELD, refusal="GPU-2 is quarantined."),
}


def _list(*ids: str, health: str = HEALTHY) -> bytes:
    return kubelet.ListAndWatchResponse(
        devices=[kubelet.Device(ID=each, health=health) for each in ids]
    ).SerializeToString()


@target(
    "upstream-list",
    parser="the list of a vendor's plugin",
    covers=("plugin.upstream.device_ids", "plugin.upstream.device_list"),
    oracle="a device is healthy only if the vendor says so and its id means the one device that the service advertises, and "
    "no two ids that are not replicas mean the same device",
    seeds=(
        _list("GPU-1", "GPU-2"),
        _list("GPU-1::0", "GPU-1::1"),
        _list("0", "0000:3b:00.0", "nvidia1"),
        _list("GPU-3", health="x"),
    ),
    words=(b"GPU-1", b"::", b"0000:3b:00.0", b"00000000:3B:00.0", b"nvidia0", b"MIG-1", HEALTHY.encode()),
)
def upstream_list(data: bytes) -> bool:
    try:
        devices = kubelet.ListAndWatchResponse.FromString(data).devices
    except DecodeError:
        return False
    meanings = resolve_lists(_IDS, {"nvidia.com/gpu": [each.ID for each in devices]})["nvidia.com/gpu"]
    report = (
        VendorReport().with_list(kubelet.ListAndWatchResponse.FromString(_list("GPU-2")).devices).with_list(devices)
    )
    healthy: dict[str, set[tuple[str, bool]]] = {}
    for entry in build_entries(report, meanings, _OFFERS):
        assert (entry.message.health == HEALTHY) <= (not entry.unhealthy_reason)
        if entry.message.health == HEALTHY:
            assert entry.resolved.device == "GPU-1", entry
            healthy.setdefault(entry.resolved.device, set()).add((entry.resolved.base, entry.resolved.replica))
    for claimants in healthy.values():
        assert len({base for base, _ in claimants}) == 1, claimants
    return bool(devices)


def _allocation(**fields: Any) -> bytes:
    return kubelet.ContainerAllocateResponse(**fields).SerializeToString()


@target(
    "upstream-allocation",
    parser="a vendor's answer to `Allocate`",
    covers=("plugin.upstream.allocate_response",),
    oracle="an answer that names another device, by node, mount, variable, annotation or CDI name, is reported as one "
    "that gives access to an unallocated device",
    seeds=(
        _allocation(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}),
        _allocation(devices=[kubelet.DeviceSpec(host_path="/dev/nvidia1", container_path="/dev/nvidia1")]),
        _allocation(cdi_devices=[kubelet.CDIDevice(name="nvidia.com/gpu=1")]),
        _allocation(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=GPU-2,nvidia.com/gpu=all"}),
        _allocation(
            mounts=[kubelet.Mount(container_path="/var/run/nvidia-container-devices/GPU-2", host_path="/dev/null")]
        ),
    ),
    words=(b"GPU-2", b"all", b"nvidia.com/gpu=", b"/dev/nvidia1", b"/var/run/nvidia-container-devices/", b","),
)
def upstream_allocation(data: bytes) -> bool:
    try:
        answer = kubelet.ContainerAllocateResponse.FromString(data)
    except DecodeError:
        return False
    found = set(_PATHS.unallocated_devices(answer, ["GPU-1"]))
    assert "GPU-1" not in found
    visible = answer.envs.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    files = {each.host_path for each in answer.devices} | {each.host_path for each in answer.mounts}
    if {"GPU-2", "all"} & {each.strip() for each in visible} or "/dev/nvidia1" in files:
        assert "GPU-2" in found
    assert all(owners for owners in referenced_devices(answer, _PATHS))
    return bool(found)


@cache
def _directory() -> Path:
    directory = tempfile.TemporaryDirectory(prefix="files-")
    on_close(_directory.cache_clear)
    on_close(directory.cleanup)
    return Path(directory.name)


_LIBRARY = "/usr/lib/libcuda.so.550.54.15"
_TOOLKIT = {
    "cdiVersion": "0.7.0",
    "kind": "nvidia.com/gpu",
    "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia7"}]}}],
    "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_CTK_LIBCUDA_DIR=/usr/lib"],
        "deviceNodes": [{"path": "/dev/nvidiactl"}],
        "hooks": [
            {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["a", "create-symlinks"]}
        ],
        "mounts": [{"hostPath": _LIBRARY, "containerPath": _LIBRARY, "options": ["ro"]}],
    },
}


@target(
    "toolkit-spec",
    parser="NVIDIA's CDI specification",
    covers=("plugin.nvidia.toolkit_spec",),
    oracle="a specification is not used, or its edits have no device node, no variable that shows devices, and no file that "
    "does not exist",
    seeds=(*EDIT_SEEDS, json.dumps(_TOOLKIT).encode(), *(b"\0" + bytes((place, 0, 17)) for place in range(26))),
    words=(b"containerEdits", b"mounts", b"hostPath", b"hooks", b"env", b"NVIDIA_VISIBLE_DEVICES=all", b"cdiVersion"),
    goal=SLOW_GOAL,
)
def toolkit_spec(data: bytes) -> bool:
    root = _directory() / "root"
    for file in (root / "usr/bin/nvidia-cdi-hook", root / _LIBRARY.lstrip("/")):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    cdi = _directory() / "cdi"
    cdi.mkdir(exist_ok=True)
    (cdi / "nvidia.yaml").write_bytes(json_input(data, _TOOLKIT))
    lines = io.StringIO()
    spec = ToolkitSpec(
        cdi,
        root=DriverRoot(PurePosixPath("/"), root),
        disabled_hooks=(),
        sockets=False,
        log=create_logger("json", "info", lines),
    )
    found = spec.common_edits(DriverFiles("550.54.15", (_LIBRARY,), (), ()))
    if found is None:
        assert "cdi.toolkit-spec-unused" in lines.getvalue()
        return False
    version, edits = found
    assert [int(part) for part in version.split(".")]
    assert version.isascii()
    assert "deviceNodes" not in edits
    shown = [each for each in edits["env"] if each.startswith("NVIDIA_VISIBLE_DEVICES=")]
    assert shown == ["NVIDIA_VISIBLE_DEVICES=void"]
    for mount in edits["mounts"]:
        assert (root / str(mount["hostPath"]).lstrip("/")).exists(), mount
    json.dumps(edits, allow_nan=False)
    return True


_READY = (
    b"IS_HOST_DRIVER=true\nNVIDIA_DRIVER_ROOT=/run/nvidia/driver\nDRIVER_ROOT_CTR_PATH=/driver-root\nNVIDIA_DEV_ROOT=/\n",
    b"NVIDIA_DRIVER_ROOT=/\nDRIVER_ROOT_CTR_PATH=/host\nNVIDIA_DEV_ROOT=/\n",
)
_READY_NAMES = (b"NVIDIA_DRIVER_ROOT", b"DRIVER_ROOT_CTR_PATH", b"NVIDIA_DEV_ROOT")


@target(
    "driver-ready-file",
    parser="the file by which the operator's validator says that the driver is ready",
    covers=("plugin.nvidia.driver_ready",),
    oracle="a file is refused with a message of one line, or the paths are those that it assigns, absolute, and do not lead "
    "upwards",
    seeds=(*EDIT_SEEDS, *_READY, b"# comment\n\n", *(EDITS + bytes((0, place, 5, 7)) for place in range(16))),
    words=(b"NVIDIA_DRIVER_ROOT=", b"DRIVER_ROOT_CTR_PATH=", b"NVIDIA_DEV_ROOT=", b"..", b"/../", b"\n"),
)
def driver_ready_file(data: bytes) -> bool:
    content = text_input(data, *_READY)
    try:
        found = parse_driver_ready(content, "file")
    except InvalidConfiguration as error:
        assert str(error).startswith("file:")
        assert "\n" not in str(error)
        return False
    assigned = dict(line.split(b"=", 1) for line in content.split(b"\n") if b"=" in line and not line.startswith(b"#"))
    paths = (found.driver_root, found.driver_root_ctr_path, found.dev_root)
    for name, path in zip(_READY_NAMES, paths, strict=True):
        assert path == PurePosixPath(assigned[name].decode()), name
        assert path.is_absolute()
        assert ".." not in path.parts
        assert str(path).isprintable()
    return True


_CONFIG = {
    "version": "v1",
    "flags": {
        "migStrategy": "none",
        "failOnInitError": True,
        "plugin": {"deviceIDStrategy": "uuid", "passDeviceSpecs": False},
    },
    "resources": {"gpus": [{"pattern": "*", "name": "nvidia.com/gpu"}]},
    "sharing": {"timeSlicing": {"renameByDefault": False, "resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}},
}


@target(
    "nvidia-config-file",
    parser="the configuration file of NVIDIA's plugin",
    covers=("plugin.nvidia.settings", "plugin.nvidia.config_file"),
    oracle="a file is refused with the number of a line, or what it says of unknown keys is one line",
    seeds=(*EDIT_SEEDS, json.dumps(_CONFIG).encode(), *(b"\0" + bytes((place, 0, 17)) for place in range(20))),
    words=(b"timeSlicing", b"replicas", b"flags", b"plugin", b"deviceListStrategy", b"[envvar, cdi-cri]"),
    goal=SLOW_GOAL,
)
def nvidia_config_file(data: bytes) -> bool:
    path = _directory() / "config.yaml"
    path.write_bytes(json_input(data, _CONFIG))
    try:
        found = read_config_file(path)
    except InvalidConfiguration as error:
        assert all(str(path) in line for line in str(error).split("\n")), str(error)
        return False
    assert (found.ignored or "").isprintable(), found.ignored
    return True
