"""Ranks and scales of LoRA by name (`cogumi.lora_preset`), each with where its numbers are from. `lora:` goes over them.

What a preset does not say stays the default: every linear layer, rank 16, alpha 32, no dropout (`models/adapters.py`).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Keys of peft's LoraConfig, and why these."""

    values: dict[str, Any]
    reason: str


# "LoRA Without Regret": Schulman et al., Thinking Machines Lab, 2025, https://thinkingmachines.ai/blog/lora/
PRESETS = {
    "rl": Preset(
        {"r": 8, "lora_alpha": 32},
        "a reward says a few bits an episode, and rank 1 learned them as well as full fine-tuning did; alpha 32 at every "
        "rank (LoRA Without Regret, 2025)",
    ),
    "large": Preset(
        {"r": 256, "lora_alpha": 32},
        "for SFT on more tokens than a small adapter can hold: rank 256 followed full fine-tuning longest, with alpha 32, "
        "about ten times its learning rate, and a batch that is not large (LoRA Without Regret, 2025)",
    ),
    "qlora": Preset(
        {"r": 64, "lora_alpha": 16, "lora_dropout": 0.1},
        "what QLoRA trained models of up to 13B with, on every linear layer (arXiv:2305.14314, appendix B); set "
        "lora.lora_dropout to 0 for RL, whose ratio it disturbs",
    ),
    "rslora": Preset(
        {"r": 64, "lora_alpha": 16, "use_rslora": True},
        "alpha/sqrt(r) keeps activations and gradients of one size at every rank, where alpha/r lets them shrink "
        "(arXiv:2312.03732); alpha 16 makes the scale 2, as the default's is",
    ),
}


def with_preset(name: str, lora: dict[str, Any]) -> dict[str, Any]:
    """`lora:` over the values of a preset."""
    return PRESETS[name].values | lora


def describe(name: str, lora: dict[str, Any]) -> str:
    """One line for the log: what the preset gave, what `lora:` said instead, and why these numbers."""
    values = PRESETS[name].values
    given = ", ".join(f"{key} {value}" for key, value in values.items() if lora[key] == value)
    other = ", ".join(f"{key} {lora[key]}" for key, value in values.items() if lora[key] != value)
    instead = f"{'; ' if given else ''}lora: says {other}" if other else ""
    of_preset = f"the preset's {', '.join(f'{key} {value}' for key, value in values.items())}: " if other else ""
    return f"lora_preset {name}: {given}{instead} ({of_preset}{PRESETS[name].reason})"
