"""Fork the children of backends from an interpreter that has already imported their modules.

Not the erasers and diagnoses of AMD: a forked process runs no destructors of libraries, and the stand-in for HIP releases
its memory in one. The tests of how children are started start them as the service does.
"""

import asyncio

import pytest

from tests import forkserver

FORKED = ("test_amd_", "test_command_", "test_composite_", "test_cuda_", "test_nvidia_", "test_sim_")


@pytest.fixture(autouse=True)
def forked_children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.name.startswith(FORKED):
        monkeypatch.setattr(asyncio, "create_subprocess_exec", forkserver.start_child)
