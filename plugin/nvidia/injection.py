"""Injection settings for NVIDIA GPUs: how a container learns which GPUs it has.

The names are those of NVIDIA's device plugin, so that its flags, its environment variables and its configuration file
mean the same here. They apply to devices with nodes of NVIDIA's driver. For any other device, its backend alone decides
how a container gets it (:class:`~scrubber.domain.device.AccessKind`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import InvalidConfiguration

__all__ = [
    "CDI_ANNOTATION_PREFIX",
    "CDI_KIND",
    "Feature",
    "IdStrategy",
    "ListStrategy",
    "NvidiaInjection",
    "cdi_device_name",
    "has_nvidia_node",
    "parse_list_strategies",
]

CDI_KIND = "scrubber.dev/gpu"
"""CDI kind of the plugin's devices."""
CDI_ANNOTATION_PREFIX = "cdi.k8s.io/"
"""Prefix of the annotations that every runtime with CDI support reads."""


HOST_ROOT = PurePosixPath("/")

_NVIDIA_NODES = "/dev/nvidia"
"""Path prefix of all device nodes of NVIDIA's driver."""


def has_nvidia_node(access: Iterable[Access]) -> bool:
    """Return whether a device node of NVIDIA's driver is among ``access``."""
    return any(each.kind is AccessKind.DEVICE_NODE and each.container_path.startswith(_NVIDIA_NODES) for each in access)


def cdi_device_name(name: str) -> str:
    """Return the name of the device ``name`` in CDI, as the kubelet and the runtime use it."""
    return f"{CDI_KIND}={name}"


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_PREFIX = re.compile(rf"{_LABEL}(\.{_LABEL})*/")
_MAX_PREFIX_LENGTH = 254
"""Kubernetes' limit for the domain in an annotation's key, and the slash."""


class ListStrategy(StrEnum):
    """How the list of a container's devices reaches the runtime."""

    ENVVAR = "envvar"
    """``NVIDIA_VISIBLE_DEVICES`` holds the list. Any pod can set that variable itself."""
    VOLUME_MOUNTS = "volume-mounts"
    """A mount of ``/dev/null`` for each device; a pod needs a ``hostPath`` volume to forge that."""
    CDI_ANNOTATIONS = "cdi-annotations"
    """An annotation on the container that names devices of the plugin's CDI specification."""
    CDI_CRI = "cdi-cri"
    """The same names in a field of the CRI."""


class IdStrategy(StrEnum):
    """How a device is named in that list. CDI names, which the plugin defines, always contain the UUID."""

    UUID = "uuid"
    INDEX = "index"


class Feature(StrEnum):
    """Further features: requested from NVIDIA's runtime by ``NVIDIA_<FEATURE>=enabled``, and part of our CDI specification."""

    GDRCOPY = "gdrcopy"
    GDS = "gds"
    MOFED = "mofed"


@dataclass(frozen=True, slots=True)
class NvidiaInjection:
    """What a container gets with NVIDIA GPUs.

    Attributes:
        strategies: at least one; in the order of :class:`ListStrategy`.
        pass_device_specs: pass the device nodes to the kubelet too, so that it does not remove them when it updates the
            container. No effect where CDI alone injects, because CDI does that itself.
        dev_root: where the device nodes are on the host: the directory that contains ``dev``.
        annotation_prefix: prefix of the key of the CDI annotation.

    Raises:
        InvalidConfiguration: a combination that cannot work.
    """

    strategies: tuple[ListStrategy, ...] = (ListStrategy.ENVVAR,)
    ids: IdStrategy = IdStrategy.UUID
    pass_device_specs: bool = False
    dev_root: PurePosixPath = HOST_ROOT
    annotation_prefix: str = CDI_ANNOTATION_PREFIX
    features: frozenset[Feature] = frozenset()

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.annotation_prefix) or len(self.annotation_prefix) > _MAX_PREFIX_LENGTH:
            raise InvalidConfiguration(
                f'"{self.annotation_prefix}" is not a valid prefix of CDI annotations. '
                f"Use a domain and a slash, such as {CDI_ANNOTATION_PREFIX}."
            )

    @property
    def needs_cdi(self) -> bool:
        """Whether a CDI specification is needed."""
        return any(each in _CDI for each in self.strategies)

    @property
    def is_cdi_only(self) -> bool:
        return all(each in _CDI for each in self.strategies)

    @property
    def uses_envvar(self) -> bool:
        """Whether an environment variable, which any pod can set, decides what a container sees."""
        return ListStrategy.ENVVAR in self.strategies

    def host_path(self, container_path: str, host_path: str) -> str:
        """Return a device node's path on the host; ``host_path`` is the service's path, which assumes no other root."""
        if self.dev_root == HOST_ROOT:
            return host_path
        return str(self.dev_root / container_path.lstrip("/"))


_CDI = (ListStrategy.CDI_ANNOTATIONS, ListStrategy.CDI_CRI)


def parse_list_strategies(values: Iterable[str], origin: str) -> tuple[ListStrategy, ...]:
    """Parse strategies that are separated by commas, repeated, or both; each counts once.

    Args:
        origin: where they were written, for error messages: a flag, or ``FILE:LINE: KEY``.

    Raises:
        InvalidConfiguration: no strategy, or one that does not exist.
    """
    words = [word for each in values for part in each.split(",") if (word := part.strip())]
    known = ", ".join(ListStrategy)
    for word in words:
        if word not in list(ListStrategy):
            raise InvalidConfiguration(f'{origin}: "{word}" is not a way to pass devices. Use one or more of: {known}.')
    if not words:
        raise InvalidConfiguration(f"{origin}: no way to pass devices is set. Use one or more of: {known}.")
    return tuple(each for each in ListStrategy if each in words)
