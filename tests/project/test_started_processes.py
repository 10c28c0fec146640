"""Every place that starts a process: a yield of the node waits for all that the service has started."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_STARTS = re.compile(
    r"create_subprocess_(?:exec|shell)\(|\bsubprocess\.(?:run|Popen|call|check_\w+)\(|os\.(?:fork|posix_spawn|spawn\w+|system|popen)\("
)


def test_service_and_plugin_start_processes_only_where_they_are_counted() -> None:
    """A process that is not counted can keep the driver open on a node that is reported as free of it.

    A new place counts its processes in :class:`scrubber.adapters.children.process.Children`.
    """
    places = [
        path.relative_to(ROOT).as_posix()
        for package in ("scrubber", "plugin")
        for path in sorted((ROOT / package).rglob("*.py"))
        if _STARTS.search(path.read_text())
    ]
    assert [each for each in places if not each.startswith("scrubber/emulator/")] == [
        "scrubber/adapters/children/process.py",  # Children itself
        "scrubber/adapters/children/zygote_server.py",  # registered by the client of the zygote
        "scrubber/adapters/command/child.py",  # ends with its supervisor, which is a child
        "scrubber/adapters/nvidia/dcgm.py",  # dcgmi asks DCGM's host engine, and opens no device
        "scrubber/adapters/nvidia/smi.py",  # counted by Children.count_program
        "scrubber/adapters/sim/tenant.py",  # a simulated tenant, not the service
    ]
