"""What the kubelet writes and answers: its checkpoint, its list of pods, its log directories, its tokens."""

from __future__ import annotations

import base64
import json
from typing import Any

from scrubber.adapters.kubelet.checkpoint import parse_checkpoint
from scrubber.adapters.kubelet.crosscheck import assignments_of, listed_claims, missing_pods, shares_of
from scrubber.adapters.kubelet.device_ids import DeviceIdResolver
from scrubber.adapters.kubelet.pod_identity import parse_account
from scrubber.adapters.kubelet.pod_logs import index_pod_logs
from scrubber.adapters.kubelet.pod_resources import parse_pod_list
from scrubber.domain.errors import Unavailable
from scrubber.wire import podresources_pb2 as messages
from tests.fuzz.structure import EDIT_SEEDS, json_input
from tests.fuzz.target import target

_CHECKPOINT = {
    "Data": {
        "PodDeviceEntries": [
            {
                "PodUID": "0f6e1f7c",
                "ContainerName": "main",
                "ResourceName": "nvidia.com/gpu",
                "DeviceIDs": {"0": ["GPU-1", "GPU-2"], "-1": None},
                "AllocResp": "CgA=",
            }
        ],
        "RegisteredDevices": {"nvidia.com/gpu": ["GPU-1", "GPU-2"]},
    },
    "Checksum": 3193117373,
}


@target(
    "checkpoint",
    parser="the kubelet's device checkpoint",
    covers=("scrubber.adapters.kubelet.checkpoint",),
    oracle="the result is a message of one line and no entries, or has exactly the devices that Python's JSON reader finds",
    seeds=(
        *EDIT_SEEDS,
        json.dumps(_CHECKPOINT).encode(),
        b'{"Data":{"PodDeviceEntries":null}}',
        b'{"Data":{"PodDeviceEntries":[{"PodUID":"a","ContainerName":"b","ResourceName":"c","DeviceIDs":null}]}}',
    ),
    words=(b'"PodUID":', b'"DeviceIDs":', b'"ContainerName":', b'"ResourceName":', b'"Data":', b'["GPU-1"]'),
)
def checkpoint(data: bytes) -> bool:
    data = json_input(data, _CHECKPOINT)
    found = parse_checkpoint(data)
    if found.error:
        assert not found.entries
        assert found.error.isprintable(), found.error
        return False
    raw: Any = json.loads(data)
    expected = []
    for each in raw["Data"]["PodDeviceEntries"] or ():
        devices = frozenset(device for ids in (each["DeviceIDs"] or {}).values() for device in ids or ())
        if devices:
            expected.append((each["PodUID"], each["ContainerName"], each["ResourceName"], devices))
    assert [(each.pod_uid, each.container, each.resource, each.devices) for each in found.entries] == expected
    assert all(uid and container and resource for uid, container, resource, _ in expected)
    return True


def _pod_list(*, device: str = "GPU-1", name: str = "train") -> bytes:
    return messages.ListPodResourcesResponse(
        pod_resources=[
            messages.PodResources(
                name=name,
                namespace="team-a",
                containers=[
                    messages.ContainerResources(
                        name="main",
                        devices=[
                            messages.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=[device, "GPU-2::0"])
                        ],
                        dynamic_resources=[
                            messages.DynamicResource(
                                claim_name="claim",
                                claim_namespace="team-a",
                                claim_resources=[
                                    messages.ClaimResource(
                                        driver_name="gpu.scrubber.dev",
                                        device_name="gpu-1",
                                        cdi_devices=[messages.CDIDevice(name="gpu.scrubber.dev/gpu=GPU-1")],
                                    )
                                ],
                            )
                        ],
                    )
                ],
            )
        ]
    ).SerializeToString()


_RESOLVER = DeviceIdResolver(("GPU-1", "GPU-2"))
_LOGS = index_pod_logs(["team-a_train_0f6e1f7c"])
_PARSED_CHECKPOINT = parse_checkpoint(json.dumps(_CHECKPOINT).encode())


