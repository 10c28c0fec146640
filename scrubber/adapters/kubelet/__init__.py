"""Device assignments as known to the kubelet, from three sources that corroborate each other.

PodResources lists the active pods and the devices of their containers. The pod log directories give the UID of each
pod. The device manager's checkpoint contains init containers, and distinguishes recreated pods with the same name. A
kubelet that is unreachable, has just restarted or sends malformed data yields an untrusted reading, never an empty one
that looks valid.
"""
