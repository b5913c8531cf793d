"""Files from the hub: which there are, how large, and their download."""
