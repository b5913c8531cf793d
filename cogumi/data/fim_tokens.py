"""How each family of code models spells fill in the middle: its control tokens, and the orders it was trained on."""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

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
    """<PRE> prefix <SUF> suffix <MID>, and the second SPM variant of arXiv:2207.14255 (its appendix on SPM
    encoding), which opens like PSM: <PRE> <SUF> suffix <MID> prefix."""
    return FimTokens(family, psm=((prefix,), (suffix,), (middle,)), spm=((prefix, suffix), (middle,), ()), end=None)


FAMILIES = (
    # bigcode-project/Megatron-LM, megatron/data/gpt_dataset.py, permute(): both orders, fim_spm_rate 0.5.
    _paper_family("StarCoder", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # The same code; only the spelling differs (model card bigcode/santacoder).
    _paper_family("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # QwenLM/Qwen2.5-Coder README, "File-Level Code Completion", and arXiv:2409.12186: PSM only. CodeGemma
    # spells its tokens the same way.
    FimTokens(
        "Qwen-Coder",
        psm=(("<|fim_prefix|>",), ("<|fim_suffix|>",), ("<|fim_middle|>",)),
        spm=None,
    ),
    # facebookresearch/codellama, llama/generation.py, infilling_prompt_tokens(): "<PRE> {pre} <SUF>{suf} <MID>" and
    # with suffix_first "<PRE> <SUF>{suf} <MID> {pre}"; text_infilling() stops at <EOT>, not at the end of sequence.
    FimTokens(
        "CodeLlama",
        psm=(("▁<PRE>",), ("▁<SUF>",), ("▁<MID>",)),
        spm=(("▁<PRE>", "▁<SUF>"), ("▁<MID>",), ()),
        end="▁<EOT>",
    ),
    # deepseek-ai/DeepSeek-Coder README, "Code Insertion": the hole stands where the middle is cut out.
    # arXiv:2401.14196: trained on PSM at a rate of 50 %, not on SPM.
    FimTokens(
        "DeepSeek-Coder",
        psm=(("<｜fim▁begin｜>",), ("<｜fim▁hole｜>",), ("<｜fim▁end｜>",)),
        spm=None,
    ),
    # mistralai/mistral-common, encode_fim() and its test: "<s>[SUFFIX]{suffix}[PREFIX]{prefix}"; no other order.
    FimTokens("Codestral", psm=None, spm=(("[SUFFIX]",), ("[PREFIX]",), ())),
)


def detect_fim_tokens(tokenizer: Any) -> FimTokens | None:
    """The first family of `FAMILIES` all of whose control tokens this tokenizer reads as one id each, else None.

    A spelling that is in the vocabulary but comes out of the tokenizer as several ids does not count: the model would
    never have seen that id in a prompt.
    """
    vocabulary = tokenizer.get_vocab()
    for family in FAMILIES:
        texts = family.texts()
        if all(
            text in vocabulary and list(tokenizer(text, add_special_tokens=False)["input_ids"]) == [vocabulary[text]]
            for text in texts
        ):
            ids = {text: vocabulary[text] for text in texts}
            return FimTokens(family.family, family.psm, family.spm, family.end, ids)
    return None
