"""The flags of NVIDIA's device plugin, with its names and its environment variables.

A manifest that starts NVIDIA's plugin starts ours when only the image and the command are changed. So a boolean flag
may also be written ``--flag=true``, as Go programs accept it, and older names of a flag are supported.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

__all__ = [
    "AnnotationPrefixOption",
    "CdiDirOption",
    "CdiHookOption",
    "ClusterChoice",
    "ClusterOption",
    "ConfigFileOption",
    "ContainerDriverRootOption",
    "DevRootOption",
    "DeviceIdChoice",
    "DeviceIdStrategyOption",
    "DeviceListStrategyOption",
    "DriverRootOption",
    "FailOnInitErrorOption",
    "GdrcopyOption",
    "GdsOption",
    "MigChoice",
    "MigStrategyOption",
    "MofedOption",
    "NodeNameOption",
    "PassDeviceSpecsOption",
    "PluginCommand",
]


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


class PluginCommand(TyperCommand):
    """A command whose flags may be written ``--flag=true`` and ``--flag=false``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        no = {
            name: each.secondary_opts[0]
            for each in self.params
            if isinstance(each, TyperOption) and each.secondary_opts
            for name in each.opts
        }
        return super().parse_args(ctx, [_normalize_boolean(word, no) for word in args])


TRUE_VALUES = ("1", "t", "true")
FALSE_VALUES = ("0", "f", "false")


def _normalize_boolean(word: str, no: dict[str, str]) -> str:
    """Return ``--flag`` or ``--no-flag`` for ``--flag=true`` or ``--flag=false``; other words unchanged."""
    name, equals, value = word.partition("=")
    if not equals or name not in no:
        return word
    if value.lower() in TRUE_VALUES:
        return name
    return no[name] if value.lower() in FALSE_VALUES else word


DeviceListStrategyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--device-list-strategy",
        envvar="DEVICE_LIST_STRATEGY",
        metavar="WAY,…",
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
