"""The plugin writes to the cluster only with credentials intended for it, and only under a configured node name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plugin.cluster.credentials import Kubeconfig, PodServiceAccount, find_credentials, resolve_credentials
from scrubber.domain.errors import InvalidConfiguration

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret")
    return tmp_path


def test_empty_environment_gives_no_credentials(tmp_path: Path) -> None:
    assert find_credentials({}, tmp_path) is None


def test_kubeconfig_in_the_home_directory_is_ignored(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").touch()
    assert find_credentials({"HOME": str(tmp_path), "KUBECONFIG": ""}, tmp_path) is None


def test_a_pod_without_a_token_has_no_credentials(tmp_path: Path) -> None:
    assert find_credentials(POD, tmp_path) is None


def test_token_without_an_api_server_address_gives_no_credentials(account: Path) -> None:
    assert find_credentials({}, account) is None


@pytest.mark.parametrize(
    ("host", "server"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_pod_service_account_is_found_by_token_and_api_server_address(account: Path, host: str, server: str) -> None:
    found = find_credentials(POD | {"KUBERNETES_SERVICE_HOST": host}, account)
    assert found == PodServiceAccount(server, account / "ca.crt", account / "token")


def test_kubeconfig_variable_precedes_the_service_account(account: Path) -> None:
    assert find_credentials(POD | {"KUBECONFIG": "/etc/k"}, account) == Kubeconfig(Path("/etc/k"))


def test_cluster_off_disables_cluster_writes_despite_credentials(account: Path) -> None:
    assert resolve_credentials("off", "node-1", POD, account) == (None, "--cluster-reporting is off")


def test_missing_credentials_are_given_as_the_reason(tmp_path: Path) -> None:
    assert resolve_credentials("auto", "node-1", {}, tmp_path) == (None, "no credentials were found")


def test_cluster_writes_are_disabled_if_the_node_name_is_unknown(account: Path) -> None:
    credentials, reason = resolve_credentials("auto", "", POD, account)
    assert credentials is None
    assert "--node-name" in reason


def test_credentials_and_node_name_enable_cluster_writes(account: Path) -> None:
    credentials, reason = resolve_credentials("auto", "node-1.example.com", POD, account)
    assert isinstance(credentials, PodServiceAccount)
    assert reason == ""


@pytest.mark.parametrize(
    ("use", "node", "message"),
    [
        ("on", "node-1", "Use auto or off"),
        ("auto", "node/../x", "is not a valid name of a node"),
        ("auto", "Node", "is not a valid name of a node"),
        ("auto", "-", "is not a valid name of a node"),
    ],
)
def test_contradictory_cluster_options_are_refused(use: str, node: str, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        resolve_credentials(use, node, {})


def test_kubernetes_client_is_not_imported_with_the_plugin() -> None:
    code = (
        "import sys, plugin.main; print([each for each in ('lightkube', 'httpx2', 'msgspec') if each in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
