"""The container runtime's reading of CDI specifications."""

import json
from pathlib import Path
from typing import Any

import pytest

from scrubber.emulator.cdi import CdiRegistry, CdiUnresolvable

KIND = "scrubber.dev/claim"


def write(directory: Path, name: str, *devices: Any, **more: Any) -> Path:
    path = directory / name
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": KIND, "devices": list(devices), **more}))
    return path


def entry(name: str, **edits: Any) -> dict[str, Any]:
    return {"name": name, "containerEdits": edits}


def test_edits_of_a_specification_come_once_before_those_of_its_devices(tmp_path: Path) -> None:
    common = {"env": ["A=all", "B=all"], "mounts": [{"hostPath": "/lib", "containerPath": "/usr/lib"}]}
    devices = [entry(each, env=[f"B={each}"], deviceNodes=[{"path": f"/dev/{each}"}]) for each in ("x", "y")]
    write(tmp_path, "spec.json", *devices, containerEdits=common)
    edits = CdiRegistry(tmp_path).edits([f"{KIND}=x", f"{KIND}=y", f"{KIND}=x"])
    assert edits.env == {"A": "all", "B": "y"}
    assert [each.container_path for each in edits.mounts] == ["/usr/lib"]
    assert [(each.host_path, each.container_path) for each in edits.devices] == [
        ("/dev/x", "/dev/x"),
        ("/dev/y", "/dev/y"),
    ]


def test_yaml_is_read_as_well_and_other_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        f"{{cdiVersion: 0.5.0, kind: {KIND}, devices: [{{name: x, containerEdits: {{}}}}]}}"
    )
    (tmp_path / ".draft.json.tmp").write_text("{")
    assert CdiRegistry(tmp_path).edits([f"{KIND}=x"]).env == {}


def test_missing_directory_has_no_devices(tmp_path: Path) -> None:
    with pytest.raises(CdiUnresolvable, match=f"unresolvable CDI devices {KIND}=x, {KIND}=y"):
        CdiRegistry(tmp_path / "none").edits([f"{KIND}=x", f"{KIND}=y"])


@pytest.mark.parametrize(
    "more",
    [
        {"hostname": "unknown field"},
        {"containerEdits": {"environment": []}},
        {"cdiVersion": "latest"},
        {"kind": "no-vendor"},
        {"devices": []},
        {"devices": [{"name": "x"}]},
        {"devices": [entry("x", hooks=[{"hookName": "poststop"}])]},
    ],
)
def test_specification_with_an_unknown_or_malformed_field_is_not_loaded(tmp_path: Path, more: Any) -> None:
    write(tmp_path, "good.json", entry("y"))
    path = write(tmp_path, "bad.json", entry("x"))
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    registry = CdiRegistry(tmp_path)
    registry.edits([f"{KIND}=y"])
    with pytest.raises(CdiUnresolvable):
        registry.edits([f"{KIND}=x"])


def test_device_of_two_specifications_is_unresolvable(tmp_path: Path) -> None:
    write(tmp_path, "one.json", entry("x"))
    write(tmp_path, "two.json", entry("x"), entry("y"))
    registry = CdiRegistry(tmp_path)
    registry.edits([f"{KIND}=y"])
    with pytest.raises(CdiUnresolvable):
        registry.edits([f"{KIND}=x"])
