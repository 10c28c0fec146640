"""Stand-ins for an NVIDIA node: its driver's library, its tools, and the files behind them."""
