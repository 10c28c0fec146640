"""Configuration of all tests: a short directory for sockets, Hypothesis profiles, bytecode caching and SIGINT.

- How many examples searching tests try is declared in ``tests/depth.py``.
- Compiled bytecode is written independent of the environment: otherwise each of the thousands of daemons and
  children that the tests start would compile all that it imports.
- The device plugin sees no host: how the container runtime of this machine is configured must not matter.
- The garbage collector rarely runs, and not at all until every test is collected: what is loaded is never garbage, and
  the tests of decisions and of the simulated cluster would spend a fifth of their time in it.
- SIGINT always interrupts: a shell without job control starts background commands with SIGINT ignored, and their
  children inherit that.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.depth import register_profiles

gc.disable()
os.environ["SCRUBBER_HOST_ROOT_CTR_PATH"] = "/nonexistent"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
register_profiles()


def pytest_collection_finish() -> None:
    """Exempt everything loaded so far from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    gc.enable()


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Provide a directory with a path short enough for Unix sockets below it (107 bytes in all); removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
