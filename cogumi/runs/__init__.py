"""A run as a thing one holds: started, attached to, stopped."""
