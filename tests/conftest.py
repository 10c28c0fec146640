"""Configuration of all tests: a short directory for sockets, Hypothesis profiles, bytecode caching and SIGINT.

- Hypothesis applies no deadline, because load on a shared machine would fail the test, and uses the same examples in
  every run, so that a new failure is caused by a change.
- Compiled bytecode is written independent of the environment: otherwise each of the thousands of daemons and
  children that the tests start would compile all that it imports.
- The device plugin sees no host: how the container runtime of this machine is configured must not matter.
- SIGINT always interrupts: a shell without job control starts background commands with SIGINT ignored, and their
  children inherit that.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["SCRUBBER_HOST_ROOT_CTR_PATH"] = "/nonexistent"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "house", deadline=None, print_blob=True, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("house"), derandomize=False, max_examples=2_000)
settings.load_profile("house")


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Provide a directory with a path short enough for Unix sockets below it (107 bytes in all); removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
