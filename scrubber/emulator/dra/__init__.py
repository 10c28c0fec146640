"""The kubelet's side of Dynamic Resource Allocation.

Promise: what a DRA driver can observe of Kubernetes 1.36, it observes here, from the order of calls to the gaps.
"""
