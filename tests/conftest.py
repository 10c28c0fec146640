"""What every test may ask for: a short directory for sockets, and one way to run properties.

Three things happen by themselves. Hypothesis measures no time: on a shared machine a deadline would fail for what the
neighbours do; and it looks at the same examples each time, so that what fails is what was changed. What Python compiles is kept, whatever the environment says: else each of the thousands of daemons and
children that the tests start would compile all that it imports. And an interrupt interrupts: a shell without job control
starts in the background what ignores it, and what that starts inherits it.
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
    """A directory whose path is short enough for Unix sockets below it (107 bytes in all); removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
