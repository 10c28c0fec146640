"""The CDI specification of a claim: a runtime accepts it, and it is there completely or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from plugin.dra.cdi import ClaimCdiSpecs
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.logs import create_logger
from plugin.nvidia.cdi import CdiPublisher
from plugin.nvidia.driver_files import DriverRoot
from plugin.nvidia.injection import ListStrategy, NvidiaInjection
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import InvalidConfiguration, InvalidRequest, Unavailable
from tests.cdi_rules import errors_of
from tests.gpus import gpu, install_driver

DRIVER = "gpu.scrubber.dev"
CLAIM = "11111111-2222-3333-4444-555555555555"
OTHER = "99999999-2222-3333-4444-555555555555"


def device(number: int, *access: Access) -> AdvertisedDevice:
    return AdvertisedDevice(id=f"dev-{number}", index=str(number), verdict=ServiceVerdict.ADVERTISED, access=access)


def node(path: str, host: str = "") -> Access:
    return Access(AccessKind.DEVICE_NODE, host or path, path)


def specs(directory: Path, **facts: Any) -> ClaimCdiSpecs:
    return ClaimCdiSpecs(directory, DRIVER, log=facts.pop("log", create_logger("json", "info", io.StringIO())), **facts)


def published(directory: Path, claim: str, devices: dict[str, AdvertisedDevice], **facts: Any) -> Any:
    requests = facts.pop("requests", {"main": sorted(devices)})
    specs(directory, **facts).stage(claim, devices, requests).publish()
    return json.loads((directory / f"{DRIVER}-claim_{claim}.json").read_text())


def test_specification_has_what_each_backend_requests_and_is_valid(tmp_path: Path) -> None:
    both = {
        "one": device(
            0,
            node("/dev/kfd"),
            node("/dev/dri/renderD128", "/dev/dri/renderD129"),
            Access(AccessKind.MOUNT, "/sim/0", "/dev/simgpu0"),
            Access(AccessKind.ENVIRONMENT, "0", "ROCR_VISIBLE_DEVICES"),
        ),
        "two": device(1, Access(AccessKind.ENVIRONMENT, "1", "ROCR_VISIBLE_DEVICES")),
    }
    spec = published(tmp_path, CLAIM, both)
    assert errors_of(spec) == []
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", "gpu.scrubber.dev/claim")
    one, two, request = spec["devices"]
    assert (one["name"], two["name"], request["name"]) == (f"{CLAIM}-one", f"{CLAIM}-two", f"{CLAIM}.main")
    assert one["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/kfd", "permissions": "rw"},
        {"path": "/dev/dri/renderD128", "hostPath": "/dev/dri/renderD129", "permissions": "rw"},
    ]
    (mount,) = one["containerEdits"]["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == ("/sim/0", "/dev/simgpu0")
    assert request["containerEdits"] == {"env": ["ROCR_VISIBLE_DEVICES=0,1", "SCRUBBER_VISIBLE_DEVICES=dev-0,dev-1"]}


def test_container_that_uses_one_request_of_a_claim_sees_the_devices_of_that_request_only(tmp_path: Path) -> None:
    devices = {
        name: device(number, node(f"/dev/{name}"), Access(AccessKind.ENVIRONMENT, str(number), "ROCR_VISIBLE_DEVICES"))
        for number, name in enumerate(["one", "two", "three"])
    }
    requests = {"big-pair": ["one", "two"], "small": ["three"]}
    spec = published(tmp_path, CLAIM, devices, requests=requests)
    assert errors_of(spec) == []
    assert "containerEdits" not in spec
    edits = {f"{spec['kind']}={each['name']}": each["containerEdits"] for each in spec["devices"]}
    ids = specs(tmp_path).stage(CLAIM, devices, requests).cdi_ids

    def variables(*used: str) -> list[str]:
        return [
            variable
            for request in used
            for name in requests[request]
            for each in ids[request, name]
            for variable in edits[each].get("env", [])
        ]

    assert variables("small") == [
        "ROCR_VISIBLE_DEVICES=2",
        "SCRUBBER_VISIBLE_DEVICES=dev-2",
        "SCRUBBER_VISIBLE_DEVICES_SMALL=dev-2",
    ]
    assert variables("big-pair") == [
        "ROCR_VISIBLE_DEVICES=0,1",
        "SCRUBBER_VISIBLE_DEVICES=dev-0,dev-1",
        "SCRUBBER_VISIBLE_DEVICES_BIG_PAIR=dev-0,dev-1",
    ]


def test_devices_own_id_comes_before_the_vendors(tmp_path: Path) -> None:
    devices = {"one": device(0, Access(AccessKind.CDI, "amd.com/gpu=0", ""))}
    staged = specs(tmp_path).stage(CLAIM, devices, {"main": ["one"]})
    own = f"{DRIVER}/claim={CLAIM}-one", f"{DRIVER}/claim={CLAIM}.main"
    assert staged.cdi_ids == {("main", "one"): (*own, "amd.com/gpu=0")}
    staged.publish()
    assert errors_of(json.loads((tmp_path / f"{DRIVER}-claim_{CLAIM}.json").read_text())) == []


def test_nvidia_gpu_gets_the_driver_files_under_the_claims_own_names(tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir()
    install_driver(tmp_path / "root")
    root = DriverRoot(PurePosixPath("/run/driver"), tmp_path / "root")
    injection = NvidiaInjection((ListStrategy.CDI_CRI,))
    log = create_logger("json", "info", io.StringIO())
    nvidia = CdiPublisher(tmp_path / "cdi", root=root, hook=None, injection=injection, log=log)
    spec = published(tmp_path / "cdi", CLAIM, {"g": gpu(0), "d": device(1, node("/dev/x"))}, nvidia=nvidia)
    assert errors_of(spec) == []
    by_name = {each["name"]: each["containerEdits"] for each in spec["devices"]}
    assert set(by_name) == {f"{CLAIM}-g", f"{CLAIM}-d", f"{CLAIM}.main"}
    assert [each["path"] for each in by_name[f"{CLAIM}-g"]["deviceNodes"]] == ["/dev/nvidia0"]
    assert any("libcuda" in each["containerPath"] for each in spec["containerEdits"]["mounts"])
    assert spec["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


def test_nvidia_gpu_without_its_driver_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as refused:
        specs(tmp_path).stage(CLAIM, {"g": gpu(0)}, {"main": ["g"]})
    assert "files of the GPU driver" in refused.value.public_message


def test_staged_specification_is_invisible_to_runtimes_until_it_is_published(tmp_path: Path) -> None:
    staged = specs(tmp_path).stage(CLAIM, {"one": device(0, node("/dev/x"))}, {"main": ["one"]})
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    staged.publish()
    staged.discard()
    assert [path.name for path in tmp_path.iterdir()] == [f"{DRIVER}-claim_{CLAIM}.json"]


def test_discarded_specification_leaves_nothing(tmp_path: Path) -> None:
    specs(tmp_path).stage(CLAIM, {"one": device(0, node("/dev/x"))}, {"main": ["one"]}).discard()
    assert list(tmp_path.iterdir()) == []


def test_repeated_specification_is_the_same_file(tmp_path: Path) -> None:
    devices = {"one": device(0, node("/dev/x")), "two": device(1, node("/dev/y"))}
    published(tmp_path, CLAIM, devices)
    (path,) = tmp_path.iterdir()
    before = path.stat()
    published(tmp_path, CLAIM, dict(reversed(devices.items())))
    assert path.stat() == before


def test_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as refused:
        specs(tmp_path / "gone").stage(CLAIM, {"one": device(0, node("/dev/x"))}, {"main": ["one"]})
    assert f"{tmp_path / 'gone'} on this node: No such file or directory" in refused.value.public_message


def test_full_disk_is_named_and_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unavailable, match="No space left on device"):
        specs(tmp_path).stage(CLAIM, {"one": device(0, node("/dev/x"))}, {"main": ["one"]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uid", ["", "../x", "a/b", "a" * 64, "-x"])
def test_claim_uid_that_cannot_be_part_of_a_path_is_refused(tmp_path: Path, uid: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the UID of a claim"):
        specs(tmp_path).stage(uid, {"one": device(0, node("/dev/x"))}, {"main": ["one"]})
    specs(tmp_path).remove(uid)


def test_claims_with_a_specification_of_this_driver_are_found(tmp_path: Path) -> None:
    here = specs(tmp_path)
    for claim in (CLAIM, OTHER):
        here.stage(claim, {"one": device(0, node("/dev/x"))}, {"main": ["one"]}).publish()
    here.stage("staged", {"one": device(0, node("/dev/x"))}, {"main": ["one"]})
    for name in ("nvidia.yaml", f"{DRIVER}-other.json", "other-claim_x.json"):
        (tmp_path / name).touch()
    assert here.claims() == {CLAIM, OTHER}
    assert (here.has(CLAIM), here.has("staged")) == (True, False)
    here.remove(OTHER)
    assert here.claims() == {CLAIM}
    assert specs(tmp_path / "gone").claims() == frozenset()
    assert specs(tmp_path / "nvidia.yaml").has(CLAIM)  # a directory that cannot be read proves nothing


def test_temporary_files_of_killed_instances_are_removed_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    here = specs(tmp_path)
    here.stage(CLAIM, {"one": device(0, node("/dev/x"))}, {"main": ["one"]})
    (path,) = tmp_path.iterdir()
    written = path.lstat().st_mtime
    here.remove_left_behind(written + 1.0)
    assert path.exists()
    here.remove_left_behind(written + 3600.0)
    assert not path.exists()


def test_directory_is_checked_before_anything_is_prepared(tmp_path: Path) -> None:
    specs(tmp_path / "new").check()
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfiguration, match="set another directory with --cdi-dir"):
        specs(tmp_path / "file").check()


def test_driver_name_that_cannot_be_a_vendor_in_cdi_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="begin the driver's name with a letter"):
        ClaimCdiSpecs(tmp_path, "1.dev", log=create_logger("json", "info", io.StringIO())).check()
