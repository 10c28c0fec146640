"""The controller of one device, composed of its state, its health, its occupancy and its scrubs."""
