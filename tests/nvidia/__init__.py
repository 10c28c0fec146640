"""Stand-ins for an NVIDIA node: its driver's library, its tools, and the world of files behind them."""
