"""The Helm chart: rendered by Helm's own engine, it is what kustomize builds from the manifests, and refuses wrong values.

Nothing here starts a cluster.
"""

from __future__ import annotations

import base64
import copy
import gzip
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

import scrubber
from dashboards.cluster_label import rename_in_board
from scripts.gen_chart import CHART, COMPONENTS, generated, values_schema
from scripts.gen_rules import Objectives, prometheus_rule
from scrubber.config.bundled import bundled_policies
from scrubber.config.policy_file import load_policy
from tests.deployed import (
    BASE,
    CDI,
    DEPLOY,
    GPU_OPERATOR,
    ROOT,
    Workload,
    apply_patches,
    documents,
    environment_of,
    mounts,
    value_of,
    yaml_of,
)
from tests.project.test_deploy import parsed

NAMESPACE = "scrubber-system"
LEDGER = "/var/lib/scrubber"
NAMESPACED = {
    *("ServiceAccount", "DaemonSet", "NetworkPolicy", "Role", "RoleBinding", "ConfigMap", "ResourceQuota"),
    *("PodMonitor", "PrometheusRule"),
}
OF_OTHER_OPERATORS = {"PodMonitor", "PrometheusRule", "SecurityContextConstraints"}
"""Kinds that Kubernetes has no schema of."""

Objects = dict[tuple[str, str], dict[str, Any]]


def on(*names: str) -> dict[str, Any]:
    """Return values in which these switches are on: ``cluster.taint`` is cluster.taint.enabled."""
    values: dict[str, Any] = {}
    for name in names:
        at = values
        for word in name.split("."):
            at = at.setdefault(word, {})
        at["enabled"] = True
    return values


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def rendered(values: Mapping[str, Any] | None = None, namespace: str = NAMESPACE, **options: Any) -> Objects:
    """Return the objects that Helm would send to the API server: (kind, name) → object."""
    found: Objects = {}
    for path, text in chart().render(dict(values or {}), name="scrubber", namespace=namespace, **options).items():
        if path.endswith(".yaml"):
            for each in filter(None, yaml.safe_load_all(text)):
                key = each["kind"], value_of(each, "name")
                assert key not in found, key
                found[key] = each
    return found


def built(overlay: Path, *components: str) -> Objects:
    """Return the objects that kustomize would build, except the namespace: (kind, name) → object."""
    found = copy.deepcopy(documents(overlay))
    for directory in (DEPLOY / "kubernetes" / name for name in components):
        kustomization = yaml_of(directory)
        for name in kustomization.get("resources", []):
            found += yaml.safe_load_all((directory / name).read_text())
        patches = kustomization.get("patches", [])
        removed = [yaml.safe_load(each["patch"]) for each in patches if "target" not in each]
        apply_patches(found, [each for each in patches if "target" in each])
        for gone in removed:
            assert gone["$patch"] == "delete"
            found = [
                each
                for each in found
                if (each["kind"], value_of(each, "name")) != (gone["kind"], gone["metadata"]["name"])
            ]
    for each in found:
        if each["kind"] in NAMESPACED:
            each["metadata"].setdefault("namespace", NAMESPACE)
    text = json.dumps(found).replace("scrubber:VERSION", f"scrubber:{scrubber.__version__}")
    return {(each["kind"], value_of(each, "name")): each for each in json.loads(text) if each["kind"] != "Namespace"}


REPORTS = ("cluster.reporting", "cluster.taint", "cluster.eviction", "cluster.nvsentinel")
RESETS = ("reset.agentPause", "reset.nvsentinel")
COMMON = ("admission", "resourceQuota", "openshift.scc")
OF_REPORTS = ("cluster", "taint", "eviction", "nvsentinel", "agent-pause", "gpu-reset")
OF_COMMON = ("admission", "priority-quota", "openshift")
CASES: dict[str, tuple[dict[str, Any], Path, tuple[str, ...]]] = {
    "defaults": ({}, BASE, ()),
    "host": (
        on("metrics", *REPORTS, "cluster.yield", *RESETS, *COMMON) | {"deviceListStrategy": "cdi-cri"},
        CDI,
        ("metrics", "cluster", "taint", "eviction", "yield", "nvsentinel", "agent-pause", "gpu-reset", *OF_COMMON),
    ),
    "gpu-operator": (
        on("gpuOperator", *REPORTS, *RESETS) | {"cdi": {"nriPluginEnabled": True}},
        GPU_OPERATOR,
        ("gpu-operator-client-label", "gpu-operator-nri", *OF_REPORTS),
    ),
    "gpu-operator before 26.7": (
        {"gpuOperator": {"enabled": True, "deployLabel": "device-plugin"}},
        GPU_OPERATOR,
        ("gpu-operator-plugin-label",),
    ),
    "dra": (on("dra", *COMMON), BASE, (*OF_COMMON, "dra")),
    "dra with metrics": (on("dra", "metrics"), BASE, ("metrics", "dra", "dra-metrics")),
}


