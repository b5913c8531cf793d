"""torch.compile for training: layer by layer, measured, reported."""
