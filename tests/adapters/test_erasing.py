"""An eraser that says nothing any more is given up long before its deadline, which goes by the size of its device."""

from __future__ import annotations

import pytest

from scrubber.adapters.children.erasing import listen
from scrubber.adapters.children.process import Children
from scrubber.domain.errors import Stuck
from scrubber.ports.device import Progress


async def test_a_child_that_hangs_in_mid_work_is_stuck_and_named() -> None:
    children = Children()
    child = await children.start("tests.adapters.wayward_child")
    heard: list[Progress] = []
    try:
        await child.send({"do": "hang"})
        with pytest.raises(Stuck, match=rf"Process {child.pid} has not said for 0\.05 s how far it is"):
            await listen(child, heard.append, silence=0.05)
    finally:
        await child.kill()
    assert heard == []
