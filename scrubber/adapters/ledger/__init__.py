"""The durable record: SQLite on a local disk, the audit chain in it, and a ledger in memory that keeps the same contract."""
