"""The control tokens of each model family for fill-in-the-middle, and the order in which they stand.

Every piece is tokenized on its own and the control tokens are put in by id. A batch is one flat pool of ids. An example
is seven runs of the pool.
"""

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from cogumi.core.errors import UsageError
from cogumi.data.encoding import cuts_at_spaces, encode, encode_by_words, gather_runs, special_texts

PLAIN, PSM, SPM = 0, 1, 2
"""Left to right; prefix, suffix, middle; suffix, prefix, middle."""

Runs = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Control tokens before the first text, between the two texts, and after the second."""


@dataclass(frozen=True)
class FimTokens:
    """One family's control tokens in its order; `psm` or `spm` is None where the family was not trained on that order.

    In `psm` the first text is the prefix and the second the suffix, in `spm` the other way round. `end` closes the
    middle; None means the tokenizer's end of sequence. `ids` is empty until `detect_fim_tokens` fills it.
    """

    family: str
    psm: Runs | None
    spm: Runs | None
    end: str | None = None
    ids: dict[str, int] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """Every control token of this family once, as text."""
        runs = chain.from_iterable(chain(*(order for order in (self.psm, self.spm) if order is not None)))
        return list(dict.fromkeys([*runs, *([self.end] if self.end else [])]))

    def prompt(self, prefix: str, suffix: str, order: int) -> str:
        """The prompt as text, `order` being PSM or SPM; the middle is what follows it."""
        before, between, after = (self.spm if order == SPM else self.psm) or ((), (), ())
        first, second = (suffix, prefix) if order == SPM else (prefix, suffix)
        return "".join([*before, first, *between, second, *after])


def _paper_family(family: str, prefix: str, suffix: str, middle: str) -> FimTokens:
    """PSM is <PRE> prefix <SUF> suffix <MID>, and SPM is <PRE> <SUF> suffix <MID> prefix.
    SPM is the second variant of arXiv:2207.14255 (its appendix on SPM encoding), which opens like PSM."""
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
    """The first family of `FAMILIES` all of whose control tokens this tokenizer reads as one id each, else None.

    The vocabulary alone does not count: the model would never have seen an id that the tokenizer does not give.
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
    """What the assembly needs from a tokenizer, read once."""

    tokens: FimTokens | None
    runs: dict[int, tuple[list[int], list[int], list[int], list[int]]]
    """By order: ids before the first text, between the two, before the middle, and after it."""
    guard: str | None
    """A control token to tokenize pieces behind, where that changes how they read (SentencePiece's leading "▁")."""
    special_texts: list[str]
    cuts_at_spaces: bool
    """Whether `encode_by_words` may be used."""

    def spm_rate(self, asked: float) -> float:
        """The share of examples in suffix-prefix-middle order that this family was trained for, `asked` where both."""
        if self.tokens is None or self.tokens.spm is None:
            return 0.0
        return asked if self.tokens.psm is not None else 1.0


def read_controls(tokenizer: Any) -> Controls:
    if tokenizer.eos_token_id is None:
        raise UsageError("the tokenizer has no end token, so a completion could not end", fix="set tokenizer.eos_token")
    tokens = detect_fim_tokens(tokenizer)
    # The beginning of sequence, where the tokenizer adds one by itself: what stands before a text's own ids.
    bare, dressed = list(tokenizer("a", add_special_tokens=False)["input_ids"]), list(tokenizer("a")["input_ids"])
    before = next((at for at in range(len(dressed)) if dressed[at : at + len(bare)] == bare), None)
    if before is None:
        raise UsageError(
            "the tokenizer reads 'a' differently with and without special tokens", fix="FIM needs one that does not"
        )
    lead = dressed[:before]
    end = [tokenizer.eos_token_id]
    runs: dict[int, tuple[list[int], list[int], list[int], list[int]]] = {PLAIN: (lead, [], [], end)}
    if tokens is None:
        runs[PSM] = (lead, [], [], end)  # the instruction is one text
    else:
        closing = [tokens.ids[tokens.end]] if tokens.end else end
        for order, texts in ((PSM, tokens.psm), (SPM, tokens.spm)):
            if texts is not None:
                opening, between, after = ([tokens.ids[text] for text in run] for run in texts)
                runs[order] = (lead + opening, between, after, closing)
    guard = tokens.texts()[0] if tokens else tokenizer.eos_token
    behind_guard = list(tokenizer(f"{guard}a b", add_special_tokens=False)["input_ids"])[1:]
    needs_guard = behind_guard != list(tokenizer("a b", add_special_tokens=False)["input_ids"])
    special = list(dict.fromkeys([*(tokens.texts() if tokens else []), *special_texts(tokenizer)]))
    return Controls(tokens, runs, guard if needs_guard else None, special, cuts_at_spaces(tokenizer))


