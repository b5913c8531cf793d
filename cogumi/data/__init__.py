"""From data files to examples for a trainer."""
