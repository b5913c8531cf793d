"""Fill-in-the-middle (FIM) examples from rows of source code, for supervised training and for reinforcement learning.

A source is cut at two character positions into prefix, middle and suffix; the model sees prefix and suffix and learns
the middle (Bavarian et al. 2022, arXiv:2207.14255). PSM shows prefix, then suffix; SPM shows suffix, then prefix, so
that the middle continues the prefix directly. The cut ignores token boundaries on purpose, as the paper's does,
because an editor's cursor does.

What is decided here:

- Every piece is tokenized on its own and the control tokens are put in by id. A row whose text contains one of the
  tokenizer's special tokens is dropped and counted: as text it would turn into a control token in the middle of the
  code.
- Row i draws from its own block of a counter-based generator keyed by the seed, so its cut depends on (seed, i, text)
  alone: not on other rows, dropped rows or how the rows are chunked.
- No FIM tokens in the vocabulary: a plain-text instruction (`INSTRUCTION`) asks for the missing part, prefix first.
- The budget `max_length` counts the whole example: beginning of sequence, control tokens, text and end token.
- Tokenizers of the SentencePiece kind put a "▁" before a text's first word. Pieces are tokenized as they stand after
  a control token, which is how the same tokenizer reads the prompt at inference, so training and inference agree.
  Some (Llama 2 style) add the "▁" after every control token, hence also before suffix and middle, where CodeLlama's
  pretraining had none; it vanishes in decoding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cogumi.data.encode import cuts_at_spaces, encode, encode_by_words, gather
from cogumi.data.fim_tokens import PLAIN, PSM, SPM, FimTokens, detect_fim_tokens
from cogumi.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset

INSTRUCTION = (
    "A piece is missing from this code. Reply with the missing piece only.\n"
    "### Before\n{prefix}\n### After\n{suffix}\n### Missing\n"
)
"""The prompt for tokenizers without FIM tokens."""

CHUNK_BYTES = 8 * 2**20
"""Text tokenized at a time: bounds what is held in the tokenizer's own objects (some 50 times the text)."""


class FimConfig(BaseModel):
    """How rows become fill-in-the-middle examples."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    fim_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of rows turned into FIM examples; the others stay left-to-right text, all of it learned."""
    spm_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of FIM examples in suffix-prefix-middle order. Only families trained on both orders use it."""
    middle_chars: tuple[int, int] = (8, 128)
    """Shortest and longest middle in characters; the length is drawn uniformly, then the position."""
    max_length: int = Field(default=512, ge=1)
    """Budget in tokens for a whole example, control and end tokens included."""
    seed: int = Field(default=0, ge=0)
    """With the row's index it decides order, length and position of the cut."""
    overlong: Literal["drop", "trim"] = "drop"
    """Examples over the budget: drop them, or trim the prefix's start and the suffix's end (plain rows are dropped)."""

    @model_validator(mode="after")
    def _check_middle(self) -> "FimConfig":
        low, high = self.middle_chars
        if not 1 <= low <= high:
            raise ValueError(f"middle_chars: [{low}, {high}] must be 1 <= shortest <= longest")
        return self


