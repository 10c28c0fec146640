"""A proxy in front of a vendor's device plugin, which registers with our socket instead of the kubelet's.

Invariant: the vendor's responses pass through unchanged, except that a gate precedes every container start and
quarantined devices are unhealthy in every list. An id that does not name exactly one device of the service is never
handed over.
"""
