"""What scores a completion."""

from cogumi.rewards.fim import fim_rewards

__all__ = ["fim_rewards"]
