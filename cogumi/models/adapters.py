"""The LoRA that a run trains, and what it did."""

from typing import Any

import torch
from peft import LoraConfig

# Rank 16 on every linear layer with alpha = 2r; dropout 0, because GSPO's ratio must be 1 before the first update.
DEFAULTS: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}


def lora_config(lora: dict[str, Any], revision: str | None = None) -> LoraConfig:
    """The LoraConfig of a run: `lora:` over the defaults. `revision` is the base's, recorded for the merge."""
    return LoraConfig(**{**DEFAULTS, "task_type": "CAUSAL_LM", "revision": revision, **lora})


def largest_change(model: torch.nn.Module) -> float:
    """The largest |B| of the adapter's up-projections: 0 before training, and still 0 if nothing was learned."""
    return max((p.detach().abs().max().item() for n, p in model.named_parameters() if "lora_B" in n), default=0.0)
