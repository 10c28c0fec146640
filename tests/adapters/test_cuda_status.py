"""Every CUDA status has one meaning for the service, and an unknown one never means healthy."""

import os
import subprocess
import sys

import pytest

from scrubber.adapters.children.request_pool import FAULT_TYPES
from scrubber.adapters.cuda.status import STATUSES, fault_for_status

NAMES = """
import json, sys
from cupy.cuda.runtime import CUDARuntimeError
print(json.dumps([str(CUDARuntimeError(int(status))) for status in sys.argv[1:]]))
"""


def test_status_table_uses_cudas_own_names() -> None:
    command = [sys.executable, "-c", NAMES, *map(str, STATUSES)]
    environment = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    for meaning in STATUSES.values():
        assert f'"cudaError{meaning.name}: ' in found


@pytest.mark.parametrize("status", STATUSES)
def test_status_becomes_a_fault_with_a_code_and_a_complete_message(status: int) -> None:
    fault = fault_for_status(status, "cudaErrorOfSomeKind: details", "The memory could not be allocated")
    meaning = STATUSES[status]
    assert fault.code == meaning.code
    assert fault.code in FAULT_TYPES
    assert fault.message.startswith("The memory could not be allocated: ")
    assert fault.message.endswith(".")
    assert meaning.message in fault.message
    assert "cudaErrorOfSomeKind" in fault.message


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ((3, 35, 222, 802, 803), "away"),
        ((2, 46, 216), "held"),
        ((100, 214, 220, 226, 700, 714, 715, 716, 717, 718, 719, 999), "unreadable"),
    ],
)
def test_status_unrelated_to_a_device_maps_to_no_device_fault(statuses: tuple[int, ...], code: str) -> None:
    assert {fault_for_status(status, "", "").code for status in statuses} == {code}


@pytest.mark.parametrize("status", [1, 4, 720, 12345])
def test_unknown_status_makes_the_device_unreadable(status: int) -> None:
    fault = fault_for_status(status, "cudaErrorUnheardOf", "The device failed")
    assert (fault.code, "cudaErrorUnheardOf" in fault.message) == ("unreadable", True)


def test_missing_library_is_no_device_fault() -> None:
    fault = fault_for_status(None, "libcuda.so.1: cannot open shared object file", "No context could be created")
    assert (fault.code, "install or load the driver" in fault.message) == ("away", True)
