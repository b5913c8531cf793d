"""From files to examples a trainer takes."""
