"""Every error that NVML can return has one meaning here, and an actionable message."""

import pynvml
import pytest

from scrubber.adapters.children.request_pool import FAULT_TYPES
from scrubber.adapters.nvidia.errors import NVML_ERRORS, DriverUnavailable, NvmlErrorKind, NvmlFault, error_info

CODES = {name: value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}


@pytest.mark.parametrize(("name", "number"), sorted(CODES.items()))
def test_every_nvml_error_is_in_the_table(name: str, number: int) -> None:
    meaning = NVML_ERRORS[number]
    assert meaning.message.endswith(".")
    assert meaning.kind is NvmlErrorKind.NOT_APPLICABLE or meaning.kind.value in FAULT_TYPES


def test_error_table_contains_only_nvml_errors() -> None:
    assert set(NVML_ERRORS) == set(CODES.values())


def test_every_nvml_error_has_its_own_message() -> None:
    assert len({meaning.message for meaning in NVML_ERRORS.values()}) == len(NVML_ERRORS)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, NvmlErrorKind.LOST),
        (pynvml.NVML_ERROR_GPU_NOT_FOUND, NvmlErrorKind.LOST),
        (pynvml.NVML_ERROR_RESET_REQUIRED, NvmlErrorKind.UNREADABLE),
        (pynvml.NVML_ERROR_NO_DATA, NvmlErrorKind.UNREADABLE),
        (pynvml.NVML_ERROR_UNKNOWN, NvmlErrorKind.UNREADABLE),
        (pynvml.NVML_ERROR_IN_USE, NvmlErrorKind.HELD),
        (pynvml.NVML_ERROR_TIMEOUT, NvmlErrorKind.STUCK),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, NvmlErrorKind.AWAY),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, NvmlErrorKind.AWAY),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, NvmlErrorKind.NOT_APPLICABLE),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, NvmlErrorKind.NOT_APPLICABLE),
        (pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, NvmlErrorKind.NOT_APPLICABLE),
    ],
)
def test_each_nvml_error_maps_to_its_kind(number: int, kind: NvmlErrorKind) -> None:
    assert error_info(number).kind is kind


def test_unknown_nvml_error_is_unreadable_and_never_healthy() -> None:
    assert error_info(4711).kind is NvmlErrorKind.UNREADABLE


def test_unsupported_value_is_a_fault_where_the_value_is_required() -> None:
    fault = NvmlFault(pynvml.NVML_ERROR_NOT_SUPPORTED, "GPU 0000:1b:00.0, nvmlDeviceGetUUID")
    assert (fault.code, fault.not_applicable) == ("unreadable", True)
    assert fault.message.startswith("GPU 0000:1b:00.0, nvmlDeviceGetUUID: ")


@pytest.mark.parametrize("number", sorted(CODES.values()))
def test_nvml_initialization_error_is_no_device_fault(number: int) -> None:
    fault = DriverUnavailable(number)
    assert fault.code == "away"
    assert NVML_ERRORS[number].message in fault.message


def test_missing_driver_and_driver_version_mismatch_are_distinguished() -> None:
    missing, other, no_library = (
        DriverUnavailable(number).message
        for number in (
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        )
    )
    assert missing.startswith("The driver is not loaded:")
    assert other.startswith("The versions of the driver and its library differ: reboot")
    assert no_library.startswith("The driver's library (libnvidia-ml.so.1) was not found:")
