"""The commands that run until they are told to stop: ``serve``, ``plugin`` and ``demo``.

Each one only gathers its settings and hands them to the daemon, which is imported when it is to run: nobody who asks
for ``--help`` waits for a gRPC server to load.
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
        "--log-format", envvar="SCRUBBER_LOG_FORMAT", help="auto: console on a terminal, JSON lines elsewhere."
    ),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", envvar="SCRUBBER_LOG_LEVEL", help="The least important event that is logged.")
]
TracesOption = Annotated[
    TraceExport,
    typer.Option(
        "--traces",
        envvar="SCRUBBER_TRACES",
        help="otlp: send traces to where OTEL_EXPORTER_OTLP_ENDPOINT says; needs the extra otel.",
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
    """gRPC's core writes lines of its own to standard error, which are no JSON; it reads this when it is loaded."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _load_structlog_without_rich() -> None:
    """Load structlog without rich, of which it would use nothing: that takes longer to load than gRPC."""
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # the interpreter's own way to say that there is none
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
            envvar="SCRUBBER_SIM_DIR", metavar="DIR", help="The simulated node (scrubber sim create makes one)."
        ),
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(envvar="SCRUBBER_STATE_DIR", metavar="DIR", help="The ledger; on a local disk, mode 0700.")
    ] = Path("/var/lib/scrubber"),
    socket: SocketOption = Path("/run/scrubber"),
    policy: Annotated[
        str,
        typer.Option(envvar="SCRUBBER_POLICY", metavar="FILE", help="A policy file, or the name of a shipped policy."),
    ] = "default",
    kubelet_dir: KubeletDirOption = Path("/var/lib/kubelet"),
    pod_resources_socket: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_POD_RESOURCES_SOCKET",
            metavar="PATH",
            help="The kubelet's PodResources socket.",
            show_default="pod-resources/kubelet.sock in the kubelet's directory",
        ),
    ] = None,
    pod_logs_dir: Annotated[
        Path, typer.Option(envvar="SCRUBBER_POD_LOGS_DIR", metavar="DIR", help="The kubelet's pod log directories.")
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
            help="Goes into every certificate.",
            show_default="the host name",
        ),
    ] = None,
    cgroup_root: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_CGROUP_ROOT", metavar="DIR", help="Where cgroups are mounted.", show_default="found"
        ),
    ] = None,
    containers: Annotated[
        ContainerIdentity,
        typer.Option(
            envvar="SCRUBBER_CONTAINERS",
            help="How a process is known to belong to a pod: by cgroup, or by the marker that the kubelet emulator's "
            "containers carry. auto: by marker with the sim backend beside the emulator or without a kubelet, else by cgroup.",
        ),
    ] = ContainerIdentity.AUTO,
    log_format: LogFormatOption = LogFormat.AUTO,
    log_level: LogLevelOption = LogLevel.INFO,
    reflection: Annotated[
        bool, typer.Option(envvar="SCRUBBER_REFLECTION", help="Answer gRPC reflection, for grpcurl and the like.")
    ] = False,
    admin_group: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_ADMIN_GROUP",
            metavar="GROUP",
            help="Its members may look and act.",
            show_default="root only",
        ),
    ] = None,
    read_group: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_READ_GROUP",
            metavar="GROUP",
            help="Its members may look, and not act. Who acts has to be in it too, to look.",
            show_default="the admin group",
        ),
    ] = None,
    watch_interval: Annotated[
        float,
        typer.Option(
            envvar="SCRUBBER_WATCH_INTERVAL",
            metavar="TIME",
            parser=seconds,
            help="Pause between two looks at who holds what. Who uses a device is looked for at random moments, at most 1s apart.",
            show_default="1s",
        ),
    ] = 1.0,
    list_settle: Annotated[
        float,
        typer.Option(
            envvar="SCRUBBER_LIST_SETTLE",
            metavar="TIME",
            parser=seconds,
            help="How long a kubelet that has just started may list no pods for no reason.",
            show_default="60s",
        ),
    ] = 60.0,
    nvidia_driver_root: Annotated[
        Path,
        typer.Option(
            envvar="NVIDIA_DRIVER_ROOT",
            metavar="DIR",
            help="Where NVIDIA's driver is installed, as this process sees it.",
        ),
    ] = Path("/"),
    fail_on_init_error: Annotated[
        bool,
        typer.Option(
            envvar="FAIL_ON_INIT_ERROR",
            help="End when NVIDIA's driver is not there at the start; otherwise wait until it is.",
        ),
    ] = True,
    disable_healthchecks: Annotated[
        str,
        typer.Option(
            envvar="DP_DISABLE_HEALTHCHECKS",
            metavar="XIDS",
            help="XIDs that count for nothing: all, xids, or numbers with commas. Better said in the policy.",
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
        container_identity=containers,
        log_format=log_format,
        log_level=log_level,
        reflection=reflection,
        admin_group=admin_group,
        read_group=read_group,
        watch_interval=watch_interval,
        list_stabilize_seconds=list_settle,
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
            help="What pods ask for.",
            show_default="nvidia.com/gpu on NVIDIA, scrubber.dev/gpu on a simulated node",
        ),
    ] = "",
    registration: Annotated[
        RegistrationChoice,
        typer.Option(
            envvar="SCRUBBER_REGISTRATION",
            help="watcher: the kubelet finds us in plugins_registry; classic: we call it; auto: watcher, then classic.",
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
            help="Stand in front of a vendor's own plugin, which finds its kubelet in DIR.",
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
            help="Make this file once the plugin could take over from an instance that runs; for a pod's startup probe.",
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
    keep: Annotated[bool, typer.Option("--keep", help="Keep the node's directory and logs.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Where the node is made, and its logs and ledger stay.",
            show_default="a new one, which is removed",
        ),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay",
            help="Leave the node running afterwards until Ctrl-C, with its metrics on ports of 127.0.0.1 that it names.",
        ),
    ] = False,
) -> None:
    """Tell the story of a hand-over. It runs on a simulated node of its own, and exits with 0 if every expectation held."""
    from scrubber.emulator.scenario import main

    raise typer.Exit(main(keep=keep, directory=directory, stay=stay))
