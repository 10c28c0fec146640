"""Options of ``serve`` and ``plugin`` reach the daemons unchanged, or are refused with a message."""

import dataclasses
import sys
from pathlib import Path
from socket import gethostname
from types import ModuleType
from typing import Any

import pytest

import plugin.main
from plugin.main import PluginSettings
from scrubber.backends import BACKENDS, Backend, choose_backend
from scrubber.cli.main import main
from scrubber.config.policy_file import load_policy
from scrubber.config.settings import (
    EMULATOR_MARKER_FILE,
    Address,
    ContainerIdentity,
    DisabledHealthchecks,
    LogFormat,
    LogLevel,
    MetricsTls,
    ServiceSettings,
)
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.health.signal_table import ErrorClass

SIMULATED, NVIDIA = BACKENDS["sim"], BACKENDS["nvidia"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("SCRUBBER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[ServiceSettings]:
    """Replace the daemon by one that exits with 7; return the settings that it was given."""
    settings: list[ServiceSettings] = []
    daemon = ModuleType("scrubber.daemon")

    async def run(given: ServiceSettings) -> int:
        settings.append(given)
        return 7

    daemon.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scrubber.daemon", daemon)
    monkeypatch.setattr("scrubber.daemon", daemon, raising=False)
    return settings


def exit_code(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_omitted_options_have_their_documented_defaults(received: list[ServiceSettings], tmp_path: Path) -> None:
    assert exit_code("serve", "--sim-dir", str(tmp_path)) == 7
    assert received == [
        ServiceSettings(
            backend=SIMULATED,
            sim_dir=tmp_path,
            state_dir=Path("/var/lib/scrubber"),
            socket_dir=Path("/run/scrubber"),
            policy="default",
            kubelet_dir=Path("/var/lib/kubelet"),
            pod_resources_socket=Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
            pod_logs_dir=Path("/var/log/pods"),
            metrics_address=Address("127.0.0.1", 9464),
            metrics_required=False,
            metrics_tls=None,
            node_name=gethostname(),
            cgroup_root=None,
            container_identity=ContainerIdentity.AUTO,
            log_format=LogFormat.AUTO,
            log_level=LogLevel.INFO,
            reflection=False,
            admin_group=None,
            poll_interval=1.0,
            list_stabilize_seconds=60.0,
        )
    ]


EVERYTHING = {
    "backend": "nvidia",
    "sim-dir": "sim",
    "state-dir": "state",
    "socket-dir": "sockets",
    "policy": "mine.yaml",
    "kubelet-dir": "kubelet",
    "pod-resources-socket": "kubelet.sock",
    "pod-logs-dir": "pods",
    "metrics-address": "[::1]:0",
    "metrics-cert": "cert.pem",
    "metrics-key": "key.pem",
    "metrics-client-ca": "ca.pem",
    "node-name": "n7",
    "cgroup-root": "cgroup",
    "container-identity": "marker",
    "log-format": "json",
    "log-level": "debug",
    "admin-group": "root",
    "poll-interval": "250ms",
    "list-stabilization-window": "2m",
    "nvidia-driver-root": "driver",
    "disable-healthchecks": "13,31",
}
NVIDIAS = {
    "nvidia-driver-root": "NVIDIA_DRIVER_ROOT",
    "disable-healthchecks": "DP_DISABLE_HEALTHCHECKS",
    "fail-on-init-error": "FAIL_ON_INIT_ERROR",
}
"""Variables that NVIDIA's plugin has, too."""


def everything(directory: Path) -> ServiceSettings:
    (directory / "driver").mkdir(exist_ok=True)
    return ServiceSettings(
        backend=NVIDIA,
        sim_dir=directory / "sim",
        state_dir=directory / "state",
        socket_dir=directory / "sockets",
        policy="mine.yaml",
        kubelet_dir=directory / "kubelet",
        pod_resources_socket=directory / "kubelet.sock",
        pod_logs_dir=directory / "pods",
        metrics_address=Address("::1", 0),
        metrics_required=True,
        metrics_tls=MetricsTls(directory / "cert.pem", directory / "key.pem", directory / "ca.pem"),
        node_name="n7",
        cgroup_root=directory / "cgroup",
        container_identity=ContainerIdentity.MARKER,
        log_format=LogFormat.JSON,
        log_level=LogLevel.DEBUG,
        reflection=True,
        admin_group="root",
        poll_interval=0.25,
        list_stabilize_seconds=120.0,
        nvidia_driver_root=directory / "driver",
        fail_on_init_error=True,
        disabled_healthchecks=DisabledHealthchecks(codes=frozenset({13, 31})),
    )


def test_every_option_reaches_the_settings(
    received: list[ServiceSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for flag, value in EVERYTHING.items() for word in (f"--{flag}", value)]
    expected = everything(tmp_path)
    assert exit_code("serve", "--grpc-reflection", *words) == 7
    assert received == [expected]


def test_every_environment_variable_reaches_the_settings(
    received: list[ServiceSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for flag, value in {**EVERYTHING, "grpc-reflection": "true", "fail-on-init-error": "true"}.items():
        monkeypatch.setenv(NVIDIAS.get(flag, f"SCRUBBER_{flag.upper().replace('-', '_')}"), value)
    expected = everything(tmp_path)
    assert exit_code("serve") == 7
    assert received == [expected]


@pytest.mark.parametrize(
    "words",
    [["--backend", "nvidia,command"], ["--backend", "nvidia", "--backend", "command"]],
    ids=["list", "repeated"],
)
def test_several_backends_become_one_with_the_settings_and_locks_of_all(
    received: list[ServiceSettings], tmp_path: Path, words: list[str]
) -> None:
    config = tmp_path / "command.yaml"
    config.write_text("program: /opt/tool\n")
    assert exit_code("serve", *words, "--config", str(config), "--state-dir", str(tmp_path)) == 7
    (settings,) = received
    chosen = settings.backend
    assert isinstance(chosen, Backend)
    assert (chosen.name, chosen.simulated) == ("nvidia,command", False)
    assert chosen.lock_directories(settings) == (tmp_path / "locks",)
    assert list(chosen.member_tables()) == ["nvidia", "command"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "nvidia,tpu"], '"tpu" is not a backend; --backend has: sim, nvidia, amd, command.'),
        (["--backend", "nvidia", "--backend", "nvidia"], "--backend names nvidia twice"),
        (["--backend", "nvidia,command"], "pass it with --config FILE"),
    ],
)
def test_backends_that_cannot_be_combined_are_refused_with_a_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("serve", *words) == 2
    assert message in capsys.readouterr().err


def test_setting_of_a_policy_is_unsupported_only_where_no_backend_may_have_it() -> None:
    unknown = {"no_such_setting": "1"}
    assert choose_backend(["nvidia", "amd"]).unsupported_settings(unknown)
    assert not choose_backend(["nvidia", "command"]).unsupported_settings(unknown)


def test_option_takes_precedence_over_its_environment_variable(
    received: list[ServiceSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRUBBER_NODE_NAME", "n1")
    assert exit_code("serve", "--sim-dir", str(tmp_path), "--node-name", "n2") == 7
    assert received[0].node_name == "n2"


def test_kubelet_socket_path_is_derived_from_the_kubelet_directory(tmp_path: Path) -> None:
    settings = ServiceSettings(backend=SIMULATED, sim_dir=tmp_path, kubelet_dir=tmp_path / "k")
    assert settings.pod_resources_socket == tmp_path / "k" / "pod-resources" / "kubelet.sock"


class TestContainerIdentity:
    """``--container-identity auto`` decides by the configured kubelet."""

    def uses_cgroups(self, directory: Path, **more: Any) -> bool:
        config = directory / "command.yaml"
        config.write_text("program: /opt/tool\n")
        more = {"backend": SIMULATED, "config": config, **more}
        return ServiceSettings(sim_dir=directory, kubelet_dir=directory / "k", **more).uses_cgroups

    @pytest.mark.parametrize("backend", BACKENDS.values())
    def test_cgroups_are_used_with_every_backend_beside_a_real_kubelet(self, tmp_path: Path, backend: Backend) -> None:
        (tmp_path / "k").mkdir()
        assert self.uses_cgroups(tmp_path, backend=backend)

    def test_cgroups_are_used_when_only_a_kubelets_pod_resources_socket_exists(self, tmp_path: Path) -> None:
        (tmp_path / "kubelet.sock").touch()
        assert self.uses_cgroups(tmp_path, pod_resources_socket=tmp_path / "kubelet.sock")

    def test_markers_are_used_on_a_simulated_node_with_the_emulator_or_without_a_kubelet(self, tmp_path: Path) -> None:
        assert not self.uses_cgroups(tmp_path)
        (tmp_path / "k").mkdir()
        (tmp_path / "k" / EMULATOR_MARKER_FILE).touch()
        assert not self.uses_cgroups(tmp_path)
        assert self.uses_cgroups(tmp_path, cgroup_root=tmp_path)
        assert self.uses_cgroups(tmp_path, backend=NVIDIA)

    @pytest.mark.parametrize(
        ("configured", "used"), [(ContainerIdentity.CGROUP, True), (ContainerIdentity.MARKER, False)]
    )
    def test_explicit_container_identity_takes_precedence_over_detection(
        self, tmp_path: Path, configured: ContainerIdentity, used: bool
    ) -> None:
        assert self.uses_cgroups(tmp_path, container_identity=configured) is used
        (tmp_path / "k").mkdir()
        assert self.uses_cgroups(tmp_path, container_identity=configured) is used


def test_relative_paths_are_resolved_when_settings_are_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ServiceSettings(backend=SIMULATED, sim_dir=Path("sim"), socket_dir=Path("run"), kubelet_dir=Path("k"))
    paths = [getattr(settings, each.name) for each in dataclasses.fields(settings)]
    assert all(path.is_absolute() for path in paths if isinstance(path, Path))


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("127.0.0.1:9464", Address("127.0.0.1", 9464)),
        ("node.example:0", Address("node.example", 0)),
        ("[::]:65535", Address("::", 65535)),
        ("off", None),
        ("", None),
    ],
)
def test_listen_address_is_parsed(written: str, address: Address | None) -> None:
    assert Address.parse(written) == address
    assert address is None or str(address) == written


@pytest.mark.parametrize(
    "written", ["9464", ":9464", "localhost", "localhost:", "a:b", "h:65536", "h:-1", "::1:9464", "a b:1", "h:٣"]
)
def test_invalid_listen_address_is_refused(written: str) -> None:
    with pytest.raises(InvalidConfiguration, match="is not an address to listen on; write HOST:PORT"):
        Address.parse(written)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "The sim backend needs the directory of a simulated node: pass it with --sim-dir DIR"),
        (("--sim-dir", "{file}"), "--sim-dir {file} is not a directory; pass a directory."),
        (("--backend", "nvidia", "--state-dir", "{file}"), "--state-dir {file} is not a directory"),
        (("--backend", "nvidia", "--metrics-address", "9464"), '"9464" is not an address to listen on'),
        (
            ("--backend", "nvidia", "--metrics-cert", "{file}"),
            "--metrics-cert needs --metrics-key: pass a certificate and",
        ),
        (
            ("--backend", "nvidia", "--metrics-key", "{file}"),
            "--metrics-key needs --metrics-cert: pass a certificate and",
        ),
        (
            ("--backend", "nvidia", "--metrics-client-ca", "{file}"),
            "--metrics-client-ca needs --metrics-cert and --metrics-key: without them scrapes are not encrypted",
        ),
        (("--backend", "nvidia", "--poll-interval", "0"), "--poll-interval cannot be 0 s"),
        (("--backend", "nvidia", "--poll-interval", "1h"), "--poll-interval cannot be 3600 s"),
        (
            ("--backend", "nvidia", "--nvidia-driver-root", "/no/such"),
            "--nvidia-driver-root /no/such does not exist; pass",
        ),
        (
            ("--backend", "nvidia", "--disable-healthchecks", "13,x"),
            'DP_DISABLE_HEALTHCHECKS: "x" is not an XID; write all,',
        ),
        (("--backend", "nvidia", "--node-name", "a b"), '"a b" is not a valid node name'),
        (("--backend", "nvidia", "--policy", ""), "--policy is empty"),
        (("--backend", "nvidia", "--admin-group", "no-such-group"), 'The group "no-such-group" does not exist'),
    ],
)
def test_unusable_settings_are_refused_before_the_daemon_starts(
    received: list[ServiceSettings],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert exit_code("serve", *(word.format(file=file) for word in words)) == 2
    out, err = capsys.readouterr()
    assert (out, received) == ("", [])
    assert err.startswith(f"Error: {message.format(file=file)}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("written", "disabled", "still_counts"),
    [
        ("", DisabledHealthchecks(), {13, 79, 4242}),
        ("all", DisabledHealthchecks(all_codes=True), set()),
        ("xids", DisabledHealthchecks(all_codes=True), set()),
        (" 79, 13 ", DisabledHealthchecks(codes=frozenset({13, 79})), {4242}),
    ],
)
def test_disabled_xids_are_parsed_like_nvidias_plugin(
    written: str, disabled: DisabledHealthchecks, still_counts: set[int]
) -> None:
    assert DisabledHealthchecks.parse(written) == disabled
    policy = disabled.apply_to(load_policy("default"))
    assert {code for code in (13, 79, 4242) if policy.error_class(code) is not ErrorClass.IGNORE} == still_counts


def test_plugin_options_reach_the_plugin_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    received: list[PluginSettings] = []

    async def run(given: PluginSettings) -> int:
        received.append(given)
        return 0

    monkeypatch.setattr(plugin.main, "run", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRUBBER_SOCKET_DIR", "sockets")
    words = ("--kubelet-dir", "kubelet", "--resource-name", "nvidia.com/gpu", "--registration", "classic")
    assert exit_code("plugin", *words, "--log-format", "json", "--log-level", "warning") == 0
    assert received == [
        PluginSettings(
            kubelet_dir=tmp_path / "kubelet",
            socket=tmp_path / "sockets",
            resource_name="nvidia.com/gpu",
            registration="classic",
            log_format="json",
            log_level="warning",
            metrics_address=Address("127.0.0.1", 9465),
            metrics_required=False,
        )
    ]


METRICS = {"address": "[::1]:0", "cert": "cert.pem", "key": "key.pem", "client-ca": "ca.pem"}


@pytest.mark.parametrize("by_variable", [False, True])
def test_metrics_options_reach_the_plugin_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_variable: bool
) -> None:
    received: list[PluginSettings] = []

    async def run(given: PluginSettings) -> int:
        received.append(given)
        return 0

    monkeypatch.setattr(plugin.main, "run", run)
    monkeypatch.chdir(tmp_path)
    words = [word for flag, value in METRICS.items() for word in (f"--metrics-{flag}", value)]
    for flag, value in METRICS.items():
        # The service's variables do not affect the plugin: both may be set on one node.
        monkeypatch.setenv(f"SCRUBBER_METRICS_{flag.upper().replace('-', '_')}", "127.0.0.1:1")
        if by_variable:
            monkeypatch.setenv(f"SCRUBBER_PLUGIN_METRICS_{flag.upper().replace('-', '_')}", value)
    assert exit_code("plugin", *(() if by_variable else words)) == 0
    (settings,) = received
    assert settings.metrics_address == Address("::1", 0)
    assert settings.metrics_required
    assert settings.metrics_tls == MetricsTls(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--metrics-address", "9465"), '"9465" is not an address to listen on'),
        (("--metrics-cert", "c.pem"), "--metrics-cert needs --metrics-key: pass a certificate and its key together."),
        (("--metrics-key", "k.pem"), "--metrics-key needs --metrics-cert: pass a certificate and its key together."),
        (("--metrics-client-ca", "ca.pem"), "--metrics-client-ca needs --metrics-cert and --metrics-key"),
        (("--metrics-client-ca", "ca.pem", "--metrics-key", "k.pem"), "--metrics-key needs --metrics-cert"),
    ],
)
def test_unusable_plugin_options_are_refused_before_the_plugin_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    async def run(given: PluginSettings) -> int:
        raise AssertionError("it was started")

    monkeypatch.setattr(plugin.main, "run", run)
    assert exit_code("plugin", *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"Error: {message}")
    assert err.count("\n") == 1


def test_configuration_error_inside_an_exception_group_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(given: PluginSettings) -> int:
        refusal = InvalidConfiguration("The socket's path is too long.")
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [refusal])])

    monkeypatch.setattr(plugin.main, "run", run)
    assert exit_code("plugin") == 2
    assert capsys.readouterr() == ("", "Error: The socket's path is too long.\n")
