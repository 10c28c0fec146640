"""Logging of the plugin. The format of a line is tested in tests/observability/test_logging.py, for both daemons."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.kubelet.server import call_fields
from plugin.logs import WaitLogger, create_logger, log_context
from scrubber.domain.errors import InvalidConfiguration


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_log_event_is_one_json_line_if_the_output_is_no_terminal() -> None:
    stream = io.StringIO()
    log = create_logger("auto", "info", stream)
    log.debug("not.requested")
    log.warning("handover.refused", code="unavailable", public_message="two\nlines")
    (line,) = lines(stream)
    assert line["event"] == "handover.refused"
    assert line["level"] == "warning"
    assert line["public_message"] == "two\nlines"
    assert line["component"] == "plugin"
    assert "timestamp" in line


@pytest.mark.parametrize(("format_", "level"), [("xml", "info"), ("json", "loud")])
def test_unknown_log_format_or_level_is_refused(format_: str, level: str) -> None:
    with pytest.raises(InvalidConfiguration, match="Use one of"):
        create_logger(format_, level)


async def test_log_lines_of_a_call_carry_its_resource_and_devices_and_other_lines_do_not() -> None:
    stream = io.StringIO()
    log, both = create_logger("json", "info", stream), asyncio.Barrier(2)

    async def call(resource: str) -> None:
        with log_context(resource=resource, devices=["sim-0"]):
            await both.wait()
            log.info("allocation.granted", devices=["sim-0", "sim-1"])
        log.info("service.available")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(call("a.b/c"))
        tasks.create_task(call("a.b/d"))
    granted = [line for line in lines(stream) if line["event"] == "allocation.granted"]
    assert {str(line["resource"]) for line in granted} == {"a.b/c", "a.b/d"}
    assert [line["devices"] for line in granted] == [["sim-0", "sim-1"]] * 2
    assert not any("resource" in line for line in lines(stream) if line["event"] == "service.available")


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
def test_call_fields_are_method_resource_and_devices(request_: object, devices: list[str] | None) -> None:
    assert call_fields("Any", "a.b/c", request_) == {
        "method": "Any",
        "resource": "a.b/c",
        **({} if devices is None else {"devices": devices}),
    }


def test_wait_is_logged_once_then_at_intervals_and_once_at_its_end() -> None:
    stream = io.StringIO()
    now = 0.0
    reminder = WaitLogger(create_logger("json", "info", stream), every=30.0, clock=lambda: now)
    reminder.log_ended("kubelet.available")
    for second in range(65):
        now = float(second)
        reminder.log_waiting("kubelet.unavailable", message="no socket")
    reminder.log_waiting("kubelet.unavailable", message="no answer")
    reminder.log_ended("kubelet.available")
    reminder.log_ended("kubelet.available")
    logged = [(line["event"], line.get("message"), line["waited_seconds"]) for line in lines(stream)]
    assert logged == [
        ("kubelet.unavailable", "no socket", 0.0),
        ("kubelet.unavailable", "no socket", 30.0),
        ("kubelet.unavailable", "no socket", 60.0),
        ("kubelet.unavailable", "no answer", 64.0),
        ("kubelet.available", None, 64.0),
    ]
