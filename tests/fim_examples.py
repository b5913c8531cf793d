"""FIM examples of rows in memory, for tests."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
from datasets import Dataset

from cogumi.config.schema import FimConfig
from cogumi.data.fim import fim_prompts_chunk, fim_sft_chunk, read_controls
from cogumi.data.rows import Chunk


@dataclass(frozen=True)
class FimData:
    """Examples, and counts of dropped rows: `total` = len(dataset) + sum(dropped.values())."""

    dataset: Dataset
    dropped: dict[str, int]
    total: int


def tokenize_for_sft(
    rows: pl.DataFrame, tokenizer: Any, config: FimConfig, column: str = "source", first_row: int = 0
) -> FimData:
    """Make `input_ids` and `completion_mask` for SFTTrainer; `first_row` is the index of `rows[0]` in the source."""
    return _examples_of(fim_sft_chunk, rows.select(source=column), tokenizer, config, first_row)


def prompts_for_rl(rows: pl.DataFrame, tokenizer: Any, config: FimConfig, column: str = "source") -> FimData:
    """Make `prompt`, `prefix`, `suffix` and `middle` for GRPOTrainer."""
    return _examples_of(partial(fim_prompts_chunk, rewarded={}), rows.select(source=column), tokenizer, config, 0)


def _examples_of(
    make: Callable[..., Chunk], rows: pl.DataFrame, tokenizer: Any, config: FimConfig, first_row: int
) -> FimData:
    chunk = make(rows, first_row, controls=read_controls(tokenizer), config=config)
    dropped = {reason: counted.count for reason, counted in chunk.dropped.items()}
    return FimData(Dataset(chunk.table), dropped, rows.height)
