"""The life of one service process: what kill -9 ends, and what it does not.

Everything that the service does goes through ports that belong to a life. Once the life is over they do nothing any
more, so whatever its tasks still attempt while they unwind has no effect, as in a process that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from weakref import WeakSet

__all__ = ["Killed", "Life", "follow_lives", "in_the_world", "listen"]

T = TypeVar("T")

_LIFE: ContextVar[Life | None] = ContextVar("life", default=None)


class Killed(BaseException):
    """The process is gone: nothing of it runs any more. Like ``SystemExit``, no ``except Exception`` sees it."""


class Life:
    """From a start of the service to its end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = True
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()

    def check(self) -> None:
        """What every port does first."""
        if not self.alive:
            raise Killed(f"life {self.number} is over")

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A task of this life; the tasks that it starts are of this life too."""
        context = Context()
        context.run(_LIFE.set, self)
        return asyncio.get_running_loop().create_task(work, name=name, context=context)

    def end(self) -> None:
        """kill -9: at this very instant, between any two lines."""
        self.alive = False
        for task in list(self.tasks):
            task.add_done_callback(listen)
            task.cancel()


def listen(task: asyncio.Task[Any]) -> None:
    """Take note of how a task ended that nobody awaits any more."""
    if not task.cancelled():
        task.exception()


def in_the_world(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task that no service's end ends: a pod's, the kubelet's, an eraser's."""
    return asyncio.get_running_loop().create_task(work, name=name, context=Context())


def follow_lives(loop: asyncio.AbstractEventLoop) -> None:
    """Make every task of ``loop`` known to the life that started it."""

    def factory(
        loop: asyncio.AbstractEventLoop, work: Any, *, context: Context | None = None, **more: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context, **more)
        life = (context if context is not None else copy_context()).get(_LIFE)
        if life is not None:
            life.tasks.add(task)
        return task

    loop.set_task_factory(factory)
