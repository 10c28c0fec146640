"""The life of one service process: what kill -9 ends, and what it does not.

Everything that the service does goes through ports that belong to a life. After its end they do nothing, so that the
actions of its tasks during their cancellation have no effect, as in a process that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from weakref import WeakSet

__all__ = ["Killed", "Life", "follow_lives", "listen", "start_outside_service"]

T = TypeVar("T")

_LIFE: ContextVar[Life | None] = ContextVar("life", default=None)


class Killed(BaseException):
    """The process is gone: none of its code runs. Like ``SystemExit``, no ``except Exception`` catches it."""


class Life:
    """The time from a start of the service to its end.

    Attributes:
        ended: set at its end.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = True
        self.ended = asyncio.Event()
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()

    def check(self) -> None:
        """Raise Killed after the end of this life; every port calls it first."""
        if not self.alive:
            raise Killed(f"life {self.number} is over")

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task of this life; the tasks that it starts belong to this life, too."""
        context = Context()
        context.run(_LIFE.set, self)
        return asyncio.get_running_loop().create_task(work, name=name, context=context)

    def end(self) -> None:
        """Simulate kill -9: at this instant, between any two lines."""
        self.alive = False
        self.ended.set()
        for task in list(self.tasks):
            task.add_done_callback(listen)
            task.cancel()


def listen(task: asyncio.Task[Any]) -> None:
    """Retrieve the result of a task that is no longer awaited."""
    if not task.cancelled():
        task.exception()


def start_outside_service(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that no service's end affects: of a pod, the kubelet, an eraser."""
    return asyncio.get_running_loop().create_task(work, name=name, context=Context())


def follow_lives(loop: asyncio.AbstractEventLoop) -> None:
    """Register every task of ``loop`` with the life that started it."""

    def factory(
        loop: asyncio.AbstractEventLoop, work: Any, *, context: Context | None = None, **more: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context, **more)
        life = (context if context is not None else copy_context()).get(_LIFE)
        if life is not None:
            life.tasks.add(task)
        return task

    loop.set_task_factory(factory)
