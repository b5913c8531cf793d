"""Changes to other people's code, one file each: `apply()`, `undo()`, `status()`, and a test that fails when upstream moves."""
