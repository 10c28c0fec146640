"""A scrub under way, which any number of callers can join and watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from scrubber.domain.evidence import Certificate, Outcome, Path, ScrubRecord, Step
from scrubber.engine import events
from scrubber.engine.views import ScrubNews
from scrubber.ports.device import Progress

__all__ = ["ScrubJob"]


class ScrubJob:
    """Its news are states, not a queue: whoever is slow sees the newest and the end, and blocks nobody.

    Attributes:
        ordered: a person ordered a reset with it.
        proved: the unused certificate of a device that was clean when it began: nobody was granted it since.
    """

    def __init__(self, record: ScrubRecord, *, ordered: bool = False, proved: Certificate | None = None) -> None:
        self.record = record
        self.ordered = ordered
        self.proved = proved
        self.certificate: Certificate | None = None
        self.waiters = 0
        self.task: asyncio.Task[None] | None = None
        self._news = ScrubNews(record.id, record.device)
        self._ended = asyncio.Event()
        self._moved = asyncio.Event()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def path(self) -> Path:
        return self.record.path

    @property
    def outcome(self) -> Outcome | None:
        return self.record.outcome

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for it."""
        return self.waiters > 0

    @property
    def step(self) -> Step | None:
        return self._news.step

    def begin(self, step: Step) -> None:
        self._tell(ScrubNews(self.id, self.record.device, step=step))

    def progress(self, progress: Progress) -> None:
        self._tell(ScrubNews(self.id, self.record.device, step=self._news.step, progress=progress))

    def end(self, record: ScrubRecord, certificate: Certificate | None) -> None:
        """The scrub is over and what it means is in the ledger (or could not be put there)."""
        self.record = record
        self.certificate = certificate
        self._ended.set()
        unexplained = events.unexplained(record, self.proved)
        self._tell(ScrubNews(self.id, record.device, finished=record, certificate=certificate, unexplained=unexplained))

    def _tell(self, news: ScrubNews) -> None:
        self._news = news
        self._moved.set()
        self._moved = asyncio.Event()

    async def over(self) -> None:
        """Wait for the end without making the scrub urgent."""
        await self._ended.wait()

    async def wait(self) -> ScrubRecord:
        """Join: the finished record. Cancelling this leaves the scrub alone."""
        self.waiters += 1
        try:
            await self._ended.wait()
        finally:
            self.waiters -= 1
        return self.record

    async def news(self, *, joined: bool) -> AsyncIterator[ScrubNews]:
        """Updates until the end, the last one with ``finished`` set."""
        self.waiters += 1
        try:
            while True:
                news, moved = self._news, self._moved
                yield replace(news, joined=joined)
                if news.finished is not None:
                    return
                await moved.wait()
        finally:
            self.waiters -= 1
