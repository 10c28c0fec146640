"""Every error that NVML can answer has one meaning here, and a sentence that somebody can act on."""

import pynvml
import pytest

from scrubber.adapters.children.questions import FAULTS
from scrubber.adapters.nvidia.errors import MEANINGS, DriverAway, Kind, NvmlFault, meaning_of

CODES = {name: value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}


@pytest.mark.parametrize(("name", "number"), sorted(CODES.items()))
def test_every_error_of_nvml_is_in_the_table(name: str, number: int) -> None:
    meaning = MEANINGS[number]
    assert meaning.sentence.endswith(".")
    assert meaning.kind is Kind.NOT_APPLICABLE or meaning.kind.value in FAULTS


def test_the_table_holds_nothing_that_nvml_does_not_answer() -> None:
    assert set(MEANINGS) == set(CODES.values())


def test_every_error_has_a_sentence_of_its_own() -> None:
    assert len({meaning.sentence for meaning in MEANINGS.values()}) == len(MEANINGS)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, Kind.LOST),
        (pynvml.NVML_ERROR_GPU_NOT_FOUND, Kind.LOST),
        (pynvml.NVML_ERROR_RESET_REQUIRED, Kind.UNREADABLE),
        (pynvml.NVML_ERROR_NO_DATA, Kind.UNREADABLE),
        (pynvml.NVML_ERROR_UNKNOWN, Kind.UNREADABLE),
        (pynvml.NVML_ERROR_IN_USE, Kind.HELD),
        (pynvml.NVML_ERROR_TIMEOUT, Kind.STUCK),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, Kind.AWAY),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, Kind.AWAY),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, Kind.NOT_APPLICABLE),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, Kind.NOT_APPLICABLE),
        (pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, Kind.NOT_APPLICABLE),
    ],
)
def test_what_follows_from_an_error(number: int, kind: Kind) -> None:
    assert meaning_of(number).kind is kind


def test_an_error_that_nobody_knows_is_unreadable_and_never_fine() -> None:
    assert meaning_of(4711).kind is Kind.UNREADABLE


def test_what_does_not_apply_is_a_fault_where_the_value_is_needed() -> None:
    fault = NvmlFault(pynvml.NVML_ERROR_NOT_SUPPORTED, "GPU 0000:1b:00.0, nvmlDeviceGetUUID")
    assert (fault.code, fault.not_applicable) == ("unreadable", True)
    assert fault.sentence.startswith("GPU 0000:1b:00.0, nvmlDeviceGetUUID: ")


@pytest.mark.parametrize("number", sorted(CODES.values()))
def test_whatever_keeps_nvml_from_starting_is_no_fault_of_a_device(number: int) -> None:
    fault = DriverAway(number)
    assert fault.code == "away"
    assert MEANINGS[number].sentence in fault.sentence


def test_a_missing_driver_and_a_driver_of_another_version_are_told_apart() -> None:
    missing, other, no_library = (
        DriverAway(number).sentence
        for number in (
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        )
    )
    assert missing.startswith("The driver is not loaded:")
    assert other.startswith("The driver and its library are of different versions: reboot")
    assert no_library.startswith("The driver's library (libnvidia-ml.so.1) is not found:")
