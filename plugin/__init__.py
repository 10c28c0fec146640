"""The device plugin: the kubelet's protocols, the gate before container starts, and reports to the API server.

Invariant: nothing here touches a device. Only the scrub service, through its client, decides whether a device may be
handed over.
"""
