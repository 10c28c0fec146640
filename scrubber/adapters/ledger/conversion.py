"""Conversion of a ledger that another version of this program wrote: an upgrade, or a return to an earlier version.

The whole ledger is read, converted and written into a new file, which then takes the place of the old one; the old one
is kept as a copy that its schema names. Guarantee: a crash, a full disk or data that cannot be read leaves the old
ledger as it was. No row of the audit log is changed or omitted.

Upgrade: each document passes the steps between the two schemas and is then read exactly. Return to an earlier version:
fields that this version does not know are dropped, if the newer version declared that this is safe. A device whose
record cannot be read even so is quarantined until an operator releases it, and keeps every open grant; no other device
is concerned.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from scrubber import __version__
from scrubber.adapters.ledger.chain import ChainReport
from scrubber.adapters.ledger.documents import ASSIGNMENT, CERTIFICATE, CLAIM, GRANT, NODE, PAUSE, RECORD, SCRUB
from scrubber.adapters.ledger.failures import REFUSED_UNTIL_THEN, START_OVER_HINT, is_full
from scrubber.adapters.ledger.json_codec import CodecError, Document, Json, JsonCodec, canonical_json, parse_object
from scrubber.adapters.ledger.queries import AUDIT_COLUMNS, verify_stored_chain
from scrubber.adapters.ledger.schema import (
    CURRENT,
    Schema,
    StoredSchema,
    connect,
    create_database,
    read_stored_schema,
)
from scrubber.adapters.ledger.state_directory import StateDirectory
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import LedgerFailure
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod

__all__ = ["Conversion", "convert"]

T = TypeVar("T")

_CHAIN_COLUMNS = "pruned_sequence, pruned_hash, head_sequence, head_hash"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What the conversion of a ledger has done.

    Attributes:
        from_schema, from_version: schema of the earlier ledger, and the version that wrote it (empty: not known).
        copy: the earlier ledger.
        omitted: number of grants, certificates and scrubs of the history that only the copy has.
        quarantined: devices whose record could not be read.
    """

    from_schema: int
    from_version: str
    to_schema: int
    copy: Path
    omitted: int
    quarantined: tuple[str, ...]


# See docs/decisions/0046-upgrades.md.
def convert(
    place: StateDirectory, now: float, schema: Schema = CURRENT, *, reported_directory: Path | None = None
) -> Conversion | None:
    """Convert the ledger in ``place`` to ``schema``; None when it has that schema already.

    Precondition: the lock is held, and nothing in this process has the database open.

    Args:
        now: wall-clock seconds.
        reported_directory: directory named in errors; by default that of ``place``.

    Raises:
        LedgerFailure: It cannot be converted; the message says what to do instead. Nothing was changed.
        sqlite3.Error, OSError: The storage failed. Nothing was changed.
    """
    directory = place.directory if reported_directory is None else reported_directory
    with closing(connect(place.database)) as old:
        stored = read_stored_schema(old, directory / place.database.name)
        if stored.number == schema.number:
            return None
        _check_convertible(stored, schema, directory)
        before = _check_undamaged(old, directory)
        documents = _UpgradedDocuments(schema, stored.number) if stored.number < schema.number else _NewerDocuments(now)
        try:
            place.create_temporary_database(lambda path: create_database(path, schema, _Rows(old, documents).copy))
            _check_same_audit_log(before, place.temporary_database, directory)
            # The copy is one file: nothing of it may be left in the log.
            old.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            old.close()
            copy = place.replace_database(stored.number)
        except CodecError as problem:
            place.remove_temporary_database()
            raise LedgerFailure(_unreadable(problem, stored, directory)) from problem
        except (sqlite3.Error, OSError) as error:
            place.remove_temporary_database()
            if not is_full(error):
                raise
            raise LedgerFailure(_no_space(place, stored, directory)) from error
        except BaseException:
            place.remove_temporary_database()
            raise
    _remove_old_copies(place, stored.number, schema.number)
    return Conversion(
        stored.number,
        stored.program_version,
        schema.number,
        copy,
        documents.omitted,
        tuple(sorted(documents.quarantined)),
    )


def _writer(stored: StoredSchema) -> str:
    return f"version {stored.program_version}" if stored.program_version else "another version"


def _unreadable(problem: CodecError, stored: StoredSchema, directory: Path) -> str:
    return (
        f"The ledger in {directory}, written by {_writer(stored)}, contains data that version {__version__} cannot "
        f"convert ({problem}). Nothing was changed: install {_writer(stored)} again, and report this. {REFUSED_UNTIL_THEN}"
    )


