"""The check on a real GPU: ``make gpu-check``, or ``python3 -m tests.gpu`` wherever there is an NVIDIA driver.

Promise: one command, under ten minutes, no network. What could be tried is reported as passed or failed; what could not
is reported as such with its reason, and nothing is estimated. It never resets the device, changes MIG, clocks, limits or
persistence unless a flag asks for that, and it refuses a device that somebody uses: it overwrites all of its memory.

It loads the adapters and the standard library, not the service: CuPy, nvidia-ml-py and a driver are enough. A scrub is
judged here as the engine judges it under the default policy; whatever the policy, the figures are in the report.
"""
