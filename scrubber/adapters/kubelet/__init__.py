"""What the kubelet says about who has which device, from three witnesses that corroborate each other.

PodResources says which pods are active and what their containers have; the pod log directories give each pod's UID;
the device manager's checkpoint knows init containers, and tells recreated pods of one name apart. A kubelet that is
away, has just restarted or talks nonsense makes an untrusted reading, never an empty one that looks like the truth.
"""
