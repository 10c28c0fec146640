"""Streams, events, and the two interfaces below them."""

from __future__ import annotations

from cupy.cuda import driver, runtime
from cupy.cuda.stream import Event, Stream, get_elapsed_time

__all__ = ["Event", "Stream", "driver", "get_elapsed_time", "runtime"]
