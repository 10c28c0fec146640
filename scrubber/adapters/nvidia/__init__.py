"""NVIDIA GPUs through NVML, which is only ever loaded in child processes.

NVML can hang in the kernel, and a process that has attached a GPU blocks its reset. So the service itself knows paths,
words and answers; ``nvml.py``, ``events.py`` and ``driver.py``, with what it reads (``driver_description.py``,
``driver_health.py``, ``driver_settings.py``), are what runs in the children. This module stays empty: the children import
it, and they start while a device waits.
"""
