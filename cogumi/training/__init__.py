"""A run, from its configuration to a checked, merged model."""

from cogumi.patches import unsloth_rl

unsloth_rl.apply()  # where there is a GPU for it, before the next line imports transformers, trl and peft

from cogumi.training.run import RunResult, train  # noqa: E402

__all__ = ["RunResult", "train"]
