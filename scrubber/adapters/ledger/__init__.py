"""The durable record: SQLite on a local disk, the audit chain in it, and a ledger in memory that keeps the same contract."""

from scrubber.adapters.ledger.chain import ChainReport
from scrubber.adapters.ledger.memory import MemoryLedger
from scrubber.adapters.ledger.offline import verify
from scrubber.adapters.ledger.retention import Retention
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.ports.trail import Head

__all__ = ["ChainReport", "Head", "MemoryLedger", "Retention", "SqliteLedger", "verify"]
