"""Acts on decisions. Uses the ports and the domain, and is independent of the adapters behind the ports."""
