"""The check on a real GPU: ``make gpu-check``, or ``python3 -m tests.gpu`` on any machine with an NVIDIA driver.

One command, under ten minutes, no network. What could be tested is reported as passed or failed; what could not is
reported as unavailable with its reason, and nothing is estimated. It never resets the device, changes MIG, clocks,
limits or persistence unless a flag requests that, and it refuses a device in use: it overwrites all of its memory.

It imports the adapters and the standard library, not the service: CuPy, nvidia-ml-py and a driver are enough. A scrub
is judged here as the engine judges it under the default policy; the report contains the figures in any case.
"""
