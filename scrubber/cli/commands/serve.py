"""The long-running commands: ``serve``, ``plugin`` and ``demo``.

Each one only collects its settings and passes them to the daemon, which is imported only when it runs, so that
``--help`` need not wait for a gRPC server to load.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from enum import StrEnum
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.backends import BACKENDS
from scrubber.cli import daemon_options as metrics
from scrubber.cli import plugin_options as flags
from scrubber.cli.gc_tuning import restore_gc
from scrubber.cli.options import KubeletDirOption, SocketOption, seconds
from scrubber.config.settings import (
    FROM_KUBELET_DIR,
    Address,
    ContainerIdentity,
    DisabledHealthchecks,
    LogFormat,
    LogLevel,
    MetricsTls,
    ServiceSettings,
    TraceExport,
)

__all__ = ["add_commands"]

if TYPE_CHECKING:

    class BackendName(StrEnum):
        """One member for each row of the registry."""

else:
    BackendName = StrEnum("BackendName", [(each, each) for each in BACKENDS])

_DEFAULT_BACKEND = next(iter(BackendName))

LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format", envvar="SCRUBBER_LOG_FORMAT", help="auto: console on a terminal, otherwise JSON lines."
    ),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", envvar="SCRUBBER_LOG_LEVEL", help="Lowest level that is logged.")
]
TracesOption = Annotated[
    TraceExport,
    typer.Option(
        "--traces",
        envvar="SCRUBBER_TRACES",
        help="otlp: send traces to OTEL_EXPORTER_OTLP_ENDPOINT; requires the extra otel.",
    ),
]


class RegistrationChoice(StrEnum):
    AUTO = "auto"
    WATCHER = "watcher"
    CLASSIC = "classic"


def add_commands(app: typer.Typer) -> None:
    app.command()(serve)
    app.command(cls=flags.PluginCommand)(plugin)
    app.command()(demo)


def _silence_grpc_logs() -> None:
    """Silence gRPC's core, which writes non-JSON lines to standard error; it reads this variable when it is loaded."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _load_structlog_without_rich() -> None:
    """Load structlog without rich, which it would not use and which takes longer to load than gRPC."""
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # None makes the import fail as if rich were not installed
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]


