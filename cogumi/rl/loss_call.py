"""What one call of a GRPO loss received, whichever library computed it."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class LossCall:
    """One micro-batch as the loss that ran received it. B sequences of at most T completion tokens."""

    new: Tensor
    """(B, T) log-probabilities under the policy that is trained, with their graph, in nats."""
    old: Tensor | None
    """(B, T) log-probabilities under the policy that wrote the completions; None: the loss took `new.detach()`."""
    ref: Tensor | None
    """(B, T) log-probabilities under the reference model; None without a KL term."""
    mask: Tensor
    """(B, T) 1 for the tokens that count: completion, and not written by a tool."""
    advantages: Tensor
    """(B,), or (B, T) where they vary along the sequence."""
    entropy: Tensor | None
    """(B, T) of the policy at the sampling temperature, in nats."""
    function: Any
    """What computed the loss."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The loss's settings: as it was called under unsloth, as it reads them off the trainer under TRL."""
    weight: Tensor | None = None
    """(B, T) or (B, 1) factor of the policy term: TRL's correction for the sampler's own numerics (vLLM)."""

    def old_or_new(self) -> Tensor:
        return self.new.detach() if self.old is None else self.old
