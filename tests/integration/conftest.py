"""Start the daemons and commands of all stages by forking an interpreter that has already imported their modules."""

import pytest

from scrubber.emulator import playground
from tests import forkserver


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground, "start_module", forkserver.start)
