"""What every other folder may use: errors, files, text, processes, the run directory."""
