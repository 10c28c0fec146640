"""The generated code in the tree matches the .proto files, and no two files share a name in the descriptor pool."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plugin.api import (
    deviceplugin_pb2,
    dra_health_pb2,
    dra_v1_pb2,
    dra_v1beta1_pb2,
    nvsentinel_pb2,
    pluginregistration_pb2,
)
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
        (dra_v1_pb2, "plugin/api/dra_v1.proto", "k8s.io.kubelet.pkg.apis.dra.v1"),
        (dra_v1beta1_pb2, "plugin/api/dra_v1beta1.proto", "k8s.io.kubelet.pkg.apis.dra.v1beta1"),
        (dra_health_pb2, "plugin/api/dra_health.proto", "v1alpha1"),
        (pluginregistration_pb2, "plugin/api/pluginregistration.proto", "pluginregistration"),
        (nvsentinel_pb2, "plugin/api/nvsentinel.proto", "datamodels"),
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


def test_protobuf_field_numbers_match_nvsentinels() -> None:
    """An event written field by field, with the numbers of NVSentinel's interface."""
    entity = b"\x52\x0d" + b"\x0a\x08GPU_UUID" + b"\x12\x01g"
    event = (
        b"\x08\x01"  # version 1
        b"\x12\x01a"  # agent 2
        b"\x1a\x03GPU"  # componentClass 3
        b"\x22\x01c"  # checkName 4
        b"\x28\x01"  # isFatal 5
        b"\x30\x01"  # isHealthy 6
        b"\x3a\x01m"  # message 7
        b"\x40\x05"  # recommendedAction 8
        b"\x4a\x0295"  # errorCode 9
        + entity  # entitiesImpacted 10
        + b"\x5a\x06\x0a\x01k\x12\x01v"  # metadata 11
        b"\x62\x02\x08\x07"  # generatedTimestamp 12
        b"\x6a\x01n"  # nodeName 13
        b"\x80\x01\x02"  # processingStrategy 16
    )
    raw = b"\x08\x01\x12" + bytes([len(event)]) + event
    events = nvsentinel_pb2.HealthEvents.FromString(raw)
    (read,) = events.events
    assert (events.version, read.version, read.agent, read.componentClass, read.checkName) == (1, 1, "a", "GPU", "c")
    assert (read.isFatal, read.isHealthy, read.message, list(read.errorCode)) == (True, True, "m", ["95"])
    assert read.recommendedAction == nvsentinel_pb2.CONTACT_SUPPORT
    assert [(each.entityType, each.entityValue) for each in read.entitiesImpacted] == [("GPU_UUID", "g")]
    assert (dict(read.metadata), read.generatedTimestamp.seconds, read.nodeName) == ({"k": "v"}, 7, "n")
    assert read.processingStrategy == nvsentinel_pb2.STORE_ONLY
    service = nvsentinel_pb2.DESCRIPTOR.services_by_name["PlatformConnector"]
    assert f"/{service.full_name}/{service.methods[0].name}" == "/datamodels.PlatformConnector/HealthEventOccurredV1"


@pytest.mark.parametrize("dra", [dra_v1_pb2, dra_v1beta1_pb2], ids=["v1", "v1beta1"])
def test_protobuf_field_numbers_match_the_kubelets_dra_protocol(dra: Any) -> None:
    """Messages written field by field as the kubelet would, in both versions of the protocol."""
    claim = b"\x0a\x02ns\x12\x01u\x1a\x04name"  # namespace 1, uid 2, name 3
    request = b"\x0a" + bytes([len(claim)]) + claim
    for message in (dra.NodePrepareResourcesRequest, dra.NodeUnprepareResourcesRequest):
        (read,) = message.FromString(request).claims
        assert (read.namespace, read.uid, read.name) == ("ns", "u", "name")

    device = b"\x0a\x01r\x12\x01p\x1a\x01d\x22\x05k.d=x\x2a\x01s"  # request_names 1 … share_id 5
    claims_entry = (
        b"\x0a\x01u\x12" + bytes([len(device) + 2 + 3]) + b"\x0a" + bytes([len(device)]) + device + b"\x12\x01e"
    )
    prepared = dra.NodePrepareResourcesResponse.FromString(b"\x0a" + bytes([len(claims_entry)]) + claims_entry).claims
    (given,) = prepared["u"].devices
    assert prepared["u"].error == "e"
    assert (list(given.request_names), given.pool_name, given.device_name) == (["r"], "p", "d")
    assert (list(given.cdi_device_ids), given.share_id) == (["k.d=x"], "s")

    released = dra.NodeUnprepareResourcesResponse.FromString(b"\x0a\x08\x0a\x01u\x12\x03\x0a\x01e").claims
    assert released["u"].error == "e"

    service = dra.DESCRIPTOR.services_by_name["DRAPlugin"]
    assert [each.name for each in service.methods] == ["NodePrepareResources", "NodeUnprepareResources"]


def test_protobuf_field_numbers_match_the_kubelets_health_stream() -> None:
    raw = (
        b"\x0a\x06\x0a\x01p\x12\x01d"  # device 1: pool_name 1, device_name 2
        b"\x10\x02"  # health 2: unhealthy
        b"\x18\x07"  # last_updated_time 3
        b"\x20\x1e"  # health_check_timeout_seconds 4
        b"\x2a\x01m"  # message 5
    )
    response = dra_health_pb2.NodeWatchResourcesResponse.FromString(b"\x0a" + bytes([len(raw)]) + raw)
    (read,) = response.devices
    assert (read.device.pool_name, read.device.device_name, read.message) == ("p", "d", "m")
    assert (read.health, read.last_updated_time) == (dra_health_pb2.UNHEALTHY, 7)
    assert read.health_check_timeout_seconds == 30
    service = dra_health_pb2.DESCRIPTOR.services_by_name["DRAResourceHealth"]
    assert f"/{service.full_name}/{service.methods[0].name}" == "/v1alpha1.DRAResourceHealth/NodeWatchResources"
    assert service.methods[0].server_streaming
