"""Generated code of the kubelet's protocols: device plugin, DRA driver with its health stream, and plugin registration.

The ``.proto`` files state interface facts (names and field numbers) in our own words. ``make protos`` generates the
``_pb2`` modules from them, and ``tests/project/test_protos.py`` fails when the two differ. Upstream gives both of its
files the same base name. Ours have distinct paths, because Python's descriptor pool treats equal file names as the same
file.
"""
