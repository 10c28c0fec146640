"""``scrubber dra``: run the driver for dynamic resource allocation (DRA)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from scrubber.cli.commands.plugin import (
    CdiDirOption,
    CdiDisableHooksOption,
    CdiFeatureFlagsOption,
    CdiHookOption,
    ContainerDriverRootOption,
    DevRootOption,
    DriverReadyOption,
    DriverRootOption,
    GdrcopyOption,
    GdsOption,
    MofedOption,
)
from scrubber.cli.daemon_options import (
    DRIVER_METRICS_ADDRESS,
    DriverDevicesOption,
    DriverMetricsAddressOption,
    DriverMetricsCertOption,
    DriverMetricsClientCaOption,
    DriverMetricsKeyOption,
    DriverProbeAddressOption,
    LogFormatOption,
    LogLevelOption,
    TracesOption,
)
from scrubber.cli.options import SocketOption
from scrubber.cli.startup import load_structlog_without_rich, restore_gc, silence_grpc_logs
from scrubber.config.settings import Address, LogFormat, LogLevel, MetricsTls, TraceExport

__all__ = ["add_commands"]


def add_commands(app: typer.Typer) -> None:
    app.command()(dra)


def dra(
    node_name: Annotated[
        str,
        typer.Option(
            "--node-name",
            envvar="SCRUBBER_NODE_NAME",
            metavar="NAME",
            help="Name of this node in the cluster; required.",
            show_default="none",
        ),
    ] = "",
    driver_name: Annotated[
        str,
        typer.Option(
            envvar="SCRUBBER_DRIVER_NAME",
            metavar="NAME",
            help="Name of the driver, by which device classes select its devices.",
        ),
    ] = "gpu.scrubber.dev",
    kubelet_plugins_dir: Annotated[
        Path,
        typer.Option(
            envvar="SCRUBBER_KUBELET_PLUGINS_DIR",
            metavar="DIR",
            help="Directory of the kubelet in which the driver creates a directory for its socket.",
        ),
    ] = Path("/var/lib/kubelet/plugins"),
    registry_dir: Annotated[
        Path,
        typer.Option(
            envvar="SCRUBBER_REGISTRY_DIR",
            metavar="DIR",
            help="Directory in which the kubelet looks for drivers.",
        ),
    ] = Path("/var/lib/kubelet/plugins_registry"),
    pod_uid: Annotated[
        str,
        typer.Option(
            envvar="SCRUBBER_POD_UID",
            metavar="UID",
            help="UID of the pod that the driver runs in; required for rolling updates without a gap.",
            show_default="none",
        ),
    ] = "",
    cdi_dir: CdiDirOption = "/var/run/cdi",
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_KUBECONFIG",
            metavar="FILE",
            help="Credentials for the API server.",
            show_default="the pod's service account",
        ),
    ] = None,
    socket: SocketOption = Path("/run/scrubber"),
    devices: DriverDevicesOption = "",
    binding_conditions: Annotated[
        bool,
        typer.Option(
            "--binding-conditions",
            envvar="SCRUBBER_DRA_BINDING_CONDITIONS",
            help="Bind pods to devices that are being cleaned only once they are clean. The driver then watches all "
            "resource claims of the cluster.",
        ),
    ] = False,
    nvidia_driver_root: DriverRootOption = None,
    nvidia_dev_root: DevRootOption = None,
    driver_root_ctr_path: ContainerDriverRootOption = None,
    nvidia_cdi_hook_path: CdiHookOption = None,
    driver_ready_file: DriverReadyOption = None,
    cdi_disable_hooks: CdiDisableHooksOption = None,
    cdi_feature_flags: CdiFeatureFlagsOption = None,
    gdrcopy_enabled: GdrcopyOption = None,
    gds_enabled: GdsOption = None,
    mofed_enabled: MofedOption = None,
    metrics_address: DriverMetricsAddressOption = None,
    metrics_cert: DriverMetricsCertOption = None,
    metrics_key: DriverMetricsKeyOption = None,
    metrics_client_ca: DriverMetricsClientCaOption = None,
    probe_address: DriverProbeAddressOption = "",
    traces: TracesOption = TraceExport.OFF,
    log_format: LogFormatOption = LogFormat.AUTO,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Run the driver for dynamic resource allocation.

    It lets the kubelet start pods with a resource claim only after the scrub service has granted the claim's devices, and
    releases a claim only when they are scrubbed.
    """
    silence_grpc_logs()
    load_structlog_without_rich()
    from plugin.device_selection import DeviceSelection
    from plugin.dra.main import DriverSettings, run
    from plugin.dra.paths import DriverSocketPaths
    from plugin.dra.settings import driver_credentials
    from plugin.nvidia import settings as nvidia_settings
    from plugin.nvidia.injection import Feature

    options = nvidia_settings.options_from_flags(
        strategies=["cdi-cri"],
        driver_root=nvidia_driver_root,
        dev_root=nvidia_dev_root,
        driver_root_ctr_path=driver_root_ctr_path,
        hook=nvidia_cdi_hook_path,
        features={Feature.GDRCOPY: gdrcopy_enabled, Feature.GDS: gds_enabled, Feature.MOFED: mofed_enabled},
        cdi_features=cdi_feature_flags,
        disabled_cdi_hooks=cdi_disable_hooks,
    )
    specs = Path(cdi_dir or nvidia_settings.CDI_DIRECTORY).absolute()
    source = nvidia_settings.NvidiaSettingsSource(
        options, driver_ready=driver_ready_file.absolute() if driver_ready_file else None, cdi_directory=specs
    )
    settings = DriverSettings(
        paths=DriverSocketPaths(driver_name, kubelet_plugins_dir.absolute(), registry_dir.absolute(), pod_uid),
        node_name=node_name,
        credentials=driver_credentials(node_name, kubeconfig),
        cdi_dir=specs,
        socket=socket.absolute(),
        devices=DeviceSelection.parse(devices),
        binding_conditions=binding_conditions,
        nvidia=source.load(),
        nvidia_source=source,
        log_format=log_format.value,
        log_level=log_level.value,
        metrics_address=Address.parse(metrics_address or DRIVER_METRICS_ADDRESS),
        metrics_required=metrics_address is not None,
        metrics_tls=MetricsTls.from_flags(metrics_cert, metrics_key, metrics_client_ca),
        probe_address=Address.parse(probe_address),
        traces=traces,
    )
    restore_gc()
    raise typer.Exit(asyncio.run(run(settings)))
