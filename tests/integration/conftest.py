"""Start the daemons and commands of all stages by forking an interpreter that has already imported their modules.

The children of services are forked, too, by a process that is no child of the service for any test.
"""

from collections.abc import Mapping
from functools import partial

import pytest

from scrubber.emulator import playground
from scrubber.emulator.playground import Daemon, Playground
from tests import forkserver
from tests.forked_children import without_forking_process


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    child_processes = Playground.child_processes

    def others(daemon: Daemon) -> Mapping[int, int]:
        found = child_processes(daemon)
        return {pid: found[pid] for pid in without_forking_process(found)}

    monkeypatch.setattr(playground, "start_module", partial(forkserver.start, forks_children=True))
    monkeypatch.setattr(Playground, "child_processes", staticmethod(others))
