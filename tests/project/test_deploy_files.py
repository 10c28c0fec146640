"""The files of a deployment: only known fields, no registry, and the packages that were tested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from scripts.build_deb import LOCKS
from tests.deployed import (
    BASE,
    CDI,
    DEPLOY,
    DROP_INS,
    GPU_OPERATOR,
    ROOT,
    UNITS,
    documents,
    unit,
    value_of,
    yaml_of,
)

DIRECTIVES = {
    *("Description", "After", "Wants", "RequiresMountsFor", "StartLimitIntervalSec"),
    *("Type", "ExecStart", "ExecReload", "Environment", "EnvironmentFile", "Restart", "RestartSec", "TimeoutStartSec"),
    *("TimeoutStopSec", "WatchdogSec", "KillMode", "User", "UMask", "CapabilityBoundingSet", "NoNewPrivileges"),
    *("StateDirectory", "StateDirectoryMode", "RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve"),
    *("OOMScoreAdjust", "OOMPolicy", "LimitNOFILE", "LimitCORE", "TasksMax", "TemporaryFileSystem", "BindPaths"),
    "BindReadOnlyPaths",
    *("PrivateDevices", "PrivateNetwork", "PrivateTmp", "ProtectSystem", "ProtectHome", "ProtectClock"),
    *("ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables"),
    *("LockPersonality", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "SystemCallArchitectures"),
    *("WantedBy", "IPAddressDeny", "IPAddressAllow"),
}
"""The directives in use that systemd 252 knows (systemd.exec(5), .service(5), .unit(5), .kill(5),
.resource-control(5))."""

Fields = dict[str, Any]
"""Field → None (a value or a map of strings), a dict of fields, or a list with one of these."""

META: Fields = {"name": None, "labels": None}
SECURITY: Fields = dict.fromkeys(
    ["runAsUser", "runAsGroup", "privileged", "allowPrivilegeEscalation", "readOnlyRootFilesystem"]
) | {"capabilities": {"drop": None}, "seccompProfile": {"type": None}}
PROBE: Fields = {"httpGet": {"path": None, "port": None}} | dict.fromkeys(
    ["periodSeconds", "timeoutSeconds", "failureThreshold"]
)
CONTAINER: Fields = dict.fromkeys(["name", "image", "imagePullPolicy", "args", "command", "terminationMessagePath"]) | {
    "env": [{"name": None, "value": None, "valueFrom": {"fieldRef": {"fieldPath": None}}}],
    "securityContext": SECURITY,
    "resources": {"requests": {"cpu": None, "memory": None}, "limits": {"memory": None}},
    "startupProbe": PROBE,
    "livenessProbe": PROBE,
    "readinessProbe": PROBE,
    "volumeMounts": [{"name": None, "mountPath": None, "readOnly": None, "mountPropagation": None}],
}
POD: Fields = dict.fromkeys(
    [
        *("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "priorityClassName", "hostPID"),
        *("nodeSelector", "runtimeClassName", "terminationGracePeriodSeconds"),
    ]
) | {
    "tolerations": [{"operator": None}],
    "securityContext": SECURITY,
    "containers": [CONTAINER],
    "initContainers": [CONTAINER],
    "volumes": [
        {"name": None, "hostPath": {"path": None, "type": None}, "emptyDir": {"medium": None, "sizeLimit": None}}
    ],
}
KINDS: dict[tuple[str, str], Fields] = {
    ("v1", "Namespace"): {},
    ("v1", "ServiceAccount"): {"automountServiceAccountToken": None},
    ("networking.k8s.io/v1", "NetworkPolicy"): {"spec": {"podSelector": {}, "policyTypes": None}},
    ("apps/v1", "DaemonSet"): {
        "spec": {
            "selector": {"matchLabels": None},
            "updateStrategy": {"type": None, "rollingUpdate": {"maxUnavailable": None, "maxSurge": None}},
            "template": {"metadata": META, "spec": POD},
        }
    },
}


def unknown(value: Any, fields: Any, at: str) -> list[str]:
    """Return paths of what is not in ``fields``: Kubernetes drops unknown fields, and their protection with them."""
    if fields is None:
        return []
    if isinstance(fields, list):
        return [found for number, each in enumerate(value) for found in unknown(each, fields[0], f"{at}[{number}]")]
    assert isinstance(value, dict), at
    return [f"{at}.{key}" for key in value.keys() - fields.keys()] + [
        found for key in value.keys() & fields.keys() for found in unknown(value[key], fields[key], f"{at}.{key}")
    ]


@pytest.mark.parametrize("directory", [BASE, CDI, GPU_OPERATOR])
def test_every_manifest_field_is_known_to_kubernetes(directory: Path) -> None:
    for each in documents(directory):
        fields = {"apiVersion": None, "kind": None, "metadata": META} | KINDS[each["apiVersion"], each["kind"]]
        assert unknown(each, fields, each["kind"]) == []
    kinds = {each["kind"] for each in documents(directory)}
    assert kinds == {"Namespace", "ServiceAccount", "NetworkPolicy", "DaemonSet"}  # and therefore no role


def test_every_base_manifest_is_in_the_kustomization_and_in_one_namespace() -> None:
    written = {path.name for path in BASE.iterdir()} - {"kustomization.yaml"}
    assert set(yaml_of(BASE)["resources"]) == written
    (namespace,) = [each for each in documents() if each["kind"] == "Namespace"]
    assert yaml_of(BASE)["namespace"] == value_of(namespace, "name")
    assert yaml_of(CDI)["resources"] == yaml_of(GPU_OPERATOR)["resources"] == ["../base"]


@pytest.mark.parametrize("name", sorted(UNITS | DROP_INS))
def test_every_unit_directive_is_known_to_systemd(name: str) -> None:
    assert set(unit(name)) <= DIRECTIVES  # systemd only logs a warning for an unknown one, and ignores it


def test_no_deployment_file_names_a_registry() -> None:
    host = re.compile(r"\b[a-z0-9-]+(\.[a-z0-9-]+)*\.(com|io|org|net|dev|cloud)(:\d+)?/[a-z0-9._/-]+:[A-Za-z0-9]")
    for path in (each for each in DEPLOY.rglob("*") if each.is_file()):
        text = path.read_text()
        assert not host.search(text), path
        assert "://" not in text, path
        assert ":latest" not in text, path


def locked(path: Path) -> dict[str, int]:
    """Return the pinned requirements of a lock file → number of hashes."""
    entries = re.split(r"\n(?=[a-z])", path.read_text().replace("\\\n", " "))
    pinned = {entry.split("--hash=")[0].strip(): entry.count("--hash=sha256:") for entry in entries if "==" in entry}
    assert all("==" in str(Requirement(each).specifier) for each in pinned)
    return pinned


@pytest.mark.parametrize(
    ("cuda", "gpu"),
    [("12", {"cupy-cuda12x", "nvidia-ml-py"}), ("13", {"cupy-cuda13x", "nvidia-ml-py"}), ("none", set())],
)
def test_image_contains_the_tested_packages_and_the_gpu_libraries(cuda: str, gpu: set[str]) -> None:
    own, base = locked(LOCKS[cuda]), locked(ROOT / "requirements" / "base.txt")
    assert all(own.values())
    assert base.keys() <= own.keys()
    names = {name.split("==")[0] for name in own}
    assert names >= gpu | {"opentelemetry-sdk"}
    assert {each for each in names - gpu if each.startswith(("cupy", "nvidia"))} == set()
    # The markers of a requirement depend on its dependents; its version does not.
    held, tested = ({each.split(" ;")[0] for each in file} for file in (own, locked(ROOT / "requirements" / "dev.txt")))
    assert {each for each in held - tested if not each.startswith("cupy-cuda13x==")} == set()
    # What only builds is in neither the image nor the Debian package.
    assert not locked(ROOT / "requirements" / "build.txt").keys() & own.keys()
