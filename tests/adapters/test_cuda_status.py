"""Every status of CUDA means one thing to the service, and an unknown one never means health."""

import os
import subprocess
import sys

import pytest

from scrubber.adapters.children.questions import FAULTS
from scrubber.adapters.cuda.status import STATUSES, fault_of

NAMES = """
import json, sys
from cupy.cuda.runtime import CUDARuntimeError
print(json.dumps([str(CUDARuntimeError(int(status))) for status in sys.argv[1:]]))
"""


def test_the_table_calls_each_status_what_cuda_calls_it() -> None:
    command = [sys.executable, "-c", NAMES, *map(str, STATUSES)]
    environment = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    for meaning in STATUSES.values():
        assert f'"cudaError{meaning.name}: ' in found


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_becomes_a_fault_that_the_parent_knows_and_a_whole_sentence(status: int) -> None:
    fault = fault_of(status, "cudaErrorOfSomeKind: told", "The memory could not be taken")
    meaning = STATUSES[status]
    assert fault.code == meaning.code
    assert fault.code in FAULTS
    assert fault.sentence.startswith("The memory could not be taken: ")
    assert fault.sentence.endswith(".")
    assert meaning.words in fault.sentence
    assert "cudaErrorOfSomeKind" in fault.sentence


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ((3, 35, 222, 802, 803), "away"),
        ((2, 46, 216), "held"),
        ((100, 214, 220, 226, 700, 714, 715, 716, 717, 718, 719, 999), "unreadable"),
    ],
)
def test_what_is_no_device_s_fault_blames_none(statuses: tuple[int, ...], code: str) -> None:
    assert {fault_of(status, "", "").code for status in statuses} == {code}


@pytest.mark.parametrize("status", [1, 4, 720, 12345])
def test_a_status_that_nobody_foresaw_makes_the_device_unreadable(status: int) -> None:
    fault = fault_of(status, "cudaErrorUnheardOf", "The device failed")
    assert (fault.code, "cudaErrorUnheardOf" in fault.sentence) == ("unreadable", True)


def test_a_library_that_is_not_there_is_no_device_s_fault() -> None:
    fault = fault_of(None, "libcuda.so.1: cannot open shared object file", "No context could be opened")
    assert (fault.code, "install the driver" in fault.sentence) == ("away", True)
