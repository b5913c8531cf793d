"""What scores a completion."""

from cogumi.rewards.named_rewards import rewards_of

__all__ = ["rewards_of"]