@cache
def rendered_case(name: str) -> Objects:
    return rendered(CASES[name][0])


def test_committed_chart_equals_the_generated_one() -> None:
    files = generated()
    assert {path: path.read_text() for path in files} == dict(files)  # run `make chart`
    written_by_hand = {"_helpers.tpl", "NOTES.txt", "validation.yaml", "configuration.yaml", "dashboards.yaml"}
    templates = {path for path in (CHART / "templates").rglob("*") if path.is_file()}
    assert {path.name for path in templates - files.keys()} == written_by_hand | {"prometheusrule.yaml"}


def test_every_component_is_a_condition_of_the_chart_and_in_a_case() -> None:
    directories = {path.name for path in (DEPLOY / "kubernetes").iterdir()}
    assert {each.name for each in COMPONENTS} == directories - {"base"}
    cases = {name for _, overlay, names in CASES.values() for name in (overlay.name, *names)}
    assert cases == directories


@pytest.mark.parametrize("name", CASES)
def test_chart_renders_what_kustomize_builds(name: str) -> None:
    _, overlay, components = CASES[name]
    assert rendered_case(name) == built(overlay, *components)


@pytest.mark.parametrize("version", ["1.34", "1.35", "1.36"])
def test_every_object_passes_the_strict_schema_of_kubernetes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise it reads a megabyte of definitions for each object.
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
    checked = {json.dumps(each): each for name in CASES for each in rendered_case(name).values()}
    kinds = set()
    for each in (*checked.values(), *rendered(on("dashboards") | OWN).values()):
        if each["kind"] not in OF_OTHER_OPERATORS:
            kubernetes_validate.validate(each, version, strict=True)
            kinds.add(each["kind"])
    assert {"DaemonSet", "ValidatingAdmissionPolicy", "DeviceClass", "ConfigMap", "ResourceQuota"} <= kinds


