"""The checks of ``scrubber doctor``, by what could be wrong: the service, its files, who may use it, and the node.

``queries`` queries the service and the kubelet, ``files`` reads files that any user may have written, ``checks`` lists
the checks and bounds their running time. Each other module is a few checks.
"""
