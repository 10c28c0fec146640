"""Acts on decisions. Knows the ports and the domain, and nothing of who stands behind a port."""
