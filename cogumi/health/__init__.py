"""What can be wrong with a training: flags, their causes, the verdict."""
