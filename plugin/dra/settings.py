"""The driver's access to the API server, without which it cannot read a claim."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from plugin.cluster.credentials import (
    SERVICE_ACCOUNT_DIRECTORY,
    Credentials,
    Kubeconfig,
    check_node_name,
    find_credentials,
)
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["driver_credentials"]


def driver_credentials(
    node: str,
    kubeconfig: Path | None,
    environment: Mapping[str, str] | None = None,
    account: Path = SERVICE_ACCOUNT_DIRECTORY,
) -> Credentials:
    """Return the credentials: ``kubeconfig``, or the pod's service account.

    ``KUBECONFIG`` in the environment is ignored, because it often belongs to an administrator.

    Raises:
        InvalidConfiguration: there are no credentials, or ``node`` is not the name of a node.
    """
    if not node:
        raise InvalidConfiguration("--node-name is required: the driver publishes the devices of one node.")
    check_node_name(node)
    if kubeconfig is not None:
        if not kubeconfig.is_file():
            raise InvalidConfiguration(f"--kubeconfig: {kubeconfig} is not a file.")
        return Kubeconfig(kubeconfig.absolute())
    inside = {name: value for name, value in (environment or os.environ).items() if name != "KUBECONFIG"}
    credentials = find_credentials(inside, account)
    if credentials is None:
        raise InvalidConfiguration(
            "The driver needs access to the API server: run it in a pod with a service account, or pass --kubeconfig."
        )
    return credentials
