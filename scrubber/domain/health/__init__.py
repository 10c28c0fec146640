"""What driver reports mean for a device's health: signals, their history, recovery and the circuit breaker."""
