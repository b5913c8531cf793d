"""The trainer that a run will have, with a model of shapes and no memory: to know what it writes before anything is loaded."""

import copy
import tempfile
from typing import Any

import torch
from peft import get_peft_model
from transformers import Trainer

from cogumi.models.meta import meta_model


class PlannedTrainer(Trainer):
    """A Trainer whose model stays on the meta device. It forecasts, and cannot train."""

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        pass


def planned_trainer(config: Any, dtype: torch.dtype, args: Any, lora: Any = None, tokenizer: Any = None) -> Any:
    """A trainer for the model of a config, for `checkpoint_bytes` and `outlook`. 8 billion parameters take seconds and no memory.

    config: the base's, quantized or not. dtype: what the base is loaded in. args: TrainingArguments, or TRL's; nothing
    is written to their output_dir. lora: a PEFT config, or None where every weight is trained. As any Trainer this one
    sets the seeds. Raises what PEFT and transformers raise for a setting that they refuse, and UsageError for a model
    that transformers cannot build.
    """
    model = meta_model(config).to(dtype)
    if lora is not None:
        model = get_peft_model(model, copy.copy(lora), low_cpu_mem_usage=True)  # which completes what it is given
    if is_bitsandbytes(config):
        # TRL's trainers do so (sft_trainer.py and grpo_trainer.py, 1.15), after QLoRA.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    args = copy.copy(args)
    output_dir, args.push_to_hub, args.report_to = args.output_dir, False, []  # no repository is made, no run announced
    with tempfile.TemporaryDirectory(prefix="cogumi-forecast-") as scratch:
        args.output_dir = scratch  # a Trainer makes it
        trainer = PlannedTrainer(model, args, eval_dataset=[], processing_class=tokenizer)  # type: ignore[arg-type]
    args.output_dir = output_dir
    return trainer


def is_bitsandbytes(config: Any) -> bool:
    found = getattr(config, "quantization_config", None)
    entries = found if isinstance(found, dict) or found is None else found.to_dict()
    return entries is not None and bool(entries.get("load_in_4bit") or entries.get("load_in_8bit"))
