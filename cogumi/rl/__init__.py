"""Policy optimisation on TRL's GRPO trainer: the losses by name, what is checked before a rollout, what is measured."""

from cogumi.config.presets import PRESETS, preset

__all__ = ["PRESETS", "preset"]
