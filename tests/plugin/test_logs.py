"""How the plugin logs. What a line looks like is in tests/observability/test_logging.py, for both daemons."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.logs import Reminder, about, logger
from plugin.server import asked_for
from scrubber.domain.errors import BadConfiguration


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_event_is_one_line_of_json_off_a_terminal() -> None:
    stream = io.StringIO()
    log = logger("auto", "info", stream)
    log.debug("not.asked-for")
    log.warning("handover.refused", code="away", told="two\nlines")
    (line,) = lines(stream)
    assert line["event"] == "handover.refused"
    assert line["level"] == "warning"
    assert line["told"] == "two\nlines"
    assert line["component"] == "plugin"
    assert "timestamp" in line


@pytest.mark.parametrize(("format_", "level"), [("xml", "info"), ("json", "loud")])
def test_a_format_or_level_that_does_not_exist_is_refused(format_: str, level: str) -> None:
    with pytest.raises(BadConfiguration, match="write one of"):
        logger(format_, level)


async def test_what_a_call_asks_for_is_on_its_lines_and_on_no_other_call_s() -> None:
    stream = io.StringIO()
    log, both = logger("json", "info", stream), asyncio.Barrier(2)

    async def call(resource: str) -> None:
        with about(resource=resource, devices=["sim-0"]):
            await both.wait()
            log.info("allocation.granted", devices=["sim-0", "sim-1"])
        log.info("service.there")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(call("a.b/c"))
        tasks.create_task(call("a.b/d"))
    granted = [line for line in lines(stream) if line["event"] == "allocation.granted"]
    assert {str(line["resource"]) for line in granted} == {"a.b/c", "a.b/d"}
    assert [line["devices"] for line in granted] == [["sim-0", "sim-1"]] * 2
    assert not any("resource" in line for line in lines(stream) if line["event"] == "service.there")


@pytest.mark.parametrize(
    ("request_", "devices"),
    [
        (kubelet.PreStartContainerRequest(devices_ids=["b", "a"]), ["a", "b"]),
        (
            kubelet.AllocateRequest(
                container_requests=[
                    kubelet.ContainerAllocateRequest(devices_ids=["c"]),
                    kubelet.ContainerAllocateRequest(devices_ids=["a"]),
                ]
            ),
            ["a", "c"],
        ),
        (kubelet.PreferredAllocationRequest(), None),
    ],
)
def test_what_a_call_asks_for_is_its_resource_and_its_devices(request_: object, devices: list[str] | None) -> None:
    assert asked_for("Any", "a.b/c", request_) == {
        "method": "Any",
        "resource": "a.b/c",
        **({} if devices is None else {"devices": devices}),
    }


def test_a_wait_is_said_once_then_at_intervals_and_its_end_once() -> None:
    stream = io.StringIO()
    now = 0.0
    reminder = Reminder(logger("json", "info", stream), every=30.0, clock=lambda: now)
    reminder.over("kubelet.there")
    for second in range(65):
        now = float(second)
        reminder.waiting("kubelet.away", sentence="no socket")
    reminder.waiting("kubelet.away", sentence="nobody answers")
    reminder.over("kubelet.there")
    reminder.over("kubelet.there")
    said = [(line["event"], line.get("sentence"), line["waited_seconds"]) for line in lines(stream)]
    assert said == [
        ("kubelet.away", "no socket", 0.0),
        ("kubelet.away", "no socket", 30.0),
        ("kubelet.away", "no socket", 60.0),
        ("kubelet.away", "nobody answers", 64.0),
        ("kubelet.there", None, 64.0),
    ]
