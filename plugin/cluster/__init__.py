"""Reports the node to the Kubernetes API server: a condition, labels, events and, where allowed, evictions.

Invariants: no other part of the plugin ever waits for the API server. Only the current state is written,
never a queue of old states. Without credentials, no client library is loaded, no request is sent and no event is
written.
"""
