"""Fill-in-the-middle: where a document is cut, and the examples that come of it.

A source is cut at two character positions into prefix, middle and suffix. The model sees prefix and suffix and learns
the middle (Bavarian et al. 2022, arXiv:2207.14255). PSM shows prefix, then suffix; SPM shows suffix, then prefix. The
cut ignores token boundaries, because an editor's cursor does.

- Every piece is tokenized on its own and the control tokens are put in by id. A row whose text contains one of the
  tokenizer's special tokens is dropped. That text would become a control token in the middle of the code.
- Row i draws from its own block of a counter-based generator keyed by the seed. Its cut depends on the seed, i and the
  text alone. Other rows, dropped rows and the size of chunks do not change it.
- Without FIM tokens in the vocabulary a plain-text instruction (`fim_tokens.INSTRUCTION`) asks for the missing part.
- Tokenizers of the SentencePiece kind put a "▁" before a text's first word. Pieces are tokenized as they stand after
  a control token, as the same tokenizer reads the prompt at inference. Some (Llama 2 style) hence have a "▁" before
  suffix and middle, where CodeLlama's pretraining had none; it vanishes in decoding.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from cogumi.config.subsections import FimConfig
from cogumi.data.encoding import list_array
from cogumi.data.fim_tokens import (
    PLAIN,
    PSM,
    SPM,
    Controls,
    Segments,
    check_prompts_read_back,
    prompt_texts,
    tokenize_pieces,
)
from cogumi.data.rows import Chunk, Dropped, count_dropped

PIECES = ("prefix", "middle", "suffix")


class DroppedCounter:
    """The rows dropped so far, by reason."""

    def __init__(self, first_row: int):
        self.first_row = first_row
        self.dropped: dict[str, Dropped] = {}

    def keep(self, frame: pl.DataFrame, keep: pl.Expr | pl.Series, reason: str, text: str) -> pl.DataFrame:
        """The rows to keep; the others are counted under `reason`, the first with its `text` column."""
        holds = (frame.select(keep).to_series() if isinstance(keep, pl.Expr) else keep).fill_null(False)
        if not holds.all():
            first = frame.row((~holds).arg_max() or 0, named=True)
            count_dropped(self.dropped, reason, self.first_row + first["row"], first[text], int((~holds).sum()))
        return frame.filter(holds)


def cut_rows(
    rows: pl.DataFrame, columns: Mapping[str, str], controls: Controls, config: FimConfig, dropping: DroppedCounter
) -> pl.DataFrame:
    """Examples: `row`, `order`, `prefix`, `middle`, `suffix`, and `shown_prefix` and `shown_suffix`, which trimming may
    shorten. A plain row is all middle. `columns` is {"source": column}, or names the three pieces."""
    # Philox is a counter-based generator whose every count yields four 64-bit words: row i owns count first_row + i.
    bits = np.random.Philox(key=config.seed, counter=[dropping.first_row, 0, 0, 0])
    draws = np.random.Generator(bits).random((rows.height, 4))
    frame = pl.DataFrame(draws, schema=["fim", "spm", "length", "start"]).with_row_index("row")
    for name, column in columns.items():
        frame = _with_text(frame, rows[column][frame["row"]], name, dropping)
    spm = pl.col("spm") < controls.spm_rate(config.spm_rate)
    frame = frame.with_columns(order=pl.when(spm).then(SPM).otherwise(PSM))
    if "source" in columns:
        frame = _cut(frame, controls, config, dropping)
    else:
        frame = dropping.keep(frame, pl.col("middle") != "", "with an empty middle", "prefix")
        frame = dropping.keep(frame, (pl.col("prefix") != "") | (pl.col("suffix") != ""), "without context", "middle")
        for piece in PIECES:
            frame = _without_special_texts(frame, piece, controls, dropping)
    return frame.select("row", "order", *PIECES, shown_prefix="prefix", shown_suffix="suffix")


def _with_text(frame: pl.DataFrame, raw: pl.Series, name: str, dropping: DroppedCounter) -> pl.DataFrame:
    """The frame with a column of text; rows that have none are dropped."""
    # polars' own cast fails for the whole column at the first invalid byte, even when not strict.
    text = pl.Series([_decode(value) for value in raw], dtype=pl.String) if raw.dtype == pl.Binary else raw
    frame = frame.with_columns(raw=raw, **{name: text.cast(pl.String)})
    frame = dropping.keep(frame, pl.col("raw").is_not_null(), "null", "raw")
    return dropping.keep(frame, pl.col(name).is_not_null(), "not UTF-8", "raw").drop("raw")


def _decode(value: bytes | None) -> str | None:
    """The text of these bytes, or None where they are not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _cut(frame: pl.DataFrame, controls: Controls, config: FimConfig, dropping: DroppedCounter) -> pl.DataFrame:
    plain = pl.col("order") == PLAIN
    frame = frame.with_columns(
        n=pl.col("source").str.len_chars().cast(pl.Int64),
        order=pl.when(pl.col("fim") >= config.fim_rate).then(PLAIN).otherwise("order"),
    )
    shortest, longest = config.middle_chars
    # At least one character of context must stay, or there is nothing to complete from.
    least = pl.when(plain).then(1).otherwise(shortest + 1)
    frame = dropping.keep(frame, pl.col("n") >= least, "too short to split", "source")
    frame = _without_special_texts(frame, "source", controls, dropping)

    n = pl.col("n")
    choices = pl.min_horizontal(pl.lit(longest, pl.Int64), n - 1) - shortest + 1
    drawn_length = shortest + (pl.col("length") * choices).cast(pl.Int64)
    frame = frame.with_columns(length=pl.when(plain).then(n).otherwise(drawn_length))
    drawn_start = (pl.col("start") * (n - pl.col("length") + 1)).cast(pl.Int64)
    frame = frame.with_columns(start=pl.when(plain).then(0).otherwise(drawn_start))
    source, start, length = pl.col("source"), pl.col("start"), pl.col("length")
    return frame.with_columns(
        prefix=source.str.slice(0, start),
        middle=source.str.slice(start, length),
        suffix=source.str.slice(start + length),
    )


