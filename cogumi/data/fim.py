"""Fill-in-the-middle (FIM): control tokens of each model family, cuts of a document, and the resulting examples.

A source is cut at two character positions into prefix, middle and suffix. The model sees prefix and suffix and learns
the middle (Bavarian et al. 2022, arXiv:2207.14255). PSM shows prefix, then suffix; SPM shows suffix, then prefix. The
cut ignores token boundaries, as an editor's cursor does. It depends on the seed, the row's index and its text alone.

Every piece is tokenized separately, and control tokens are inserted by id. SentencePiece tokenizers put a "▁" before a
text's first word, so pieces are tokenized behind a control token, as in the prompt at inference. Llama 2 style tokenizers
thus have a "▁" before suffix and middle, where CodeLlama's pretraining had none; it vanishes in decoding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from cogumi.config.schema import FimConfig
from cogumi.core.errors import UsageError
from cogumi.data.encoding import ID_LISTS, MASK_LISTS, Ids, cuts_at_spaces, encode, encode_by_words
from cogumi.data.literal import LiteralText
from cogumi.data.rows import RECORD_COLUMN, Chunk, Dropped, count_dropped, describe_value, record_columns

PLAIN, PSM, SPM = 0, 1, 2
"""Left to right; prefix, suffix, middle; suffix, prefix, middle."""

Runs = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Control tokens before the first text, between the two texts, and after the second."""


@dataclass(frozen=True)
class FimTokens:
    """Control tokens of one family; `psm` or `spm` is None if the family was not trained on that order.

    `end` closes the middle; None is the tokenizer's end of sequence. `detect_fim_tokens` fills `ids`.
    """

    family: str
    psm: Runs | None
    spm: Runs | None
    end: str | None = None
    ids: dict[str, int] = field(default_factory=dict)

    def texts(self) -> list[str]:
        runs = chain.from_iterable(chain(*(order for order in (self.psm, self.spm) if order is not None)))
        return list(dict.fromkeys([*runs, *([self.end] if self.end else [])]))

    def prompt(self, prefix: str, suffix: str, order: int) -> str:
        """Return the prompt before the middle as text; `order` is PSM or SPM."""
        before, between, after = (self.spm if order == SPM else self.psm) or ((), (), ())
        first, second = (suffix, prefix) if order == SPM else (prefix, suffix)
        return "".join([*before, first, *between, second, *after])


def _paper_family(family: str, prefix: str, suffix: str, middle: str) -> FimTokens:
    """SPM is <PRE> <SUF> suffix <MID> prefix, the variant of arXiv:2207.14255's appendix that opens like PSM."""
    return FimTokens(family, psm=((prefix,), (suffix,), (middle,)), spm=((prefix, suffix), (middle,), ()))


