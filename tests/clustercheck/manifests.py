"""The objects that the check creates: two namespaces, claim templates and pods."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from tests.clustercheck.placement import Path, Placement
from tests.clustercheck.tenant import BOOT

__all__ = ["PREFIX_LABEL", "RUN_LABEL", "PodSettings", "namespace", "pod", "pull_secret", "template"]

PREFIX_LABEL = "scrubber.dev/cluster-check"
"""Of every namespace of the check; its value is the prefix of its name."""
RUN_LABEL = "scrubber.dev/cluster-check-run"
_PROGRAM = FilePath(__file__).with_name("tenant.py").read_text(encoding="utf-8")
_KERNELS = FilePath(__file__).with_name("search.ptx").read_text(encoding="ascii")
_PULL_SECRET = "image-pull"
_GRACE = 2
"""Seconds between SIGTERM and SIGKILL of a pod that is deleted."""


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What all pods of a run have in common.

    Attributes:
        runtime_class: name of the RuntimeClass that gives containers GPUs; empty: the default.
        memory_limit: bytes; only of a pod that is to run out of memory.
        pull_secret: credentials for the image, as a Docker configuration file has them; empty: none.
    """

    image: str
    placement: Placement
    runtime_class: str
    memory_limit: int
    pull_secret: str = ""


def namespace(prefix: str, run: str, tenant: str) -> dict[str, Any]:
    labels = {PREFIX_LABEL: prefix, RUN_LABEL: run, "pod-security.kubernetes.io/enforce": "baseline"}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": f"{prefix}-{run}-{tenant}", "labels": labels},
    }


def pull_secret(credentials: str) -> dict[str, Any]:
    """Return the secret with the credentials for the image."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": _PULL_SECRET},
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": base64.b64encode(credentials.encode()).decode()},
    }


def template(placement: Placement, count: int) -> dict[str, Any]:
    """Return the template of claims for ``count`` devices."""
    exactly = {"deviceClassName": placement.device_class, "allocationMode": "ExactCount", "count": count}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": template_name(count)},
        "spec": {"spec": {"devices": {"requests": [{"name": "devices", "exactly": exactly}]}}},
    }


def template_name(count: int) -> str:
    return f"devices-{count}"


def pod(name: str, settings: PodSettings, options: Mapping[str, Any], *, count: int) -> dict[str, Any]:
    """Return a pod with ``count`` devices that runs ``tenant.py`` with ``options``."""
    placement = settings.placement
    limits: dict[str, Any] = {}
    resources: dict[str, Any] = {"limits": limits}
    spec: dict[str, Any] = {}
    if placement.path is Path.CLAIM:
        spec["resourceClaims"] = [{"name": "devices", "resourceClaimTemplateName": template_name(count)}]
        resources["claims"] = [{"name": "devices"}]
    else:
        limits[placement.resource] = str(count)
    if options.get("end") == "out-of-memory":
        limits["memory"] = str(settings.memory_limit)
    if settings.runtime_class:
        spec["runtimeClassName"] = settings.runtime_class
    if settings.pull_secret:
        spec["imagePullSecrets"] = [{"name": _PULL_SECRET}]
    environment = {
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "CLUSTER_CHECK_PROGRAM": _PROGRAM,
        "CLUSTER_CHECK_KERNELS": _KERNELS,
        "CLUSTER_CHECK_OPTIONS": json.dumps({**options, "memoryLimit": settings.memory_limit}),
    }
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "main",
        "image": settings.image,
        "command": ["python3", "-c", BOOT],
        "workingDir": "/",
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": resources,
        "securityContext": security,
    }
    keys = {placement.resource or "nvidia.com/gpu", "nvidia.com/gpu"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            **spec,
            "containers": [container],
            "restartPolicy": "OnFailure" if options["role"] == "restart" else "Never",
            "terminationGracePeriodSeconds": _GRACE,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "nodeSelector": placement.node_selector,
            "tolerations": [{"key": each, "operator": "Exists"} for each in sorted(keys)],
        },
    }