def order_note(controls: Controls, spm_rate: float) -> str:
    """Why the orders are not those asked for; empty where they are."""
    if controls.tokens is None:
        return "no FIM tokens in this tokenizer: instruction prompts"
    if controls.spm_rate(spm_rate) == spm_rate:
        return ""
    order = "PSM" if controls.tokens.psm else "SPM"
    return f"{controls.tokens.family} was trained on {order} only: spm_rate not used"


@dataclass(frozen=True)
class Segments:
    """Examples as seven runs of a flat pool of ids: control, first text, control, second text, control, middle, end."""

    pool: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    """(rows, 7), positions in the pool."""
    lengths: npt.NDArray[np.int64]
    """(rows, 7)."""

    def take(self, rows: npt.NDArray[np.bool_]) -> "Segments":
        return Segments(self.pool, self.starts[rows], self.lengths[rows])

    def gather(self) -> npt.NDArray[np.int32]:
        """All examples' ids one after the other."""
        return gather_runs(self.pool, self.starts.ravel(), self.lengths.ravel())

    def completion_mask(self) -> npt.NDArray[np.int8]:
        """For each id of `gather_runs`: 1 in the middle and the end."""
        learned = np.array([0, 0, 0, 0, 0, 1, 1], np.int8)
        return np.repeat(np.tile(learned, len(self.lengths)), self.lengths.ravel())


def tokenize_pieces(examples: pl.DataFrame, tokenizer: Any, controls: Controls) -> Segments:
    """Tokenize the three texts of every example in one batch and lay out the seven runs."""
    order = examples["order"].to_numpy()
    fim = order != PLAIN
    if controls.tokens is None:
        prompts = zip(prompt_texts(examples, controls), fim, strict=True)
        first, second = [prompt if asked else "" for prompt, asked in prompts], [""] * len(order)
    else:
        swapped = pl.col("order") == SPM
        shown = examples.select(
            first=pl.when(swapped).then("shown_suffix").otherwise("shown_prefix"),
            second=pl.when(swapped).then("shown_prefix").otherwise("shown_suffix"),
        )
        first, second = shown["first"].to_list(), shown["second"].to_list()
    texts = first + second + examples["middle"].to_list()
    # Behind a control token stand all pieces but a plain row's text and an instruction, which open the sequence.
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
        rows = np.empty((len(order), 7), np.int64)
        rows[:, [0, 2, 4, 6]] = control[order]
        rows[:, [1, 3, 5]] = text.reshape(3, -1).T
        return rows

    return Segments(np.concatenate(pool), seven(run_starts, starts), seven(run_lengths, lengths))


def prompt_texts(examples: pl.DataFrame, controls: Controls) -> list[str]:
    """The prompts as text; meaningless for plain rows."""
    shown = examples.select("shown_prefix", "shown_suffix", "order").iter_rows()
    if controls.tokens is None:
        return [INSTRUCTION.format(prefix=prefix, suffix=suffix) for prefix, suffix, _ in shown]
    return [controls.tokens.prompt(prefix, suffix, order) for prefix, suffix, order in shown]


def check_prompts_read_back(examples: pl.DataFrame, segments: Segments, tokenizer: Any, controls: Controls) -> None:
    """UsageError unless the tokenizer reads these prompts as the ids that supervised training uses."""
    for at, prompt in enumerate(prompt_texts(examples, controls)):
        only = Segments(segments.pool, segments.starts[at : at + 1, :5], segments.lengths[at : at + 1, :5])
        if list(tokenizer(prompt)["input_ids"]) != only.gather().tolist():
            raise UsageError(
                f"the tokenizer reads the FIM prompt {prompt[:60]!r}... as other ids than those trained on",
                fix="have it add no end token (add_eos_token) and strip no spaces around its FIM tokens (lstrip, rstrip)",
            )
