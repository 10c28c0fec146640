"""Background loops: pods, use of devices, recovery, the policy file, and the reconcile at service start."""
