"""The metrics of the service: counted from events and records, and shown as they are when the page is read."""
