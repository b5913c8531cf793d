"""FIM examples: layout of every family, nothing lost, and exactly what a plain row-at-a-time loop gives."""

import random

import numpy as np
import polars as pl
import pytest
from golden import Golden
from pydantic import ValidationError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cogumi.core.errors import UsageError
from cogumi.data import encoding as encoding
from cogumi.data import fim
from cogumi.data.encoding import FormatOptions
from cogumi.data.fim import FAMILIES, INSTRUCTION, FimConfig, FimTokens, detect_fim_tokens
from cogumi.data.formats import layout_note, tokenize_for
from cogumi.data.stdlib_sample import sample_path
from tests.fim_examples import FimData, prompts_for_rl, tokenize_for_sft

EOS = "<|endoftext|>"
BOS = "<|begin|>"
QWEN, LLAMA3 = encoding.WORD_PATTERNS


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    """Real functions, with characters of one to four bytes among them."""
    sources = pl.read_parquet(sample_path())["source"].sample(250, seed=1).to_list()
    return pl.DataFrame(
        {"source": [*sources, "def größe(x):\n    return 'naïve 日本語 🎉🎉' + x\n" * 2, "x = 1\r\ny  =\t2\n\n\n"]}
    )


@pytest.fixture(scope="module")
def byte_level(rows: pl.DataFrame) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, rows["source"].to_list(), pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def sentencepiece_like(rows: pl.DataFrame) -> str:
    """A Llama-2-like BPE with "▁" for spaces; how it prepends is set by `with_metaspace`."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return trained(tokenizer, [line for text in rows["source"] for line in text.splitlines()], [])


def trained(tokenizer: Tokenizer, texts: list[str], alphabet: list[str], size: int = 1000) -> str:
    special = [EOS, "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False, max_token_length=24
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def with_tokens(base: str, texts: list[str], bos: bool = False, **flags: bool) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(base)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True, **flags) for text in texts])
    if bos:
        backend.add_special_tokens([BOS])
        template = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))])
        backend.post_processor = template
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, bos_token=BOS if bos else None, additional_special_tokens=texts
    )


def with_metaspace(base: str, texts: list[str], scheme: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(base)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    return with_tokens(backend.to_str(), texts, bos=True)


def one_by_one(
    rows: pl.DataFrame, tokenizer: PreTrainedTokenizerFast, tokens: FimTokens | None, config: FimConfig
) -> list[tuple[list[int], list[int]]]:
    """The oracle: one row at a time, the prompt tokenized as text, scalar arithmetic."""
    examples = []
    for index, source in enumerate(rows["source"]):
        bits = np.random.Philox(key=config.seed, counter=[index, 0, 0, 0])
        u_fim, u_spm, u_length, u_start = np.random.Generator(bits).random(4)
        if u_fim >= config.fim_rate:
            whole = tokenizer(source)["input_ids"]
            own = len(tokenizer(source, add_special_tokens=False)["input_ids"])
            ids = [*whole, tokenizer.eos_token_id]
            mask = [0] * (len(whole) - own) + [1] * (own + 1)
        else:
            low, high = config.middle_chars
            if len(source) < low + 1:
                continue
            length = low + int(u_length * (min(high, len(source) - 1) - low + 1))
            start = int(u_start * (len(source) - length + 1))
            prefix, middle, suffix = source[:start], source[start : start + length], source[start + length :]
            if tokens is None:
                prompt = INSTRUCTION.format(prefix=prefix, suffix=suffix)
            else:
                is_spm = tokens.psm is None or (tokens.spm is not None and u_spm < config.spm_rate)
                before, between, after = ("".join(run) for run in (tokens.spm if is_spm else tokens.psm))
                first, second = (suffix, prefix) if is_spm else (prefix, suffix)
                prompt = before + first + between + second + after
            prompt_ids = tokenizer(prompt)["input_ids"]
            end = tokenizer.convert_tokens_to_ids((tokens and tokens.end) or EOS)
            completion = [*tokenizer(middle, add_special_tokens=False)["input_ids"], end]
            ids, mask = prompt_ids + completion, [0] * len(prompt_ids) + [1] * len(completion)
        if len(ids) <= config.max_length:
            examples.append((ids, mask))
    return examples


def columns(data: FimData) -> list[tuple[list[int], list[int]]]:
    return list(zip(data.dataset["input_ids"][:], data.dataset["completion_mask"][:], strict=True))


def prompt_of(ids: list[int], mask: list[int]) -> list[int]:
    return [token for token, learned in zip(ids, mask, strict=True) if not learned]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.family)
@pytest.mark.parametrize("bos", [False, True], ids=["bare", "bos"])
def test_every_family_equals_the_row_at_a_time_loop(rows, byte_level, family, bos):
    tokenizer = with_tokens(byte_level, family.texts(), bos)
    config = FimConfig(fim_rate=0.8, max_length=300)
    data = tokenize_for_sft(rows, tokenizer, config)
    assert detect_fim_tokens(tokenizer).family == family.family
    assert columns(data) == one_by_one(rows, tokenizer, family, config)
    assert data.total == rows.height == len(data.dataset) + sum(data.dropped.values())


@pytest.mark.parametrize(
    ("family", "psm", "spm"),
    [
        ("StarCoder", "<fim_prefix>P<fim_suffix>S<fim_middle>", "<fim_prefix><fim_suffix>S<fim_middle>P"),
        ("SantaCoder", "<fim-prefix>P<fim-suffix>S<fim-middle>", "<fim-prefix><fim-suffix>S<fim-middle>P"),
        ("Qwen-Coder", "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>", None),
        ("CodeLlama", "▁<PRE>P▁<SUF>S▁<MID>", "▁<PRE>▁<SUF>S▁<MID>P"),
        ("DeepSeek-Coder", "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>", None),
        ("Codestral", None, "[SUFFIX]S[PREFIX]P"),
    ],
)
def test_the_published_layouts(family, psm, spm):
    tokens = next(each for each in FAMILIES if each.family == family)
    assert (tokens.psm is None, tokens.spm is None) == (psm is None, spm is None)
    assert psm is None or tokens.prompt("P", "S", fim.PSM) == psm
    assert spm is None or tokens.prompt("P", "S", fim.SPM) == spm


def test_tokens_that_split_do_not_count_as_detected(byte_level):
    family = FAMILIES[0]
    assert detect_fim_tokens(with_tokens(byte_level, [])) is None
    assert detect_fim_tokens(with_tokens(byte_level, family.texts()[:2])) is None
    state = Tokenizer.from_str(byte_level)
    split = PreTrainedTokenizerFast(tokenizer_object=state, eos_token=EOS)
    vocabulary = split.get_vocab() | dict.fromkeys(family.texts(), 7)
    split.get_vocab = lambda: vocabulary  # in the vocabulary, yet the tokenizer makes several ids of it
    assert detect_fim_tokens(split) is None


@pytest.mark.parametrize("family", [*FAMILIES, None], ids=lambda family: family.family if family else "instruction")
@pytest.mark.parametrize("overlong", ["drop", "trim"])
def test_rl_prompts_read_back_as_the_sft_prompts(rows, byte_level, family, overlong):
    tokenizer = with_tokens(byte_level, family.texts() if family else [], bos=True)
    config = FimConfig(max_length=150, overlong=overlong)
    sft, rl = tokenize_for_sft(rows, tokenizer, config), prompts_for_rl(rows, tokenizer, config)
    assert sft.dropped == rl.dropped
    assert len(rl.dataset) > 50
    for (ids, mask), prompt in zip(columns(sft), rl.dataset["prompt"], strict=True):
        assert tokenizer(prompt)["input_ids"] == prompt_of(ids, mask)
    used = {row["prefix"] + row["middle"] + row["suffix"] for row in rl.dataset}
    assert used <= set(rows["source"])


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_sentencepiece_style_tokenizers(rows, sentencepiece_like, scheme):
    tokens = next(family for family in FAMILIES if family.family == "CodeLlama")
    tokenizer = with_metaspace(sentencepiece_like, tokens.texts(), scheme)
    ascii_rows = rows.filter(pl.col("source").str.contains(r"^[ -~\n]*$"))
    config = FimConfig(max_length=2000)
    sft, rl = tokenize_for_sft(ascii_rows, tokenizer, config), prompts_for_rl(ascii_rows, tokenizer, config)
    assert len(sft.dataset) > 100
    unknown = tokenizer.convert_tokens_to_ids("<unk>")
    for (ids, mask), row in zip(columns(sft), rl.dataset, strict=True):
        assert tokenizer(row["prompt"])["input_ids"] == prompt_of(ids, mask)
        completion = ids[mask.index(1) : -1]
        if scheme == "first" and unknown not in completion:  # nothing comes between the control token and the middle
            middle = "".join(tokenizer.convert_ids_to_tokens(completion)).replace("▁", " ")
            assert middle == row["middle"]


def test_a_tokenizer_that_changes_prompts_is_refused(rows, byte_level):
    family = FAMILIES[0]
    swallowing = with_tokens(byte_level, family.texts(), rstrip=True, lstrip=True)
    with pytest.raises(UsageError, match=r"lstrip, rstrip"):
        prompts_for_rl(rows, swallowing, FimConfig())
    closing = with_tokens(byte_level, family.texts())
    closing.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, closing.eos_token_id)]
    )
    with pytest.raises(UsageError, match="add_eos_token"):
        prompts_for_rl(rows, closing, FimConfig())


def test_no_fim_tokens_means_an_instruction(rows, byte_level):
    tokenizer = with_tokens(byte_level, [])
    config = FimConfig(fim_rate=0.5)
    data = tokenize_for_sft(rows, tokenizer, config)
    assert columns(data) == one_by_one(rows, tokenizer, None, config)
    assert "instruction" in layout_note(FormatOptions("sft", "fim"), tokenizer)
    row = prompts_for_rl(rows, tokenizer, config).dataset[0]
    assert row["prompt"] == INSTRUCTION.format(prefix=row["prefix"], suffix=row["suffix"])


@pytest.fixture(scope="module")
def starcoder(byte_level) -> PreTrainedTokenizerFast:
    return with_tokens(byte_level, FAMILIES[0].texts())


def test_the_result_does_not_depend_on_chunks_or_other_rows(rows, starcoder):
    config = FimConfig(fim_rate=0.7, seed=3)
    whole = columns(tokenize_for_sft(rows, starcoder, config))
    assert whole == columns(tokenize_for_sft(rows, starcoder, config))
    parts = (tokenize_for_sft(rows[at : at + 37], starcoder, config, first_row=at) for at in range(0, rows.height, 37))
    assert [example for part in parts for example in columns(part)] == whole
    nulled = rows.with_columns(pl.when(pl.int_range(pl.len()) == 0).then(None).otherwise("source").alias("source"))
    assert columns(tokenize_for_sft(nulled, starcoder, config)) == whole[1:]
    assert whole != columns(tokenize_for_sft(rows, starcoder, FimConfig(fim_rate=0.7, seed=4)))


@pytest.mark.parametrize("left_over", [{"padding": "max_length"}, {"truncation": True}], ids=str)
def test_an_earlier_call_leaves_no_trace(starcoder, left_over):
    texts = ["a", "b c d e f g h"]
    before = [list(each) for each in encoding.encode(starcoder, texts)]
    starcoder.pad_token = EOS
    starcoder(texts, max_length=3, **left_over)
    assert [list(each) for each in encoding.encode(starcoder, texts)] == before


@pytest.mark.parametrize("family", [FAMILIES[0], None], ids=["StarCoder", "instruction"])
def test_trim_fits_every_row_and_keeps_what_is_near(rows, byte_level, family):
    tokenizer = with_tokens(byte_level, family.texts() if family else [])
    dropped = tokenize_for_sft(rows, tokenizer, FimConfig(max_length=120))
    config = FimConfig(max_length=120, overlong="trim", spm_rate=0)
    trimmed = tokenize_for_sft(rows, tokenizer, config)
    assert dropped.dropped["longer than 120 tokens"] > 50
    assert sum(trimmed.dropped.values()) == 0
    lengths = [len(ids) for ids in trimmed.dataset["input_ids"]]
    assert max(lengths) <= 120
    assert sum(length > 100 for length in lengths) > 50, "trimming takes no more than it must"
    if family is None:
        return
    for row in prompts_for_rl(rows, tokenizer, config).dataset:
        shown_prefix, shown_suffix = row["prompt"].removeprefix("<fim_prefix>").split("<fim_suffix>")
        assert row["prefix"].endswith(shown_prefix)
        assert row["suffix"].startswith(shown_suffix.removesuffix("<fim_middle>"))


@pytest.mark.parametrize("build", [tokenize_for_sft, prompts_for_rl])
def test_a_column_without_text_is_refused(starcoder, build):
    with pytest.raises(UsageError, match="a column of text, and this one holds Int64"):
        build(pl.DataFrame({"source": [1, 2]}), starcoder, FimConfig())


def test_a_tokenizer_without_an_end_token_is_refused(byte_level, golden: Golden):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_level))
    with golden.raises("data", fix="eos_token"):
        tokenize_for(FormatOptions("sft", "fim"), tokenizer)


@pytest.mark.parametrize(
    "bad",
    [{"fim_rate": 1.1}, {"spm_rate": -0.1}, {"middle_chars": (0, 4)}, {"middle_chars": (9, 4)}, {"max_length": 0},
     {"seed": -1}, {"overlong": "cut"}, {"fim_rte": 1}],
    ids=str,
)  # fmt: skip
def test_config_refuses_nonsense(bad):
    with pytest.raises(ValidationError):
        FimConfig(**bad)


def pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt2", "starcoder"))
    first = {
        "gpt2": [],
        "starcoder": [pre_tokenizers.Digits(individual_digits=True)],
        "qwen": [pre_tokenizers.Split(Regex(QWEN), "isolated")],
        "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
    }
    steps = [*first[kind], byte_level]
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else byte_level


@pytest.mark.parametrize("kind", ["gpt2", "starcoder", "qwen", "llama3"])
def test_word_by_word_is_exact_on_hostile_text(rows, kind):
    pieces = [*" \n\t\r_.,('\"=", "  ", "    ", "\r\n", "'s", "'LL", "a", "Bc", "re", "1", "23", "é", "\u0301", "日本"]
    pieces += ["\u00a0", "\u2028", "\x00", "\x1c", "\x7f", "🎉", "٣", "ſ"]
    draw = random.Random(0)
    hostile = ["".join(draw.choices(pieces, k=draw.randrange(14))) for _ in range(6000)]
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC() if kind == "qwen" else None
    backend.pre_tokenizer = pre_tokenizer(kind)
    # A vocabulary grown on the hostile texts has merges across every kind of border that a wrong cut would lose.
    state = trained(backend, hostile + rows["source"].to_list(), pre_tokenizers.ByteLevel.alphabet(), size=4000)
    tokenizer = with_tokens(state, [])
    assert encoding.cuts_at_spaces(tokenizer)
    for texts in (hostile, rows["source"].to_list(), ["", "", "a", ""], [""]):
        whole, by_words = encoding.encode(tokenizer, texts), encoding.encode_by_words(tokenizer, texts)
        assert [ids.tolist() for ids in by_words] == [ids.tolist() for ids in whole]


def test_other_tokenizers_are_read_whole(byte_level, sentencepiece_like):
    def changed(name: str, value: object) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(byte_level)
        setattr(backend, name, value)
        return with_tokens(backend.to_str(), [])

    assert encoding.cuts_at_spaces(with_tokens(byte_level, []))
    steps = [pre_tokenizers.Split(Regex(r"\w+ ?"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    for other in (
        with_metaspace(sentencepiece_like, [], "first"),
        changed("normalizer", normalizers.Lowercase()),
        changed("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed("pre_tokenizer", pre_tokenizers.Sequence(steps)),
        with_tokens(byte_level, ["<a b>"]),
        with_tokens(byte_level, ["<a>"], lstrip=True),
    ):
        assert not encoding.cuts_at_spaces(other)