def test_schema_check_refuses_an_unknown_field() -> None:
    wrong = copy.deepcopy(rendered_case("defaults")["DaemonSet", "scrubber"])
    wrong["spec"]["template"]["spec"]["tolerance"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.36", strict=True)


def test_helm_lint_has_no_warning() -> None:
    report = helm_python.lint(CHART, strict=True, namespace=NAMESPACE)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


# --- values ----------------------------------------------------------------------------------------------------------

OWN: dict[str, Any] = {
    "image": {"repository": "place/scrubber", "tag": "sha256:" + "0" * 64, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "gpu"},
    "nfd": {"enabled": True},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "priorityClassName": "mine",
    "podAnnotations": {"note": "1"},
    "runtimeClassName": None,
    "seLinuxOptions": {"type": "spc_t"},
    "kubeletDir": "/var/snap/kubelet",
    "policy": {"name": "mine", "reset": "required", "limits": {"handOver": "20s", "minClearRate": 100000000}},
    "migStrategy": "single",
    "failOnInitError": False,
    "service": {"env": [{"name": "SCRUBBER_LOG_LEVEL", "value": "debug"}], "terminationGracePeriodSeconds": 120},
    "plugin": {"configFile": {"version": "v1", "flags": {"migStrategy": "mixed"}}},
    "nodeGroups": {"mig": {"policy": "strict"}, "lab": {"policy": {"name": "lab"}, "configFile": {"version": "v1"}}},
}


def workload(objects: Objects, name: str) -> Workload:
    whole = objects["DaemonSet", name]
    pod = whole["spec"]["template"]["spec"]
    return Workload(pod, pod["containers"][0], whole)


@cache
def with_own_values() -> Objects:
    return rendered(OWN)


def test_other_backend_needs_nothing_of_nvidia() -> None:
    of = workload(rendered({"backend": "amd"}), "scrubber")
    assert of.container["args"] == ["serve", "--backend=amd"]
    assert "runtimeClassName" not in of.pod
    assert not [each["name"] for each in of.container["env"] if each["name"].startswith("NVIDIA_")]


def test_several_backends_have_what_each_of_them_needs() -> None:
    of = workload(rendered({"backend": "command,nvidia"}), "scrubber")
    assert of.container["args"] == ["serve", "--backend=command,nvidia"]
    assert [each["name"] for each in of.container["env"] if each["name"].startswith("NVIDIA_")]


def test_values_reach_the_pods() -> None:
    for name in ("scrubber", "scrubber-plugin"):
        of = workload(with_own_values(), name)
        assert of.container["image"] == "place/scrubber@sha256:" + "0" * 64
        assert of.container["imagePullPolicy"] == "Always"
        assert of.pod["imagePullSecrets"] == [{"name": "registry"}]
        assert of.pod["nodeSelector"] == {"kubernetes.io/os": "linux", "scrubber.dev/node": "true", "pool": "gpu"}
        terms = of.pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert {"feature.node.kubernetes.io/pci-10de.present", "nvidia.com/gpu.present"} < {
            each["matchExpressions"][0]["key"] for each in terms["nodeSelectorTerms"]
        }
        assert of.pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
        assert of.pod["priorityClassName"] == "mine"
        assert "runtimeClassName" not in of.pod
        assert of.whole["spec"]["template"]["metadata"]["annotations"]["note"] == "1"
        kubelet = {path for path, inside, _ in mounts(of) if "kubelet" in path and path == inside}
        assert kubelet
        assert all(path.startswith("/var/snap/kubelet/") for path in kubelet)
    plugin, service = workload(with_own_values(), "scrubber-plugin"), workload(with_own_values(), "scrubber")
    assert "seLinuxOptions" not in service.container["securityContext"]  # it is privileged
    assert plugin.container["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert service.pod["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize("name", ["scrubber", "scrubber-plugin", "scrubber-mig", "scrubber-plugin-lab"])
def test_variables_of_the_values_are_valid_for_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = workload(with_own_values(), name)
    _, values = parsed(of.container["args"], monkeypatch, environment_of(of))
    assert values["kubelet_dir"] == Path("/var/snap/kubelet")


def test_configured_policy_is_one_that_the_service_accepts(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(with_own_values()["ConfigMap", "scrubber-policy"]["data"]["policy.yaml"])
    policy = load_policy(file)
    assert (policy.name, policy.limits.hand_over, policy.limits.min_clear_rate) == ("mine", 20.0, 100_000_000)
    of = workload(with_own_values(), "scrubber")
    assert environment_of(of)["SCRUBBER_POLICY"] == "/etc/scrubber/policy.yaml"
    assert {"name": "policy", "configMap": {"name": "scrubber-policy"}} in of.pod["volumes"]
    # The service rereads a changed file. A restart would make every device dirty.
    assert "checksum/config" not in of.whole["spec"]["template"]["metadata"]["annotations"]


def test_group_of_nodes_has_its_own_policy_and_plugin_configuration() -> None:
    objects = with_own_values()
    mig, lab, plugin = (workload(objects, name) for name in ("scrubber-mig", "scrubber-lab", "scrubber-plugin-lab"))
    assert environment_of(mig)["SCRUBBER_POLICY"] == "strict"
    assert {"name": "policy", "configMap": {"name": "scrubber-policy-lab"}} in lab.pod["volumes"]
    assert {"name": "config", "configMap": {"name": "scrubber-plugin-config-lab"}} in plugin.pod["volumes"]
    assert objects["ConfigMap", "scrubber-plugin-config-lab"]["data"]["config.yaml"] == "version: v1\n"
    for of, group in ((mig, "mig"), (lab, "lab"), (plugin, "lab")):
        assert of.pod["nodeSelector"]["scrubber.dev/node"] == group
        assert of.whole["spec"]["selector"]["matchLabels"]["scrubber.dev/node-group"] == group
        labels = of.whole["spec"]["template"]["metadata"]["labels"]
        assert labels.items() >= of.whole["spec"]["selector"]["matchLabels"].items()


def test_changed_plugin_configuration_restarts_the_plugin() -> None:
    annotations = [
        workload(with_own_values(), name).whole["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for name in ("scrubber-plugin", "scrubber-plugin-lab")
    ]
    assert len({*annotations}) == 2


def test_every_value_is_in_the_schema_and_every_property_has_a_default() -> None:
    def keys(schema: Mapping[str, Any], at: str) -> Iterator[str]:
        for key, each in schema["properties"].items():
            yield from keys(each, f"{at}{key}.") if "properties" in each else [f"{at}{key}"]

    def values(node: Mapping[str, Any], schema: Mapping[str, Any], at: str) -> Iterator[str]:
        for key, each in node.items():
            inner = schema["properties"][key]
            yield from values(each, inner, f"{at}{key}.") if "properties" in inner else [f"{at}{key}"]

    schema = values_schema()
    written = yaml.safe_load((CHART / "values.yaml").read_text())
    assert sorted(values(written, schema, "")) == sorted({*keys(schema, "")} - {"global"})
    assert schema["$defs"]["PolicyValue"]["then"]["enum"] == sorted(bundled_policies())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"imagePullSecret": []}, "imagePullSecret"),
        ({"cluster": {"tain": {"enabled": True}}}, "tain"),
        ({"policy": "strickt"}, "/policy"),
        ({"policy": {"name": "mine", "limits": {"handOver": "20 parsecs"}}}, "handOver"),
        ({"nodeGroups": {"plugin-x": {}}}, "plugin-x"),
        ({"nodeGroups": {"lab": {"policy": {"reset": "never"}}}}, "name"),
        ({"metrics": {"networkPolicy": {"from": []}}}, "from"),
        ({"deviceListStrategy": "envvar"}, "deviceListStrategy"),
        ({"dra": {"enabled": "yes"}}, "dra"),
    ],
)
def test_wrong_value_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=named):
        chart().validate_schema(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (on("dra", "cluster.reporting"), "cluster.reporting.enabled needs the device plugin"),
        (on("gpuOperator") | {"deviceListStrategy": "volume-mounts"}, "containers would start without a GPU"),
        (on("gpuOperator", "cluster.yield"), "or disable cluster.yield"),
        (
            {
                "gpuOperator": {"enabled": True, "deployLabel": "device-plugin"},
                "cluster": {"yield": {"enabled": True, "labels": ["nvidia.com/gpu.deploy.device-plugin"]}},
            },
            "or disable cluster.yield",
        ),
        (on("cluster.taint"), "need cluster.reporting.enabled"),
        (on("nfd") | {"affinity": {"podAffinity": {}}}, "nfd.enabled and affinity"),
        ({"service": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}}, "two services cannot run on one node"),
        ({"nodeGroups": {"mig": {}}, "nodeSelector": {"scrubber.dev/node": None}}, "nodeGroups needs the label"),
        ({"nodeGroups": {"a": {}}, "nodeSelector": {"scrubber.dev/node": "a"}}, "two services"),
    ],
)
def test_combination_that_would_not_work_is_refused_with_what_to_do(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=message):
        rendered(values)


