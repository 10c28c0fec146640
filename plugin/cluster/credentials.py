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

from scrubber.domain.errors import BadConfiguration

__all__ = ["SERVICE_ACCOUNT", "ClusterUse", "Credentials", "Login", "ServiceAccount", "find", "settle"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts a pod's token and the API server's certificate authority."""


_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A node's name; it becomes part of a URL."""


class ClusterUse(StrEnum):
    """``--cluster``."""

    AUTO = "auto"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """A pod's own account. The kubelet replaces the token file before the token runs out."""

    server: str
    authority: Path
    token: Path

    def __str__(self) -> str:
        return "the pod's service account"


@dataclass(frozen=True, slots=True)
class Login:
    """A kubeconfig file; its current context is used."""

    kubeconfig: Path

    def __str__(self) -> str:
        return str(self.kubeconfig)


Credentials = ServiceAccount | Login


def find(environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> Credentials | None:
    """``KUBECONFIG`` before the pod's service account; None when there is neither."""
    if written := environment.get("KUBECONFIG", ""):
        return Login(Path(written))
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "")
    if not (host and port and (account / "token").exists()):
        return None
    bracketed = f"[{host}]" if ":" in host else host
    return ServiceAccount(f"https://{bracketed}:{port}", account / "ca.crt", account / "token")


def settle(
    use: str, node: str, environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT
) -> tuple[Credentials | None, str]:
    """By what right the cluster is told, if it is, and the reason why it is not.

    Credentials without the node's name are of no use: a host name in a pod is the pod's, and a node that is told of
    under another one's name would take that one's place.

    Raises:
        BadConfiguration: ``use`` is no word for it, or ``node`` no name.
    """
    try:
        wish = ClusterUse(use)
    except ValueError:
        known = " or ".join(ClusterUse)
        raise BadConfiguration(f"--cluster {use!r} means nothing: write {known}.") from None
    if node and not _NODE.fullmatch(node):
        raise BadConfiguration(f"--node-name {node!r} is no name that a node can have in a cluster.")
    if wish is ClusterUse.OFF:
        return None, "--cluster off"
    credentials = find(environment, account)
    if credentials is None:
        return None, "there are no credentials"
    if not node:
        return None, "there are credentials, but nobody said which node this is: start the plugin with --node-name"
    return credentials, ""