@target(
    "pod-resources",
    parser="the answer of `PodResources.List`",
    covers=("scrubber.adapters.kubelet.pod_resources", "scrubber.adapters.kubelet.crosscheck"),
    oracle="the answer is refused as unavailable, or every pod of the message is in the result with all its devices, and no "
    "assignment has a device that the message does not contain",
    seeds=(_pod_list(), _pod_list(device="GPU-9"), _pod_list(name=""), _pod_list() * 2, b""),
    words=(b"GPU-1", b"gpu-2", b"::0", b"team-a", b"nvidia.com/gpu"),
)
def pod_resources(data: bytes) -> bool:
    try:
        listed = parse_pod_list(data)
    except Unavailable as error:
        assert str(error).isprintable(), str(error)
        return False
    raw = messages.ListPodResourcesResponse.FromString(data).pod_resources
    assert [(each.namespace, each.name) for each in listed] == [(each.namespace, each.name) for each in raw]
    for pod, each in zip(raw, listed, strict=True):
        for container in pod.containers:
            for entry in container.devices:
                assert {(entry.resource_name, id) for id in entry.device_ids} <= each.containers[container.name]
    assignments = assignments_of(listed, _PARSED_CHECKPOINT, _LOGS, _RESOLVER)
    assert {(each.pod.namespace, each.pod.name) for each in assignments} == {
        (each.namespace, each.name) for each in raw
    }
    for device in {device for each in assignments for device in each.devices}:
        assert device.encode().lower() in data.lower()
    shares_of(listed, _PARSED_CHECKPOINT, _LOGS, _RESOLVER)
    listed_claims(listed, _PARSED_CHECKPOINT, _LOGS)
    missing_pods(assignments, _PARSED_CHECKPOINT, _LOGS, _RESOLVER)
    return bool(listed)


@target(
    "pod-log-directories",
    parser="names in `/var/log/pods`",
    covers=("scrubber.adapters.kubelet.pod_logs",),
    oracle="the two directions of the mapping agree, every mapped name has the kubelet's format, and a UID with two names maps "
    "to no pod",
    seeds=(
        b"team-a_train_0f6e1f7c\0team-a_other_11",
        b"team-a_train_1\0team-b_train_1",
        b"a_b_c_d\0__\0a_b_",
    ),
    words=(b"_", b"\0", b"team-a_train_1"),
)
def pod_log_directories(data: bytes) -> bool:
    entries = data.decode(errors="surrogateescape").split("\0")
    found = index_pod_logs(entries)
    claims: dict[str, set[tuple[str, str]]] = {}
    for entry in entries:
        if entry.count("_") == 2 and all(entry.split("_")):
            namespace, name, uid = entry.split("_")
            claims.setdefault(uid, set()).add((namespace, name))
    assert found.names == {uid: next(iter(pods)) for uid, pods in claims.items() if len(pods) == 1}
    assert found.disputed == {uid: pods for uid, pods in claims.items() if len(pods) > 1}
    assert {(uid, pod) for pod, uids in found.uids.items() for uid in uids} == set(found.names.items())
    return bool(found.names)


def _token(payload: object) -> bytes:
    return b"e30." + base64.urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=") + b".c2ln"


def _claims(uid: str = "0f6e1f7c", namespace: str = "team-a") -> dict[str, Any]:
    account = {"name": "nvidia-dcgm", "uid": "22"}
    return {"kubernetes.io": {"namespace": namespace, "pod": {"name": "train", "uid": uid}, "serviceaccount": account}}


@target(
    "account-token",
    parser="the service account token in a pod's volume",
    covers=("scrubber.adapters.kubelet.pod_identity",),
    oracle="an account is found only in a token whose payload names this very pod",
    seeds=(
        *EDIT_SEEDS,
        _token(_claims()),
        _token(_claims(uid="33")),
        _token(_claims(namespace="team-b")),
        json.dumps(_claims()).encode(),
        b"..",
    ),
    words=(b".", b"=", b'"uid":', b'"pod":'),
)
def account_token(data: bytes) -> bool:
    data = json_input(data, _claims())
    for token in (data, b"e30." + base64.urlsafe_b64encode(data) + b".c2ln"):
        found = parse_account(token, "0f6e1f7c", ("team-a", "train"))
        if found is not None:
            payload = token.strip(b" \t\r\n").split(b".")[1]
            raw = json.loads(base64.urlsafe_b64decode(payload + b"=" * (-len(payload) % 4)))["kubernetes.io"]
            assert (raw["pod"]["uid"], raw["namespace"], raw["pod"]["name"]) == ("0f6e1f7c", "team-a", "train")
            assert raw["serviceaccount"]["name"] == found
            return True
    return False
