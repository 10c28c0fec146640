"""Generated code of the kubelet's device-plugin (``v1beta1``) and plugin-registration (watcher ``v1``) protocols.

The ``.proto`` files state interface facts (names and field numbers) in our own words. ``make protos`` generates the
``_pb2`` modules from them, and ``tests/project/test_protos.py`` fails when the two differ. Upstream gives both of its
files the same base name. Ours have distinct paths, because Python's descriptor pool treats equal file names as the same
file.
"""
