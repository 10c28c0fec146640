"""The daemons and commands of all stages begin in a fork of an interpreter that is warm already."""

import pytest

from scrubber.emulator import playground
from tests import forkserver


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground, "start_module", forkserver.start)
