"""Supervised fine-tuning: TRL's SFTTrainer on tokenized examples."""

from typing import Any

import polars as pl
from transformers import PreTrainedTokenizerBase

from cogumi.config import RunConfig
from cogumi.data.fim import FimData, tokenize_for_sft
from cogumi.errors import UsageError


def arguments(run: RunConfig) -> dict[str, Any]:
    """SFTConfig arguments. Raises UsageError for settings that would quietly train on something else."""
    length, budget = run.train.get("max_length"), run.data.fim.max_length
    if length is not None and length < budget:
        raise UsageError(
            f"train.max_length {length} would cut examples that data.fim.max_length {budget} lets through; "
            f"set data.fim.max_length to {length}, which drops and counts them"
        )
    # Only the middle is learned; the data's own budget has already dropped, and counted, what is too long.
    return {"completion_only_loss": True, "max_length": None, **run.train}


def prepare(run: RunConfig, rows: pl.DataFrame, tokenizer: PreTrainedTokenizerBase, name: str) -> FimData:
    return tokenize_for_sft(rows, tokenizer, run.data.fim, column=run.data.column, name=name)


def build_trainer(run: RunConfig, **common: Any) -> Any:
    import trl  # looked up here: unsloth may have put its own trainer on the module

    trainer = trl.SFTTrainer(**common)
    if not run.train.get("packing"):  # packed: rows of their own, whose labels are folded into other columns
        refuse_other_labels(trainer, common["train_dataset"])
    return trainer


def refuse_other_labels(trainer: Any, dataset: Any) -> None:
    """Raise RuntimeError unless the trainer learns exactly the tokens the data says: whoever's trainer it is.

    TRL 1.15 ignores `completion_mask` without `completion_only_loss`, and a trainer that unsloth generated may have a
    preparation of its own. The prompts would be trained on without a word.
    """
    first = range(min(4, len(dataset)))
    wanted = [sum(dataset[i]["completion_mask"]) for i in first]
    labels = trainer.data_collator([trainer.train_dataset[i] for i in first])["labels"]
    learned = (labels != -100).sum(-1).tolist()
    if learned != wanted:
        raise RuntimeError(
            f"{type(trainer).__name__} would learn {learned} tokens of the first examples, whose middles have {wanted}"
        )
