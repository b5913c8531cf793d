"""Presets by name, each with where its numbers are from: policy losses (`train.loss_type`) and LoRA (`cogumi.lora_preset`).

A loss is a set of TRL's own GRPOConfig values. A key in the config wins over the loss's value. Values equal to TRL's
defaults are spelled out too, because unsloth's generated config has others. Those are a KL term for a loss that it does
not know, learning rate 5e-5 and 8-bit AdamW.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One named loss: what it optimises, where it was published, and its GRPOConfig values."""

    summary: str
    paper: str
    values: dict[str, Any] = field(hash=False)
    token_ratio: bool = False
    """GSPO-token: the value of the sequence's ratio with each token's own gradient (`cogumi.rl.loss_capture`)."""


def _preset(summary: str, paper: str, loss_type: str, level: str, token_ratio: bool = False, **values: Any) -> Preset:
    spelled_out = {"importance_sampling_level": level, "beta": 0.0, "scale_rewards": "group", "delta": None}
    spelled_out |= {"mask_truncated_completions": False}
    return Preset(summary, paper, {"loss_type": loss_type, **spelled_out, **values}, token_ratio)


_GSPO_CLIP: dict[str, Any] = {"epsilon": 3e-4, "epsilon_high": 4e-4}  # arXiv:2507.18071, section 5.1
_TOKEN_CLIP: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.2}

PRESETS: dict[str, Preset] = {
    "gspo": _preset(
        "mean over sequences of the clipped sequence ratio times the advantage",
        "Zheng et al. 2025, arXiv:2507.18071, equation 5",
        "grpo", "sequence", **_GSPO_CLIP,
    ),
    "gspo-length": _preset(
        "gspo, each sequence weighted by its length: Fast-LLM's and LUSPO's sum",
        "arXiv:2602.05261; epsilons of Fast-LLM's GSPO recipe",
        "luspo", "sequence", epsilon=3e-3, epsilon_high=4e-3,
    ),
    "gspo-token": _preset(
        "gspo for advantages that vary along a sequence: clipped by the sequence's ratio, gradient token by token",
        "arXiv:2507.18071, equation 13",
        "grpo", "token", token_ratio=True, **_GSPO_CLIP,
    ),
    "grpo": _preset(
        "token ratios, mean over each sequence, then over sequences; a KL term of 0.04",
        "Shao et al. 2024, arXiv:2402.03300, equation 3",
        "grpo", "token", beta=0.04, **_TOKEN_CLIP,
    ),
    "dr_grpo": _preset(
        "token ratios summed and divided by a constant; advantages not divided by the group's deviation",
        "Liu et al. 2025, arXiv:2503.20783",
        "dr_grpo", "token", scale_rewards="none", **_TOKEN_CLIP,
    ),
    "dapo": _preset(
        "token ratios averaged over all tokens of the step; a higher upper clip; truncated completions left out",
        "Yu et al. 2025, arXiv:2503.14476",
        "dapo", "token", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True,
    ),
    "bnpo": _preset(
        "token ratios averaged over the tokens of each micro-batch (depends on the micro-batch)",
        "TRL's `bnpo`",
        "bnpo", "token", **_TOKEN_CLIP,
    ),
    "cispo": _preset(
        "REINFORCE weighted by the token ratio, capped at epsilon_high and detached",
        "MiniMax 2025, arXiv:2506.13585; cap of arXiv:2510.13786",
        "cispo", "token", epsilon=0.2, epsilon_high=5.0,
    ),
    "sapo": _preset(
        "token ratios through a sigmoid gate instead of a clip, colder for negative advantages",
        "arXiv:2511.20347",
        "sapo", "token", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, **_TOKEN_CLIP,
    ),
    "vespo": _preset(
        "REINFORCE weighted by a Gamma-shaped function of the whole sequence's ratio",
        "arXiv:2602.10693",
        "vespo", "token", vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, **_TOKEN_CLIP,
    ),
}  # fmt: skip

# The names TRL does not know; the others mean TRL's own loss in a script and the preset in a run's YAML.
OURS = ("gspo", "gspo-length", "gspo-token")


def preset(name: str) -> dict[str, Any]:
    """GRPOConfig keyword arguments of a preset, for `trl.GRPOConfig(**preset("dapo"), ...)`. KeyError for other names.

    Ours keep their names, which `cogumi.patch()` makes GRPOConfig understand, and with them their trainers' watch.
    """
    return {**PRESETS[name].values, **({"loss_type": name} if name in OURS else {})}


# ---------------------------------------------------------------------------------------------------------------- LoRA

# Keys of peft's LoraConfig, and why these. What a preset does not say stays the default: every linear layer, rank 16,
# alpha 32, no dropout (`models/adapters.py`).
# "LoRA Without Regret": Schulman et al., Thinking Machines Lab, 2025, https://thinkingmachines.ai/blog/lora/
LORA_PRESETS: dict[str, tuple[dict[str, Any], str]] = {
    "rl": (
        {"r": 8, "lora_alpha": 32},
        "a reward says a few bits an episode, and rank 1 learned them as well as full fine-tuning did; alpha 32 at every "
        "rank (LoRA Without Regret, 2025)",
    ),
    "large": (
        {"r": 256, "lora_alpha": 32},
        "for SFT on more tokens than a small adapter can hold: rank 256 with alpha 32 followed full fine-tuning longest. It "
        "wants about ten times the learning rate, and a batch that is not large (LoRA Without Regret, 2025)",
    ),
    "qlora": (
        {"r": 64, "lora_alpha": 16, "lora_dropout": 0.1},
        "what QLoRA trained models of up to 13B with, on every linear layer (arXiv:2305.14314, appendix B); set "
        "lora.lora_dropout to 0 for RL, whose ratio it disturbs",
    ),
    "rslora": (
        {"r": 64, "lora_alpha": 16, "use_rslora": True},
        "alpha/sqrt(r) keeps activations and gradients of one size at every rank, where alpha/r lets them shrink "
        "(arXiv:2312.03732); alpha 16 makes the scale 2, as the default's is",
    ),
}


def describe_lora(name: str, lora: dict[str, Any]) -> str:
    """One line for the log: what the preset gives, what `lora:` says instead, and why these numbers."""
    values, reason = LORA_PRESETS[name]
    given = ", ".join(f"{key} {value}" for key, value in values.items())
    other = ", ".join(f"{key} {lora[key]}" for key, value in values.items() if lora[key] != value)
    instead = f", but lora: says {other}" if other else ""
    return f"lora_preset {name}: {given}{instead} ({reason})"
