"""``scrubber plugin``: run the device plugin.

It has the flags of NVIDIA's device plugin, with their names and environment variables: a manifest that starts NVIDIA's
plugin starts ours when only the image and the command are changed.
"""

from __future__ import annotations

import asyncio
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from scrubber.cli.daemon_options import (
    PLUGIN_METRICS_ADDRESS,
    KubeletDirOption,
    LogFormatOption,
    LogLevelOption,
    PluginMetricsAddressOption,
    PluginMetricsCertOption,
    PluginMetricsClientCaOption,
    PluginMetricsKeyOption,
    TracesOption,
)
from scrubber.cli.options import SocketOption
from scrubber.cli.startup import load_structlog_without_rich, restore_gc, silence_grpc_logs
from scrubber.config.settings import Address, LogFormat, LogLevel, MetricsTls, TraceExport

__all__ = ["NodeNameOption", "RegistrationChoice", "add_commands"]


class MigChoice(StrEnum):
    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class DeviceIdChoice(StrEnum):
    UUID = "uuid"
    INDEX = "index"


class ClusterChoice(StrEnum):
    AUTO = "auto"
    OFF = "off"


class RegistrationChoice(StrEnum):
    AUTO = "auto"
    WATCHER = "watcher"
    CLASSIC = "classic"


DeviceListStrategyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--device-list-strategy",
        envvar="DEVICE_LIST_STRATEGY",
        metavar="STRATEGY,…",
        help="How devices are passed to the container runtime: envvar, volume-mounts, cdi-annotations, "
        "cdi-cri; comma-separated or repeated.",
        show_default="envvar",
    ),
]
DeviceIdStrategyOption = Annotated[
    DeviceIdChoice | None,
    typer.Option(
        "--device-id-strategy",
        envvar="DEVICE_ID_STRATEGY",
        help="How devices are identified there; CDI always uses UUIDs. If a device is lost, indexes "
        "refer to other devices.",
        show_default="uuid",
    ),
]
PassDeviceSpecsOption = Annotated[
    bool | None,
    typer.Option(
        "--pass-device-specs/--no-pass-device-specs",
        envvar="PASS_DEVICE_SPECS",
        help="Also pass the device nodes to the kubelet; required with its static CPU manager.",
        show_default="no",
    ),
]
DriverRootOption = Annotated[
    str | None,
    typer.Option(
        "--driver-root",
        "--nvidia-driver-root",
        envvar="NVIDIA_DRIVER_ROOT",
        metavar="DIR",
        help="Root directory of the driver on the host; /run/nvidia/driver if a container installs it.",
        show_default="/",
    ),
]
DevRootOption = Annotated[
    str | None,
    typer.Option(
        "--dev-root",
        "--nvidia-dev-root",
        envvar="NVIDIA_DEV_ROOT",
        metavar="DIR",
        help="Directory on the host that contains dev with the device nodes.",
        show_default="the driver's root",
    ),
]
ContainerDriverRootOption = Annotated[
    str | None,
    typer.Option(
        "--driver-root-ctr-path",
        "--container-driver-root",
        envvar=["DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"],
        metavar="DIR",
        help="Root directory of the driver as seen by the plugin.",
        show_default="/driver-root if it exists, otherwise the driver's root",
    ),
]
MigStrategyOption = Annotated[
    MigChoice | None,
    typer.Option(
        "--mig-strategy",
        envvar="MIG_STRATEGY",
        help="none: whole GPUs only; single: instances of one profile as GPUs; mixed: one resource per profile.",
        show_default="none",
    ),
]
AnnotationPrefixOption = Annotated[
    str | None,
    typer.Option(
        "--cdi-annotation-prefix",
        envvar="CDI_ANNOTATION_PREFIX",
        metavar="DOMAIN/",
        help="Prefix of the CDI annotation key.",
        show_default="cdi.k8s.io/",
    ),
]
CdiHookOption = Annotated[
    str | None,
    typer.Option(
        "--nvidia-cdi-hook-path",
        "--nvidia-ctk-path",
        envvar=["NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"],
        metavar="PATH",
        help="Path of NVIDIA's CDI hook on the host.",
        show_default="detected",
    ),
]
CdiDirOption = Annotated[
    str,
    typer.Option(
        "--cdi-dir", envvar="SCRUBBER_CDI_DIR", metavar="DIR", help="Directory for the generated CDI specification."
    ),
]
FailOnInitErrorOption = Annotated[
    bool | None,
    typer.Option(
        "--fail-on-init-error/--no-fail-on-init-error",
        envvar="FAIL_ON_INIT_ERROR",
        help="Exit if the node's MIG instances cannot be advertised as configured; otherwise wait until they can.",
        show_default="exit",
    ),
]
ConfigFileOption = Annotated[
    str | None,
    typer.Option(
        "--config-file",
        envvar="CONFIG_FILE",
        metavar="FILE",
        help="NVIDIA's configuration file. Flags and variables take precedence; sharing is configured only here.",
        show_default="none",
    ),
]


