"""GSPO: TRL's GRPOTrainer with a sequence-level ratio (cogumi/patches/gspo.py), on rewards named in the config."""

from typing import Any

import polars as pl
import torch
from transformers import PreTrainedTokenizerBase

from cogumi.config import RunConfig
from cogumi.data.fim import FimData, prompts_for_rl
from cogumi.errors import UsageError
from cogumi.patches.gspo import gspo_arguments
from cogumi.rewards.fim import fim_rewards


def arguments(run: RunConfig) -> dict[str, Any]:
    """GRPOConfig arguments with GSPO spelled out. Raises UsageError for an unknown reward or a contradiction."""
    fim_rewards(run.cogumi.rewards)
    for key in ("epsilon", "epsilon_high"):
        if (value := run.train.get(key)) is not None and value <= 0:
            raise UsageError(f"train.{key} is {value}; the clip needs a positive number, such as 3e-4")
    return gspo_arguments({"loss_type": "gspo", **run.train})


def prepare(run: RunConfig, rows: pl.DataFrame, tokenizer: PreTrainedTokenizerBase, name: str) -> FimData:
    return prompts_for_rl(rows, tokenizer, run.data.fim, column=run.data.column, name=name)


def build_trainer(run: RunConfig, **common: Any) -> Any:
    from trl import GRPOTrainer

    trainer = GRPOTrainer(reward_funcs=fim_rewards(run.cogumi.rewards), **common)
    log_ratios(trainer)
    return trainer


def log_ratios(trainer: Any) -> None:
    """Log mean, min and max of the sequence ratio each loss computed; TRL 1.15 logs how many were clipped, not the ratio.

    The log-probabilities are taken where the loss takes them, so nothing is computed twice.
    """
    compute_loss, compute_logps = trainer._compute_loss, trainer._get_per_token_logps_and_entropies
    latest: list[torch.Tensor] = []

    def remember_logps(*args: Any, **kwargs: Any) -> Any:
        result = compute_logps(*args, **kwargs)
        latest[:] = [result[0].detach()]
        return result

    def loss_and_ratio(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = compute_loss(model, inputs)
        (new,) = latest
        old = inputs.get("old_per_token_logps")
        old = new if old is None else old  # as in the loss: on-policy, the ratio is 1
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        ratio = torch.exp(((new - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1))
        metrics = trainer._metrics["train" if model.training else "eval"]
        for name, value in (("mean", ratio.mean()), ("min", ratio.min()), ("max", ratio.max())):
            metrics[f"ratio_new_old/{name}"].append(value.item())
        return loss

    trainer._get_per_token_logps_and_entropies = remember_logps
    trainer._compute_loss = loss_and_ratio
