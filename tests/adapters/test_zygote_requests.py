"""What a zygote answers wrongly is never taken for a child, and leaves neither a process nor a descriptor behind."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

import scrubber
from scrubber.adapters.children.process import ChildNotStarted, Children
from scrubber.adapters.children.zygote_client import Zygote
from tests.adapters.shortage import descriptors_left

MODULE = "tests.adapters.wayward_zygote"
ROOT = str(Path(scrubber.__file__).parent.parent)
LONG = 30.0


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    made = Children(kill_timeout=LONG)
    yield made
    await made.close()
    assert made.pids() == frozenset()


@pytest.fixture
def zygote(children: Children) -> Callable[..., Zygote]:
    def create(*arguments: str) -> Zygote:
        return Zygote(children, MODULE, programs=arguments, environment={"PYTHONPATH": ROOT})

    return create


def open_descriptors() -> frozenset[tuple[str, str]]:
    """The descriptors of this process with what they refer to; those of earlier tests may disappear at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists the directory
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(found)


async def no_process_left(children: Children) -> None:
    await children.close()
    assert children.pids() == frozenset()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("short", "cannot fork"),
        ("close", "cannot fork"),
        ("garbage", "cannot fork"),
        ("pid-zero", "the invalid PID 0"),
        ("pid-negative", "the invalid PID -7"),
        ("pid-text", "the invalid PID '7'"),
        ("pid-missing", "the invalid PID None"),
        ("pid-boolean", "the invalid PID True"),
        ("pid-fraction", "the invalid PID 1.5"),
    ],
)
async def test_invalid_answer_is_tried_once_more_with_a_new_zygote_and_then_refused(
    children: Children, zygote: Callable[..., Zygote], how: str, reason: str
) -> None:
    bad, before = zygote(how), open_descriptors()
    with pytest.raises(ChildNotStarted, match=f"zygote .{MODULE}. cannot fork") as refused:
        await bad.fork("program")
    assert reason in str(refused.value)
    assert children.starts[MODULE] == 2
    assert bad.pid is None
    await no_process_left(children)
    assert not open_descriptors() - before


@pytest.mark.parametrize("how", ["short", "close", "garbage", "pid-zero"])
async def test_zygote_that_fails_once_is_replaced_without_an_error(
    children: Children, zygote: Callable[..., Zygote], tmp_path: Path, how: str
) -> None:
    replaced = zygote(how, str(tmp_path / "marker"))
    await replaced.warm_up()
    assert children.starts[MODULE] == 2
    await replaced.warm_up()
    assert children.starts[MODULE] == 2


@pytest.mark.parametrize("count", [0, 2])
async def test_answer_without_exactly_one_pidfd_is_no_child(
    children: Children, zygote: Callable[..., Zygote], count: int
) -> None:
    bad = zygote(f"descriptors-{count}")
    await bad.warm_up()
    before = open_descriptors()
    with pytest.raises(ChildNotStarted, match="too many open files"):
        await bad.fork("program")
    assert not open_descriptors() - before
    assert children.starts == {MODULE: 1}
    assert bad.pid is not None, "it keeps its other children"


async def test_request_without_a_free_descriptor_is_refused_and_the_zygote_stays(
    children: Children, zygote: Callable[..., Zygote]
) -> None:
    good = zygote("good")
    await good.warm_up()
    first = good.pid
    with descriptors_left(0), pytest.raises(ChildNotStarted, match="cannot be started"):
        await good.fork("program")
    await good.warm_up()
    assert good.pid == first


async def test_closed_zygote_starts_no_process(children: Children, zygote: Callable[..., Zygote]) -> None:
    closed = zygote("good")
    await closed.close()
    with pytest.raises(ChildNotStarted, match="the service is stopping"):
        await closed.fork("program")
    assert children.starts == {}
