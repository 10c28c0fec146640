"""Bringing a GPU's settings back, through the driver's child."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.adapters.children.questions import QuestionPool
from scrubber.adapters.nvidia.question import about, gpu_of, texts
from scrubber.domain.device import Device

__all__ = ["NvidiaSettings"]


class NvidiaSettings:
    """:class:`scrubber.ports.Settings` of NVML.

    An instance has no settings of its own: nothing is written through it, because others live by its GPU's.
    """

    def __init__(self, questions: QuestionPool) -> None:
        self._questions = questions

    async def restore(self, device: Device, wanted: Mapping[str, str]) -> Mapping[str, str]:
        question = about(device, "restore", wanted=dict(wanted))
        return texts(await self._questions.ask(gpu_of(device), question), "values")
