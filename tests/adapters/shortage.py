"""A node that is short of something, for as long as a test wants."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["descriptors_left"]


@contextmanager
def descriptors_left(spare: int) -> Iterator[None]:
    """This process may open ``spare`` more files and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
