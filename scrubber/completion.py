"""Runs work that must not be left half done to its end: a commit with its application, a reset, a note on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_to_completion"]

T = TypeVar("T")


async def run_to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` to its end even if the caller is cancelled; the cancellation is raised afterwards.

    A commit is applied inside the same ``coroutine``: a caller that was cancelled between the two would otherwise leave
    a state in memory that is older than the ledger.
    """
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as stop:
            cancelled = stop
    if cancelled is not None:
        raise cancelled from task.exception()
    return task.result()
