"""``make cluster-check``: on any user's cluster, what does a tenant find of the tenant that had the device before?

It is a client of the API server alone: it needs neither the scrub service nor a program on the node.
"""
