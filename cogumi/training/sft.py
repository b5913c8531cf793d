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
    from trl import SFTTrainer

    return SFTTrainer(**common)
