"""The loops that run while nobody asks: pods, use, recovery, the policy file, and the reconcile at the start."""
