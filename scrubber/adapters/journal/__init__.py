"""Log lines and metrics, made from the same events that the audit trail keeps."""

from scrubber.adapters.journal.binding import Binding
from scrubber.adapters.journal.journal import StructlogJournal

__all__ = ["Binding", "StructlogJournal"]
