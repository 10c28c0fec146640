"""Decides, once at start, whether the plugin writes to a cluster, and with which credentials.

Invariant: nothing is written to a cluster unless ``--cluster-reporting`` requests it. ``KUBECONFIG`` in the environment often
belongs to an administrator, and ``~/.kube/config`` always does, so the latter is never read. Without credentials the
result is None, and nothing else happens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from scrubber.domain.errors import InvalidConfiguration

__all__ = [
    "SERVICE_ACCOUNT_DIRECTORY",
    "ClusterMode",
    "Credentials",
    "Kubeconfig",
    "PodServiceAccount",
    "check_node_name",
    "find_credentials",
    "resolve_credentials",
]

SERVICE_ACCOUNT_DIRECTORY = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts a pod's token and the API server's certificate authority."""


_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A valid node name; it becomes part of a URL."""


# See docs/decisions/0040-only-the-plugin-writes-to-the-cluster.md.
class ClusterMode(StrEnum):
    """Values of ``--cluster-reporting``."""

    AUTO = "auto"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class PodServiceAccount:
    """The pod's own service account. The kubelet replaces the token file before the token expires."""

    server: str
    ca_file: Path
    token_file: Path

    def __str__(self) -> str:
        return "the pod's service account"


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """A kubeconfig file; its current context is used."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Credentials = PodServiceAccount | Kubeconfig


def find_credentials(environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT_DIRECTORY) -> Credentials | None:
    """Return the credentials: ``KUBECONFIG`` before the pod's service account, None when neither exists."""
    if written := environment.get("KUBECONFIG", ""):
        return Kubeconfig(Path(written))
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "")
    if not (host and port and (account / "token").exists()):
        return None
    bracketed = f"[{host}]" if ":" in host else host
    return PodServiceAccount(f"https://{bracketed}:{port}", account / "ca.crt", account / "token")


def check_node_name(node: str) -> None:
    """Raise :class:`InvalidConfiguration` unless ``node`` is a valid name of a node."""
    if not _NODE.fullmatch(node):
        raise InvalidConfiguration(f"--node-name {node!r} is not a valid name of a node.")


def resolve_credentials(
    mode: str, node: str, environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT_DIRECTORY
) -> tuple[Credentials | None, str]:
    """Return the credentials to write to the cluster with, or None and the reason why nothing is written.

    Credentials are useless without the node's name: the host name in a pod is the pod's, and a report under the name of
    another node would overwrite that node's status.

    Raises:
        InvalidConfiguration: ``mode`` is not a valid mode, or ``node`` is not a valid node name.
    """
    try:
        wish = ClusterMode(mode)
    except ValueError:
        known = " or ".join(ClusterMode)
        raise InvalidConfiguration(f"--cluster-reporting has the unknown value {mode!r}. Use {known}.") from None
    if node:
        check_node_name(node)
    if wish is ClusterMode.OFF:
        return None, "--cluster-reporting is off"
    credentials = find_credentials(environment, account)
    if credentials is None:
        return None, "no credentials were found"
    if not node:
        return None, "credentials were found, but the name of this node is unknown: start the plugin with --node-name"
    return credentials, ""
