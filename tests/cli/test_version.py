"""``scrubber version``: the version of the command, and whether the running service has the same."""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber import __version__
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import PermissionDenied
from tests.cli.stage import Service, run, serving
from tests.cli.terminal import WIDTHS, at_terminal


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Service]:
    async with serving(short_tmp) as service:
        service.info = pb.ServiceInfo(version=__version__)
        yield service


async def test_version_is_one_line_and_contacts_no_service(service: Service, short_tmp: Path) -> None:
    ended = await run(short_tmp, "version")
    assert (ended.code, ended.out, ended.err) == (0, f"{__version__}\n", "")
    assert service.requests == []


async def test_json_contains_the_runtime_environment(short_tmp: Path) -> None:
    ended = await run(short_tmp, "version", "-o", "json")
    assert ended.json == {
        "apiVersion": "cli.scrubber.dev/v1",
        "kind": "Version",
        "clientVersion": __version__,
        "pythonVersion": platform.python_version(),
        "serviceVersion": None,
    }


async def test_service_of_the_same_version_exits_with_zero(service: Service, short_tmp: Path) -> None:
    ended = await run(short_tmp, "version", "--service", "-o", "json")
    assert (ended.code, ended.json["serviceVersion"], ended.err) == (0, __version__, "")


@pytest.mark.parametrize("columns", WIDTHS)
async def test_service_of_another_version_exits_with_one_and_names_the_remedy(
    service: Service, short_tmp: Path, columns: int
) -> None:
    service.info = pb.ServiceInfo(version="9.9\x1b[2J")
    result = await at_terminal(
        "version", "--service", columns=columns, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)}
    )
    assert result.code == 1
    shown = " ".join(result.text.split())
    assert f"client {__version__}" in shown
    assert "service 9.9\N{REPLACEMENT CHARACTER}[2J" in shown
    assert f"restart it to run {__version__}." in shown


async def test_unavailable_or_refusing_service_exits_with_one(service: Service, short_tmp: Path) -> None:
    away = await run(short_tmp / "nowhere", "version", "--service")
    assert (away.code, away.out) == (1, "")
    assert "is not reachable" in away.err
    service.error = PermissionDenied("Not you.")
    refused = await run(short_tmp, "version", "--service")
    assert (refused.code, refused.out) == (3, "")
    assert "Not you." in refused.err
