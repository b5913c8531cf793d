"""Reward functions of GSPO runs."""

from cogumi.rewards.named_rewards import rewards_of

__all__ = ["rewards_of"]
