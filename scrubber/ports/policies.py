"""Where the policy in force comes from."""

from __future__ import annotations

from typing import Protocol

from scrubber.domain.policy import Policy

__all__ = ["Policies"]


class Policies(Protocol):
    @property
    def policy(self) -> Policy:
        """The one in force."""

    @property
    def touched(self) -> bool:
        """Whether what it comes from is another thing, or in another state, than when it was last read."""

    def reload(self) -> bool:
        """Read it again and put it in force; whether anything is another policy's now. May block for a moment.

        Raises:
            BadConfiguration: it cannot be read, or cannot be in force; the old one stays.
        """
