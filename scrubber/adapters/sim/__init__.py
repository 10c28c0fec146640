"""The simulated node: a GPU is a file, and everything about it that bytes and processes can show is real.

Residue, leftovers and clearing are real bytes, real processes and real system calls; only what a driver would report
(XID, ECC, temperature, resets, hangs, untraceable use) comes from a control file that a command can change at any time.
This module stays empty: the children import it, and they start while a device waits.
"""
