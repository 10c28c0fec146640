"""The flags of NVIDIA's device plugin, under its names and with its environment variables.

A manifest that starts NVIDIA's plugin starts ours when only the image and the command are changed. So a flag that is
true or false may also be written ``--flag=true``, as programs in Go take it, and older names of a flag are known.
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
    """``--flag`` or ``--no-flag`` for ``--flag=true`` or ``--flag=false``; anything else as it is."""
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
        help="How a container's runtime learns its devices: envvar, volume-mounts, cdi-annotations, cdi-cri; several "
        "by commas, or repeated.",
        show_default="envvar",
    ),
]
DeviceIdStrategyOption = Annotated[
    DeviceIdChoice | None,
    typer.Option(
        "--device-id-strategy",
        envvar="DEVICE_ID_STRATEGY",
        help="What a device is called there; in CDI always its UUID. Once a device is lost, an index is another one's.",
        show_default="uuid",
    ),
]
PassDeviceSpecsOption = Annotated[
    bool | None,
    typer.Option(
        "--pass-device-specs/--no-pass-device-specs",
        envvar="PASS_DEVICE_SPECS",
        help="Give the device nodes to the kubelet too; needed beside its static CPU manager.",
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
        help="Where the driver is installed on the host; /run/nvidia/driver where a container brings it.",
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
        help="The directory on the host that holds dev with the device nodes.",
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
        help="The driver's root as the plugin sees it.",
        show_default="/driver-root if that is there, else the driver's root",
    ),
]
MigStrategyOption = Annotated[
    MigChoice | None,
    typer.Option(
        "--mig-strategy",
        envvar="MIG_STRATEGY",
        help="none: whole GPUs only; single: instances of one kind as whole GPUs; mixed: a resource for each profile.",
        show_default="none",
    ),
]
AnnotationPrefixOption = Annotated[
    str | None,
    typer.Option(
        "--cdi-annotation-prefix",
        envvar="CDI_ANNOTATION_PREFIX",
        metavar="DOMAIN/",
        help="How the key of the CDI annotation begins.",
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
        help="NVIDIA's hook program on the host, for CDI.",
        show_default="found",
    ),
]
CdiDirOption = Annotated[
    str,
    typer.Option("--cdi-dir", envvar="SCRUBBER_CDI_DIR", metavar="DIR", help="Where our CDI specification is written."),
]
FailOnInitErrorOption = Annotated[
    bool | None,
    typer.Option(
        "--fail-on-init-error/--no-fail-on-init-error",
        envvar="FAIL_ON_INIT_ERROR",
        help="End when the node's MIG instances cannot be advertised as asked; else wait until they can.",
        show_default="end",
    ),
]
ConfigFileOption = Annotated[
    str | None,
    typer.Option(
        "--config-file",
        envvar="CONFIG_FILE",
        metavar="FILE",
        help="NVIDIA's configuration file: flags and variables win over it, and shared devices are written there only.",
        show_default="none",
    ),
]


ClusterOption = Annotated[
    ClusterChoice,
    typer.Option(
        "--cluster",
        envvar="SCRUBBER_CLUSTER",
        help="Write this node's GPUs to the API server. auto: where there are credentials (KUBECONFIG, or a pod's own).",
    ),
]
NodeNameOption = Annotated[
    str,
    typer.Option(
        "--node-name",
        envvar="SCRUBBER_NODE_NAME",
        metavar="NAME",
        help="This node's name in the cluster; without it, --cluster tells nothing.",
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