@pytest.mark.parametrize(
    ("key", "name"), [("service", "scrubber"), ("plugin", "scrubber-plugin"), ("dra", "scrubber-dra")]
)
def test_update_strategy_of_every_daemon_set_is_a_value(key: str, name: str) -> None:
    values: dict[str, Any] = {"dra": {"enabled": key == "dra"}}
    values.setdefault(key, {})["updateStrategy"] = {"type": "OnDelete"}
    (strategy,) = [
        each["spec"]["updateStrategy"] for id_, each in rendered(values).items() if id_ == ("DaemonSet", name)
    ]
    assert strategy["type"] == "OnDelete"


def test_labels_by_which_the_node_is_yielded_are_a_value() -> None:
    labels = ["nvidia.com/gpu.deploy.device-plugin", "mine/driver"]
    values = on("gpuOperator") | {"cluster": {"yield": {"enabled": True, "labels": labels}}}
    assert environment_of(workload(rendered(values), "scrubber-plugin"))["SCRUBBER_YIELD_LABELS"] == ",".join(labels)


def test_installation_in_the_default_namespace_is_refused() -> None:
    with pytest.raises(helm_python.HelmRenderError, match="allowDefaultNamespace"):
        rendered(namespace="default")


def test_every_object_is_in_the_namespace_of_the_release() -> None:
    values = CASES["host"][0]
    text = json.dumps([*rendered(values, namespace="gpu-gate").values()])
    assert NAMESPACE not in text
    expected = json.dumps([*rendered_case("host").values()]).replace(NAMESPACE, "gpu-gate")
    assert text == expected


# --- upgrades, dashboards and rules ----------------------------------------------------------------------------------


def test_upgrade_and_uninstallation_keep_the_ledger() -> None:
    for name in CASES:
        objects = rendered_case(name)
        # No hook or job runs at an upgrade or an uninstallation, and only the service has the directory.
        assert not {"Job", "CronJob", "Pod"} & {kind for kind, _ in objects}
        assert "helm.sh/hook" not in json.dumps([*objects.values()])
        having = [
            (key, volume)
            for key, each in objects.items()
            if key[0] == "DaemonSet"
            for volume in each["spec"]["template"]["spec"]["volumes"]
            if Path(LEDGER).is_relative_to(volume.get("hostPath", {}).get("path", "/none"))
        ]
        assert having == [
            (("DaemonSet", "scrubber"), {"name": "state", "hostPath": {"path": LEDGER, "type": "DirectoryOrCreate"}})
        ]
    assert rendered(is_upgrade=True, is_install=False, revision=2) == rendered_case("defaults")


