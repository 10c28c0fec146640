"""The taint that the plugin puts on its node while no GPU of the node is in service, as configured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from scrubber.domain.errors import InvalidConfiguration

__all__ = ["NodeTaint", "TaintEffect"]

_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:(?P<domain>[a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?)/)?{_NAME}")
_VALUE = re.compile(rf"({_NAME})?")
_KUBERNETES = re.compile(r"(?:.*\.)?(?:kubernetes\.io|k8s\.io)")


class TaintEffect(StrEnum):
    """What the scheduler, and for ``NoExecute`` the control plane, does with pods that do not tolerate the taint."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True, slots=True)
class NodeTaint:
    """A taint; another one with the same key and effect is this one, whatever its value."""

    key: str
    value: str
    effect: TaintEffect

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read ``KEY[=VALUE]:EFFECT``, as in ``kubectl taint``; None for ``off`` and for the empty text.

        Raises:
            InvalidConfiguration: the text is neither, or the key belongs to Kubernetes.
        """
        if text in ("", "off"):
            return None
        pair, _, effect = text.rpartition(":")
        key, _, value = pair.partition("=")
        found = _KEY.fullmatch(key)
        if found is None or not _VALUE.fullmatch(value) or effect not in set(TaintEffect):
            raise InvalidConfiguration(
                f"--taint {text!r} is not a taint. Write KEY[=VALUE]:EFFECT with one of the effects "
                f"{', '.join(TaintEffect)}, such as scrubber.dev/no-gpu-in-service:NoSchedule."
            )
        if _KUBERNETES.fullmatch(found["domain"] or ""):
            raise InvalidConfiguration(
                f"--taint: the key {key} belongs to Kubernetes. Choose a key of your own domain."
            )
        return cls(key, value, TaintEffect(effect))

    def matches(self, taint: Mapping[str, Any]) -> bool:
        """Return whether this is the taint of the API."""
        return (taint.get("key"), taint.get("effect")) == (self.key, self.effect.value)

    def to_api(self) -> dict[str, str]:
        """Return the taint as the API writes it."""
        return {"key": self.key, "effect": self.effect.value} | ({"value": self.value} if self.value else {})