ClusterOption = Annotated[
    ClusterChoice,
    typer.Option(
        "--cluster-reporting",
        envvar="SCRUBBER_CLUSTER_REPORTING",
        help="Report this node's GPUs to the API server. auto: if there are credentials (KUBECONFIG, "
        "or the pod's own).",
    ),
]
NodeNameOption = Annotated[
    str,
    typer.Option(
        "--node-name",
        envvar="SCRUBBER_NODE_NAME",
        metavar="NAME",
        help="Name of this node in the cluster; required for --cluster-reporting.",
        show_default="none",
    ),
]


def _feature_option(name: str, variable: str, what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--{name}-enabled/--no-{name}-enabled",
        envvar=variable,
        help=f"Ask NVIDIA's runtime for {what}.",
        show_default="no",
    )
    return option


GdrcopyOption = Annotated[bool | None, _feature_option("gdrcopy", "GDRCOPY_ENABLED", "GDRCopy")]
GdsOption = Annotated[bool | None, _feature_option("gds", "GDS_ENABLED", "GPUDirect Storage")]
MofedOption = Annotated[bool | None, _feature_option("mofed", "MOFED_ENABLED", "MOFED")]


def add_commands(app: typer.Typer) -> None:
    app.command()(plugin)


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
    device_list_strategy: DeviceListStrategyOption = None,
    device_id_strategy: DeviceIdStrategyOption = None,
    pass_device_specs: PassDeviceSpecsOption = None,
    nvidia_driver_root: DriverRootOption = None,
    nvidia_dev_root: DevRootOption = None,
    driver_root_ctr_path: ContainerDriverRootOption = None,
    mig_strategy: MigStrategyOption = None,
    cdi_annotation_prefix: AnnotationPrefixOption = None,
    nvidia_cdi_hook_path: CdiHookOption = None,
    cdi_dir: CdiDirOption = "/var/run/cdi",
    gdrcopy_enabled: GdrcopyOption = None,
    gds_enabled: GdsOption = None,
    mofed_enabled: MofedOption = None,
    fail_on_init_error: FailOnInitErrorOption = None,
    config_file: ConfigFileOption = None,
    upstream_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_UPSTREAM_DIR",
            metavar="DIR",
            help="Proxy a vendor's plugin, which registers in DIR instead of with the kubelet.",
            show_default="none",
        ),
    ] = None,
    cluster: ClusterOption = ClusterChoice.OFF,
    node_name: NodeNameOption = "",
    metrics_address: PluginMetricsAddressOption = None,
    metrics_cert: PluginMetricsCertOption = None,
    metrics_key: PluginMetricsKeyOption = None,
    metrics_client_ca: PluginMetricsClientCaOption = None,
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
    """Run the device plugin.

    It lets the kubelet start a container with a device only after the scrub service has granted the device.
    """
    silence_grpc_logs()
    load_structlog_without_rich()
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
        metrics_address=Address.parse(metrics_address or PLUGIN_METRICS_ADDRESS),
        metrics_required=metrics_address is not None,
        metrics_tls=MetricsTls.from_flags(metrics_cert, metrics_key, metrics_client_ca),
        traces=traces,
        ready_file=ready_file.absolute() if ready_file else None,
    )
    restore_gc()
    raise typer.Exit(asyncio.run(run(settings)))