FAMILIES = (
    # bigcode-project/Megatron-LM, megatron/data/gpt_dataset.py, permute(): both orders, fim_spm_rate 0.5.
    _paper_family("StarCoder", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # The same code; only the spelling differs (model card bigcode/santacoder).
    _paper_family("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # QwenLM/Qwen2.5-Coder README, "File-Level Code Completion", and arXiv:2409.12186: PSM only. CodeGemma
    # spells its tokens the same way.
    FimTokens("Qwen-Coder", psm=(("<|fim_prefix|>",), ("<|fim_suffix|>",), ("<|fim_middle|>",)), spm=None),
    # facebookresearch/codellama, llama/generation.py, infilling_prompt_tokens(): "<PRE> {pre} <SUF>{suf} <MID>" and
    # with suffix_first "<PRE> <SUF>{suf} <MID> {pre}"; text_infilling() stops at <EOT>, not at the end of sequence.
    replace(_paper_family("CodeLlama", "▁<PRE>", "▁<SUF>", "▁<MID>"), end="▁<EOT>"),
    # deepseek-ai/DeepSeek-Coder README, "Code Insertion": the hole stands where the middle is cut out.
    # arXiv:2401.14196: trained on PSM at a rate of 50 %, not on SPM.
    FimTokens("DeepSeek-Coder", psm=(("<｜fim▁begin｜>",), ("<｜fim▁hole｜>",), ("<｜fim▁end｜>",)), spm=None),
    # mistralai/mistral-common, encode_fim() and its test: "<s>[SUFFIX]{suffix}[PREFIX]{prefix}"; no other order.
    FimTokens("Codestral", psm=None, spm=(("[SUFFIX]",), ("[PREFIX]",), ())),
)


def detect_fim_tokens(tokenizer: Any) -> FimTokens | None:
    """Return the first family of which this tokenizer reads every control token as one id, or None.

    A vocabulary entry is not enough: the model never saw an id that the tokenizer does not produce.
    """
    vocabulary = tokenizer.get_vocab()
    for family in FAMILIES:
        ids = {text: vocabulary[text] for text in family.texts() if text in vocabulary}
        read = {text: list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ids}
        if len(ids) == len(family.texts()) and all(read[text] == [ids[text]] for text in ids):
            return replace(family, ids=ids)
    return None


# ----------------------------------------------------------------------------------------------------------- fim layout


INSTRUCTION = (
    "A piece is missing from this code. Reply with the missing piece only.\n"
    "### Before\n{prefix}\n### After\n{suffix}\n### Missing\n"
)
"""The prompt for tokenizers without FIM tokens."""


@dataclass(frozen=True)
class Controls:
    """Properties of a tokenizer that assembling examples needs, read once."""

    tokenizer: Any
    tokens: FimTokens | None
    runs: dict[int, list[list[int]]]
    """By order: ids before the first text, between the two, before the middle, and after it."""
    guard: str
    """A control token to tokenize pieces behind, if that changes their ids (SentencePiece's leading "▁"), else ""."""
    special_texts: list[str]
    by_words: bool
    """Whether `encode_by_words` may be used."""

    def spm_rate(self, requested: float) -> float:
        """Return the share of examples in SPM order: `requested` if the family was trained on both orders."""
        if self.tokens is None or self.tokens.spm is None:
            return 0.0
        return requested if self.tokens.psm is not None else 1.0

    def order_note(self, requested: float) -> str:
        """Explain why the orders are not the requested ones; empty if they are."""
        if self.tokens is None:
            return "no FIM tokens in this tokenizer: instruction prompts"
        order = "PSM" if self.tokens.psm else "SPM"
        only = f"{self.tokens.family} was trained on {order} only: spm_rate not used"
        return "" if self.spm_rate(requested) == requested else only

    def prompt(self, prefix: str, suffix: str, order: int) -> str:
        """Return the prompt before the middle as text."""
        if self.tokens is None:
            return INSTRUCTION.format(prefix=prefix, suffix=suffix)
        return self.tokens.prompt(prefix, suffix, order)


def read_controls(tokenizer: Any) -> Controls:
    def read(text: str, special_tokens: bool = False) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])

    tokens = detect_fim_tokens(tokenizer)
    # The ids that the tokenizer adds before a text: the beginning of sequence, if any.
    bare, full = read("a"), read("a", special_tokens=True)
    before = next((start for start in range(len(full)) if full[start : start + len(bare)] == bare), None)
    if before is None:
        message = "the tokenizer reads 'a' differently with and without special tokens"
        raise UsageError(message, fix="FIM needs one that does not")
    lead, end = full[:before], [tokenizer.eos_token_id]
    plain = [lead, [], [], end]
    runs = {PLAIN: plain, PSM: plain}  # an instruction is one text
    if tokens:
        for order, texts in ((PSM, tokens.psm), (SPM, tokens.spm)):
            if texts:
                opening, between, after = ([tokens.ids[text] for text in run] for run in texts)
                runs[order] = [lead + opening, between, after, [tokens.ids[tokens.end]] if tokens.end else end]
    controls = tokens.texts() if tokens else []
    guard = controls[0] if controls else tokenizer.eos_token
    guarded = read(f"{guard}a b")[1:] != read("a b")
    special = list(dict.fromkeys([*controls, *LiteralText(tokenizer).controls]))
    return Controls(tokenizer, tokens, runs, guard if guarded else "", special, cuts_at_spaces(tokenizer))


