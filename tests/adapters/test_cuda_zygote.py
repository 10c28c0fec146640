"""Children that the CUDA zygote forks: programs that see one device, in an environment that the service defines."""

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.adapters.cuda.erasure import CudaEraser
from scrubber.adapters.cuda.gpu_jobs import GpuJobRunner
from scrubber.adapters.cuda.programs import DIAGNOSIS_MODULE, ERASER_MODULE, ProgramLauncher
from scrubber.domain.errors import Unavailable
from tests.adapters.cuda_rig import CudaRig, cuda_rig, request

PROGRAM = "tests.adapters.wayward_child"
VARIABLES = "CUDA_VISIBLE_DEVICES CUDA_MPS_PIPE_DIRECTORY CUDA_CACHE_PATH CUDA_MODULE_LOADING OPENBLAS_NUM_THREADS HOME"
LONG = 30.0


@pytest.fixture
async def rig(short_tmp: Path) -> AsyncIterator[CudaRig]:
    async with cuda_rig(short_tmp, modules=(PROGRAM, ERASER_MODULE, DIAGNOSIS_MODULE)) as made:
        yield made


async def fork_and_report(rig: CudaRig, number: int) -> Message:
    child = await rig.programs.start(PROGRAM, rig.device(number))
    answer = parse_answer(await child.call({"do": "tell", "variables": VARIABLES}, LONG))
    assert await child.kill()
    return answer


async def test_forked_program_sees_only_its_own_device_and_a_clean_environment(
    rig: CudaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "another-device")
    monkeypatch.setenv("HOME", "/root")
    answers = await asyncio.gather(fork_and_report(rig, 0), fork_and_report(rig, 1))
    for number, answer in enumerate(answers):
        assert answer["variables"] == {
            "CUDA_VISIBLE_DEVICES": rig.device(number).id,
            "CUDA_MPS_PIPE_DIRECTORY": str(rig.state / "no-mps"),
            "CUDA_CACHE_PATH": str(rig.state / "cuda-cache"),
            "CUDA_MODULE_LOADING": "EAGER",
            "OPENBLAS_NUM_THREADS": "1",
            "HOME": None,
        }
        assert (answer["threads"], answer["nice"]) == (1, 19)


async def test_program_directories_are_private_to_the_service_user(rig: CudaRig) -> None:
    (rig.state / "cuda-cache").mkdir(mode=0o777)
    (rig.state / "cuda-cache").chmod(0o777)
    await fork_and_report(rig, 0)
    for name in ("cuda-cache", "no-mps"):
        assert stat.S_IMODE((rig.state / name).stat().st_mode) == 0o700


async def test_program_directory_that_is_a_symlink_is_not_used(rig: CudaRig, tmp_path: Path) -> None:
    (rig.state / "no-mps").symlink_to(tmp_path)
    with pytest.raises(Unavailable, match="not a directory of this user"):
        await rig.programs.start(PROGRAM, rig.device())


async def test_zygote_never_opens_a_device(rig: CudaRig) -> None:
    await rig.erase(rig.device())
    zygote = rig.programs.zygote.pid
    opened = [str(each.resolve()) for each in Path(f"/proc/{zygote}/fd").iterdir()]
    assert not [each for each in opened if each.startswith(("/dev/tty", "/dev/pts", str(rig.machine.root)))]
    assert len(list(Path(f"/proc/{zygote}/task").iterdir())) == 1


async def test_missing_driver_with_real_cupy_is_no_device_fault(rig: CudaRig) -> None:
    """Uses CuPy itself, on a machine without a GPU: it is imported, forked from, and used to open a context."""
    children = Children()
    programs = ProgramLauncher(children, rig.state)
    eraser = CudaEraser(GpuJobRunner(programs, rig.gpu, rig.locks))
    try:
        for _ in range(2):
            with pytest.raises(Unavailable, match="No context could be created"):
                await eraser.erase(rig.device(), request(), lambda _: None)
    finally:
        await children.close()
    assert rig.gpu.mode(rig.device()) == "default"
