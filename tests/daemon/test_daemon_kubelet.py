"""The reason for not trusting the kubelet is reported where operators see it: starts wait for that."""

from __future__ import annotations

import asyncio

from structlog.testing import CapturingLogger

from scrubber.daemon import _log_kubelet_trust
from scrubber.domain.assignment import Trust
from tests.simulation.cluster import simulated_cluster
from tests.simulation.timeline import in_virtual_time


@in_virtual_time
async def test_untrusted_kubelet_is_logged_once_and_logged_again_when_trusted() -> None:
    async with simulated_cluster(devices=1) as cluster:
        assert cluster.service is not None
        log = CapturingLogger()
        logging_task = asyncio.create_task(_log_kubelet_trust(cluster.node, cluster.clock, log))
        await cluster.run(12.0)
        assert log.calls == []
        cluster.kubelet.trust = Trust.UNREADABLE
        await cluster.run(20.0)
        cluster.kubelet.trust = Trust.TRUSTED
        await cluster.run(20.0)
        logging_task.cancel()
        assert [call.args for call in log.calls] == [("kubelet.untrusted",), ("kubelet.trusted",)]
        assert log.calls[0].kwargs["message"] == "the kubelet does not answer"
