"""What libraries ask of values and their types do not say: numbers within limits, and keys of LoRA that are not the run's."""

from collections.abc import Callable
from math import inf
from typing import Any

from cogumi.config.source import Origins

# Keys of LoraConfig that are not the run's to choose, and what says it instead.
FIXED_LORA_KEYS = {
    "peft_type": "cogumi trains LoRA and no other kind of adapter",
    "task_type": "the model is a causal language model",
    "inference_mode": "a frozen adapter does not train",
    "base_model_name_or_path": "the base is model.name",
    "revision": "the base's is model.revision",
    "auto_mapping": "PEFT writes it",
    "peft_version": "PEFT writes it",
}
# Values of lora.init_lora_weights that stand for a pass over the data, or over gradients, which a run does not make.
PREPARED_INITS = ("eva", "corda")
# What libraries ask of numbers and their types do not say: the rule in words, whether a number holds it, and the keys.
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "must be at least 1": (
        lambda n: n >= 1,
        "train.per_device_train_batch_size train.per_device_eval_batch_size train.gradient_accumulation_steps "
        "train.save_total_limit train.max_completion_length train.steps_per_generation train.num_iterations lora.r "
        "train.vllm_max_model_length",
    ),
    "must be 1, as a run is one process; a server may have more": (lambda n: n == 1, "train.vllm_tensor_parallel_size"),
    "must be at least 1, or -1 for train.num_train_epochs": (lambda n: n >= 1 or n == -1, "train.max_steps"),
    "must be at least 1 step, or a share of all steps below 1": (
        lambda n: n > 0,
        "train.save_steps train.logging_steps train.eval_steps",
    ),
    "must be more than 0": (lambda n: 0 < n < inf, "train.num_train_epochs train.repetition_penalty"),
    "must be more than 0, because GRPO samples; 1.0 samples from the model as it is": (
        lambda n: 0 < n < inf,
        "train.temperature",
    ),
    "must be more than 0 and at most 1": (lambda n: 0 < n <= 1, "train.top_p train.vllm_gpu_memory_utilization"),
    "must be at least 0 and at most 1": (lambda n: 0 <= n <= 1, "train.min_p"),
    "must be at least 1, or 0 for all tokens": (lambda n: n >= 0, "train.top_k"),
    "must be 0 or more": (lambda n: 0 <= n < inf, "train.learning_rate train.weight_decay train.warmup_steps"),
    "must be at least 0 and below 1": (lambda n: 0 <= n < 1, "train.adam_beta1 train.adam_beta2 lora.lora_dropout"),
}


def refuse_out_of_range(section: str, values: dict[str, Any], origins: Origins) -> None:
    """Raise UsageError for numbers that mean nothing, which libraries take for a default or find out late."""
    for rule, (holds, keys) in RANGES.items():
        for key in keys.split():
            name = key.removeprefix(f"{section}.")
            value = values.get(name) if name != key else None
            if isinstance(value, int | float) and not holds(value):
                raise origins.error(f"{key} = {value:g}: {rule}", key)


def refuse_no_lora(lora: dict[str, Any], origins: Origins) -> None:
    """Raise UsageError for keys that PEFT would take, and that make it no LoRA or that cogumi ignores."""
    for key, reason in FIXED_LORA_KEYS.items():
        if key in lora:
            raise origins.error(f"lora.{key} is not the run's to set: {reason}", f"lora.{key}", "drop it")
    init = str(lora.get("init_lora_weights", "")).lower()
    if init in PREPARED_INITS:
        needs = f"{init} needs a pass over the data before training, which a run does not make"
        raise origins.error(needs, "lora.init_lora_weights", "drop it")
