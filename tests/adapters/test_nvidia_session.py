"""Calls of NVML: GPU by GPU, with every error reported, and without invented values where it reports none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest

from scrubber.adapters.children.child import Fault
from scrubber.adapters.nvidia.driver_health import recovery_action_name, scrub_on_free_condition
from scrubber.adapters.nvidia.errors import DriverUnavailable, NvmlFault
from scrubber.adapters.nvidia.nvml import NvmlGpu, NvmlSession

GPU = NvmlGpu(None, "0000:1b:00.0")


def failing(*codes: int, then: Any = None) -> Callable[..., Any]:
    """Return a function of NVML that fails with each of ``codes`` in turn, and then returns ``then``."""
    left = list(codes)

    def function(*_: object) -> Any:
        if left:
            raise pynvml.NVMLError(left.pop(0))
        return then

    return function


def test_nvml_is_initialized_once_with_the_no_gpus_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags: list[int] = []
    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", flags.append)
    session = NvmlSession(tmp_path, tmp_path)
    session.open()
    session.open()
    assert flags == [pynvml.NVML_INIT_FLAG_NO_GPUS]


def test_driver_that_does_not_start_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", failing(9))
    with pytest.raises(DriverUnavailable, match="not loaded"):
        NvmlSession(tmp_path, tmp_path).open()


def test_reloaded_driver_is_initialized_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags: list[int] = []
    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", flags.append)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: flags.append(-1))
    proc = tmp_path / "nvidia"
    proc.mkdir()
    session = NvmlSession(proc, tmp_path)
    session.open()
    proc.rename(tmp_path / "before")
    proc.mkdir()
    session.open()
    assert flags == [pynvml.NVML_INIT_FLAG_NO_GPUS, -1, pynvml.NVML_INIT_FLAG_NO_GPUS]


@pytest.mark.parametrize("code", [3, 13, 22, 25, 26])
def test_optional_value_that_does_not_apply_is_none(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetSerial", failing(code, code))
    assert GPU.optional("nvmlDeviceGetSerial") is None
    with pytest.raises(NvmlFault, match=r"GPU 0000:1b:00\.0, nvmlDeviceGetSerial"):
        GPU.call("nvmlDeviceGetSerial")


@pytest.mark.parametrize("code", [1, 2, 4, 6, 14, 15, 16, 17, 21, 999, 4711])
def test_every_other_nvml_error_is_raised_for_optional_values(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetSerial", failing(code))
    with pytest.raises(NvmlFault) as caught:
        GPU.optional("nvmlDeviceGetSerial")
    assert caught.value.nvml_code == code


def test_function_missing_from_the_binding_does_not_apply() -> None:
    assert GPU.optional("nvmlDeviceGetSomethingOfTheFuture") is None


def test_text_that_is_not_utf8_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: b"\xff".decode())
    with pytest.raises(Fault, match="not text"):
        GPU.call("nvmlDeviceGetName")


def only(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """Make ``function`` read the list of compute processes, and remove all other lists."""
    for kind in ("Compute", "Graphics", "MPSCompute"):
        for version in (2, 3):
            monkeypatch.setattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses_v{version}", failing(*[3] * 9))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses_v2", function)


def row(pid: int) -> pynvml.c_nvmlProcessInfo_v2_t:
    return pynvml.c_nvmlProcessInfo_v2_t(pid, 10, 0xFFFFFFFF, 0xFFFFFFFF)


def test_list_that_grows_while_being_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, failing(7, 7, 7, then=[row(11)]))
    (entry,) = GPU.processes()
    assert (entry.pid, entry.memory, entry.kind, entry.gi, entry.ci) == (11, 10, "compute", None, None)


def test_list_that_keeps_growing_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, failing(*[7] * 4, then=[]))
    with pytest.raises(NvmlFault) as caught:
        GPU.processes()
    assert caught.value.code == "unreadable"


# --- fields


def field(kind: int, member: str, value: float, status: int = 0) -> pynvml.c_nvmlFieldValue_t:
    made = pynvml.c_nvmlFieldValue_t()
    made.valueType, made.nvmlReturn = kind, status
    setattr(made.value, member, value)
    return made


@pytest.mark.parametrize(
    ("kind", "member", "value"),
    [(0, "dVal", 3.0), (1, "uiVal", 3), (2, "ulVal", 3), (3, "ullVal", 1 << 40), (4, "sllVal", -3), (5, "siVal", -3)],
)
def test_field_values_are_read_by_their_type(
    monkeypatch: pytest.MonkeyPatch, kind: int, member: str, value: float
) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda *_: [field(kind, member, value)])
    assert GPU.fields([230]) == {230: value}


@pytest.mark.parametrize("status", [2, 3, 25])
def test_field_unknown_to_the_driver_is_none(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda *_: [field(1, "uiVal", 0, status)])
    assert GPU.fields([230]) == {230: None}


@pytest.mark.parametrize("answers", [[field(1, "uiVal", 0, 15)], [field(99, "uiVal", 0)]])
def test_field_that_cannot_be_read_is_a_fault(monkeypatch: pytest.MonkeyPatch, answers: Sequence[Any]) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda *_: answers)
    with pytest.raises(Fault):
        GPU.fields([230])


def test_unknown_recovery_action_is_named_by_its_number() -> None:
    assert (recovery_action_name(None), recovery_action_name(0), recovery_action_name(99)) == (
        None,
        "none",
        "unknown-99",
    )


# --- parameters of the kernel module


@pytest.mark.parametrize(
    ("parameters", "disabled"),
    [
        ('RegistryDwords: "RMDisableScrubOnFree=1"\n', True),
        ('RegistryDwords: "RmX=0;RMDisableScrubOnFree=0x1;RmY=2"\n', True),
        ("RmDisableScrubOnFree: 1\n", True),
        ('RegistryDwords: "RMDisableScrubOnFree=0"\n', False),
        ('RegistryDwords: "RMDisableScrubOnFree=0x0;RmY=1"\n', False),
        ('RegistryDwords: "RMDisableScrubOnFreeNot=1"\n', False),
        ('RegistryDwords: ""\n', False),
    ],
)
def test_module_option_that_disables_scrub_on_free_is_detected(tmp_path: Path, parameters: str, disabled: bool) -> None:
    (tmp_path / "params").write_text(parameters, encoding="ascii")
    assert bool(scrub_on_free_condition(tmp_path)) is disabled


def test_missing_module_parameters_file_yields_no_condition(tmp_path: Path) -> None:
    assert scrub_on_free_condition(tmp_path) == {}
