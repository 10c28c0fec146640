"""The command ``scrubber dra``: its flags, and the credentials that it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

import plugin.dra.main
from plugin.cluster.credentials import Credentials, Kubeconfig, PodServiceAccount
from plugin.device_selection import DeviceSelection
from plugin.dra.main import DriverSettings
from plugin.dra.paths import DriverSocketPaths
from plugin.dra.settings import driver_credentials
from scrubber.cli.main import main
from scrubber.config.settings import Address, TraceExport
from scrubber.domain.errors import InvalidConfiguration


def exit_code(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_flags_reach_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    received: list[DriverSettings] = []

    async def run(given: DriverSettings) -> int:
        received.append(given)
        return 0

    monkeypatch.setattr(plugin.dra.main, "run", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRUBBER_POD_UID", "11111111-2222-3333-4444-555555555555")
    (tmp_path / "config").touch()
    words = ["--node-name", "node-1", "--kubeconfig", "config", "--driver-name", "a.dev", "--socket-dir", "s"]
    words += ["--kubelet-plugins-dir", "p", "--registry-dir", "r", "--cdi-dir", "c", "--driver-root", "/run/driver"]
    words += ["--devices", "0,!GPU-b*", "--traces", "otlp", "--binding-conditions"]
    assert exit_code("dra", *words, "--probe-address", "127.0.0.1:1", "--log-level", "warning") == 0
    (settings,) = received
    uid = "11111111-2222-3333-4444-555555555555"
    assert settings.paths == DriverSocketPaths("a.dev", tmp_path / "p", tmp_path / "r", uid)
    assert (settings.node_name, settings.credentials) == ("node-1", Kubeconfig(tmp_path / "config"))
    assert (settings.cdi_dir, settings.socket) == (tmp_path / "c", tmp_path / "s")
    assert (settings.devices, settings.traces) == (DeviceSelection.parse("0,!GPU-b*"), TraceExport.OTLP)
    assert settings.binding_conditions
    assert str(settings.nvidia.root.host) == "/run/driver"
    assert settings.nvidia_source is not None
    assert not settings.nvidia_source.follows_driver
    assert settings.nvidia_source.load() == settings.nvidia
    assert (settings.metrics_address, settings.metrics_required) == (Address("127.0.0.1", 9466), False)
    assert (settings.probe_address, settings.log_level) == (Address("127.0.0.1", 1), "warning")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--node-name is required"),
        (("--node-name", "Node/1"), "is not a valid name of a node"),
        (("--node-name", "node-1", "--kubeconfig", "missing"), "missing is not a file"),
        (("--node-name", "node-1"), "The driver needs access to the API server"),
    ],
)
def test_driver_without_access_to_the_api_server_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert exit_code("dra", *words) == 2
    assert message in capsys.readouterr().err


def account(directory: Path) -> Path:
    (directory / "token").write_text("secret")
    return directory


def test_pods_own_account_is_used_and_never_an_administrators_kubeconfig(tmp_path: Path) -> None:
    environment = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "KUBECONFIG": "/root/config",
    }
    found: Credentials = driver_credentials("node-1", None, environment, account(tmp_path))
    assert found == PodServiceAccount("https://10.0.0.1:443", tmp_path / "ca.crt", tmp_path / "token")
    with pytest.raises(InvalidConfiguration, match="needs access to the API server"):
        driver_credentials("node-1", None, {"KUBECONFIG": "/root/config"}, tmp_path)
