"""The cluster is told only by credentials that were meant for the plugin, and only under a name that was said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plugin.cluster.credentials import Login, ServiceAccount, find, settle
from scrubber.domain.errors import BadConfiguration

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret")
    return tmp_path


def test_nothing_given_is_no_credentials(tmp_path: Path) -> None:
    assert find({}, tmp_path) is None


def test_an_administrators_own_file_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").touch()
    assert find({"HOME": str(tmp_path), "KUBECONFIG": ""}, tmp_path) is None


def test_a_pod_without_a_token_has_no_credentials(tmp_path: Path) -> None:
    assert find(POD, tmp_path) is None


def test_a_token_without_a_server_is_none_either(account: Path) -> None:
    assert find({}, account) is None


@pytest.mark.parametrize(
    ("host", "server"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_a_pods_own_account(account: Path, host: str, server: str) -> None:
    found = find(POD | {"KUBERNETES_SERVICE_HOST": host}, account)
    assert found == ServiceAccount(server, account / "ca.crt", account / "token")


def test_a_file_that_is_named_comes_first(account: Path) -> None:
    assert find(POD | {"KUBECONFIG": "/etc/k"}, account) == Login(Path("/etc/k"))


def test_off_is_off_whatever_there_is(account: Path) -> None:
    assert settle("off", "node-1", POD, account) == (None, "--cluster off")


def test_without_credentials_the_reason_is_that(tmp_path: Path) -> None:
    assert settle("auto", "node-1", {}, tmp_path) == (None, "there are no credentials")


def test_nobody_is_told_of_a_node_whose_name_is_not_known(account: Path) -> None:
    credentials, reason = settle("auto", "", POD, account)
    assert credentials is None
    assert "--node-name" in reason


def test_with_both_the_cluster_is_told(account: Path) -> None:
    credentials, reason = settle("auto", "node-1.example.com", POD, account)
    assert isinstance(credentials, ServiceAccount)
    assert reason == ""


@pytest.mark.parametrize(
    ("use", "node", "sentence"),
    [
        ("on", "node-1", "write auto or off"),
        ("auto", "node/../x", "no name that a node can have"),
        ("auto", "Node", "no name that a node can have"),
        ("auto", "-", "no name that a node can have"),
    ],
)
def test_what_cannot_be_meant_is_refused(use: str, node: str, sentence: str) -> None:
    with pytest.raises(BadConfiguration, match=sentence):
        settle(use, node, {})


def test_the_client_is_not_loaded_with_the_plugin() -> None:
    code = (
        "import sys, plugin.main; print([each for each in ('lightkube', 'httpx2', 'msgspec') if each in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