def tokenize_pieces(examples: pl.DataFrame, controls: Controls) -> list[list[Ids]]:
    """Tokenize each example as seven parts: control, first text, control, second text, control, middle, end."""
    # All pieces follow a control token, except a plain row's text and an instruction, which open the sequence.
    prompt_guard = controls.guard if controls.tokens is not None else ""
    texts, guards = [], []
    for prefix, suffix, middle, order in examples.select(*SHOWN, "middle", "order").iter_rows():
        if controls.tokens is None and order != PLAIN:
            prefix, suffix = controls.prompt(prefix, suffix, order), ""
        texts += [suffix, prefix, middle] if order == SPM else [prefix, suffix, middle]
        guards += [""] * 3 if order == PLAIN else [prompt_guard, prompt_guard, controls.guard]
    texts = [guard + text for guard, text in zip(guards, texts, strict=True)]
    ids = (encode_by_words if controls.by_words else encode)(controls.tokenizer, texts)
    ids = [piece[1:] if guard else piece for guard, piece in zip(guards, ids, strict=True)]
    control = {kind: [np.array(run, np.int32) for run in runs] for kind, runs in controls.runs.items()}
    pieces = []
    for row, order in enumerate(examples["order"]):
        before, between, after, end = control[order]
        first, second, middle = ids[3 * row : 3 * row + 3]
        pieces.append([before, first, between, second, after, middle, end])
    return pieces


# ----------------------------------------------------------------------------------------------------------------- cuts


PIECES = ("prefix", "middle", "suffix")
SHOWN = ("shown_prefix", "shown_suffix")


@dataclass
class DroppedCounter:
    """Count the rows of a chunk that are left out, by reason."""

    first_row: int
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def keep(self, frame: pl.DataFrame, keep: pl.Expr | pl.Series, reason: str, text: str) -> pl.DataFrame:
        """Return the rows to keep; count the others under `reason`, with the `text` column of the first."""
        mask = frame.select(keep).to_series().fill_null(False)
        if not mask.all():
            first = frame.row((~mask).arg_max() or 0, named=True)
            count_dropped(self.dropped, reason, self.first_row + first["row"], first[text], int((~mask).sum()))
        return frame.filter(mask)

    def keep_without_special(self, frame: pl.DataFrame, name: str, controls: Controls) -> pl.DataFrame:
        any_special = frame[name].str.contains_any(controls.special_texts).any()
        for token in controls.special_texts if any_special else ():
            is_clean = ~pl.col(name).str.contains(token, literal=True)
            frame = self.keep(frame, is_clean, f"containing a special token ({token})", name)
        return frame


def cut_rows(rows: pl.DataFrame, controls: Controls, config: FimConfig, dropping: DroppedCounter) -> pl.DataFrame:
    """Cut rows that have `source`; rows that have the three pieces are checked only. A plain row is all middle.

    Returns:
        `row`, `order`, `prefix`, `middle`, `suffix`, and `shown_prefix` and `shown_suffix`, which trimming may shorten.
    """
    # Philox is counter-based: each count yields four 64-bit words, and row i owns count first_row + i.
    bits = np.random.Philox(key=config.seed, counter=[dropping.first_row, 0, 0, 0])
    draws = np.random.Generator(bits).random((rows.height, 4))
    frame = pl.DataFrame(draws, schema=["fim", "spm", "length", "start"]).with_row_index("row")
    for name in rows.columns:
        if name in ("source", *PIECES):
            frame = _with_text(frame, rows[name][frame["row"]], dropping)
    spm = pl.col("spm") < controls.spm_rate(config.spm_rate)
    frame = frame.with_columns(order=pl.when(spm).then(SPM).otherwise(PSM))
    if "source" in rows.columns:
        frame = _cut(frame, controls, config, dropping)
    else:
        frame = dropping.keep(frame, pl.col("middle") != "", "with an empty middle", "prefix")
        frame = dropping.keep(frame, (pl.col("prefix") != "") | (pl.col("suffix") != ""), "without context", "middle")
        for piece in PIECES:
            frame = dropping.keep_without_special(frame, piece, controls)
    return frame.select("row", "order", *PIECES, shown_prefix="prefix", shown_suffix="suffix")


