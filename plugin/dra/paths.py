"""The driver's name and the paths of its sockets.

The kubelet finds a driver by a socket in its registry directory, and calls it on another one, in a directory of the
driver. Both names contain the pod's UID, so that two instances can overlap in a rolling update.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from plugin.kubelet.sockets import check_path_length
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["DEFAULT_DRIVER_NAME", "DriverSocketPaths", "driver_name_error"]

DEFAULT_DRIVER_NAME = "gpu.scrubber.dev"

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DRIVER_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_POD_UID = re.compile("[0-9a-f-]{32,36}")
_MAX_NAME_CHARS = 63
_TOKEN_CHARS = 8


def driver_name_error(name: str) -> str:
    """Return why Kubernetes would refuse a driver of this name; empty when it would not."""
    if not _DRIVER_NAME.fullmatch(name):
        return f"{name!r} is not a valid name of a DRA driver. Use a domain such as {DEFAULT_DRIVER_NAME}."
    if len(name) > _MAX_NAME_CHARS:
        return f"{name!r} is too long for the name of a DRA driver: at most {_MAX_NAME_CHARS} characters."
    return ""


@dataclass(frozen=True, slots=True)
class DriverSocketPaths:
    """The sockets of one instance of the driver.

    Attributes:
        driver: name of the driver.
        plugins: the kubelet's directory with one directory for each driver.
        registry: the kubelet's directory that it watches for registration sockets.
        pod_uid: UID of the pod that this instance runs in; empty outside of a pod.
    """

    driver: str
    plugins: Path = Path("/var/lib/kubelet/plugins")
    registry: Path = Path("/var/lib/kubelet/plugins_registry")
    pod_uid: str = ""

    @property
    def directory(self) -> Path:
        """The driver's own directory, which it creates."""
        return self.plugins / self.driver

    @property
    def calls_socket(self) -> Path:
        """Where the kubelet calls the driver."""
        return self.directory / (f"dra-{self.pod_uid}.sock" if self.pod_uid else "dra.sock")

    @property
    def registration_socket(self) -> Path:
        instance = f"-{self.pod_uid}" if self.pod_uid else ""
        return self.registry / f"{self.driver}{instance}-reg.sock"

    def sockets_of_all_instances(self) -> list[Path]:
        """Return the existing sockets of every instance of this driver, and of no other driver."""
        names = {
            self.directory: re.compile(rf"dra(-{_POD_UID.pattern})?\.sock|\.dra-[0-9a-f]+\.sock"),
            self.registry: re.compile(
                rf"{re.escape(self.driver)}(-{_POD_UID.pattern})?-reg\.sock|"
                rf"\.{re.escape(self.driver)}-[0-9a-f]{{{_TOKEN_CHARS}}}\.sock"
            ),
        }
        return [
            path
            for directory, pattern in names.items()
            if directory.is_dir()
            for path in sorted(directory.iterdir())
            if pattern.fullmatch(path.name)
        ]

    def hidden_socket(self, path: Path, token: str) -> Path:
        """Return where the socket for ``path`` is created before it gets that name.

        ``token``: eight hexadecimal digits. The kubelet does not look at names with a leading dot.
        """
        prefix = "dra" if path.parent == self.directory else self.driver
        return path.parent / f".{prefix}-{token}.sock"

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is tried.

        Raises:
            InvalidConfiguration: a name that Kubernetes would refuse, a UID that is none, a directory that is a file,
                or a socket whose path would be too long.
        """
        if error := driver_name_error(self.driver):
            raise InvalidConfiguration(error)
        if self.pod_uid and not _POD_UID.fullmatch(self.pod_uid):
            raise InvalidConfiguration(f"{self.pod_uid!r} is not the UID of a pod.")
        for directory in (self.plugins, self.directory, self.registry):
            if directory.exists() and not directory.is_dir():
                raise InvalidConfiguration(f"{directory} is a file. Use the kubelet's directory.")
        for path in (self.calls_socket, self.registration_socket):
            check_path_length(path, "the driver's socket")