def _no_space(place: StateDirectory, stored: StoredSchema, directory: Path) -> str:
    needed = -(-place.database.stat().st_size >> 20)
    return (
        f"No space left to convert the ledger in {directory} for version {__version__}: that needs about {needed} MiB. "
        f"Nothing was changed: free some, or install {_writer(stored)} again. {REFUSED_UNTIL_THEN}"
    )


def _check_convertible(stored: StoredSchema, schema: Schema, directory: Path) -> None:
    written = _writer(stored)
    what = (
        f"The ledger in {directory} was written by {written} (schema {stored.number}), and this one, version "
        f"{__version__} (schema {schema.number}), cannot read it. Nothing was changed."
    )
    if stored.number > schema.number and stored.oldest_reader > schema.number:
        through = f"version {stored.oldest_reader_version}" if stored.oldest_reader_version else "an older version"
        raise LedgerFailure(
            f"{what} Go back one minor version at a time: install {through}, wait until its service is ready, which "
            f"converts the ledger, and then install this version; or install {written} again. {REFUSED_UNTIL_THEN}"
        )
    if any(number not in schema.upgrades for number in range(stored.number, schema.number)):
        raise LedgerFailure(
            f"{what} Upgrade one minor version at a time: each service converts the ledger when it starts. "
            f"{REFUSED_UNTIL_THEN}"
        )


def _check_undamaged(old: sqlite3.Connection, directory: Path) -> ChainReport:
    """Return what the audit log contains; raises :class:`LedgerFailure` if the ledger is damaged."""
    damage = [str(row[0]) for row in old.execute("PRAGMA quick_check(1)")]
    if damage != ["ok"]:
        raise LedgerFailure(f"The ledger in {directory} is damaged ({damage[0]}); {START_OVER_HINT}")
    report = verify_stored_chain(old)
    if not report.intact:
        raise LedgerFailure(f"{report.message} The ledger in {directory} cannot be trusted; {START_OVER_HINT}")
    return report


def _check_same_audit_log(before: ChainReport, new_path: Path, directory: Path) -> None:
    with closing(connect(new_path)) as new:
        after = verify_stored_chain(new)
    if before != after:
        raise LedgerFailure(
            f"The conversion of the ledger in {directory} would change its audit log ({after.message}). Nothing was "
            f"changed. This is a bug in the service; please report it. {REFUSED_UNTIL_THEN}"
        )


def _remove_old_copies(place: StateDirectory, *kept: int) -> None:
    """Remove every copy, except that of the schema just converted from and those of the neighbours of the new one."""
    _, current = kept
    for number, path in place.copies().items():
        if number not in (*kept, current - 1, current + 1):
            path.unlink(missing_ok=True)


@dataclass(slots=True)
class _Documents:
    """Reads documents of another schema."""

    omitted: int = 0
    quarantined: list[str] = field(default_factory=list)

    def read(self, document: Document[T], table: str, text: str) -> T:
        raise NotImplementedError

    def read_history(self, document: Document[T], table: str, text: str) -> T | None:
        """Return a document that nothing is decided by; None, and count it, if it cannot be read."""
        try:
            return self.read(document, table, text)
        except CodecError:
            self.omitted += 1
            return None

    def read_record(self, device: str, version: int, text: str, last_sequence: int) -> DeviceRecord:
        """Return the record of a device; ``last_sequence`` is the highest number of its stored grants, or 0."""
        return self.read(RECORD, "devices", text)


class _UpgradedDocuments(_Documents):
    """Documents of an earlier schema, each of which is one of ``schema`` after the steps in between."""

    def __init__(self, schema: Schema, number: int) -> None:
        super().__init__()
        self._steps = [schema.upgrades[each] for each in range(number, schema.number)]

    def read(self, document: Document[T], table: str, text: str) -> T:
        steps: list[Callable[[dict[str, Json]], dict[str, Json]]] = [
            each[table] for each in self._steps if table in each
        ]
        if not steps:
            return document.decode(text)
        json_value = parse_object(text)
        for step in steps:
            json_value = step(json_value)
        return document.decode(canonical_json(json_value))


