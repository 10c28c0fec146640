"""Whether there is a cluster to tell, and by what right: decided once, from what the process was given.

Promise: nothing is written to a cluster unless ``--cluster`` asks for it: ``KUBECONFIG`` in the environment is often some
administrator's, and ``~/.kube/config`` always is; that one is never looked for. Without credentials the answer is None, and
nothing else happens.
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
    "find_credentials",
    "resolve_credentials",
]

SERVICE_ACCOUNT_DIRECTORY = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts a pod's token and the API server's certificate authority."""


_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A node's name; it becomes part of a URL."""


class ClusterMode(StrEnum):
    """``--cluster``."""

    AUTO = "auto"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class PodServiceAccount:
    """A pod's own account. The kubelet replaces the token file before the token runs out."""

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
    """``KUBECONFIG`` before the pod's service account; None when there is neither."""
    if written := environment.get("KUBECONFIG", ""):
        return Kubeconfig(Path(written))
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "")
    if not (host and port and (account / "token").exists()):
        return None
    bracketed = f"[{host}]" if ":" in host else host
    return PodServiceAccount(f"https://{bracketed}:{port}", account / "ca.crt", account / "token")


def resolve_credentials(
    mode: str, node: str, environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT_DIRECTORY
) -> tuple[Credentials | None, str]:
    """By what right the cluster is told, if it is, and the reason why it is not.

    Credentials without the node's name are of no use: a host name in a pod is the pod's, and a node that is told of
    under another one's name would take that one's place.

    Raises:
        InvalidConfiguration: ``mode`` is no word for it, or ``node`` no name.
    """
    try:
        wish = ClusterMode(mode)
    except ValueError:
        known = " or ".join(ClusterMode)
        raise InvalidConfiguration(f"--cluster {mode!r} means nothing: write {known}.") from None
    if node and not _NODE.fullmatch(node):
        raise InvalidConfiguration(f"--node-name {node!r} is no name that a node can have in a cluster.")
    if wish is ClusterMode.OFF:
        return None, "--cluster off"
    credentials = find_credentials(environment, account)
    if credentials is None:
        return None, "there are no credentials"
    if not node:
        return None, "there are credentials, but nobody said which node this is: start the plugin with --node-name"
    return credentials, ""
