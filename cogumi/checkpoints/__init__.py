"""Checkpoints that are whole or absent, and resuming from the last good one."""