class _NewerDocuments(_Documents):
    """Documents of a newer schema, without the fields that this version does not know."""

    def __init__(self, now: float) -> None:
        super().__init__()
        self._now = now

    def read(self, document: Document[T], table: str, text: str) -> T:
        if document is CERTIFICATE:  # a field that is dropped may have been signed
            json_value = parse_object(text)
            json_value["format"] = document.format
            return document.decode(canonical_json(json_value))
        return document.decode_newer(text)

    def read_record(self, device: str, version: int, text: str, last_sequence: int) -> DeviceRecord:
        try:
            return super().read_record(device, version, text, last_sequence)
        except CodecError as problem:
            try:
                record, reduced = self._readable_record(device, version, text, last_sequence)
            except CodecError as refused:
                raise CodecError(f"device {device}: {refused}") from None
            self.quarantined.append(device)
            message = (
                f"A newer version of the service wrote the record of this device, and version {__version__} cannot read "
                f"all of it ({problem}). {_reduced_message(reduced)}The copy of the ledger has the record."
            )
            cause = Cause(ErrorCode.DEVICE_FAULT.value, message, RecoveryMethod.OPERATOR, self._now)
            is_condemned = record.health is Health.CONDEMNED
            if record.cause is not None and (record.cause.by_operator or is_condemned):
                cause = record.cause
            return replace(
                record,
                hygiene=Hygiene.DIRTY,
                health=Health.CONDEMNED if is_condemned else Health.QUARANTINED,
                cause=cause,
                certificate=None,
                contaminated=True,
            )

    def _readable_record(
        self, device: str, version: int, text: str, last_sequence: int
    ) -> tuple[DeviceRecord, frozenset[int]]:
        """Return the record with every field that can be read, and the numbers of its grants in a reduced form.

        Raises:
            CodecError: It is not certain which pods may use the device, or what number the next grant has.
        """
        document = parse_object(text)
        reduced: set[int] = set()

        def readable_grant(found: Json) -> Json:
            grant = self._readable_grant(device, found)
            if grant != GRANT.codec.drop_unknown(found):
                reduced.add(GRANT.codec.decode(grant).sequence)
            return grant

        grants, claims = document.get("open_grants"), document.get("admin_claims")
        if isinstance(grants, list):
            document["open_grants"] = [readable_grant(each) for each in grants]
        if document.get("last_grant") is not None:
            document["last_grant"] = readable_grant(document["last_grant"])
        if isinstance(claims, list):
            document["admin_claims"] = [_readable_claim(each) for each in claims]
        defaults = RECORD.codec.encode(DeviceRecord(device, version=version))
        assert isinstance(defaults, dict)  # an encoded dataclass
        required = ("last_grant", "open_grants")
        cautious = {name: value for name, value in defaults.items() if name not in required}
        record = RECORD.codec.decode(_readable_fields(RECORD.codec, document, cautious))
        # The next grant must have a new number.
        grants_known = (each for each in (record.last_grant, *record.open_grants) if each is not None)
        newest = max(grants_known, key=lambda each: each.sequence, default=None)
        if newest is not None:
            newest = replace(newest, sequence=max(newest.sequence, last_sequence))
        elif last_sequence:
            raise CodecError(f"last_grant: missing, but grant {last_sequence} was made")
        record = replace(record, last_grant=newest)
        return record, frozenset(reduced)

    def _readable_grant(self, device: str, found: Json) -> Json:
        """Return a grant of ``device`` with its number, its boot and its pods, and all else that can be read."""
        grant = GRANT.codec.drop_unknown(found)
        if not isinstance(grant, dict):
            raise CodecError(f"{grant!r} is not a grant")
        if grant.get("assignment") is not None:
            unknown: dict[str, Json] = {"container": "", "devices": [device], "resource": "", "shares": []}
            grant["assignment"] = _readable_fields(ASSIGNMENT, grant["assignment"], unknown)
        if grant.get("claim") is not None:
            grant["claim"] = _readable_claim(grant["claim"])
        cautious: dict[str, Json] = {
            "kind": HandOverKind.UNKNOWN.value,
            "at": self._now,
            "certificate": None,
            "basis": Basis.ADOPTED.value,
            "baseline": [],
            "cgroups": [],
            "started": "",
            "path": None,
        }
        return _readable_fields(GRANT.codec, grant, cautious)


def _readable_claim(found: Json) -> Json:
    # A claim of unknown release counts as prepared, and no process is killed because of a list that cannot be read.
    return _readable_fields(CLAIM, found, {"listed_pods": [], "released_at": None, "manager": None})


