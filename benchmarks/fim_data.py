"""FIM data: parquet to tokenized examples, against the same transform written with datasets.map one row at a time.

Both sides read the same parquet file and end with equal `input_ids` and `completion_mask`, which is checked before
anything is timed. The peer calls the tokenizer once per piece, which is faster for it than one call with a list of
three, and has no cache to fall back on. The tokenizer is a byte-level BPE trained here on the same sample; its speed is
that of any such tokenizer, its compression is not. The ratio grows with the rows, because words repeat.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import polars as pl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Row, interleave, ratio, row, summary
from cogumi.data.fim import FimConfig
from cogumi.data.stdlib_sample import write_sample
from tests.fim_examples import tokenize_for_sft

CASE = "stdlib -> parquet -> tokenized FIM"


def run(quick: bool = False) -> list[Row]:
    """Rows per second as a ratio to the peer's, and the seconds behind it. `quick`: 2 repetitions instead of 5."""
    config = FimConfig(fim_rate=0.9)
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        sample = write_sample(Path(folder) / "sample.parquet")
        sample_seconds = time.process_time() - start
        tokenizer = starcoder_like(pl.read_parquet(sample)["source"].to_list())

        def ours() -> datasets.Dataset:
            return tokenize_for_sft(pl.read_parquet(sample, columns=["source"]), tokenizer, config).dataset

        def peer() -> datasets.Dataset:
            return row_at_a_time(sample, tokenizer, config)

        datasets.disable_caching()
        datasets.disable_progress_bars()
        try:
            expected = peer()
            equal = ours().to_dict() == expected.to_dict()
            times = interleave({"ours": ours, "peer": peer}, repeats=2 if quick else 5, warmup=0)
        finally:
            datasets.enable_progress_bars()
            datasets.enable_caching()
        rows = pl.scan_parquet(sample).select(pl.len()).collect().item()
    speedup, low, high = ratio(times, "peer", "ours")
    ours_seconds, ours_spread = summary(times["ours"])
    peer_seconds, peer_spread = summary(times["peer"])
    return [
        row(
            "fim_data",
            CASE,
            "rows/s vs datasets.map row at a time",
            speedup,
            "ratio",
            spread=(low, high),
            target=">= 5",
            ok=equal and speedup >= 5,
            note=f"{rows:,} rows; outputs {'equal' if equal else 'DIFFER'}",
        ),
        row("fim_data", CASE, "cogumi", ours_seconds, "s", spread=ours_spread),
        row("fim_data", CASE, "datasets.map row at a time", peer_seconds, "s", spread=peer_spread),
        row("fim_data", "stdlib -> sample parquet", "write_sample, one core", sample_seconds, "CPU s", target="< 5"),
    ]


def starcoder_like(texts: list[str], vocabulary: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`, with StarCoder's control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], additional_special_tokens=special[1:]
    )


def row_at_a_time(path: Path, tokenizer: PreTrainedTokenizerFast, config: FimConfig) -> datasets.Dataset:
    """The peer: what one writes first. Same cut, same layout, same drops."""
    vocabulary = tokenizer.get_vocab()
    prefix_id, suffix_id, middle_id = (vocabulary[f"<fim_{part}>"] for part in ("prefix", "suffix", "middle"))
    special_texts = tokenizer.all_special_tokens
    shortest, longest = config.middle_chars

    def example(record: dict[str, Any], index: int) -> dict[str, list[int]]:
        nothing: dict[str, list[int]] = {"input_ids": [], "completion_mask": []}
        source, n = record["source"], len(record["source"])
        bits = np.random.Philox(key=config.seed, counter=[index, 0, 0, 0])
        fim, spm, length_draw, start_draw = np.random.Generator(bits).random(4)
        if any(text in source for text in special_texts):
            return nothing
        if fim >= config.fim_rate:
            prompt, completion = [], tokenizer(source, add_special_tokens=False)["input_ids"]
        else:
            if n < shortest + 1:
                return nothing
            length = shortest + int(length_draw * (min(longest, n - 1) - shortest + 1))
            start = int(start_draw * (n - length + 1))
            pieces = [source[:start], source[start : start + length], source[start + length :]]
            prefix, completion, suffix = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
            if spm < config.spm_rate:
                prompt = [prefix_id, suffix_id, *suffix, middle_id, *prefix]
            else:
                prompt = [prefix_id, *prefix, suffix_id, *suffix, middle_id]
        completion = [*completion, tokenizer.eos_token_id]
        if len(prompt) + len(completion) > config.max_length:
            return nothing
        return {"input_ids": prompt + completion, "completion_mask": [0] * len(prompt) + [1] * len(completion)}

    features = datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int32")), "completion_mask": datasets.List(datasets.Value("int8"))}
    )
    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.Dataset.from_parquet(str(path), columns=["source"], cache_dir=cache, keep_in_memory=True)
        examples = rows.map(
            example, with_indices=True, remove_columns=["source"], features=features, keep_in_memory=True
        )
        return examples.filter(lambda each: len(each["input_ids"]) > 0, keep_in_memory=True)
