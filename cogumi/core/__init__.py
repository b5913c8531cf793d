"""Shared by all other folders: errors, files, text, processes, the run directory."""

__version__ = "0.1.0"
