"""The component that exposes both programs' metrics: only to Prometheus, and everything that dashboards need."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from plugin.main import PluginSettings
from scrubber.backends import BACKENDS
from scrubber.cli import daemon_options
from scrubber.config.settings import Address, MetricsTls, ServiceSettings
from scrubber.observability.metrics_server import TlsFiles
from tests.dashboards.prometheus import POSSIBLE, promtool
from tests.deployed import (
    BASE,
    CDI,
    DEPLOY,
    DROP_INS,
    ROOT,
    UNITS,
    documents,
    patch_all,
    unit,
    value_of,
    workload,
    yaml_of,
)
from tests.pods import only_with
from tests.project.test_deploy import parsed

METRICS = DEPLOY / "kubernetes" / "metrics"
DRA = DEPLOY / "kubernetes" / "dra"
DRA_METRICS = DEPLOY / "kubernetes" / "dra-metrics"
STATIC = DEPLOY / "prometheus" / "scrape.yaml"
DROP_IN = "scrubber-plugin.service.d/metrics.conf"
PAGE = (ROOT / "docs" / "deploying.md").read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
PORTS = {"scrubber": 9464, "scrubber-plugin": 9465}
"""By job, which has the name of its workload."""
COMMANDS = {"scrubber": "serve", "scrubber-plugin": "plugin"}
VARIABLES = {"scrubber": "SCRUBBER_METRICS", "scrubber-plugin": "SCRUBBER_PLUGIN_METRICS"}

Document = dict[str, Any]


def added() -> list[Document]:
    names = yaml_of(METRICS)["resources"]
    return [each for name in names for each in yaml.safe_load_all((METRICS / name).read_text())]


def of_kind(kind: str) -> dict[str, Document]:
    return {value_of(each, "name"): each for each in added() if each["kind"] == kind}


def patched(base: Path) -> dict[tuple[str, str], Document]:
    found = copy.deepcopy(documents(base))
    patch_all(found, METRICS)
    return {(each["kind"], value_of(each, "name")): each for each in found}


def template(name: str, base: Path = BASE) -> Document:
    of: Document = patched(base)["DaemonSet", name]["spec"]["template"]
    return of


@pytest.mark.parametrize("base", [BASE, CDI])
@pytest.mark.parametrize("name", PORTS)
def test_metrics_component_adds_only_the_metrics_port_and_address(name: str, base: Path) -> None:
    was = copy.deepcopy(workload(name, base).whole)
    now = copy.deepcopy(patched(base)["DaemonSet", name])
    (container,) = now["spec"]["template"]["spec"]["containers"]
    port, variable = container.pop("ports"), container["env"].pop()
    assert now == was
    assert port == [{"name": "metrics", "containerPort": PORTS[name]}]
    assert variable == {"name": f"{VARIABLES[name]}_ADDRESS", "value": f"0.0.0.0:{PORTS[name]}"}


@pytest.mark.parametrize("name", PORTS)
def test_metrics_address_is_valid_for_its_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = template(name)["spec"]["containers"]
    environment = {each["name"]: each.get("value", "some-value") for each in container["env"]}
    command, values = parsed(container["args"], monkeypatch, environment)
    assert command == COMMANDS[name]
    assert Address.parse(values["metrics_address"]) == Address("0.0.0.0", PORTS[name])
    # Without the component it is the pod's own loopback, which is unreachable from outside.
    _, values = parsed(container["args"], monkeypatch, {})
    assert values["metrics_address"] is None
    default = {"serve": daemon_options.SERVICE_METRICS_ADDRESS, "plugin": daemon_options.PLUGIN_METRICS_ADDRESS}[
        command
    ]
    assert Address.parse(default) == Address("127.0.0.1", PORTS[name])


def test_network_policy_admits_prometheus_only() -> None:
    (policy,) = of_kind("NetworkPolicy").values()
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    ((way_in),) = spec["ingress"]
    assert way_in["ports"] == [{"protocol": "TCP", "port": "metrics"}]
    ((whom),) = way_in["from"]
    assert set(whom) == {
        "namespaceSelector",
        "podSelector",
    }  # those pods of that namespace: two entries would mean either
    assert all(each["matchLabels"] for each in whom.values())
    for name in PORTS:
        labels = template(name)["metadata"]["labels"]
        assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    (network_policy,) = [each for each in documents() if each["kind"] == "NetworkPolicy"]
    assert network_policy["spec"]["podSelector"] == {}  # everything else stays closed


def test_pod_monitors_select_both_programs_and_set_the_labels_of_the_dashboards() -> None:
    monitors = of_kind("PodMonitor")
    assert set(monitors) == set(PORTS)
    for name, monitor in monitors.items():
        assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
        assert monitor["spec"]["selector"] == {"matchLabels": template(name)["metadata"]["labels"]}
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint == {
            "port": "metrics",
            "interval": "15s",
            "relabelings": [
                {"targetLabel": "job", "replacement": name},
                {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"},
            ],
        }


def test_dra_driver_is_scraped_in_place_of_the_plugin_and_with_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    found = copy.deepcopy(documents(BASE))
    for directory in (METRICS, DRA, DRA_METRICS):
        for name in yaml_of(directory)["resources"]:
            found += yaml.safe_load_all((directory / name).read_text())
        patch_all(found, directory)
    built = {(each["kind"], value_of(each, "name")): each for each in found}
    pod = built["DaemonSet", "scrubber-dra"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    environment = {each["name"]: each.get("value", "some-value") for each in container["env"]}
    command, values = parsed(container["args"], monkeypatch, environment)
    assert command == "dra"
    assert Address.parse(daemon_options.DRIVER_METRICS_ADDRESS) == Address("127.0.0.1", 9466)
    assert Address.parse(values["metrics_address"]) == Address("0.0.0.0", 9466)
    assert container["ports"] == [{"name": "metrics", "containerPort": 9466}]
    assert (
        built["NetworkPolicy", "metrics"]["spec"]["podSelector"]["matchLabels"].items()
        <= pod["metadata"]["labels"].items()
    )
    monitors = {name: each["spec"] for (kind, name), each in built.items() if kind == "PodMonitor"}
    assert set(monitors) == {"scrubber", "scrubber-dra"}
    replaced = of_kind("PodMonitor")["scrubber-plugin"]["spec"]
    assert monitors["scrubber-dra"] == replaced | {"selector": {"matchLabels": pod["metadata"]["labels"]}}


def test_every_manifest_of_the_metrics_component_is_in_its_kustomization_and_namespace() -> None:
    assert yaml_of(METRICS)["kind"] == "Component"
    assert set(yaml_of(METRICS)["resources"]) == {each.name for each in METRICS.iterdir()} - {"kustomization.yaml"}
    assert {each["kind"] for each in added()} == {"NetworkPolicy", "PodMonitor", "PrometheusRule"}
    for each in added():
        if each["kind"] != "PrometheusRule":
            assert each["metadata"]["namespace"] == yaml_of(BASE)["namespace"]


def test_static_scrape_configuration_sets_the_labels_of_the_pod_monitors() -> None:
    static = yaml.safe_load(STATIC.read_text())
    assert set(static) == {"scrape_configs"}
    nodes: dict[str, list[str]] = {}
    for each in static["scrape_configs"]:
        job = each["job_name"]
        for target in each["static_configs"]:
            node = target["labels"]["instance"]
            assert target["targets"] == [f"{node}:{PORTS[job]}"]
            nodes.setdefault(job, []).append(node)
    assert nodes["scrubber"] == nodes["scrubber-plugin"]
    assert set(nodes) == set(PORTS)


@only_with(POSSIBLE)
def test_static_scrape_configuration_passes_promtool() -> None:
    verdict = promtool("check", "config", str(STATIC))
    assert verdict.returncode == 0, verdict.stdout


def test_plugin_unit_with_its_metrics_drop_in_is_reachable_from_the_node_only() -> None:
    assert unit("scrubber-plugin.service")["PrivateNetwork"] == ["yes"]  # its loopback is not shared
    assert unit(DROP_IN) == {"PrivateNetwork": ["no"], "IPAddressDeny": ["any"], "IPAddressAllow": ["localhost"]}
    assert {name.partition(".d/")[0] for name in DROP_INS} <= set(UNITS)
    assert not {"PrivateNetwork", "IPAddressDeny"} & set(unit("scrubber.service"))


def test_both_daemons_use_the_same_tls_settings() -> None:
    given = MetricsTls.from_flags(Path("/c"), Path("/k"), Path("/ca"))
    assert given == MetricsTls(Path("/c"), Path("/k"), Path("/ca"))
    assert given is not None
    what_is_served: TlsFiles = given
    assert what_is_served.client_ca == Path("/ca")
    assert (
        ServiceSettings(backend=BACKENDS["sim"], sim_dir=Path("/")).metrics_tls is PluginSettings().metrics_tls is None
    )


def test_metrics_page_documents_flags_ports_and_limitations() -> None:
    for word in ("cert", "key", "client-ca"):
        assert f"--metrics-{word}" in PAGE
    for job, port in PORTS.items():
        assert f"127.0.0.1:{port}" in PAGE
        assert f"`{VARIABLES[job]}_ADDRESS`" in PAGE
    for name in ("deploy/kubernetes/metrics", "deploy/prometheus/scrape.yaml", f"deploy/systemd/{DROP_IN}"):
        assert name in PAGE
    assert "no basic auth" in PAGE
    assert "without a restart" in PAGE


def test_certificate_files_in_the_example_are_mounted() -> None:
    example = re.search(r"```yaml\n(# certificates.*?)```", PAGE, re.DOTALL)
    assert example is not None
    patches = yaml.safe_load(example[1])["patches"]
    assert {each["target"]["name"] for each in patches} == set(PORTS)
    for patch in patches:
        name = patch["target"]["name"]
        steps = [(step["path"].rpartition("/spec/")[2], step["value"]) for step in yaml.safe_load(patch["patch"])]
        variables = {value["name"]: value["value"] for path, value in steps if path.endswith("env/-")}
        (mount,) = [value for path, value in steps if path.endswith("volumeMounts/-")]
        (volume,) = [value for path, value in steps if path.endswith("volumes/-")]
        assert set(variables) == {f"{VARIABLES[name]}_{word}" for word in ("CERT", "KEY", "CLIENT_CA")}
        assert all(value.startswith(f"{mount['mountPath']}/") for value in variables.values())
        assert mount["readOnly"] is True
        assert mount["name"] == volume["name"]
