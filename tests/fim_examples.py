"""Examples of rows that are in memory: what a run makes of its files, for tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
from datasets import Dataset

from cogumi.config.schema import FimConfig
from cogumi.core.errors import UsageError
from cogumi.data.fim import fim_prompts_chunk, fim_sft_chunk, read_controls
from cogumi.data.rows import Chunk


@dataclass(frozen=True)
class FimData:
    """Examples, and what became of every row: `total` = len(dataset) + sum(dropped.values())."""

    dataset: Dataset
    dropped: dict[str, int]
    total: int
    name: str = "rows"
    note: str = ""

    def report(self) -> str:
        """One line: "sample.parquet: 9,421 rows, 9,100 used; dropped 300 longer than 512 tokens, 21 null"."""
        return report_of(self.name, self.total, len(self.dataset), self.dropped) + (
            f" ({self.note})" if self.note else ""
        )


def tokenize_for_sft(
    rows: pl.DataFrame,
    tokenizer: Any,
    config: FimConfig,
    column: str = "source",
    *,
    name: str = "rows",
    first_row: int = 0,
) -> FimData:
    """Tokenized examples for TRL's SFTTrainer, in row order.

    The dataset has `input_ids` (list of int32) and `completion_mask` (list of int8): 1 on the middle and its end
    token, or on all of a plain row but its beginning of sequence. SFTTrainer (trl 1.15, sft_trainer.py, build_labels)
    takes these columns as they are but reads the mask only when SFTConfig.completion_only_loss is True; for tokenized
    data its default is False.

    `first_row` is the index of `rows[0]` in the whole source, so that chunks give what the whole would. Raises
    UsageError when the column is missing or not text, the tokenizer has no end token, or no row is usable.
    """
    return examples_of(fim_sft_chunk, rows, tokenizer, config, column, name, first_row)


def prompts_for_rl(
    rows: pl.DataFrame,
    tokenizer: Any,
    config: FimConfig,
    column: str = "source",
    *,
    name: str = "rows",
    first_row: int = 0,
) -> FimData:
    """Prompts for TRL's GRPOTrainer, with what the rewards need, in row order.

    The dataset has the strings `prompt`, `prefix`, `suffix` and `middle`. `tokenizer(prompt)` gives the ids that
    `tokenize_for_sft` puts before the middle of the same row. prefix + middle + suffix is the source even where
    `overlong="trim"` shortened what the prompt shows. `fim_rate` does not apply: a plain row has nothing to ask for.
    The budget is that of the whole example, so `max_length` less the longest middle bounds the prompt.

    Raises UsageError as `tokenize_for_sft`, and when the tokenizer reads a prompt's text as other ids (for instance
    because it appends an end token to every text).
    """
    return examples_of(partial(fim_prompts_chunk, rewarded={}), rows, tokenizer, config, column, name, first_row)


def examples_of(
    make: Callable[..., Chunk],
    rows: pl.DataFrame,
    tokenizer: Any,
    config: FimConfig,
    column: str,
    name: str,
    first_row: int,
) -> FimData:
    """What `make` makes of all rows. Raises UsageError where that is nothing."""
    controls = read_controls(tokenizer)
    chunk = make(rows.select(source=column), first_row, controls=controls, config=config)
    dropped = {reason: rows_of_it.count for reason, rows_of_it in chunk.dropped.items()}
    if not len(chunk.table):
        said = report_of(name, rows.height, 0, dropped)
        raise UsageError(said, fix="give other rows, or change max_length or middle_chars")
    note = controls.order_note(config.spm_rate)
    return FimData(Dataset(chunk.table), dropped, rows.height, name, note)


def report_of(name: str, total: int, used: int, dropped: dict[str, int]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
    return f"{name}: {total:,} rows, {used:,} used" + (f"; dropped {reasons}" if reasons else "")