def _with_text(frame: pl.DataFrame, raw: pl.Series, dropping: DroppedCounter) -> pl.DataFrame:
    """Add a column of text and drop rows without one. Raises UsageError for a column without any."""
    values = raw.to_list()
    is_text = pl.Series([isinstance(value, str | bytes | None) for value in values], dtype=pl.Boolean)
    has_type = raw.dtype in (pl.String, pl.Binary, pl.Null)
    if not has_type and (raw.dtype != pl.Object or (values and not is_text.any())):
        kind = "no text" if raw.dtype == pl.Object else raw.dtype
        key = "data.column" if raw.name == "source" else f"data.columns.{raw.name}"
        raise UsageError(f"fim needs a column of text, and this one holds {kind}", key=key, fix="name another")
    texts, shown = [], []  # polars' own cast fails for the whole column at the first invalid byte
    for value in values:
        shown.append(None if value is None else describe_value(value))
        try:
            texts.append(value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else None)
        except UnicodeDecodeError:
            texts.append(None)
    columns = {raw.name: pl.Series(texts, dtype=pl.String), "shown": pl.Series(shown, dtype=pl.String)}
    frame = frame.with_columns(**columns, is_text=is_text)
    frame = dropping.keep(frame, pl.col("is_text"), "with a field that is no text", "shown")
    frame = dropping.keep(frame, pl.col("shown").is_not_null(), "null", "shown")
    return dropping.keep(frame, pl.col(raw.name).is_not_null(), "not UTF-8", "shown").drop("shown", "is_text")


def _cut(frame: pl.DataFrame, controls: Controls, config: FimConfig, dropping: DroppedCounter) -> pl.DataFrame:
    plain = pl.col("order") == PLAIN
    frame = frame.with_columns(
        n=pl.col("source").str.len_chars().cast(pl.Int64),
        order=pl.when(pl.col("fim") >= config.fim_rate).then(PLAIN).otherwise("order"),
    )
    shortest, longest = config.middle_chars
    # At least one character of context must remain.
    least = pl.when(plain).then(1).otherwise(shortest + 1)
    frame = dropping.keep(frame, pl.col("n") >= least, "too short to split", "source")
    frame = dropping.keep_without_special(frame, "source", controls)

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


# ------------------------------------------------------------------------------------------------------------ examples


def fim_sft_chunk(rows: pl.DataFrame, first_row: int, *, controls: Controls, config: FimConfig) -> Chunk:
    """Make `input_ids` and `completion_mask`: 1 on the middle and its end token, on a plain row on all but the BOS."""
    examples, pieces, dropped = _select_fitting(rows, first_row, controls, config)
    learned = np.array([0, 0, 0, 0, 0, 1, 1], np.int8)
    table = {
        "input_ids": pa.array(map(np.concatenate, pieces), ID_LISTS),
        "completion_mask": pa.array([learned.repeat([*map(len, parts)]) for parts in pieces], MASK_LISTS),
    }
    return Chunk(pa.table(table), dropped, _trimmed(examples))


