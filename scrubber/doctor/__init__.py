"""What ``scrubber doctor`` looks at, by what could be wrong: the service, its files, who may use it, the node around it.

``queries`` asks the service and the kubelet, ``files`` reads files that may be anybody's, ``checks`` lists the checks
and sees that none takes for ever. Every other module is a handful of checks.
"""
