"""What every other folder may use: errors, files, text, processes, the run directory."""

__version__ = "0.1.0"
