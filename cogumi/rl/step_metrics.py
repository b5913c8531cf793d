"""What a policy-gradient step looked like, under Fast-LLM's names, summed over the whole optimizer step.

Sources: Fast-LLM `fast_llm/layers/language_model/loss/policy_gradient.py` (`_policy_metrics_reduce`) for the
definitions; the KL estimate R - log R - 1 is Schulman's k3 (http://joschu.net/blog/kl-approx.html). Means are over
documents (completions with at least one token that counts), each token weighing 1 / its document's length. Micro-batches
are summed before anything is divided, so that a metric does not depend on how a step was cut up.
"""

import math
from typing import Any

import torch
from torch import Tensor

from cogumi.rl.loss_call import LossCall
from cogumi.rl.loss_capture import is_per_sequence, sequence_log_ratio

# Sums over documents, divided by their number at the end of the step.
MEANS = (
    "new_logprobs",
    "old_logprobs",
    "ratio_new_old",
    "kl_new_old",
    "clipped_ratio_fraction",
    "advantage",
    "entropy",
)
# Sums over what has a ratio of its own: documents at sequence level, tokens at token level.
SUMS = ("ratio_new_old_sum", "ratio_new_old_squared_sum", "num_ratios")
COUNTS = ("num_tokens", "num_segments", "staleness")
SUMMED = (*MEANS, *SUMS, *COUNTS)
MAXIMA = ("max_advantage", "max_ratio", "negative_min_advantage", "negative_min_ratio")
PREFIX = "policy/"


class PolicyMetrics:
    """Sums of one optimizer step, kept on the device: one transfer a step, none per micro-batch."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.maxima: Tensor | None = None
        self.has_entropy = True

    def add(self, call: LossCall, staleness: float, token_ratio: bool = False) -> None:
        """One micro-batch; `staleness`: documents trained on since the policy that wrote it."""
        with torch.no_grad():
            sums, maxima = micro_batch(call, staleness, token_ratio)
        self.has_entropy &= call.entropy is not None
        self.sums = sums if self.sums is None else self.sums + sums
        self.maxima = maxima if self.maxima is None else torch.maximum(self.maxima, maxima)

    def take(self, accelerator: Any) -> dict[str, float]:
        """The step's metrics over all processes, named `policy/...`; empty if no micro-batch was added. Starts anew."""
        if self.sums is None or self.maxima is None:
            return {}
        gathered = accelerator.gather(torch.cat([self.sums, self.maxima])[None]).cpu()
        self.sums = self.maxima = None
        summed = dict(zip(SUMMED, gathered[:, : len(SUMMED)].sum(0).tolist(), strict=True))
        largest = dict(zip(MAXIMA, gathered[:, len(SUMMED) :].amax(0).tolist(), strict=True))
        documents = max(summed["num_segments"], 1.0)
        metrics = {name: summed[name] / documents for name in (*MEANS, "staleness")}
        if not self.has_entropy:
            del metrics["entropy"]
        self.has_entropy = True
        metrics |= {name: summed[name] for name in (*SUMS[:2], "num_tokens", "num_segments")}
        if summed["num_segments"] > 0:
            metrics |= {"max_advantage": largest["max_advantage"], "min_advantage": -largest["negative_min_advantage"]}
            metrics |= {"max_ratio": largest["max_ratio"], "min_ratio": -largest["negative_min_ratio"]}
        metrics["effective_sample_size"] = effective_sample_size(
            summed["ratio_new_old_sum"], summed["ratio_new_old_squared_sum"], summed["num_ratios"]
        )
        return {PREFIX + name: value for name, value in metrics.items()}


def micro_batch(call: LossCall, staleness: float, token_ratio: bool) -> tuple[Tensor, Tensor]:
    """(sums in the order of SUMMED, maxima in the order of MAXIMA) of one micro-batch, float64."""
    keep = call.mask > 0
    mask = keep.double()
    lengths = mask.sum(-1)
    nonempty = lengths > 0
    weight = mask / lengths.clamp(min=1)[:, None]  # sums to 1 over a document
    documents = nonempty.double()

    def per_document(tokens: Tensor) -> Tensor:
        # A masked position may hold anything, infinities included.
        return (torch.where(keep, tokens.detach().double(), 0.0) * weight).sum()

    if is_per_sequence(call, token_ratio):
        log_ratio = torch.where(nonempty, sequence_log_ratio(call).double(), 0.0)
        share = own = documents
        has_ratio = nonempty
    else:
        log_ratio = torch.where(keep, (call.new.detach() - call.old_or_new()).double(), 0.0)
        share, own, has_ratio = weight, mask, keep
    ratio = torch.exp(log_ratio)
    low, high = call.arguments["epsilon_low"], call.arguments["epsilon_high"]
    clipped = ((ratio < 1 - low) | (ratio > 1 + high)).double()
    advantages = call.advantages.double()
    advantages = advantages[:, None].expand_as(mask) if advantages.dim() == 1 else advantages
    sums = {
        "new_logprobs": per_document(call.new),
        "old_logprobs": per_document(call.old_or_new()),
        "ratio_new_old": (ratio * share).sum(),
        "kl_new_old": ((ratio - log_ratio - 1) * share).sum(),
        "clipped_ratio_fraction": (clipped * share).sum(),
        "advantage": per_document(advantages),
        "entropy": per_document(torch.zeros_like(mask) if call.entropy is None else call.entropy),
        "ratio_new_old_sum": (ratio * own).sum(),
        "ratio_new_old_squared_sum": (ratio.square() * own).sum(),
        "num_ratios": own.sum(),
        "num_tokens": mask.sum(),
        "num_segments": documents.sum(),
        "staleness": documents.sum() * staleness,
    }
    nothing = torch.full((1,), -math.inf, dtype=torch.float64, device=mask.device)
    extremes = {
        "max_advantage": torch.where(keep, advantages, -math.inf),
        "max_ratio": torch.where(has_ratio, ratio, -math.inf),
        "negative_min_advantage": torch.where(keep, -advantages, -math.inf),
        "negative_min_ratio": torch.where(has_ratio, -ratio, -math.inf),
    }
    maxima = torch.stack([torch.cat([extremes[name].flatten(), nothing]).amax() for name in MAXIMA])
    return torch.stack([sums[name] for name in SUMMED]), maxima


def effective_sample_size(total: float, squared: float, count: float) -> float:
    """(sum R)^2 / (n sum R^2), the share of n samples that importance weights leave in effect, in (0, 1]. Kish 1965."""
    return total * total / (count * squared) if squared > 0 and count > 0 else math.nan
