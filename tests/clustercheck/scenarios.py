"""The ways in which the first tenant's pod ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["SCENARIOS", "Deletion", "Scenario"]


class Deletion(Enum):
    """How the check deletes the first pod."""

    NONE = "none"
    GRACEFUL = "graceful"
    FORCED = "forced"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario.

    Attributes:
        end: what the writing program does at its end (``tenant.py``).
        exit_code: of its container, where that ends by itself.
        all_devices: whether both pods request every device of the node instead of one.
        same_container: whether the searching process is the next run of the same container.
    """

    name: str
    end: str
    exit_code: int | None
    deletion: Deletion = Deletion.NONE
    all_devices: bool = False
    same_container: bool = False


SCENARIOS = (
    Scenario("exits", "exit", 0),
    Scenario("is-killed", "kill", 137),
    Scenario("crashes-while-computing", "crash", 134),
    Scenario("is-deleted", "hold", None, Deletion.GRACEFUL),
    Scenario("is-force-deleted", "hold", None, Deletion.FORCED),
    Scenario("leaves-a-process", "leftover", 0),
    Scenario("runs-out-of-memory", "out-of-memory", 137),
    Scenario("container-restarts", "exit", 1, same_container=True),
    Scenario("has-all-devices", "exit", 0, all_devices=True),
)
