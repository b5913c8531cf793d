"""Disks: the monitor and its callback, what a directory holds, what interrupted work left behind."""
