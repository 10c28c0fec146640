"""NVIDIA GPUs through NVML, which is only ever loaded in child processes.

NVML can hang in the kernel, and a process that has attached a GPU blocks its reset. So the service process handles only
paths, requests and replies. The modules that run in children are ``nvml.py``, ``events.py`` and ``driver.py`` with its
readers (``driver_description.py``, ``driver_health.py``, ``driver_settings.py``). This module stays empty: the children
import it, and they start while a device waits.
"""
