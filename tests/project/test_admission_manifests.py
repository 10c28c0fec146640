"""The component that refuses pods which could get a GPU without the device plugin, and permits all other pods."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml

from tests.cel import AdmissionPolicy
from tests.deployed import BASE, DEPLOY, ROOT, SERVICE, apply_patches, documents, value_of, yaml_of

COMPONENT = DEPLOY / "kubernetes" / "admission"
PAGE = (ROOT / "docs" / "deploying.md").read_text()
RUNTIME, ANNOTATIONS = "scrubber-nvidia-runtime", "scrubber-cdi-annotations"
Document = dict[str, Any]


def added() -> list[Document]:
    names = yaml_of(COMPONENT)["resources"]
    return [each for name in names for each in yaml.safe_load_all((COMPONENT / name).read_text())]


def manifest(name: str) -> Document:
    (found,) = [
        each for each in added() if (each["kind"], value_of(each, "name")) == ("ValidatingAdmissionPolicy", name)
    ]
    return found


def refusals(name: str, pod: Document, before: Document | None = None) -> list[str]:
    """Return the messages for the creation of a pod, or for its change."""
    request = {"operation": "CREATE" if before is None else "UPDATE"}
    return AdmissionPolicy(manifest(name)).refusals(object=pod, oldObject=before, request=request)


def env(*variables: Document) -> Document:
    return {"name": "main", "image": "cuda", "env": list(variables)}


def variable(value: str) -> Document:
    return {"name": "NVIDIA_VISIBLE_DEVICES", "value": value}


def pod(*containers: Document, annotations: dict[str, str] | None = None, **spec: Any) -> Document:
    metadata: Document = {"name": "p"} | ({} if annotations is None else {"annotations": annotations})
    return {"metadata": metadata, "spec": {"containers": list(containers) or [{"name": "main"}]} | spec}


FROM_CONFIG = {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}
OTHER = {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"}


@pytest.mark.parametrize("name", ["nvidia", "nvidia-cdi", "nvidia-legacy"])
def test_pod_with_nvidias_runtime_class_is_refused(name: str) -> None:
    (message,) = refusals(RUNTIME, pod(runtimeClassName=name))
    assert "request a GPU as a resource" in message


@pytest.mark.parametrize("value", ["all", "0", "GPU-1a2b", "0,1", "/var/run/nvidia-container-devices", "ALL"])
def test_pod_that_selects_gpus_by_environment_variable_is_refused(value: str) -> None:
    assert len(refusals(RUNTIME, pod(env(OTHER), env(variable(value))))) == 1
    assert len(refusals(RUNTIME, pod(initContainers=[env(variable(value))]))) == 1


def test_variable_whose_value_is_unknown_is_refused() -> None:
    assert len(refusals(RUNTIME, pod(env(FROM_CONFIG)))) == 1


@pytest.mark.parametrize(
    "permitted",
    [
        pod(),
        pod(env(OTHER)),
        pod(env(variable("void")), env(variable("none")), env(variable(""))),
        pod(env({"name": "NVIDIA_VISIBLE_DEVICES"})),
        pod(runtimeClassName="gvisor", initContainers=[env(OTHER), {"name": "second"}]),
        pod(annotations={"example.com/x": "y"}),
    ],
)
def test_other_pods_are_permitted(permitted: Document) -> None:
    assert refusals(RUNTIME, permitted) == []
    assert refusals(ANNOTATIONS, permitted) == []


def test_ephemeral_container_that_selects_gpus_is_refused_in_a_pod_that_was_permitted_before() -> None:
    before = pod(
        env(variable("all")), runtimeClassName="nvidia"
    )  # from before the policy: it must not block this update
    after = copy.deepcopy(before)
    after["spec"]["ephemeralContainers"] = [env(OTHER)]
    assert refusals(RUNTIME, after, before) == []
    after["spec"]["ephemeralContainers"] = [env(OTHER), env(variable("all"))]
    assert refusals(RUNTIME, after, before) == [
        "an ephemeral container must not select GPUs with NVIDIA_VISIBLE_DEVICES"
    ]


@pytest.mark.parametrize(
    "key",
    [
        "nvidia.cdi.k8s.io/container.main",
        "nvidia.cdi.k8s.io/container.*",
        "nvidia.cdi.k8s.io/pod",
        "nvidia.cdi.k8s.io",
        "cdi.k8s.io/gpus",
        "cdi.k8s.io",
    ],
)
def test_pod_that_names_cdi_devices_in_an_annotation_is_refused(key: str) -> None:
    named = {"example.com/x": "y", key: "scrubber.dev/gpu=GPU-1a2b"}
    assert len(refusals(ANNOTATIONS, pod(annotations=named))) == 1
    assert len(refusals(ANNOTATIONS, pod(annotations=named), pod())) == 1
    assert len(refusals(ANNOTATIONS, pod(annotations=named), pod(annotations={key: "another"}))) == 1
    # A pod from before the policy can still be updated, for example by a controller that removes its finalizer.
    assert refusals(ANNOTATIONS, pod(annotations=named), pod(annotations={key: named[key]})) == []
    assert refusals(ANNOTATIONS, pod(), pod(annotations=named)) == []


@pytest.mark.parametrize("key", ["cdi.k8s.io.example.com/x", "example.com/cdi.k8s.io", "xnvidia.cdi.k8s.io/a"])
def test_annotation_of_another_domain_is_permitted(key: str) -> None:
    assert refusals(ANNOTATIONS, pod(annotations={key: "x"})) == []


def test_admission_policies_apply_to_all_pods_outside_the_listed_namespaces() -> None:
    resources = {}
    for name in (RUNTIME, ANNOTATIONS):
        constraints = manifest(name)["spec"]["matchConstraints"]
        assert set(constraints) == {"namespaceSelector", "resourceRules"}
        ((rule,),) = constraints["namespaceSelector"].values()
        assert (rule["key"], rule["operator"]) == ("kubernetes.io/metadata.name", "NotIn")
        # The service's own pod needs the class; GPU Operator: its usual namespaces.
        assert rule["values"] == [yaml_of(BASE)["namespace"], "gpu-operator", "nvidia-gpu-operator"]
        resources[name] = {
            f"{operation} {resource}"
            for each in constraints["resourceRules"]
            for operation in each["operations"]
            for resource in each["resources"]
        }
        assert manifest(name)["spec"]["failurePolicy"] == "Fail"
        assert "matchConditions" not in manifest(name)["spec"]
    assert resources == {
        RUNTIME: {"CREATE pods", "UPDATE pods/ephemeralcontainers"},
        ANNOTATIONS: {"CREATE pods", "UPDATE pods"},
    }
    assert len(refusals(RUNTIME, {"metadata": {}, "spec": SERVICE.pod})) == 2  # why our own namespace is listed


def test_every_admission_policy_is_bound_and_denies() -> None:
    bound = {
        each["spec"]["policyName"]: each["spec"]["validationActions"]
        for each in added()
        if each["kind"] == "ValidatingAdmissionPolicyBinding"
    }
    assert bound == {RUNTIME: ["Deny"], ANNOTATIONS: ["Deny"]}
    assert len(added()) == 4
    assert set(yaml_of(COMPONENT)["resources"]) == {each.name for each in COMPONENT.iterdir()} - {"kustomization.yaml"}


def test_documented_patch_permits_the_runtime_class_for_volume_mounts() -> None:
    (snippet,) = [each for each in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if RUNTIME in each]
    found = [*copy.deepcopy(documents(BASE)), *copy.deepcopy(added())]
    apply_patches(found, yaml.safe_load(snippet)["patches"])
    (policy,) = [
        each for each in found if (each["kind"], value_of(each, "name")) == ("ValidatingAdmissionPolicy", RUNTIME)
    ]
    request = {"operation": "CREATE"}
    admission = AdmissionPolicy(policy)
    assert admission.refusals(object=pod(runtimeClassName="nvidia"), oldObject=None, request=request) == []
    assert len(admission.refusals(object=pod(env(variable("all"))), oldObject=None, request=request)) == 1
