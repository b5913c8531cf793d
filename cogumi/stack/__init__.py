"""Which wheels, are they here, do they work."""
