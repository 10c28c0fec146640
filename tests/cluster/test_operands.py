"""The stand-in for an operator's DaemonSets, and objects of the API server's stand-in."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.operands import OperandsStandIn, holding_process
from tests.cluster.plugin_server import PluginApiServer

DCGM, EXPORTER = "nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.dcgm-exporter"


async def test_operands_run_exactly_while_their_label_is_true(tmp_path: Path) -> None:
    (tmp_path / "node").touch()
    async with PluginApiServer() as server:
        server.add_node("node-1", **{DCGM: "true", EXPORTER: "false"})
        operands = (holding_process(DCGM, [str(tmp_path / "node")]), holding_process(EXPORTER, []))
        async with OperandsStandIn(server, "node-1", *operands) as running:
            assert running.running.keys() == {DCGM}
            server.set_labels("node-1", {DCGM: "false", EXPORTER: "true"})
            await running.until(EXPORTER)
            server.set_labels("node-1", {EXPORTER: None})
            await running.until()
        assert running.log == [f"+{DCGM}", f"-{DCGM}", f"+{EXPORTER}", f"-{EXPORTER}"]
