"""One story for all tests that look at what Prometheus made of it; it is told when the first of them begins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.dashboards.story import Told, told


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """The story, over; its Prometheus answers. Its logs stay in pytest's directory for whoever reads a failure."""
    telling = told(tmp_path_factory.mktemp("story") / "records")
    with asyncio.Runner() as runner:
        yield runner.run(telling.__aenter__())
        runner.run(telling.__aexit__(None, None, None))
