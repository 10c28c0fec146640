"""Resource shortage on a node for the duration of a test."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["descriptors_left"]


@contextmanager
def descriptors_left(spare: int) -> Iterator[None]:
    """Limit this process to opening ``spare`` more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