def test_notes_say_how_to_select_a_node_and_that_the_ledger_is_kept() -> None:
    values = {"nodeGroups": {"mig": {"policy": "strict"}}}
    notes = chart().render(values, name="scrubber", namespace="gpu-gate")["gpu-scrubber/templates/NOTES.txt"]
    for text in (
        "kubectl label namespace gpu-gate pod-security.kubernetes.io/enforce=privileged",
        "kubectl drain NODE",
        "kubectl label node NODE scrubber.dev/node=true",
        "kubectl label node NODE scrubber.dev/node=mig",
        "scrubber doctor",
        f"The ledger is on the node, in {LEDGER}",
    ):
        assert text in notes


@pytest.mark.parametrize("name", ["", "nvidia.com/gpu"])
def test_notes_name_the_restart_of_the_kubelet_where_claims_replace_a_plugins_resource(name: str) -> None:
    values = {"dra": {"enabled": True, "extendedResourceName": name}}
    notes = chart().render(values, name="scrubber", namespace=NAMESPACE)["gpu-scrubber/templates/NOTES.txt"]
    assert ("If a device plugin served nvidia.com/gpu before, restart the node's kubelet" in notes) is bool(name)


@pytest.mark.parametrize("enabled", [False, True])
def test_binding_conditions_are_a_variable_of_the_driver(enabled: bool) -> None:
    objects = rendered({"dra": {"enabled": True, "bindingConditions": enabled}})
    (container,) = objects["DaemonSet", "scrubber-dra"]["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables.get("SCRUBBER_DRA_BINDING_CONDITIONS") == ("true" if enabled else None)


def test_dashboards_are_config_maps_that_grafanas_sidecar_finds() -> None:
    objects = rendered(on("dashboards", "metrics"))
    found = {}
    for (kind, name), each in objects.items():
        if kind == "ConfigMap":
            assert each["metadata"]["labels"] == {"grafana_dashboard": "1"}
            ((file, text),) = each["data"].items()
            found[name] = json.loads(text)
            assert file == name.replace("-dashboard", "") + ".json"
            assert len(text) < 1 << 20  # the API server's limit
    assert found == {
        f"scrubber-dashboard-{path.stem}": json.loads(path.read_text()) for path in (ROOT / "dashboards").glob("*.json")
    }
    # Helm stores the chart and the objects in one Secret of at most 1 MiB.
    files = {str(path): path.read_text() for path in CHART.rglob("*") if path.is_file()}
    assert len(base64.b64encode(base64.b64encode(gzip.compress(json.dumps([files, str(objects)]).encode())))) < 1 << 20


def test_runbooks_of_rules_and_dashboards_have_the_configured_address() -> None:
    values = {
        "dashboards": {"enabled": True},
        "metrics": {"enabled": True, "prometheusRule": {"runbooks": "where/pages/", "labels": {"release": "p"}}},
    }
    objects = rendered(values)
    board = json.loads(objects["ConfigMap", "scrubber-dashboard-fleet"]["data"]["scrubber-fleet.json"])
    assert [each["query"] for each in board["templating"]["list"] if each["name"] == "runbooks"] == ["where/pages"]
    rule = objects["PrometheusRule", "scrubber"]
    addresses = [
        each["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for each in group["rules"]
        if "alert" in each
    ]
    assert addresses
    assert all(each.startswith("where/pages/Scrubber") for each in addresses)
    assert rule["metadata"]["labels"] == {"app.kubernetes.io/name": "scrubber", "release": "p"}


def test_rules_and_dashboards_have_the_configured_cluster_label_and_objectives() -> None:
    values = {
        "dashboards": {"enabled": True},
        "metrics": {
            "enabled": True,
            "clusterLabel": "site",
            "prometheusRule": {"objectives": {"handover": 0.95, "scrub": 0.9999}},
        },
    }
    objects = rendered(values)
    expected = yaml.safe_load(prometheus_rule(cluster="site", objectives=Objectives(handover=0.95, scrub=0.9999)))
    assert objects["PrometheusRule", "scrubber"]["spec"] == expected["spec"]
    for path in (ROOT / "dashboards").glob("*.json"):
        (text,) = objects["ConfigMap", f"scrubber-dashboard-{path.stem}"]["data"].values()
        assert json.loads(text) == rename_in_board(json.loads(path.read_text()), "site")
