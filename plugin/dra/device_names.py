"""The names of devices in the node's pool. Pure."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping

__all__ = ["device_names"]

_MAX_LABEL_CHARS = 63
_DIGEST_CHARS = 8


def device_names(device_ids: Iterable[str]) -> Mapping[str, str]:
    """Return the name of each device: a DNS label, and no two are the same.

    A name depends on the id alone, unless another device would get the same one, so that it survives restarts and the
    loss of other devices.
    """
    ids = sorted(set(device_ids))
    plain = {id_: _label(id_) for id_ in ids}
    taken = Counter(plain.values())
    return {
        id_: name if taken[name] == 1 and _is_whole(id_, name) else _marked(id_, name) for id_, name in plain.items()
    }


def _label(id_: str) -> str:
    return re.sub("-{2,}", "-", re.sub("[^a-z0-9]", "-", id_.lower())).strip("-")


def _is_whole(id_: str, name: str) -> bool:
    return 0 < len(name) <= _MAX_LABEL_CHARS and len(name) == len(id_)


def _marked(id_: str, name: str) -> str:
    digest = f"{zlib.crc32(id_.encode()):08x}"
    return f"{name[: _MAX_LABEL_CHARS - _DIGEST_CHARS - 1] or 'device'}-{digest}".replace("--", "-")
