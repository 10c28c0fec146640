"""The durable record: SQLite on a local disk, its audit chain, and an in-memory ledger with the same contract."""
