"""What is wrong with this machine, and what the failures of the field mean."""
