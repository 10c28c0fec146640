"""Log lines and metrics, made from the same events that the audit trail keeps."""

from scrubber.adapters.journal.journal import StructlogJournal
from scrubber.adapters.journal.logging import LogFormat, configure_logging

__all__ = ["LogFormat", "StructlogJournal", "configure_logging"]
