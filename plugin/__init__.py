"""What the kubelet sees: the device plugin, the kubelet's protocols, and a kubelet to try them against.

Promise: nothing here touches a device. Whether a device may be handed over is asked of the scrub service, through its
client, and of nobody else.
"""
