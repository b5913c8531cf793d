"""Training every weight of the model instead of an adapter (`cogumi.tuning: full`), where it fits."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from cogumi.checkpoints.commit import remove_if_there, written_aside
from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import gib
from cogumi.health.verdict import Check
from cogumi.rl.memory_plan import USABLE, free_memory_bytes

ADAMW_BYTES = 8  # per weight: two moments in float32
# Optimizers whose state is smaller: bytes a weight, of what must be where the weights are.
STATE_BYTES = {
    "sgd": 0,
    "adafactor": 0,
    "adamw_8bit": 2,
    "adamw_bnb_8bit": 2,
    "lion_8bit": 1,
    "paged_adamw_8bit": 0,
    "paged_adamw_32bit": 0,
    "paged_lion_8bit": 0,
}
SAMPLED = 256  # elements of each tensor that are compared to see whether it moved


def refuse_with_adapter_settings(run: RunConfig) -> None:
    """Raise UsageError for settings of an adapter that is not there."""
    given = {
        "model.adapter": run.model.adapter,
        "cogumi.lora_preset": run.cogumi.lora_preset,
        "cogumi.loraplus_lr_ratio": run.cogumi.loraplus_lr_ratio,
        **{f"lora.{key}": value for key, value in run.lora.items()},
    }
    for key, value in given.items():
        if value is not None:
            raise UsageError(
                f"{key} would be ignored: cogumi.tuning: full trains no adapter", fix="drop one of the two"
            )
    if run.model.quantization_config is not None:
        raise UsageError(
            "quantized weights cannot be trained themselves",
            key="model.quantization_config",
            fix="drop it, or drop cogumi.tuning: full (QLoRA)",
        )


def dtype_of_weights(run: RunConfig) -> str:
    """float32 unless the user says otherwise: in bfloat16 an update below 2^-9 of a weight is lost."""
    return "float32" if run.model.dtype == "auto" else run.model.dtype


def refuse_what_does_not_fit(run: RunConfig, base: str, optimizer: str) -> None:
    """Raise UsageError, before anything is loaded, where weights, gradients and optimizer states alone need more than is free.

    Bytes a weight: its dtype twice (itself, its gradient), AdamW's two moments in float32 (arXiv:1910.02054, section 3.1), and
    for DPO the reference model.
    """
    weights, itemsize = count_weights(base, run.model.revision), getattr(torch, dtype_of_weights(run)).itemsize
    state = STATE_BYTES.get(optimizer, ADAMW_BYTES)
    reference = itemsize if run.cogumi.method == "dpo" and not run.train.get("precompute_ref_log_probs") else 0
    need, free = weights * (2 * itemsize + state + reference), free_memory_bytes()
    if need > USABLE * free:
        raise UsageError(
            f"cogumi.tuning: full: {weights:,} weights need {gib(need)} before the first activation "
            f"({2 * itemsize} bytes each with the gradient, {state} for {optimizer}"
            + (f", {reference} for the reference model" if reference else "")
            + f") and {gib(USABLE * free)} of {gib(free)} free are usable; drop cogumi.tuning to train LoRA"
            + (", or set train.optim: adamw_8bit" if state == ADAMW_BYTES else "")
        )


def count_weights(base: str, revision: str | None) -> int:
    """How many weights a model has, tied ones once, from its config alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base, revision=revision))
    return sum(parameter.numel() for parameter in model.parameters())


def sample_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Some elements of each tensor that is trained, evenly spread, to see later whether it moved."""
    return {
        name: parameter.detach().flatten()[:: max(1, parameter.numel() // SAMPLED)].float().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def judge_moved(model: torch.nn.Module, start: dict[str, torch.Tensor]) -> Check:
    now = sample_of(model)
    moved = [name for name in start if not torch.equal(start[name], now[name])]
    largest = max((float((now[name] - start[name]).abs().max()) for name in start), default=0.0)
    figure = f"{len(moved)} of {len(start)} tensors moved, by {largest:.2e} at most"
    return Check("weights", figure, "most of them", len(moved) > len(start) / 2, "raise train.learning_rate")


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, run_dir: Path, dtype: torch.dtype) -> Path:
    """The trained model in the base's own dtype, as `merged/` like that of an adapter's run: written aside and renamed.

    The model itself is turned into that dtype: what is completed and compared afterwards is what was saved.
    """
    unfinished, whole = run_dir / ".merged", run_dir / "merged"
    remove_if_there(whole)
    with written_aside(unfinished):
        model.to(dtype).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    unfinished.rename(whole)
    return whole


def judge_saved(model: Any, saved: Path) -> Check:
    """Load what was saved and compare every tensor with the live one, bit for bit."""
    live = model.state_dict()
    stored = AutoModelForCausalLM.from_pretrained(saved, dtype="auto").state_dict()
    other = [name for name in live if name not in stored or not torch.equal(live[name].cpu(), stored[name])]
    figure = f"{len(other)} of {len(live)} tensors differ from the live model's"
    figure += f", the first is {other[0]}" if other else ""
    return Check("saved model", figure, "0, bit for bit", not other, "load the last checkpoint instead of merged/")
