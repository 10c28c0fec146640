"""The records of hardware errors (CPER, as UEFI defines them) that the driver keeps, and what each of them reports.

The driver's ring of records is a file in debugfs. It is opened by its full name only, and nothing else there is: reading
its neighbour ``amdgpu_gpu_recover`` resets the GPU.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BAD_PAGE_THRESHOLD", "CORRECTED", "FATAL", "UNCORRECTED", "ErrorRecord", "count_kinds", "read_records"]

FATAL, UNCORRECTED, CORRECTED, BAD_PAGE_THRESHOLD = "fatal", "uncorrected", "corrected", "bad-page-threshold"

_SEVERITIES = {0: UNCORRECTED, 1: FATAL, 2: CORRECTED}
_SIGNATURE = b"CPER"
_SIGNATURE_END = 0xFFFFFFFF
_RING_POINTERS_BYTES = 12
"""The positions in the ring, which the driver puts before the records."""
_HEADER = struct.Struct("<4sHIHIII8s64x8s")
"""Signature, revision, end of the signature, number of sections, severity, valid fields, length, timestamp, record ID."""
_HEADER_BYTES = 128
_SECTION = struct.Struct("<8x4xI")
"""The flags of a section's descriptor."""
_SECTION_BYTES = 72
_THRESHOLD_EXCEEDED = 1 << 3
_MAX_RING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """A record.

    Attributes:
        identity: its timestamp and ID in hexadecimal. The ID alone is not unique: a driver that is bound again counts from 1.
    """

    kind: str
    identity: str


def read_records(ring: Path) -> Sequence[ErrorRecord] | None:
    """Return the records in ``ring``, oldest first; None if the driver or the kernel offers no such file, or it is empty.

    Raises:
        OSError: it exists, may be opened, and cannot be read.
    """
    try:
        descriptor = os.open(ring, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # a locked-down kernel refuses debugfs
        return None
    try:
        size = os.fstat(descriptor).st_size
        if size > _MAX_RING_BYTES:
            return None
        # One read of the whole ring, in a multiple of 4 bytes: drivers of Linux 6.15 to 7.0 refuse any other multiple,
        # write all records into a smaller buffer regardless of its size, and never report an end.
        content = os.read(descriptor, -(-size // 4) * 4)
    finally:
        os.close(descriptor)
    # Some drivers write the positions alone although the ring has records: that is no proof that there are none.
    return tuple(_complete_records(content)) if len(content) > _RING_POINTERS_BYTES else None


def count_kinds(records: Sequence[ErrorRecord]) -> dict[str, int]:
    """Return the number of records of each kind."""
    counts = Counter(record.kind for record in records)
    return {kind: counts[kind] for kind in (FATAL, UNCORRECTED, CORRECTED, BAD_PAGE_THRESHOLD)}


def _complete_records(content: bytes) -> Iterator[ErrorRecord]:
    """Yield each complete record; the oldest one may have been overwritten in part."""
    at = content.find(_SIGNATURE)
    while 0 <= at <= len(content) - _HEADER_BYTES:
        _, _, end, sections, severity, _, length, timestamp, number = _HEADER.unpack_from(content, at)
        is_record = end == _SIGNATURE_END and _HEADER_BYTES <= length <= len(content) - at
        if is_record and severity in _SEVERITIES:
            record = content[at : at + length]
            kind = BAD_PAGE_THRESHOLD if _exceeds_threshold(record, sections) else _SEVERITIES[severity]
            yield ErrorRecord(kind, (timestamp + number).hex())
        at = content.find(_SIGNATURE, at + (length if is_record else 1))


def _exceeds_threshold(record: bytes, sections: int) -> bool:
    """Whether a section reports that more memory pages are bad than the driver accepts."""
    descriptors = range(
        _HEADER_BYTES, min(_HEADER_BYTES + sections * _SECTION_BYTES, len(record) - _SECTION.size + 1), _SECTION_BYTES
    )
    return any(_SECTION.unpack_from(record, at)[0] & _THRESHOLD_EXCEEDED for at in descriptors)
