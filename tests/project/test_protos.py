"""The generated code in the tree matches the .proto files, and no two files share a name in the descriptor pool."""

import subprocess
import sys
from pathlib import Path

import pytest

from plugin.api import deviceplugin_pb2, pluginregistration_pb2
from scrubber.wire import podresources_pb2

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    out = tmp_path_factory.mktemp("protos")
    command = [sys.executable, str(ROOT / "scripts" / "gen_protos.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return out, done.stdout.split()


def test_generated_code_matches_the_proto_files(regenerated: tuple[Path, list[str]]) -> None:
    out, names = regenerated
    stale = [name for name in names if (out / name).read_bytes() != (ROOT / name).read_bytes()]
    assert names
    assert stale == [], "run `make protos`"


def test_every_generated_file_has_a_proto_file(regenerated: tuple[Path, list[str]]) -> None:
    _out, names = regenerated
    found = [
        str(path.relative_to(ROOT))
        for package in ("scrubber", "plugin")
        for pattern in ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
        for path in (ROOT / package).rglob(pattern)
    ]
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize(
    ("module", "path", "package"),
    [
        (deviceplugin_pb2, "plugin/api/deviceplugin.proto", "v1beta1"),
        (pluginregistration_pb2, "plugin/api/pluginregistration.proto", "pluginregistration"),
        (podresources_pb2, "scrubber/wire/podresources.proto", "v1"),
    ],
)
def test_each_proto_file_is_registered_under_its_own_path_in_the_descriptor_pool(
    module: object, path: str, package: str
) -> None:
    descriptor = module.DESCRIPTOR  # type: ignore[attr-defined]
    assert (descriptor.name, descriptor.package) == (path, package)


def test_protobuf_field_numbers_match_the_kubelets() -> None:
    """A message written field by field as the kubelet would; a renumbered field would read back wrongly."""
    register = b"\x0a\x07v1beta1\x12\x06x.sock\x1a\x10scrubber.dev/gpu\x22\x04\x08\x01\x10\x01"
    request = deviceplugin_pb2.RegisterRequest.FromString(register)
    assert (request.version, request.endpoint, request.resource_name) == ("v1beta1", "x.sock", "scrubber.dev/gpu")
    assert request.options.pre_start_required
    assert request.options.get_preferred_allocation_available
    assert request.SerializeToString() == register
