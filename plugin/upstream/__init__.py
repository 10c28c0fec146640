"""In front of a vendor's own device plugin: it registers with a kubelet's socket of ours, and we with the kubelet.

Promise: what the vendor's plugin says passes through unchanged; what is added is the gate before every start and the
quarantine in every list. An id that is not the name of exactly one device of the service is never handed out.
"""
