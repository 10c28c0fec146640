"""The check on a real AMD GPU: ``make gpu-check BACKEND=amd``, or ``python3 -m tests.gpu.amd`` on a node with ROCm.

As the check of NVIDIA's GPUs (:mod:`tests.gpu`): one command, no network, nothing is estimated, a device in use is refused,
and nothing is reset or set unless a flag requests that. It needs ``libamdhip64`` and no Python package of ROCm. Local memory
is attacked as well, because the service itself cannot measure whether the driver's cleaner shader cleared it.
"""
