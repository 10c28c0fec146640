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
    PluginDevicesOption,
    PluginMetricsAddressOption,
    PluginMetricsCertOption,
    PluginMetricsClientCaOption,
    PluginMetricsKeyOption,
    PluginProbeAddressOption,
    TracesOption,
)
from scrubber.cli.options import SocketOption
from scrubber.cli.startup import load_structlog_without_rich, restore_gc, silence_grpc_logs
from scrubber.config.settings import Address, LogFormat, LogLevel, MetricsTls, TraceExport

__all__ = ["NodeNameOption", "RegistrationChoice", "add_commands"]

KUBELET_DIR = Path("/var/lib/kubelet")


class MigChoice(StrEnum):
    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class AmdNamingChoice(StrEnum):
    SINGLE = "single"
    MIXED = "mixed"


class DeviceIdChoice(StrEnum):
    UUID = "uuid"
    INDEX = "index"


class DiscoveryChoice(StrEnum):
    AUTO = "auto"
    NVML = "nvml"
    TEGRA = "tegra"


class ShareChoice(StrEnum):
    DISTRIBUTED = "distributed"
    PACKED = "packed"


class RuntimeCheckChoice(StrEnum):
    REFUSE = "refuse"
    WARN = "warn"


class ClusterChoice(StrEnum):
    AUTO = "auto"
    OFF = "off"


class PolarityChoice(StrEnum):
    GOOD = "good"
    BAD = "bad"


