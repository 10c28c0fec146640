"""The DRA driver: prepares and releases claims for the kubelet, and publishes the node's devices for the scheduler.

Its gate is the preparation of a claim, its release the unpreparation, and both are decided by the scrub service
(:mod:`plugin.dra.claim_service`).
"""