@dataclass(frozen=True)
class FimData:
    """Examples, and what became of every row: `total` = len(dataset) + sum(dropped.values())."""

    dataset: "Dataset"
    dropped: dict[str, int]
    total: int
    name: str = "rows"
    note: str = ""

    def report(self) -> str:
        """One line: "sample.parquet: 9,421 rows, 9,100 used; dropped 300 longer than 512 tokens, 21 null"."""
        return _report(self.name, self.total, len(self.dataset), self.dropped) + (
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
    from datasets import Dataset  # here, because whoever reads a config imports this module for FimConfig alone

    controls = _read_controls(tokenizer)
    examples, dropped = _cut(rows, column, controls, config, config.fim_rate, first_row)
    if config.overlong == "trim":
        examples = _trim(examples, tokenizer, controls, config.max_length)
    ids: list[pa.Array] = []
    masks: list[pa.Array] = []
    for chunk in _chunks(examples):
        segments = _tokenize(chunk, tokenizer, controls)
        segments = segments.take(segments.lengths.sum(axis=1) <= config.max_length)
        offsets = pa.array(np.concatenate([[0], np.cumsum(segments.lengths.sum(axis=1))]), pa.int32())
        ids.append(pa.ListArray.from_arrays(offsets, pa.array(segments.gather())))
        masks.append(pa.ListArray.from_arrays(offsets, pa.array(segments.completion_mask())))
    used = sum(map(len, ids))
    _count(dropped, f"longer than {config.max_length} tokens", examples.height - used)
    _refuse_nothing_used(name, rows.height, used, dropped)
    table = pa.table({"input_ids": pa.chunked_array(ids), "completion_mask": pa.chunked_array(masks)})
    return FimData(Dataset(table), dropped, rows.height, name, _order_note(controls, config))


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
    from datasets import Dataset  # here, because whoever reads a config imports this module for FimConfig alone

    controls = _read_controls(tokenizer)
    examples, dropped = _cut(rows, column, controls, config, 1.0, first_row)
    if config.overlong == "trim":
        examples = _trim(examples, tokenizer, controls, config.max_length)
    fitting: list[pl.DataFrame] = [examples.clear()]
    for chunk in _chunks(examples):
        segments = _tokenize(chunk, tokenizer, controls)
        fits = segments.lengths.sum(axis=1) <= config.max_length
        if not any(map(len, fitting)):
            _check_prompts_read_back(chunk.filter(fits).head(32), segments.take(fits), tokenizer, controls)
        fitting.append(chunk.filter(fits))
    kept = pl.concat(fitting)
    _count(dropped, f"longer than {config.max_length} tokens", examples.height - kept.height)
    _refuse_nothing_used(name, rows.height, kept.height, dropped)
    columns = {"prompt": _prompts(kept, controls)}
    columns |= {each: kept[each].to_list() for each in ("prefix", "suffix", "middle")}
    return FimData(Dataset.from_dict(columns), dropped, rows.height, name, _order_note(controls, config))


# --------------------------------------------------------------------------------------------------------- which rows


def _cut(
    rows: pl.DataFrame, column: str, controls: "_Controls", config: FimConfig, fim_rate: float, first_row: int
) -> tuple[pl.DataFrame, dict[str, int]]:
    """(examples, dropped by reason). An example is `order`, `prefix`, `middle`, `suffix`, and `shown_prefix` and
    `shown_suffix`, which trimming may shorten. A plain row is all middle."""
    if column not in rows.columns:
        raise UsageError(f"no column {column!r} in the rows; they have: {', '.join(rows.columns)}")
    text = rows[column]
    if text.dtype not in (pl.String, pl.Binary, pl.Null):
        raise UsageError(f"column {column!r} holds {text.dtype}, not text; name a text column")
    dropped: dict[str, int] = {}
    _count(dropped, "null", text.null_count())
    # polars' own cast fails for the whole column at the first invalid byte, even when not strict.
    decoded = pl.Series([_decode(value) for value in text], dtype=pl.String) if text.dtype == pl.Binary else text
    _count(dropped, "not UTF-8", decoded.null_count() - text.null_count())

    # Philox is a counter-based generator whose every count yields four 64-bit words: row i owns count first_row + i.
    bits = np.random.Philox(key=config.seed, counter=[first_row, 0, 0, 0])
    draws = pl.DataFrame(np.random.Generator(bits).random((rows.height, 4)), schema=["fim", "spm", "length", "start"])
    frame = (
        draws.with_columns(source=decoded.cast(pl.String))
        .drop_nulls("source")
        .with_columns(n=pl.col("source").str.len_chars())
    )
    frame = frame.with_columns(
        order=pl.when(pl.col("fim") >= fim_rate)
        .then(PLAIN)
        .when(pl.col("spm") < controls.spm_rate(config))
        .then(SPM)
        .otherwise(PSM)
    )
    shortest, longest = config.middle_chars
    # At least one character of context must stay, or there is nothing to complete from.
    enough = frame.filter(pl.col("n") >= pl.when(pl.col("order") == PLAIN).then(1).otherwise(shortest + 1))
    _count(dropped, "too short to split", frame.height - enough.height)
    clean = enough.filter(~pl.col("source").str.contains_any(controls.special_texts))
    _count(dropped, "containing a special token", enough.height - clean.height)

    n = pl.col("n").cast(pl.Int64)
    choices = pl.min_horizontal(pl.lit(longest, pl.Int64), n - 1) - shortest + 1
    plain = pl.col("order") == PLAIN
    clean = clean.with_columns(
        length=pl.when(plain).then(n).otherwise(shortest + (pl.col("length") * choices).cast(pl.Int64))
    )
    clean = clean.with_columns(
        start=pl.when(plain).then(0).otherwise((pl.col("start") * (n - pl.col("length") + 1)).cast(pl.Int64))
    )
    source, start, length = pl.col("source"), pl.col("start"), pl.col("length")
    examples = clean.select(
        "order",
        prefix=source.str.slice(0, start),
        middle=source.str.slice(start, length),
        suffix=source.str.slice(start + length),
    )
    return examples.with_columns(shown_prefix="prefix", shown_suffix="suffix"), dropped


def _decode(value: bytes | None) -> str | None:
    """The text of these bytes, or None where they are not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _trim(examples: pl.DataFrame, tokenizer: Any, controls: "_Controls", max_length: int) -> pl.DataFrame:
    """Shorten the shown prefix's start and suffix's end, by characters, until each FIM example fits the budget.

    Text is shortened and tokenized again rather than tokens cut off, because a cut token sequence is not what the
    tokenizer makes of any text. What cannot fit (the middle alone is too long) and plain rows stay as they are, for
    the caller to drop.
    """
    done: list[pl.DataFrame] = []
    left = examples.with_row_index("at")
    while left.height:
        lengths = np.concatenate([_tokenize(chunk, tokenizer, controls).lengths for chunk in _chunks(left)])
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


def _chunks(examples: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Consecutive rows with about CHUNK_BYTES of text each."""
    texts = examples.select(pl.col("middle", "shown_prefix", "shown_suffix").str.len_bytes().cast(pl.Int64).sum())
    count = 1 + sum(texts.row(0)) // CHUNK_BYTES
    return examples.iter_slices(max(1, -(-examples.height // count)))


def _count(dropped: dict[str, int], reason: str, number: int) -> None:
    if number:
        dropped[reason] = dropped.get(reason, 0) + number


def _refuse_nothing_used(name: str, total: int, used: int, dropped: dict[str, int]) -> None:
    if not used:
        raise UsageError(f"{_report(name, total, 0, dropped)}; give other rows, or change max_length or middle_chars")


def _report(name: str, total: int, used: int, dropped: dict[str, int]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
    return f"{name}: {total:,} rows, {used:,} used" + (f"; dropped {reasons}" if reasons else "")


# ------------------------------------------------------------------------------------------------------- tokens, by id


@dataclass(frozen=True)
class _Controls:
    """What the assembly needs from a tokenizer, read once."""

    tokens: FimTokens | None
    runs: dict[int, tuple[list[int], list[int], list[int], list[int]]]
    """By order: ids before the first text, between the two, before the middle, and after it."""
    guard: str | None
    """A control token to tokenize pieces behind, where that changes how they read (SentencePiece's leading "▁")."""
    special_texts: list[str]
    cuts_at_spaces: bool
    """Whether `encode_by_words` may be used."""

    def spm_rate(self, config: FimConfig) -> float:
        if self.tokens is None or self.tokens.spm is None:
            return 0.0
        return config.spm_rate if self.tokens.psm is not None else 1.0


def _read_controls(tokenizer: Any) -> _Controls:
    if tokenizer.eos_token_id is None:
        raise UsageError("the tokenizer has no end token, so a completion could not end; set tokenizer.eos_token")
    tokens = detect_fim_tokens(tokenizer)
    # The beginning of sequence, where the tokenizer adds one by itself: what stands before a text's own ids.
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    dressed = list(tokenizer("a")["input_ids"])
    if bare not in (dressed[at : at + len(bare)] for at in range(len(dressed))):
        raise UsageError(
            "the tokenizer reads 'a' differently with and without special tokens; FIM needs one that does not"
        )
    lead = dressed[: next(at for at in range(len(dressed)) if dressed[at : at + len(bare)] == bare)]
    end = [tokenizer.eos_token_id]
    runs: dict[int, tuple[list[int], list[int], list[int], list[int]]] = {PLAIN: (lead, [], [], end)}
    if tokens is None:
        runs[PSM] = (lead, [], [], end)  # the instruction is one text
    else:
        closing = [tokens.ids[tokens.end]] if tokens.end else end
        for order, texts in ((PSM, tokens.psm), (SPM, tokens.spm)):
            if texts is not None:
                before, between, after = ([tokens.ids[text] for text in run] for run in texts)
                runs[order] = (lead + before, between, after, closing)
    guard = tokens.texts()[0] if tokens else tokenizer.eos_token
    behind_guard = list(tokenizer(f"{guard}a b", add_special_tokens=False)["input_ids"])[1:]
    needs_guard = behind_guard != list(tokenizer("a b", add_special_tokens=False)["input_ids"])
    special_texts = list(dict.fromkeys([*(tokens.texts() if tokens else []), *tokenizer.all_special_tokens]))
    return _Controls(tokens, runs, guard if needs_guard else None, special_texts, cuts_at_spaces(tokenizer))


def _order_note(controls: _Controls, config: FimConfig) -> str:
    """Why the orders are not those asked for; empty where they are."""
    if controls.tokens is None:
        return "no FIM tokens in this tokenizer: instruction prompts"
    if controls.spm_rate(config) != config.spm_rate:
        return (
            f"{controls.tokens.family} was trained on {'PSM' if controls.tokens.psm else 'SPM'} only: spm_rate not used"
        )
    return ""


@dataclass(frozen=True)
class _Segments:
    """Examples as seven runs of a flat pool of ids: control, first text, control, second text, control, middle, end."""

    pool: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    """(rows, 7), positions in the pool."""
    lengths: npt.NDArray[np.int64]
    """(rows, 7)."""

    def take(self, rows: npt.NDArray[np.bool_]) -> "_Segments":
        return _Segments(self.pool, self.starts[rows], self.lengths[rows])

    def gather(self) -> npt.NDArray[np.int32]:
        """All examples' ids one after the other."""
        return gather(self.pool, self.starts.ravel(), self.lengths.ravel())

    def completion_mask(self) -> npt.NDArray[np.int8]:
        """For each id of `gather`: 1 in the middle and the end."""
        learned = np.array([0, 0, 0, 0, 0, 1, 1], np.int8)
        return np.repeat(np.tile(learned, len(self.lengths)), self.lengths.ravel())


def _tokenize(examples: pl.DataFrame, tokenizer: Any, controls: _Controls) -> _Segments:
    """Tokenize the three texts of every example in one batch and lay out the seven runs."""
    n = examples.height
    order = examples["order"].to_numpy()
    if controls.tokens is None:
        first, second = (
            [text if fim else "" for text, fim in zip(_prompts(examples, controls), order, strict=True)],
            [""] * n,
        )
    else:
        swapped = pl.col("order") == SPM
        shown = examples.select(
            first=pl.when(swapped).then("shown_suffix").otherwise("shown_prefix"),
            second=pl.when(swapped).then("shown_prefix").otherwise("shown_suffix"),
        )
        first, second = shown["first"].to_list(), shown["second"].to_list()
    texts = first + second + examples["middle"].to_list()
    # Behind a control token stand all pieces but a plain row's text and an instruction, which open the sequence.
    fim = order != PLAIN
    guarded = np.concatenate([fim & (controls.tokens is not None)] * 2 + [fim]) & (controls.guard is not None)
    if controls.guard is not None:
        texts = [controls.guard + text if guard else text for text, guard in zip(texts, guarded, strict=True)]
    ids, lengths = (encode_by_words if controls.cuts_at_spaces else encode)(tokenizer, texts)
    starts = np.cumsum(lengths) - lengths + guarded
    lengths = lengths - guarded

    pool = [ids]
    run_starts, run_lengths = np.zeros((3, 4), np.int64), np.zeros((3, 4), np.int64)
    at = len(ids)
    for kind, runs in controls.runs.items():
        for position, run in enumerate(runs):
            pool.append(np.array(run, np.int32))
            run_starts[kind, position], run_lengths[kind, position] = at, len(run)
            at += len(run)

    def seven(control: npt.NDArray[np.int64], text: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rows = np.empty((n, 7), np.int64)
        rows[:, [0, 2, 4, 6]] = control[order]
        rows[:, [1, 3, 5]] = text.reshape(3, n).T
        return rows

    return _Segments(np.concatenate(pool), seven(run_starts, starts), seven(run_lengths, lengths))


def _prompts(examples: pl.DataFrame, controls: _Controls) -> list[str]:
    """The prompts as text; meaningless for plain rows."""
    shown = examples.select("shown_prefix", "shown_suffix", "order").iter_rows()
    if controls.tokens is None:
        return [INSTRUCTION.format(prefix=prefix, suffix=suffix) for prefix, suffix, _ in shown]
    return [controls.tokens.prompt(prefix, suffix, order) for prefix, suffix, order in shown]


def _check_prompts_read_back(examples: pl.DataFrame, segments: _Segments, tokenizer: Any, controls: _Controls) -> None:
    """UsageError unless the tokenizer reads these prompts as the ids that supervised training uses."""
    for at, prompt in enumerate(_prompts(examples, controls)):
        only = _Segments(segments.pool, segments.starts[at : at + 1, :5], segments.lengths[at : at + 1, :5])
        if list(tokenizer(prompt)["input_ids"]) != only.gather().tolist():
            raise UsageError(
                f"the tokenizer reads the FIM prompt {prompt[:60]!r}... as other ids than those trained on; "
                "check that it adds no end token to texts (add_eos_token) and strips no spaces around its FIM tokens "
                "(lstrip, rstrip)"
            )