class StrategyChoice(StrEnum):
    STORE_ONLY = "store-only"
    EXECUTE = "execute"


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
        help="Root directory of the driver as seen by this program.",
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
KubeletSocketOption = Annotated[
    str | None,
    typer.Option(
        "--kubelet-socket",
        envvar="KUBELET_SOCKET",
        metavar="PATH",
        help="The kubelet's socket; sets --kubelet-dir to the directory that contains device-plugins.",
        show_default="device-plugins/kubelet.sock in --kubelet-dir",
    ),
]
DiscoveryOption = Annotated[
    DiscoveryChoice | None,
    typer.Option(
        "--device-discovery-strategy",
        envvar="DEVICE_DISCOVERY_STRATEGY",
        help="auto and nvml have no effect, because the scrub service uses NVML; tegra is refused.",
        show_default="auto",
    ),
]
CdiFeatureFlagsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cdi-feature-flags",
        envvar="CDI_FEATURE_FLAGS",
        metavar="FLAG,…",
        help="disable-ipc-discoverer: no sockets of the driver's daemons in the CDI specification.",
        show_default="none",
    ),
]
CdiDisableHooksOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cdi-disable-hooks",
        envvar="CDI_DISABLE_HOOKS",
        metavar="HOOK,…",
        help="Hooks that the CDI specification must not have, such as update-ldcache, or all.",
        show_default="none",
    ),
]
SharePolicyOption = Annotated[
    ShareChoice | None,
    typer.Option(
        "--shared-devices-allocation-policy",
        envvar="SHARED_DEVICES_ALLOCATION_POLICY",
        help="Prefer shares of the least (distributed) or the most (packed) used device.",
        show_default="distributed",
    ),
]
MpsRootOption = Annotated[
    str | None,
    typer.Option(
        "--mps-root",
        envvar="MPS_ROOT",
        metavar="DIR",
        help="No effect: MPS is not supported. A configuration file that shares GPUs by MPS is refused.",
        show_default="none",
    ),
]
ImexChannelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--imex-channel-ids",
        envvar="IMEX_CHANNEL_IDS",
        metavar="ID,…",
        help="Must be empty: IMEX channels are not supported.",
        show_default="none",
    ),
]
ImexRequiredOption = Annotated[
    bool | None,
    typer.Option(
        "--imex-required/--no-imex-required",
        envvar="IMEX_REQUIRED",
        help="No effect without IMEX channels.",
        show_default="no",
    ),
]
HostRootOption = Annotated[
    Path | None,
    typer.Option(
        "--host-root-ctr-path",
        envvar="SCRUBBER_HOST_ROOT_CTR_PATH",
        metavar="DIR",
        help="Root directory of the host, or parts of it, as seen by the plugin.",
        show_default="/host if it exists, otherwise /",
    ),
]
RuntimeCheckOption = Annotated[
    RuntimeCheckChoice,
    typer.Option(
        "--runtime-check",
        envvar="SCRUBBER_RUNTIME_CHECK",
        help="If the container runtime is configured so that containers would start without a GPU: exit, or only log it.",
    ),
]
DriverReadyOption = Annotated[
    Path | None,
    typer.Option(
        "--driver-ready-file",
        envvar="SCRUBBER_DRIVER_READY_FILE",
        metavar="FILE",
        help="Take the driver's root and device root from this file of the GPU Operator's validator; wait for it.",
        show_default="none",
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
ConditionTypeOption = Annotated[
    str,
    typer.Option(
        "--condition-type",
        envvar="SCRUBBER_CONDITION_TYPE",
        metavar="TYPE",
        help="Type of the node condition that --cluster-reporting writes.",
    ),
]
ConditionPolarityOption = Annotated[
    PolarityChoice,
    typer.Option(
        "--condition-polarity",
        envvar="SCRUBBER_CONDITION_POLARITY",
        help="What the status True of the condition means. good: every GPU is in service; bad: a GPU is not.",
    ),
]
TaintOption = Annotated[
    str,
    typer.Option(
        "--taint",
        envvar="SCRUBBER_TAINT",
        metavar="KEY[=VALUE]:EFFECT",
        help="Taint of this node while none of its GPUs is in service; requires --cluster-reporting.",
        show_default="off",
    ),
]
NvsentinelSocketOption = Annotated[
    Path | None,
    typer.Option(
        "--nvsentinel-socket",
        envvar="SCRUBBER_NVSENTINEL_SOCKET",
        metavar="PATH",
        help="Send health events to this socket of NVSentinel, usually /var/run/nvsentinel/nvsentinel.sock.",
        show_default="none",
    ),
]
NvsentinelStrategyOption = Annotated[
    StrategyChoice,
    typer.Option(
        "--nvsentinel-strategy",
        envvar="SCRUBBER_NVSENTINEL_STRATEGY",
        help="What NVSentinel does with the events: store them, or execute its rules for them.",
    ),
]
NodeNameOption = Annotated[
    str,
    typer.Option(
        "--node-name",
        envvar="SCRUBBER_NODE_NAME",
        metavar="NAME",
        help="Name of this node in the cluster; required for --cluster-reporting and --nvsentinel-socket.",
        show_default="none",
    ),
]


YieldLabelsOption = Annotated[
    str,
    typer.Option(
        "--yield-labels",
        envvar="SCRUBBER_YIELD_LABELS",
        metavar="KEY,…",
        help="Yield the node while one of these labels of it has another value than true, such as "
        "nvidia.com/gpu.deploy.client; requires --node-name and access to the API server.",
        show_default="none",
    ),
]
PauseLabelsOption = Annotated[
    str,
    typer.Option(
        "--pause-labels",
        envvar="SCRUBBER_PAUSE_LABELS",
        metavar="KEY=VALUE,…",
        help="Labels of this node that pause monitoring agents while a GPU is reset, in this order, such as "
        "nvidia.com/gpu.deploy.dcgm-exporter=false; restored afterwards; requires --node-name and access to the API server.",
        show_default="none",
    ),
]
PauseLeaseOption = Annotated[
    str,
    typer.Option(
        "--pause-lease",
        envvar="SCRUBBER_PAUSE_LEASE",
        metavar="NAMESPACE/NAME",
        help="Lease that allows one node at a time to pause its agents; empty: no limit.",
    ),
]
GpuResetOption = Annotated[
    bool,
    typer.Option(
        "--gpu-reset",
        envvar="SCRUBBER_GPU_RESET",
        help="Let NVSentinel reset a GPU that agents hold, by a GPUReset object, where the cluster has that kind; the node "
        "is yielded meanwhile; requires --node-name and access to the API server.",
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
    kubelet_dir: KubeletDirOption = KUBELET_DIR,
    kubelet_socket: KubeletSocketOption = None,
    socket: SocketOption = Path("/run/scrubber"),
    resource_name: Annotated[
        str,
        typer.Option(
            envvar="SCRUBBER_RESOURCE_NAME",
            metavar="NAME",
            help="Resource that pods request.",
            show_default="nvidia.com/gpu, amd.com/gpu or scrubber.dev/gpu, depending on the devices",
        ),
    ] = "",
    amd_resource_naming: Annotated[
        AmdNamingChoice,
        typer.Option(
            envvar="SCRUBBER_AMD_RESOURCE_NAMING",
            help="single: all AMD GPUs and partitions as one resource; mixed: one resource per kind of partition, such as "
            "amd.com/cpx_nps1.",
        ),
    ] = AmdNamingChoice.SINGLE,
    devices: PluginDevicesOption = "",
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
    driver_ready_file: DriverReadyOption = None,
    host_root_ctr_path: HostRootOption = None,
    runtime_check: RuntimeCheckOption = RuntimeCheckChoice.REFUSE,
    cdi_dir: CdiDirOption = "/var/run/cdi",
    gdrcopy_enabled: GdrcopyOption = None,
    gds_enabled: GdsOption = None,
    mofed_enabled: MofedOption = None,
    cdi_feature_flags: CdiFeatureFlagsOption = None,
    cdi_disable_hooks: CdiDisableHooksOption = None,
    device_discovery_strategy: DiscoveryOption = None,
    shared_devices_allocation_policy: SharePolicyOption = None,
    mps_root: MpsRootOption = None,
    imex_channel_ids: ImexChannelsOption = None,
    imex_required: ImexRequiredOption = None,
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
    condition_type: ConditionTypeOption = "GpusInService",
    condition_polarity: ConditionPolarityOption = PolarityChoice.GOOD,
    taint: TaintOption = "",
    nvsentinel_socket: NvsentinelSocketOption = None,
    nvsentinel_strategy: NvsentinelStrategyOption = StrategyChoice.STORE_ONLY,
    node_name: NodeNameOption = "",
    metrics_address: PluginMetricsAddressOption = None,
    metrics_cert: PluginMetricsCertOption = None,
    metrics_key: PluginMetricsKeyOption = None,
    metrics_client_ca: PluginMetricsClientCaOption = None,
    probe_address: PluginProbeAddressOption = "",
    traces: TracesOption = TraceExport.OFF,
    yield_labels: YieldLabelsOption = "",
    pause_labels: PauseLabelsOption = "",
    pause_lease: PauseLeaseOption = "scrubber-system/scrubber-agent-pause",
    gpu_reset: GpuResetOption = False,
    log_format: LogFormatOption = LogFormat.AUTO,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Run the device plugin.

    It lets the kubelet start a container with a device only after the scrub service has granted the device.
    """
    silence_grpc_logs()
    load_structlog_without_rich()
    from plugin.amd import AmdNaming
    from plugin.cluster.condition import ConditionFormat, ConditionPolarity
    from plugin.cluster.deploy_labels import parse_label_keys
    from plugin.cluster.pause_labels import LeaseName, parse_pause_labels
    from plugin.cluster.taint import NodeTaint
    from plugin.device_selection import DeviceSelection
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
        discovery=device_discovery_strategy,
        share_preference=shared_devices_allocation_policy,
        cdi_features=cdi_feature_flags,
        disabled_cdi_hooks=cdi_disable_hooks,
        imex_channels=imex_channel_ids,
    )
    source = nvidia_settings.NvidiaSettingsSource(
        options,
        Path(config_file) if config_file else None,
        driver_ready=driver_ready_file.absolute() if driver_ready_file else None,
        cdi_directory=Path(cdi_dir or nvidia_settings.CDI_DIRECTORY).absolute(),
        disabled_health_checks=os.environ.get("DP_DISABLE_HEALTHCHECKS", ""),
        enabled_health_checks=os.environ.get("DP_ENABLE_HEALTHCHECKS", ""),
        host_root=host_root_ctr_path.absolute() if host_root_ctr_path else None,
        refuse_unsuitable_runtime=runtime_check is RuntimeCheckChoice.REFUSE,
    )
    settings = PluginSettings(
        kubelet_dir=nvidia_settings.kubelet_dir_of(kubelet_socket, kubelet_dir, KUBELET_DIR).absolute(),
        socket=socket.absolute(),
        resource_name=resource_name,
        amd_naming=AmdNaming(amd_resource_naming.value),
        devices=DeviceSelection.parse(devices),
        registration=registration.value,
        log_format=log_format.value,
        log_level=log_level.value,
        nvidia=source.load(),
        nvidia_source=source,
        upstream_dir=upstream_dir.absolute() if upstream_dir else None,
        cluster=cluster.value,
        condition=ConditionFormat(condition_type, ConditionPolarity(condition_polarity)),
        taint=NodeTaint.parse(taint),
        nvsentinel_socket=nvsentinel_socket.absolute() if nvsentinel_socket else None,
        nvsentinel_strategy=nvsentinel_strategy.value,
        node_name=node_name,
        metrics_address=Address.parse(metrics_address or PLUGIN_METRICS_ADDRESS),
        metrics_required=metrics_address is not None,
        metrics_tls=MetricsTls.from_flags(metrics_cert, metrics_key, metrics_client_ca),
        probe_address=Address.parse(probe_address),
        traces=traces,
        yield_labels=(yielding := parse_label_keys(yield_labels)),
        pause_labels=parse_pause_labels(pause_labels, yielding),
        pause_lease=LeaseName.parse(pause_lease),
        gpu_reset=gpu_reset,
    )
    restore_gc()
    raise typer.Exit(asyncio.run(run(settings)))
