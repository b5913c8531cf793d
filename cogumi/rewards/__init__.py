"""What scores a completion."""

from cogumi.rewards.named import rewards_of

__all__ = ["rewards_of"]
