"""What every test may ask for: a short directory for sockets, and one way to run properties.

Two things happen by themselves. Hypothesis measures no time: on a shared machine a deadline would fail for what the
neighbours do. And what Python compiles is kept, whatever the environment says: else each of the thousands of daemons
and children that the tests start would compile all that it imports.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
settings.register_profile("house", deadline=None, print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("house"), max_examples=2_000)
settings.load_profile("house")


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets below it (107 bytes in all); removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
