"""What the GSPO tests share: real GRPO trainers on the tiny model, and float64 batches with known sequence ratios."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cogumi

Loss = Callable[..., torch.Tensor]

# Prompts of different lengths, so that padding them together pads them by different amounts.
PROMPTS = [
    "def f(", "import", "class Reader:\n    def read(self", "x", "for key in sorted(names):\n",
    "return", "with open(path) as file:\n    return", "if not", "try:\n    value =", "raise ValueError(",
]  # fmt: skip


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs inside nearly every group and costs nothing: the share of even tokens, and the length."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


def gradient_of_logps(trainer: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(d loss / d log-probability (B, T), which tokens are learned (B, T)) of a rollout's micro-batch with advantages of 1.

    Without old log-probabilities, so that no clip takes a gradient away.
    """
    seen: list[torch.Tensor] = []
    original = trainer._get_per_token_logps_and_entropies

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        result[0].retain_grad()
        seen.append(result[0])
        return result

    options = {name: value for name, value in batch.items() if name != "old_per_token_logps"}
    options["advantages"] = torch.ones_like(batch["advantages"])
    trainer.model.train()
    trainer._get_per_token_logps_and_entropies = noted
    try:
        trainer._compute_loss(trainer.model, options).backward()
    finally:
        del trainer._get_per_token_logps_and_entropies
        trainer.model.zero_grad()
    [logps] = seen
    return logps.grad, (batch["completion_mask"] * batch["tool_mask"]).bool()


def grpo_trainer(
    model_path: Path,
    output_dir: Path,
    prompts: list[str] = PROMPTS,
    dtype: torch.dtype = torch.float32,
    lora: bool | dict[str, Any] = False,
    reward: Callable[..., list[float]] = even_tokens,
    model: Any = None,
    rollout_func: Any = None,
    **values: Any,
) -> Any:
    """Build a GRPOTrainer as a script does: cogumi's patches, then TRL's own classes. `values` are GRPOConfig's keys.

    lora: settings beside the usual ones. model: instead of that of the path, whose tokenizer is taken.

    Plain SGD, no weight decay and no gradient clipping unless `values` say otherwise: a step is then a linear function
    of its gradient, so two runs differ by what their gradients differ by. (Adam divides by the gradient's size, and
    turns rounding in an entry that is almost zero into a full step.)
    """
    cogumi.patch()
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    common: dict[str, Any] = {
        "output_dir": str(output_dir),
        "num_generations": 2,
        "max_completion_length": 8,
        "optim": "sgd",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
    }
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"}
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype) if model is None else model,
        reward_funcs=reward,
        args=GRPOConfig(**{**common, **values}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        peft_config=LoraConfig(**settings | (lora if isinstance(lora, dict) else {})) if lora is not False else None,
        rollout_func=rollout_func,
    )


def loss_of(trainer: Any, new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The loss the trainer's own `_compute_loss` makes of log-probabilities new and old, (batch, length).

    `inputs` are its other inputs: advantages, and tool_mask or num_items_in_batch where they matter.
    """
    original = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    trainer.model.train()
    prompt = torch.ones(len(new), 3, dtype=torch.long)
    tokens = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
    }
    try:
        return trainer._compute_loss(trainer.model, tokens | {"old_per_token_logps": old} | inputs)
    finally:
        trainer._get_per_token_logps_and_entropies = original


def batch(lengths: list[int], drift: list[float], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(new, old, mask) with `mean(new - old) = drift` over each row's first `length` tokens, and noise beyond them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(*lengths, 1))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).double()
    old = -torch.rand(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.01
    noise -= (noise * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    new = old + noise + torch.tensor(drift, dtype=torch.float64)[:, None]
    return new.requires_grad_(), old, mask


def completion_logps(model: Any, inputs: dict[str, Any], temperature: float = 1.0) -> torch.Tensor:
    """(batch, length) log-probabilities from the model's plain, dense logits: no fused head, no TRL."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
    logps = torch.log_softmax(logits / temperature, -1)
    return logps.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
