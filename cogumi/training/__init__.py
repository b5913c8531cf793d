"""A run, from its configuration to a checked, merged model."""

from cogumi.training.run import RunResult, train

__all__ = ["RunResult", "train"]
