"""An eraser that stops reporting progress is given up long before its deadline, which depends on the device's size."""

from __future__ import annotations

import pytest

from scrubber.adapters.children.eraser_report import wait_for_report
from scrubber.adapters.children.process import Children
from scrubber.domain.errors import DriverTimeout
from scrubber.ports.device import EraseProgress


async def test_eraser_without_progress_is_reported_as_hung_with_its_pid() -> None:
    children = Children()
    child = await children.start("tests.adapters.wayward_child")
    received: list[EraseProgress] = []
    try:
        await child.send({"do": "hang"})
        with pytest.raises(DriverTimeout, match=rf"Process {child.pid} has not reported its progress for 0\.05 s"):
            await wait_for_report(child, received.append, silence_timeout=0.05)
    finally:
        await child.kill()
    assert received == []
