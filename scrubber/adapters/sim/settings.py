"""Bringing a simulated device's settings back, through the driver's child."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.adapters.children.questions import QuestionPool
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.telemetry import about, texts
from scrubber.domain.device import Device

__all__ = ["SimSettings"]


class SimSettings:
    """:class:`scrubber.ports.Settings` of ``settings.json``."""

    def __init__(self, inventory: SimInventory, questions: QuestionPool) -> None:
        self._inventory = inventory
        self._questions = questions

    async def restore(self, device: Device, wanted: Mapping[str, str]) -> Mapping[str, str]:
        question = about(self._inventory.find(device), "restore", wanted=dict(wanted))
        return texts(await self._questions.ask(device.id, question), "values")
