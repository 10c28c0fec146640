"""The kubelet's device-plugin and plugin-registration protocols, version ``v1beta1`` and ``v1`` of the watcher.

The ``.proto`` files state interface facts (names and field numbers) in our own words; the ``_pb2`` modules are made
from them by ``make protos`` and kept honest by ``tests/project/test_protos.py``. Upstream gives its files one base
name; ours have distinct paths, because Python's descriptor pool takes equal file names for the same file.
"""
