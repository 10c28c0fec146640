"""What a check of the node looks at, and what it finds: one sentence, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["Check", "Examination", "Level", "Node", "ServiceSaid"]


class Level(StrEnum):
    """What a check found. A warning is worth a look and breaks no promise."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found: ``remedy`` says what to do, and is empty when there is nothing to do."""

    name: str
    level: Level
    sentence: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class ServiceSaid:
    """What the service answered about itself; ``refusal`` is the sentence why it did not, and then the rest is empty."""

    refusal: str = ""
    version: str = ""
    backend: str = ""
    policy: str = ""
    enforcement: str = ""
    ledger: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """Where to look. ``toolkit_configs`` empty: in the usual places."""

    service: ServiceSaid
    root: Path = Path("/")
    kubelet_dir: Path = Path("/var/lib/kubelet")
    toolkit_configs: tuple[Path, ...] = ()

    def path(self, path: Path | str) -> Path:
        """``path`` of the node as it is seen from here."""
        return self.root / Path(path).relative_to("/")


Examination = Callable[[Node], Iterator[Check]]
"""One thing that is looked at; yields nothing where there is nothing to look at, and raises nothing."""