def _without_special_texts(
    frame: pl.DataFrame, name: str, controls: Controls, dropping: DroppedCounter
) -> pl.DataFrame:
    clean = ~pl.col(name).str.contains_any(controls.special_texts)
    return dropping.keep(frame, clean, "containing a special token", name)


# ------------------------------------------------------------------------------------------------------------ examples


def fim_sft_chunk(
    rows: pl.DataFrame,
    first_row: int,
    *,
    tokenizer: Any,
    controls: Controls,
    config: FimConfig,
    columns: Mapping[str, str],
) -> Chunk:
    """Tokenized examples: `input_ids` and `completion_mask`.

    The mask is 1 on the middle and its end token. On a plain row it is 1 on all but the beginning of sequence.
    `columns` is {"source": the column of code}, or names `prefix`, `middle` and `suffix`, which are not cut again.
    """
    dropping = DroppedCounter(first_row)
    examples = cut_rows(rows, columns, controls, config, dropping)
    kept, segments = _fitting(examples, tokenizer, controls, config, dropping)
    lengths = segments.lengths.sum(axis=1)
    table = {
        "input_ids": list_array(segments.gather(), lengths),
        "completion_mask": list_array(segments.completion_mask(), lengths),
    }
    return Chunk(pa.table(table), dropping.dropped, _trimmed(kept))


