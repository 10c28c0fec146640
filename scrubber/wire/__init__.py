"""Protobuf messages of third-party protocols that both daemons use: the kubelet's PodResources API.

A bottom layer: it imports nothing of this project, so that the service's adapter and the kubelet emulator can share it.
``make protos`` generates the ``_pb2`` modules.
"""
