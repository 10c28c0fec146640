"""One scenario for all tests of Prometheus' results; it is run when the first of them begins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.dashboards.story import Told, told


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """Provide the finished scenario with its Prometheus still running.

    Its logs stay in pytest's directory for the analysis of failures.
    """
    telling = told(tmp_path_factory.mktemp("story") / "records")
    with asyncio.Runner() as runner:
        yield runner.run(telling.__aenter__())
        runner.run(telling.__aexit__(None, None, None))
