"""The metrics of the service: counted from events and records, or read from the current state at a scrape."""