def fim_prompts_chunk(
    rows: pl.DataFrame,
    first_row: int,
    *,
    tokenizer: Any,
    controls: Controls,
    config: FimConfig,
    columns: Mapping[str, str],
) -> Chunk:
    """Prompts for TRL's GRPOTrainer: the strings `prompt`, `prefix`, `suffix`, `middle`, and what else `columns` names.

    `tokenizer(prompt)` gives the ids that `fim_sft_chunk` puts before the middle of the same row; UsageError where it reads
    other ids. The pieces are the source even where `overlong="trim"` shortened what the prompt shows. `fim_rate` does not
    apply: a plain row has nothing to ask for. The budget is that of the whole example.
    """
    dropping = DroppedCounter(first_row)
    config = config.model_copy(update={"fim_rate": 1.0})
    of_fim = {name: column for name, column in columns.items() if name in ("source", *PIECES)}
    examples = cut_rows(rows, of_fim, controls, config, dropping)
    kept, segments = _fitting(examples, tokenizer, controls, config, dropping)
    check_prompts_read_back(kept.head(32), segments, tokenizer, controls)
    table = {"prompt": pa.array(prompt_texts(kept, controls), pa.string())}
    table |= {piece: pa.array(kept[piece].to_list(), pa.string()) for piece in ("prefix", "suffix", "middle")}
    table |= {name: rows[columns[name]][kept["row"]].to_arrow() for name in columns.keys() - of_fim.keys()}
    return Chunk(pa.table(table), dropping.dropped, _trimmed(kept))


def _fitting(
    examples: pl.DataFrame, tokenizer: Any, controls: Controls, config: FimConfig, dropping: DroppedCounter
) -> tuple[pl.DataFrame, Segments]:
    """The examples that fit the budget, trimmed for it where the config says so, and their tokens."""
    if config.overlong == "trim":
        examples = _trim(examples, tokenizer, controls, config.max_length)
    segments = tokenize_pieces(examples, tokenizer, controls)
    fits = segments.lengths.sum(axis=1) <= config.max_length
    reason = f"longer than {config.max_length} tokens"
    return dropping.keep(examples, pl.Series(fits, dtype=pl.Boolean), reason, "middle"), segments.take(fits)


def _trim(examples: pl.DataFrame, tokenizer: Any, controls: Controls, max_length: int) -> pl.DataFrame:
    """Shorten the shown prefix's start and suffix's end, by characters, until each FIM example fits the budget.

    Text is shortened and tokenized again rather than tokens cut off, because a cut token sequence is not what the
    tokenizer makes of any text. What cannot fit (the middle alone is too long) and plain rows stay as they are, for
    the caller to drop.
    """
    done: list[pl.DataFrame] = []
    left = examples.with_row_index("at")
    while left.height:
        lengths = tokenize_pieces(left, tokenizer, controls).lengths
        context_tokens = lengths[:, 1] + lengths[:, 3]
        n_prefix, n_suffix = (
            left[each].str.len_chars().cast(pl.Int64).to_numpy() for each in ("shown_prefix", "shown_suffix")
        )
        over = lengths.sum(axis=1) - max_length
        again = (over > 0) & (n_prefix + n_suffix > 0)
        # Characters in proportion to tokens, and at least one less, so that this ends.
        keep = (n_prefix + n_suffix) * np.maximum(context_tokens - over, 0) // np.maximum(context_tokens, 1)
        keep = np.minimum(keep, n_prefix + n_suffix - 1)
        keep_suffix = np.minimum(n_suffix, np.maximum(keep // 2, keep - n_prefix))
        done.append(left.filter(~again))
        left = left.with_columns(keep_prefix=keep - keep_suffix, keep_suffix=keep_suffix).filter(again)
        left = left.with_columns(
            shown_prefix=pl.col("shown_prefix").str.tail(pl.col("keep_prefix")),
            shown_suffix=pl.col("shown_suffix").str.head(pl.col("keep_suffix")),
        ).drop("keep_prefix", "keep_suffix")
    return pl.concat(done).sort("at").drop("at") if done else examples


def _trimmed(examples: pl.DataFrame) -> int:
    """How many of these show less than they have."""
    shorter = (pl.col("shown_prefix") != pl.col("prefix")) | (pl.col("shown_suffix") != pl.col("suffix"))
    return examples.filter(shorter).height