def _readable_fields(codec: JsonCodec[T], found: Json, cautious: Mapping[str, Json]) -> Json:
    """Return ``found`` with a value of ``cautious`` for each field that cannot be read; of a list, what can be read.

    Raises:
        CodecError: A field that is not in ``cautious`` is missing or cannot be read.
    """
    known = codec.drop_unknown(found)
    if not isinstance(known, dict):
        raise CodecError(f"{known!r} is not an object")
    readable: dict[str, Json] = {**known, **cautious}
    codec.decode(readable)

    def can_read(name: str, value: Json) -> bool:
        try:
            codec.decode({**readable, name: value})
        except CodecError:
            return False
        return True

    for name in cautious.keys() & known.keys():
        value = known[name]
        if isinstance(value, list) and not can_read(name, value):
            value = [each for each in value if can_read(name, [each])] or cautious[name]
        if can_read(name, value):
            readable[name] = value
    return readable


def _reduced_message(grants: frozenset[int]) -> str:
    """Return the sentence about the ``grants`` that were kept in a reduced form, and a space; empty if there are none."""
    if not grants:
        return ""
    numbers = ", ".join(map(str, sorted(grants)))
    what = f"Grant {numbers} was" if len(grants) == 1 else f"Grants {numbers} were"
    return f"{what} kept in a reduced form: with the pods that may use the device, but not with every detail. "


class _Rows:
    """Copies all rows of ``old`` into a new database. Of other schemas, only the columns named here are required."""

    def __init__(self, old: sqlite3.Connection, documents: _Documents) -> None:
        self._old = old
        self._documents = documents

    def copy(self, new: sqlite3.Connection) -> None:
        new.executemany("INSERT INTO devices VALUES (?, ?, ?, ?, ?)", self._devices())
        new.executemany("INSERT INTO grants VALUES (?, ?, ?, ?)", self._grants())
        new.executemany("INSERT INTO certificates VALUES (?, ?, ?, ?, ?)", self._certificates())
        new.executemany("INSERT INTO scrubs VALUES (?, ?, ?, ?, ?)", self._scrubs())
        for (text,) in self._select("SELECT document FROM node"):
            node = self._documents.read(NODE, "node", str(text))
            new.execute("INSERT INTO node VALUES (1, ?)", (NODE.encode(node),))
        for (text,) in self._select("SELECT document FROM agent_pause"):
            pause = self._documents.read(PAUSE, "agent_pause", str(text))
            new.execute("INSERT INTO agent_pause VALUES (1, ?)", (PAUSE.encode(pause),))
        new.executemany(
            f"INSERT INTO audit ({AUDIT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            self._select(f"SELECT {AUDIT_COLUMNS} FROM audit ORDER BY sequence"),
        )
        new.executemany(
            f"INSERT INTO chain (only, {_CHAIN_COLUMNS}) VALUES (1, ?, ?, ?, ?)",
            self._select(f"SELECT {_CHAIN_COLUMNS} FROM chain"),
        )

    def _select(self, statement: str, *values: object) -> Iterator[tuple[object, ...]]:
        # Closed explicitly: a cursor kept alive by the traceback of an exception would also keep SQLite's lock.
        with closing(self._old.execute(statement, values)) as rows:
            yield from rows

    def _devices(self) -> Iterator[tuple[object, ...]]:
        for device, version, text in self._select("SELECT device, version, document FROM devices"):
            ((sequence,),) = self._select("SELECT coalesce(max(sequence), 0) FROM grants WHERE device = ?", device)
            record = self._documents.read_record(str(device), int(str(version)), str(text), int(str(sequence)))
            if (record.device, record.version) != (device, version):
                raise CodecError(f"the columns of device {device} do not agree with its record")
            yield device, version, record.hygiene.value, record.health.value, RECORD.encode(record)

    def _grants(self) -> Iterator[tuple[object, ...]]:
        for device, seen, text in self._select("SELECT device, seen, document FROM grants"):
            grant = self._documents.read_history(GRANT, "grants", str(text))
            if grant is not None:
                yield device, grant.sequence, seen, GRANT.encode(grant)

    def _certificates(self) -> Iterator[tuple[object, ...]]:
        for seen, text in self._select("SELECT seen, document FROM certificates"):
            found = self._documents.read_history(CERTIFICATE, "certificates", str(text))
            if found is not None:
                yield found.id, found.device, found.next_grant, seen, CERTIFICATE.encode(found)

    def _scrubs(self) -> Iterator[tuple[object, ...]]:
        for seen, text in self._select("SELECT seen, document FROM scrubs"):
            scrub = self._documents.read_history(SCRUB, "scrubs", str(text))
            if scrub is not None:
                yield scrub.id, scrub.device, int(scrub.ended is not None), seen, SCRUB.encode(scrub)
