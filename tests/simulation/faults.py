"""Faults of a device by name, so that a plot can be drawn from a seed and reproduced."""

from __future__ import annotations

from tests.simulation.cluster import SimulatedCluster

__all__ = ["inject_fault"]


def inject_fault(cluster: SimulatedCluster, number: int, fault: str) -> None:
    """Let ``fault`` happen to device ``number``.

    ``xid-95`` is an XID; ``says:nvlink-down`` a lasting condition; ``asks:reboot`` a recommendation of the driver;
    ``counts:retired_pages`` an increment of a counter of the device; ``flaw:on-chip`` a way in which its scrubs fail;
    anything else an attribute of the device.
    """
    gpu = cluster.gpu(number)
    kind, _, what = fault.partition(":")
    match kind:
        case "says":
            gpu.conditions[what] = "as read"
        case "asks":
            gpu.recovery = what
        case "counts":
            gpu.counters[what] = gpu.counters.get(what, 0) + 1
        case "flaw":
            gpu.flaws.add(what)
        case "ecc":
            gpu.ecc = (gpu.ecc or 0) + 1
        case "slow":
            gpu.slow = 20.0
        case "reset_fails" | "reset_missing":
            setattr(gpu, kind, "no reset today")
        case "settings":
            gpu.settings["compute-mode"] = "exclusive"
        case "hot":
            gpu.celsius = 120
        case "holders":
            cluster.unreadable.add(gpu.id)
        case _ if kind.startswith("xid-"):
            gpu.report_xid(int(kind.removeprefix("xid-")))
        case _:
            assert isinstance(getattr(gpu, kind), bool), fault
            setattr(gpu, kind, True)