def fim_prompts_chunk(
    rows: pl.DataFrame, first_row: int, *, controls: Controls, config: FimConfig, rewarded: Mapping[str, str]
) -> Chunk:
    """Make prompts for TRL's GRPOTrainer: the strings `prompt`, `prefix`, `suffix`, `middle`, and the rewards' columns.

    `tokenizer(prompt)` gives the ids before the middle of `fim_sft_chunk`; otherwise UsageError. The pieces are the source
    even if `overlong="trim"` shortened the prompt. `fim_rate` does not apply: a plain row asks for nothing.
    """
    examples, pieces, dropped = _select_fitting(rows, first_row, controls, config.model_copy(update={"fim_rate": 1.0}))
    prompts = [controls.prompt(*row) for row in examples.select(*SHOWN, "order").iter_rows()]
    for prompt, parts in zip(prompts[:32], pieces, strict=False):
        if list(controls.tokenizer(prompt)["input_ids"]) != np.concatenate(parts[:5]).tolist():
            raise UsageError(
                f"the tokenizer reads the FIM prompt {prompt[:60]!r}... as other ids than those trained on",
                fix="have it add no end token (add_eos_token) and strip no spaces around its FIM tokens (lstrip, rstrip)",
            )
    table = {"prompt": pa.array(prompts, pa.string())}
    table |= {piece: pa.array(examples[piece].to_list(), pa.string()) for piece in ("prefix", "suffix", "middle")}
    if RECORD_COLUMN in rows.columns:
        table |= record_columns(rows[RECORD_COLUMN].gather(examples["row"]).to_list(), rewarded)
    return Chunk(pa.table(table), dropped, _trimmed(examples), encoded=(*rewarded, RECORD_COLUMN))


def _select_fitting(
    rows: pl.DataFrame, first_row: int, controls: Controls, config: FimConfig
) -> tuple[pl.DataFrame, list[list[Ids]], dict[str, Dropped]]:
    """Cut rows into FIM examples. Return those within `max_length`, their tokens as seven parts, and the dropped rows.

    With `overlong: trim` the context of longer ones is shortened first.
    """
    dropping = DroppedCounter(first_row)
    examples = cut_rows(rows, controls, config, dropping)
    if config.overlong == "trim":
        examples = _trim(examples, controls, config.max_length)
    pieces = tokenize_pieces(examples, controls)
    fits = [sum(map(len, parts)) <= config.max_length for parts in pieces]
    reason = f"longer than {config.max_length} tokens"
    fitting = dropping.keep(examples, pl.Series(fits, dtype=pl.Boolean), reason, "middle")
    return fitting, list(compress(pieces, fits)), dropping.dropped


def _trim(examples: pl.DataFrame, controls: Controls, max_length: int) -> pl.DataFrame:
    """Shorten the shown prefix's start and suffix's end, by characters, until each FIM example fits the budget.

    Text is shortened and tokenized again: a cut token sequence need not be the tokens of any text. Plain rows, and those
    of which the middle alone is too long, are left for the caller to drop.
    """
    done: list[pl.DataFrame] = []
    left = examples.with_row_index("at")
    while left.height:
        lengths = np.array([[*map(len, parts)] for parts in tokenize_pieces(left, controls)])
        context_tokens = lengths[:, 1] + lengths[:, 3]
        n_prefix, n_suffix = (left[name].str.len_chars().cast(pl.Int64).to_numpy() for name in SHOWN)
        over = lengths.sum(axis=1) - max_length
        again = (over > 0) & (n_prefix + n_suffix > 0)
        # Characters in proportion to tokens, and at least one less, so that the loop ends.
        keep = (n_prefix + n_suffix) * np.maximum(context_tokens - over, 0) // np.maximum(context_tokens, 1)
        keep = np.minimum(keep, n_prefix + n_suffix - 1)
        keep_suffix = np.minimum(n_suffix, np.maximum(keep // 2, keep - n_prefix))
        done.append(left.filter(~again))
        left = left.with_columns(
            shown_prefix=pl.col("shown_prefix").str.tail(pl.Series(keep - keep_suffix)),
            shown_suffix=pl.col("shown_suffix").str.head(pl.Series(keep_suffix)),
        ).filter(again)
    return pl.concat(done).sort("at").drop("at") if done else examples


def _trimmed(examples: pl.DataFrame) -> int:
    """Count the examples of which some context is not shown."""
    shorter = (pl.col("shown_prefix") != pl.col("prefix")) | (pl.col("shown_suffix") != pl.col("suffix"))
    return examples.filter(shorter).height
