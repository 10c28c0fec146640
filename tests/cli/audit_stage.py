"""A service whose audit log can be read, and functions that tamper with audit logs."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from scrubber.adapters.ledger.memory import MemoryLedger
from scrubber.api import messages, scrubber_pb2_grpc
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.api.status import status_from_error
from scrubber.domain.errors import ScrubberError
from scrubber.ports.record import AuditHead, LedgerChange
from tests.cli.stage import Ended
from tests.ledger_samples import event

__all__ = ["ROWS", "Reading", "grow", "reading", "tamper", "verdict", "written"]

ROWS = 20


@dataclass
class Reading(scrubber_pb2_grpc.ReadServicer):
    """The audit part of a service with a ledger in memory; ``error`` comes after the first page."""

    ledger: MemoryLedger
    error: ScrubberError | None = None

    async def ReadAudit(self, request: Any, context: Any) -> AsyncIterator[pb.AuditPage]:
        try:
            async for page in self.ledger.pages(request.after_sequence):
                yield messages.audit_page_message(page)
                if self.error is not None:
                    raise self.error
        except ScrubberError as error:
            status = status_from_error(error, public=False)
            await context.abort(status.code, status.details, status.metadata)

    async def GetServiceInfo(self, request: Any, context: Any) -> pb.ServiceInfo:
        head = self.ledger.head()
        return pb.ServiceInfo(audit_head=pb.AuditHead(sequence=head.sequence, hash=head.hash))


@asynccontextmanager
async def reading(directory: Path) -> AsyncIterator[Reading]:
    """Provide a service whose audit log has :data:`ROWS` rows, on the read socket below ``directory``."""
    servicer, server = Reading(MemoryLedger(max_audit_rows=700)), grpc.aio.server()
    scrubber_pb2_grpc.add_ReadServicer_to_server(servicer, server)
    path = Sockets(directory).path(Purpose.READ)
    path.parent.mkdir()
    server.add_insecure_port(grpc_target(path))
    await server.start()
    try:
        await servicer.ledger.load()
        await grow(servicer.ledger, ROWS)
        yield servicer
    finally:
        await server.stop(None)


async def grow(ledger: MemoryLedger, rows: int) -> None:
    events = (event(at=100.0 + number, message=f"row \x1b[2J{number}") for number in range(rows))
    await ledger.commit(LedgerChange(events=tuple(events)))


def tamper(home: Path, statement: str) -> None:
    """Change the file as an attacker with write access: without the triggers, which are restored afterwards."""
    connection = sqlite3.connect(home / "ledger.db", isolation_level=None)
    triggers = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute(statement)
    for _, sql in triggers:
        connection.execute(sql)
    connection.close()


def written(head: AuditHead) -> str:
    return f"{head.sequence}:{head.hash}"


def verdict(ended: Ended) -> tuple[int, str]:
    assert ended.json["kind"] == "AuditReport"
    return ended.code, ended.json["verdict"]
