"""All fuzzing targets, in the order in which they run. A new module of targets is found without being listed."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from tests.fuzz import targets
from tests.fuzz.target import Target

__all__ = ["all_targets", "module_of", "targets_in"]


def targets_in(module: str) -> tuple[Target, ...]:
    """Return the targets of a module, in their order there; imports what they test."""
    return tuple(each for each in vars(import_module(module)).values() if isinstance(each, Target))


@cache
def _modules() -> Mapping[str, tuple[Target, ...]]:
    names = sorted(each.name for each in pkgutil.iter_modules(targets.__path__, f"{targets.__name__}."))
    return MappingProxyType({name: targets_in(name) for name in names})


def all_targets() -> tuple[Target, ...]:
    """Return every target."""
    return tuple(each for found in _modules().values() for each in found)


def module_of(name: str) -> str:
    """Return the module that declares the target ``name``.

    Raises:
        KeyError: There is no such target.
    """
    for module, found in _modules().items():
        if any(each.name == name for each in found):
            return module
    raise KeyError(name)
