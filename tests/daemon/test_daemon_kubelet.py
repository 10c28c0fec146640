"""The reason for not trusting the kubelet is reported where operators see it: starts wait for that."""

from __future__ import annotations

import asyncio

from structlog.testing import CapturingLogger

from scrubber.daemon import _log_kubelet_trust
from scrubber.domain.assignment import Trust
from tests.world.timeline import in_virtual_time
from tests.world.world import a_world


@in_virtual_time
async def test_untrusted_kubelet_is_logged_once_and_logged_again_when_trusted() -> None:
    async with a_world(devices=1) as world:
        assert world.service is not None
        log = CapturingLogger()
        telling = asyncio.create_task(_log_kubelet_trust(world.node, world.clock, log))
        await world.run(12.0)
        assert log.calls == []
        world.kubelet.trust = Trust.UNREADABLE
        await world.run(20.0)
        world.kubelet.trust = Trust.TRUSTED
        await world.run(20.0)
        telling.cancel()
        assert [call.args for call in log.calls] == [("kubelet.untrusted",), ("kubelet.trusted",)]
        assert log.calls[0].kwargs["message"] == "the kubelet does not answer"
