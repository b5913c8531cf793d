"""The LoRA that a run trains, and what it did."""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.merge.adapter_files import quantization_of

# Rank 16 on every linear layer with alpha = 2r; dropout 0, because GSPO's ratio must be 1 before the first update.
DEFAULTS: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
WEIGHTS = "adapter_model.safetensors"
TRAINED = "default"  # PEFT's name for the adapter that is trained


def lora_config(lora: dict[str, Any], revision: str | None = None) -> LoraConfig:
    """The LoraConfig of a run: `lora:` over the defaults. `revision` is the base's, recorded for the merge."""
    try:
        return LoraConfig(**{**DEFAULTS, "task_type": "CAUSAL_LM", "revision": revision, **lora})
    except (ValueError, TypeError) as error:
        raise UsageError(one_line(error), key="lora") from error


def refuse_unmatched(lora: dict[str, Any], of_base: Any) -> None:
    """Raise UsageError where `lora.target_modules` match no module of the base, before anything is loaded or prepared.

    of_base: its config. A base that cannot be built of it alone is left for PEFT to refuse.
    """
    wanted = lora.get("target_modules")
    if wanted is None or wanted == "all-linear" or lora.get("target_parameters"):
        return
    config = lora_config(lora)
    try:
        with torch.device("meta"):  # of the class that a run loads; building it writes into the config
            base = AutoModelForCausalLM.from_config(copy.deepcopy(of_base))
    except (ValueError, ImportError, RuntimeError):
        return
    if any(check_target_module_exists(config, name) for name, _ in base.named_modules()):
        return
    head = base.get_output_embeddings()
    linear = dict.fromkeys(
        name.rpartition(".")[2]
        for name, each in base.named_modules()
        if isinstance(each, torch.nn.Linear | Conv1D) and each is not head
    )
    words = [wanted] if isinstance(wanted, str) else sorted(wanted)
    raise UsageError(
        f"{', '.join(words)}: no module of {type(base).__name__} matches",
        key="lora.target_modules",
        fix=f"its linear modules are {', '.join(linear)} (all-linear takes them all)",
    )


def keep_float32(model: Any) -> None:
    """Give the adapter on a quantized base the float32 back that PEFT made it in. Before there is an optimizer. TRL
    1.15 casts it to bfloat16, where an update below 2^-9 of a weight is lost. What is trained whole (modules_to_save)
    gets the base's dtype."""
    if quantization_of(model.config) is None:
        return
    base = model.get_base_model().dtype
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32 if "lora_" in name else base)


def differing_tensors(model: Any, adapter: Path) -> list[str]:
    """The tensors in which the model's adapter and the one that was saved from it are not the same, bit for bit."""
    live, saved = get_peft_model_state_dict(model), load_file(adapter / WEIGHTS)
    same = {name for name in live.keys() & saved.keys() if torch.equal(live[name].cpu(), saved[name])}
    return sorted((live.keys() | saved.keys()) - same)