def serve(
    backend: Annotated[
        BackendName,
        typer.Option(
            envvar="SCRUBBER_BACKEND",
            help="; ".join(f"{each.name}: {each.summary}" for each in BACKENDS.values()) + ".",
        ),
    ] = _DEFAULT_BACKEND,
    sim_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_SIM_DIR",
            metavar="DIR",
            help="Directory of the simulated node (created by scrubber sim create).",
        ),
    ] = None,
    state_dir: Annotated[
        Path,
        typer.Option(
            envvar="SCRUBBER_STATE_DIR", metavar="DIR", help="Directory of the ledger; on a local disk, mode 0700."
        ),
    ] = Path("/var/lib/scrubber"),
    socket: SocketOption = Path("/run/scrubber"),
    policy: Annotated[
        str,
        typer.Option(envvar="SCRUBBER_POLICY", metavar="FILE", help="Policy file, or the name of a bundled policy."),
    ] = "default",
    kubelet_dir: KubeletDirOption = Path("/var/lib/kubelet"),
    pod_resources_socket: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_POD_RESOURCES_SOCKET",
            metavar="PATH",
            help="PodResources socket of the kubelet.",
            show_default="pod-resources/kubelet.sock in the kubelet's directory",
        ),
    ] = None,
    pod_logs_dir: Annotated[
        Path, typer.Option(envvar="SCRUBBER_POD_LOGS_DIR", metavar="DIR", help="Directory of the kubelet's pod logs.")
    ] = Path("/var/log/pods"),
    metrics_address: metrics.ServiceAddressOption = None,
    metrics_cert: metrics.ServiceCertOption = None,
    metrics_key: metrics.ServiceKeyOption = None,
    metrics_client_ca: metrics.ServiceClientCaOption = None,
    traces: TracesOption = TraceExport.OFF,
    node_name: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_NODE_NAME",
            metavar="NAME",
            help="Name of the node in certificates.",
            show_default="the host name",
        ),
    ] = None,
    cgroup_root: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_CGROUP_ROOT",
            metavar="DIR",
            help="Mount point of the cgroup hierarchy.",
            show_default="detected",
        ),
    ] = None,
    container_identity: Annotated[
        ContainerIdentity,
        typer.Option(
            envvar="SCRUBBER_CONTAINER_IDENTITY",
            help="How processes are mapped to pods: by cgroup, or by the marker of the kubelet emulator's "
            "containers. auto: by marker with the sim backend beside the emulator or without a "
            "kubelet, otherwise by cgroup.",
        ),
    ] = ContainerIdentity.AUTO,
    log_format: LogFormatOption = LogFormat.AUTO,
    log_level: LogLevelOption = LogLevel.INFO,
    grpc_reflection: Annotated[
        bool, typer.Option(envvar="SCRUBBER_GRPC_REFLECTION", help="Enable gRPC reflection, for tools such as grpcurl.")
    ] = False,
    admin_group: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_ADMIN_GROUP",
            metavar="GROUP",
            help="Group whose members may read and operate.",
            show_default="root only",
        ),
    ] = None,
    read_group: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_READ_GROUP",
            metavar="GROUP",
            help="Group whose members may only read. Operators must be members, too, in order to read.",
            show_default="the admin group",
        ),
    ] = None,
    poll_interval: Annotated[
        float,
        typer.Option(
            envvar="SCRUBBER_POLL_INTERVAL",
            metavar="TIME",
            parser=seconds,
            help="Interval between checks of holders. Users of devices are checked at random moments, at "
            "most 1s apart.",
            show_default="1s",
        ),
    ] = 1.0,
    list_stabilization_window: Annotated[
        float,
        typer.Option(
            envvar="SCRUBBER_LIST_STABILIZATION_WINDOW",
            metavar="TIME",
            parser=seconds,
            help="How long a kubelet that has just started may return an incomplete list of pods.",
            show_default="60s",
        ),
    ] = 60.0,
    nvidia_driver_root: Annotated[
        Path,
        typer.Option(
            envvar="NVIDIA_DRIVER_ROOT",
            metavar="DIR",
            help="Root directory of the NVIDIA driver, as seen by this process.",
        ),
    ] = Path("/"),
    fail_on_init_error: Annotated[
        bool,
        typer.Option(
            envvar="FAIL_ON_INIT_ERROR",
            help="Exit if the NVIDIA driver is missing at the start; otherwise wait for it.",
        ),
    ] = True,
    disable_healthchecks: Annotated[
        str,
        typer.Option(
            envvar="DP_DISABLE_HEALTHCHECKS",
            metavar="XIDS",
            help="XIDs to ignore: all, xids, or comma-separated numbers. Prefer xids.ignore in the policy.",
            show_default="none",
        ),
    ] = "",
) -> None:
    """Run the scrub service. It knows every device's state, scrubs, certifies, and quarantines what it cannot prove."""
    chosen = BACKENDS[backend.value]
    settings = ServiceSettings(
        backend=chosen,
        sim_dir=sim_dir,
        state_dir=state_dir,
        socket_dir=socket,
        policy=policy,
        kubelet_dir=kubelet_dir,
        pod_logs_dir=pod_logs_dir,
        metrics_address=Address.parse(metrics_address or metrics.SERVICE_DEFAULT_ADDRESS),
        metrics_required=metrics_address is not None,
        metrics_tls=MetricsTls.from_flags(metrics_cert, metrics_key, metrics_client_ca),
        traces=traces,
        cgroup_root=cgroup_root,
        container_identity=container_identity,
        log_format=log_format,
        log_level=log_level,
        reflection=grpc_reflection,
        admin_group=admin_group,
        read_group=read_group,
        poll_interval=poll_interval,
        list_stabilize_seconds=list_stabilization_window,
        node_name=node_name or gethostname(),
        pod_resources_socket=pod_resources_socket or FROM_KUBELET_DIR,
        nvidia_driver_root=nvidia_driver_root,
        fail_on_init_error=fail_on_init_error and not chosen.simulated,
        disabled_healthchecks=DisabledHealthchecks.parse(disable_healthchecks),
    )
    _silence_grpc_logs()
    _load_structlog_without_rich()
    from scrubber import daemon

    restore_gc()
    raise typer.Exit(asyncio.run(daemon.run(settings)))


