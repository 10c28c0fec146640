"""One scenario for all tests of Prometheus' results; it is run when the first of them begins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from scrubber.emulator import playground
from tests import forkserver
from tests.dashboards.scenario import FinishedScenario, run_scenario


@pytest.fixture(scope="session")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedScenario]:
    """Provide the finished scenario with its Prometheus still running.

    Its logs stay in pytest's directory for the analysis of failures.
    """
    running = run_scenario(tmp_path_factory.mktemp("story") / "records")
    with pytest.MonkeyPatch.context() as patched, asyncio.Runner() as runner:
        patched.setattr(playground, "start_module", forkserver.start)
        yield runner.run(running.__aenter__())
        runner.run(running.__aexit__(None, None, None))
