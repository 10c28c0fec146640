"""The notify protocol, against real sockets in place of systemd's."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from scrubber.observability.systemd import DEFAULT_WATCHDOG_INTERVAL, SystemdNotifier, watchdog_interval


@contextmanager
def supervisor(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listening:
        listening.bind(address)
        yield listening


def received(listening: socket.socket) -> list[bytes]:
    """Return all messages in the socket's queue."""
    messages: list[bytes] = []
    while True:
        try:
            messages.append(listening.recv(4096))
        except BlockingIOError:
            return messages


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_each_service_state_is_one_datagram_to_the_notify_socket(kind: str, short_tmp: Path) -> None:
    path, abstract = str(short_tmp / "notify"), f"scrubber-test-{os.getpid()}"
    bound, named = {"path": (path, path), "abstract": (f"\0{abstract}", f"@{abstract}")}[kind]
    with supervisor(bound) as listening, closing(SystemdNotifier(named)) as notifier:
        notifier.notify("READY=1\nSTATUS=Watching 2 devices")
        notifier.notify("WATCHDOG=1")
        assert received(listening) == [b"READY=1\nSTATUS=Watching 2 devices", b"WATCHDOG=1"]


@pytest.mark.parametrize("address", ["", "/nonexistent/notify", "@scrubber-test-unserved", "relative", "/" + 200 * "x"])
def test_missing_systemd_notify_socket_is_no_error(address: str) -> None:
    with closing(SystemdNotifier(address)) as notifier:
        notifier.notify("READY=1")


def test_recreated_notify_socket_receives_the_next_state(short_tmp: Path) -> None:
    path = short_tmp / "notify"
    with closing(SystemdNotifier(str(path))) as notifier:
        for state in ("READY=1", "WATCHDOG=1"):
            with supervisor(str(path)) as listening:
                notifier.notify(state)
                assert received(listening) == [state.encode()]
            path.unlink()
            notifier.notify("WATCHDOG=1")


def test_unread_notify_socket_does_not_block(short_tmp: Path) -> None:
    path = str(short_tmp / "notify")
    with supervisor(path) as listening, closing(SystemdNotifier(path)) as notifier:
        sent = 10_000  # Linux queues 10 by default, systemd requests 512
        for _ in range(sent):
            notifier.notify("WATCHDOG=1")
        assert 0 < len(received(listening)) < sent
        notifier.notify("READY=1")
        assert received(listening) == [b"READY=1"]


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, DEFAULT_WATCHDOG_INTERVAL),
        ({"WATCHDOG_USEC": "30000000"}, DEFAULT_WATCHDOG_INTERVAL),
        ({"WATCHDOG_USEC": "2000000"}, 0.5),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid() + 1)}, DEFAULT_WATCHDOG_INTERVAL),
        ({"WATCHDOG_USEC": "0"}, DEFAULT_WATCHDOG_INTERVAL),
        ({"WATCHDOG_USEC": "-1"}, DEFAULT_WATCHDOG_INTERVAL),
        ({"WATCHDOG_USEC": "2s"}, DEFAULT_WATCHDOG_INTERVAL),
    ],
)
def test_watchdog_is_notified_four_times_per_timeout(environment: dict[str, str], seconds: float) -> None:
    assert watchdog_interval(environment) == seconds