def plugin(
    kubelet_dir: KubeletDirOption = Path("/var/lib/kubelet"),
    socket: SocketOption = Path("/run/scrubber"),
    resource_name: Annotated[
        str,
        typer.Option(
            envvar="SCRUBBER_RESOURCE_NAME",
            metavar="NAME",
            help="Resource that pods request.",
            show_default="nvidia.com/gpu on NVIDIA, scrubber.dev/gpu on a simulated node",
        ),
    ] = "",
    registration: Annotated[
        RegistrationChoice,
        typer.Option(
            envvar="SCRUBBER_REGISTRATION",
            help="watcher: the kubelet discovers the plugin in plugins_registry; classic: the plugin calls "
            "the kubelet; auto: classic where device-plugins exists, otherwise watcher.",
        ),
    ] = RegistrationChoice.AUTO,
    device_list_strategy: flags.DeviceListStrategyOption = None,
    device_id_strategy: flags.DeviceIdStrategyOption = None,
    pass_device_specs: flags.PassDeviceSpecsOption = None,
    nvidia_driver_root: flags.DriverRootOption = None,
    nvidia_dev_root: flags.DevRootOption = None,
    driver_root_ctr_path: flags.ContainerDriverRootOption = None,
    mig_strategy: flags.MigStrategyOption = None,
    cdi_annotation_prefix: flags.AnnotationPrefixOption = None,
    nvidia_cdi_hook_path: flags.CdiHookOption = None,
    cdi_dir: flags.CdiDirOption = "/var/run/cdi",
    gdrcopy_enabled: flags.GdrcopyOption = None,
    gds_enabled: flags.GdsOption = None,
    mofed_enabled: flags.MofedOption = None,
    fail_on_init_error: flags.FailOnInitErrorOption = None,
    config_file: flags.ConfigFileOption = None,
    upstream_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_UPSTREAM_DIR",
            metavar="DIR",
            help="Proxy a vendor's plugin, which registers in DIR instead of with the kubelet.",
            show_default="none",
        ),
    ] = None,
    cluster: flags.ClusterOption = flags.ClusterChoice.OFF,
    node_name: flags.NodeNameOption = "",
    metrics_address: metrics.PluginAddressOption = None,
    metrics_cert: metrics.PluginCertOption = None,
    metrics_key: metrics.PluginKeyOption = None,
    metrics_client_ca: metrics.PluginClientCaOption = None,
    traces: TracesOption = TraceExport.OFF,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_PLUGIN_READY_FILE",
            metavar="FILE",
            help="Create this file once the plugin can take over from a running instance; for a startup probe.",
            show_default="none",
        ),
    ] = None,
    log_format: LogFormatOption = LogFormat.AUTO,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Run the device plugin. It lets the kubelet hand devices over only as the scrub service allows."""
    _silence_grpc_logs()
    _load_structlog_without_rich()
    from plugin.main import PluginSettings, run
    from plugin.nvidia import settings as nvidia_settings
    from plugin.nvidia.injection import Feature

    options = nvidia_settings.options_from_flags(
        strategies=device_list_strategy,
        ids=device_id_strategy,
        pass_device_specs=pass_device_specs,
        driver_root=nvidia_driver_root,
        dev_root=nvidia_dev_root,
        driver_root_ctr_path=driver_root_ctr_path,
        mig=mig_strategy,
        annotation_prefix=cdi_annotation_prefix,
        hook=nvidia_cdi_hook_path,
        fail_on_init_error=fail_on_init_error,
        features={Feature.GDRCOPY: gdrcopy_enabled, Feature.GDS: gds_enabled, Feature.MOFED: mofed_enabled},
    )
    settings = PluginSettings(
        kubelet_dir=kubelet_dir.absolute(),
        socket=socket.absolute(),
        resource_name=resource_name,
        registration=registration.value,
        log_format=log_format.value,
        log_level=log_level.value,
        nvidia=nvidia_settings.resolve_settings(
            options,
            Path(config_file) if config_file else None,
            cdi_directory=Path(cdi_dir or nvidia_settings.CDI_DIRECTORY).absolute(),
            disabled_health_checks=os.environ.get("DP_DISABLE_HEALTHCHECKS", ""),
        ),
        upstream_dir=upstream_dir.absolute() if upstream_dir else None,
        cluster=cluster.value,
        node_name=node_name,
        metrics_address=Address.parse(metrics_address or metrics.PLUGIN_DEFAULT_ADDRESS),
        metrics_required=metrics_address is not None,
        metrics_tls=MetricsTls.from_flags(metrics_cert, metrics_key, metrics_client_ca),
        traces=traces,
        ready_file=ready_file.absolute() if ready_file else None,
    )
    restore_gc()
    raise typer.Exit(asyncio.run(run(settings)))


def demo(
    keep: Annotated[bool, typer.Option("--keep-files", help="Keep the directory and logs of the node.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Directory for the node, its logs and its ledger.",
            show_default="a temporary directory",
        ),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--keep-running",
            help="Keep the node running afterwards until Ctrl-C, with its metrics on ports of 127.0.0.1 "
            "that it prints.",
        ),
    ] = False,
) -> None:
    """Run the demo scenario. It runs on a simulated node of its own, and exits with 0 if every expectation held."""
    from scrubber.emulator.scenario import main

    raise typer.Exit(main(keep=keep, directory=directory, stay=stay))
