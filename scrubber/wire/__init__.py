"""Messages of protocols that others define and both daemons speak: the kubelet's PodResources API.

A bottom layer: it imports nothing of ours, so that the service's adapter and the kubelet emulator can share it.
The ``_pb2`` modules are made by ``make protos``.
"""
