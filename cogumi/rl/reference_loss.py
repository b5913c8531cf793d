"""The policy losses as formulas, in float64: what a trainer's first loss and gradient are compared with.

Written from the papers named in `cogumi.config.presets`, with TRL 1.15's normalisers. Slow and plain on purpose.
"""

import math

import torch
from torch import Tensor

from cogumi.rl.loss_call import LossCall

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # TRL 1.15's losses with PPO's two-sided clip


def loss_and_gradient(call: LossCall, token_ratio: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, sum of the magnitudes of its parts, d loss / d new (B, T)), all float64."""
    new = call.new.detach().double().requires_grad_()
    with torch.enable_grad():
        parts = _contributions(call, new, token_ratio)
        loss = parts.sum()
        (gradient,) = torch.autograd.grad(loss, new)
    return loss.detach(), parts.detach().abs().sum(), gradient


def _contributions(call: LossCall, new: Tensor, token_ratio: bool) -> Tensor:
    mask = (call.mask > 0).double()
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    keep = mask > 0
    old = new.detach() if call.old is None else call.old.detach().double()
    log_ratio = torch.where(keep, new - torch.where(keep, old, 0.0), 0.0)
    per_sequence = log_ratio.sum(-1, keepdim=True) / lengths
    if token_ratio:
        log_weight = per_sequence.detach() + log_ratio - log_ratio.detach()
    else:
        log_weight = per_sequence if call.arguments["importance_sampling_level"] == "sequence" else log_ratio
    advantages = call.advantages.detach().double()
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    token_loss = _policy_term(call, log_weight.exp(), log_ratio, advantages, new, mask)
    if call.weight is not None:
        token_loss = token_loss * call.weight.detach().double()
    if call.ref is not None and call.arguments["beta"] != 0:
        away = torch.where(keep, call.ref.detach().double() - new, 0.0)
        kl = away.exp() - away - 1  # Schulman's k3
        if call.arguments.get("use_bias_correction_kl"):
            kl = kl * log_weight.exp()
        token_loss = token_loss + call.arguments["beta"] * kl
    return torch.where(keep, token_loss.expand_as(mask), 0.0) * _share(call, mask, lengths)


def _policy_term(
    call: LossCall, ratio: Tensor, log_ratio: Tensor, advantages: Tensor, new: Tensor, mask: Tensor
) -> Tensor:
    settings = call.arguments
    loss_type = settings["loss_type"]
    low, high = settings["epsilon_low"], settings["epsilon_high"]
    if loss_type in CLIPPED:
        capped = ratio if settings.get("delta") is None else ratio.clamp(max=settings["delta"])
        return -torch.minimum(capped * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if loss_type == "cispo":
        return -ratio.clamp(max=high).detach() * advantages * new
    if loss_type == "sapo":
        pos, neg = (advantages.new_tensor(settings[f"sapo_temperature_{sign}"]) for sign in ("pos", "neg"))
        temperature = torch.where(advantages > 0, pos, neg)
        return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages
    if loss_type == "vespo":
        # Clamped as in the authors' code, so that the weight of a far-off sequence is a number.
        whole = (log_ratio.detach().clamp(-20, 20) * mask).sum(-1, keepdim=True).clamp(math.log(1e-8), 20)
        k, rate = (
            torch.where(advantages >= 0, advantages.new_tensor(shape["pos"]), advantages.new_tensor(shape["neg"]))
            for shape in (
                {sign: settings[f"vespo_{name}_{sign}"] for sign in ("pos", "neg")} for name in ("k", "lambda")
            )
        )
        return -torch.exp(rate + k * whole - rate * whole.exp()) * advantages * new
    raise KeyError(loss_type)


def _share(call: LossCall, mask: Tensor, lengths: Tensor) -> Tensor:
    """What a token's loss is multiplied by: one over the loss's normaliser."""
    settings = call.arguments
    rows, accumulation = len(mask), settings["current_gradient_accumulation_steps"]
    match settings["loss_type"]:
        case "grpo" | "sapo":
            normaliser = lengths * rows
        case "luspo":
            normaliser = torch.full_like(lengths, rows)
        case "bnpo":
            normaliser = mask.sum().clamp(min=1)
        case "dr_grpo":
            normaliser = torch.full_like(lengths, rows * settings["max_completion_length"])
        case _:  # dapo, cispo, vespo: the step's tokens, which TRL takes to be an even share of the rollout's
            tokens = max(float(settings["num_items_in_batch"]), 1.0) / settings["num_processes"]
            normaliser = torch.full_like(lengths, tokens / settings["steps_per_generation"])
    return 1 / (normaliser * accumulation)
