"""Each adapter knows one outside thing; siblings never import each other, and none imports the engine."""
