"""The child that waits for events reports that it is alive, and ends with its parent."""

import itertools
from collections.abc import Callable

import pynvml
import pytest

from scrubber.adapters.children.child import Fault
from scrubber.adapters.nvidia.events import watch_events
from scrubber.adapters.nvidia.nvml import NvmlGpu

XID = pynvml.nvmlEventTypeXidCriticalError


class OneGpu(NvmlGpu):
    """A GPU that supports events of some types and accepts every registration."""

    def __init__(self, types: int | None) -> None:
        super().__init__(None, "0000:1b:00.0")
        self._types = types
        self.registered: list[object] = []

    def optional(self, function: str, *_: object) -> int | None:
        if function == "nvmlDeviceValidateInforom":
            return None
        assert function == "nvmlDeviceGetSupportedEventTypes"
        return self._types

    def call(self, function: str, *arguments: object) -> None:
        assert function == "nvmlDeviceRegisterEvents"
        self.registered.append(arguments[0])


class Parent:
    """A parent that is gone after ``patience`` waits."""

    def __init__(self, waits: int) -> None:
        self._left = waits
        self.messages: list[dict[str, object]] = []

    def send(self, message: dict[str, object]) -> None:
        self.messages.append(message)

    def is_parent_gone(self) -> bool:
        self._left -= 1
        return self._left < 0


def clock(step: float) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * step


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no event ever arrive."""

    def wait(_: object, __: int) -> object:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", lambda: "set")
    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", wait)


def test_event_child_sends_a_heartbeat_every_few_seconds() -> None:
    parent = Parent(24)
    watch_events(OneGpu(XID), parent, clock(0.5))  # type: ignore[arg-type]
    registered, inforom, *rest = parent.messages
    assert (registered, inforom) == ({"registered": XID}, {"inforom": True})
    assert rest == [{"watching": True}] * 2


def test_events_of_ordinary_work_are_not_registered() -> None:
    gpu = OneGpu(pynvml.nvmlEventTypeAll)
    watch_events(gpu, Parent(0), clock(0.5))  # type: ignore[arg-type]
    noise = pynvml.nvmlEventTypePState | pynvml.nvmlEventTypeClock | pynvml.nvmlEventTypeSingleBitEccError
    (types,) = gpu.registered
    assert isinstance(types, int)
    assert types & noise == 0
    assert types & XID
    assert types & pynvml.nvmlEventTypeSingleBitEccErrorStorm


@pytest.mark.parametrize("types", [None, 0, pynvml.nvmlEventTypeClock])
def test_gpu_without_relevant_events_is_reported_as_not_applicable(types: int | None) -> None:
    parent = Parent(9)
    with pytest.raises(Fault, match="reports no events") as raised:
        watch_events(OneGpu(types), parent, clock(0.5))  # type: ignore[arg-type]
    assert raised.value.code == "not-applicable"
    assert parent.messages == [{"inforom": True}]
