"""Socket files: of this plugin and of others, live and dead, valid and invalid."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from plugin.kubelet.registration import KubeletPaths
from plugin.kubelet.sockets import SocketFile, has_listener, remove_stale_sockets
from scrubber.domain.errors import InvalidConfiguration

RESOURCE = "scrubber.dev/gpu"


def listening(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def test_recreated_socket_differs_from_the_old_one_whatever_its_inode(short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    assert SocketFile.of(path) is None
    with closing(listening(path)):
        first = SocketFile.of(path)
        os.chmod(path, 0o660)
        assert SocketFile.of(path) == first
    path.unlink()
    with closing(listening(path)):
        recreated = path.lstat()
        os.utime(path, ns=(recreated.st_atime_ns, recreated.st_mtime_ns + 1))
        assert SocketFile.of(path) not in (None, first)


def test_regular_file_is_refused_as_a_socket(short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    path.touch()
    with pytest.raises(InvalidConfiguration, match=r"kubelet\.sock is a regular file, not a socket"):
        SocketFile.of(path)


async def test_only_the_plugins_own_dead_sockets_are_removed(short_tmp: Path) -> None:
    alive, dead, other, file = (
        short_tmp / name
        for name in (
            "scrubber-gpu-11111111.sock",
            "scrubber-gpu-22222222.sock",
            "nvidia-gpu.sock",
            "scrubber-gpu-3.sock",
        )
    )
    listening(dead).close()
    listening(other).close()
    file.touch()
    with closing(listening(alive)):
        assert await has_listener(alive, timeout=5.0)
        assert not await has_listener(dead, timeout=5.0)
        just_now = dead.lstat().st_mtime
        own = list(short_tmp.glob("scrubber-gpu-*"))
        assert await remove_stale_sockets(own, older_than=1.0, now=just_now) == []
        assert await remove_stale_sockets(own, older_than=1.0, now=just_now + 60) == [dead]
    assert sorted(path.name for path in short_tmp.iterdir()) == sorted([alive.name, other.name, file.name])


async def test_dead_socket_is_removed_although_the_clock_was_set_back_since(short_tmp: Path) -> None:
    dead = short_tmp / "scrubber-gpu-1.sock"
    listening(dead).close()
    assert await remove_stale_sockets([dead], older_than=1.0, now=dead.lstat().st_mtime - 3600) == [dead]


async def test_dead_socket_that_cannot_be_removed_stays(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = short_tmp / "scrubber-gpu-1.sock"
    listening(dead).close()
    monkeypatch.setattr(Path, "unlink", read_only)
    assert await remove_stale_sockets([dead], older_than=1.0, now=dead.lstat().st_mtime + 60) == []


def read_only(path: Path, **_: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system", str(path))


def test_kubelet_directory_with_too_long_a_path_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfiguration,
        match=r"has \d+ bytes; the limit for a Unix socket is 107\. Use a directory with a shorter",
    ):
        KubeletPaths(tmp_path / ("d" * 100), RESOURCE).check()


def test_regular_file_at_a_kubelet_path_is_refused(short_tmp: Path) -> None:
    (short_tmp / "file").touch()
    with pytest.raises(InvalidConfiguration, match=r"is a file\. Use the kubelet's directory"):
        KubeletPaths(short_tmp / "file", RESOURCE).check()
    (short_tmp / "device-plugins").mkdir()
    (short_tmp / "device-plugins" / "kubelet.sock").touch()
    with pytest.raises(InvalidConfiguration, match="is a regular file, not a socket"):
        KubeletPaths(short_tmp, RESOURCE).check()


@pytest.mark.parametrize("name", ["scrubber.dev/gpu", "nvidia.com/gpu", "a/b", "nvidia.com/mig-1g.10gb"])
def test_resource_name_that_the_kubelet_accepts_is_accepted(short_tmp: Path, name: str) -> None:
    KubeletPaths(short_tmp, name).check()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpu",
        "scrubber.dev/",
        "/gpu",
        "a/b/c",
        "UPPER.dev/gpu",
        "scrubber.dev/gpu!",
        "kubernetes.io/gpu",
        "node.kubernetes.io/gpu",
        "requests.dev/gpu",
        f"{'a.' * 130}dev/gpu",
        f"scrubber.dev/{'g' * 64}",
    ],
)
def test_resource_name_that_the_kubelet_would_refuse_is_refused_first(short_tmp: Path, name: str) -> None:
    with pytest.raises(InvalidConfiguration, match="Use DOMAIN/NAME, such as"):
        KubeletPaths(short_tmp, name).check()
