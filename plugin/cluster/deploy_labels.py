"""Labels of the node by which others ask for the GPU driver: followed, and turned into a request to yield the node.

Operators that replace the driver, partition or reset GPUs first set the deploy label of each component to a value other
than "true", such as "paused-for-driver-upgrade", and wait until its pods are gone. A component that stays, because it
runs beside Kubernetes or its pods tolerate everything, lets go of the driver instead.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NoReturn, Protocol

from plugin.cluster.errors import ClusterError
from plugin.logs import Logger, WaitLogger
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["LABEL_KEY", "DeployLabels", "NodeLabels", "parse_label_keys", "yield_reason"]

_DEPLOYED = "true"
_LOG_INTERVAL = 600.0
_MAX_BACKOFF = 60.0
_RESTART_SECONDS = 1.0
"""The least time between a watch that ended as it should and the next one."""
_MAX_REASON_CHARS = 500
"""The service accepts no longer reason."""


_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY = re.compile(rf"([a-z0-9][-a-z0-9.]{{0,251}}[a-z0-9]/)?{_NAME}")


def parse_label_keys(text: str) -> tuple[str, ...]:
    """Return the keys of labels in ``text``, separated by commas; each counts once.

    Raises:
        InvalidConfiguration: one of them is no key of a label.
    """
    keys = tuple(dict.fromkeys(key for part in text.split(",") if (key := part.strip())))
    for key in keys:
        if not LABEL_KEY.fullmatch(key):
            raise InvalidConfiguration(
                f'--yield-labels: "{key}" is not the key of a label. Use for example nvidia.com/gpu.deploy.client.'
            )
    return keys


class NodeLabels(Protocol):
    """The labels of this node, from a client of its own: it is busy as long as it watches."""

    def watch_labels(self) -> AsyncIterator[Mapping[str, str]]:
        """Yield the labels, now and after each change; end after some minutes, to be called again.

        Raises:
            ClusterError: the API server does not answer, or refuses.
        """
        ...

    async def close(self) -> None: ...


def yield_reason(labels: Mapping[str, str], keys: Sequence[str]) -> str:
    """Return why the node is to be yielded: labels of ``keys`` with another value than "true"; empty if there is none.

    A label that is missing or empty requests nothing: no operator manages it.
    """
    asked = [f"{key} is {labels[key]!r}" for key in keys if labels.get(key, "") not in {"", _DEPLOYED}]
    reason = f"node label {', '.join(asked)}" if asked else ""
    return reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[: _MAX_REASON_CHARS - 1]}…"


class DeployLabels:
    """Follows the labels of the node.

    Args:
        connect: creates the client; called in a thread, because that loads its library.
        keys: keys of the labels.
        on_reason: called with the result of :func:`yield_reason`. While the API server does not answer, the last one
            stays valid.
        jitter: random, in [0, 1).
    """

    def __init__(
        self,
        connect: Callable[[], NodeLabels],
        keys: Sequence[str],
        on_reason: Callable[[str], None],
        *,
        log: Logger,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self._connect = connect
        self._keys = tuple(keys)
        self._on_reason = on_reason
        self._reminder = WaitLogger(log, every=_LOG_INTERVAL, clock=clock)
        self._jitter = jitter

    async def run(self) -> NoReturn:
        """Follow the labels until cancelled."""
        node = await asyncio.to_thread(self._connect)
        failures = 0
        try:
            while True:
                try:
                    async for labels in node.watch_labels():
                        failures = 0
                        self._reminder.log_ended("cluster.labels-watched", message=None)
                        self._on_reason(yield_reason(labels, self._keys))
                except ClusterError as error:
                    failures += 1
                    self._reminder.log_waiting("cluster.label-watch-failed", message=str(error))
                    pause = max(error.retry_after, min(_MAX_BACKOFF, 2.0 ** min(failures, 20)))
                    await asyncio.sleep(pause * (0.5 + 0.5 * self._jitter()))
                else:
                    await asyncio.sleep(_RESTART_SECONDS * (1 + self._jitter()))
        finally:
            await node.close()
