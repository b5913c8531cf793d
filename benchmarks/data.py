"""Data preparation: speed against datasets.map one row at a time, and memory from 10^5 to 10^7 rows.

A run reads the file twice, hashes every row, looks for duplicates and writes arrow files. The peer keeps its examples in
memory and calls the tokenizer once for each piece, which is faster than one call with a list of three. Both must give equal
columns before anything is timed. The ratio grows with the rows, because words repeat.

Memory: a fresh process prepares distinct rows of 100 to 300 bytes while a thread reads its anonymous memory a hundred times
a second; the figure is the increase over the value after all imports.
"""

import itertools
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Row, interleave, ratio_row, row, status_bytes, values_row, watch_memory
from cogumi.data.cache import Prepared, Source, prepare, tokenizer_identity
from cogumi.data.fim import FimConfig, fim_sft_chunk, read_controls
from cogumi.data.rows import Chunk
from cogumi.data.selection import Selection
from cogumi.data.source_files import files_identity
from cogumi.data.stdlib_sample import sample_path, write_sample
from cogumi.models.small_base import train_tokenizer

CONFIG = FimConfig(fim_rate=0.9)
ROWS = (10**5, 10**6, 10**7)


def run(quick: bool = False) -> Iterator[Row]:
    """`quick`: 2 repetitions instead of 5, and up to 3 * 10^5 rows."""
    with tempfile.TemporaryDirectory() as folder:
        yield from compare_with_map(Path(folder), 2 if quick else 5)
    yield from memory((10**5, 3 * 10**5) if quick else ROWS)


def compare_with_map(folder: Path, repeats: int) -> Iterator[Row]:
    """Yield rows per second as a ratio to the peer's, and the seconds of both."""
    sample, caches = write_sample(folder / "sample.parquet"), itertools.count()
    tokenizer = train_tokenizer(pl.read_parquet(sample)["source"].to_list())

    def ours() -> datasets.Dataset:
        return prepare_fim(sample, tokenizer, folder / f"cache-{next(caches)}").train.dataset

    case = "stdlib parquet -> tokenized FIM on the disk"
    peer, theirs = "datasets.map row at a time", partial(row_at_a_time, sample, tokenizer, CONFIG)
    datasets.disable_caching()
    datasets.disable_progress_bars()
    equal = ours().to_dict() == theirs().to_dict()
    times = interleave({"cogumi": ours, peer: theirs}, repeats, warmup=0)
    note = f"{pq.read_metadata(sample).num_rows:,} rows; outputs {'equal' if equal else 'DIFFER'}"
    ratio = ratio_row("data", case, f"rows/s vs {peer}", times, peer, "cogumi", target=">= 5", note=note)
    yield ratio | {"ok": ratio["ok"] and equal}
    for name, seconds in times.items():
        yield values_row("data", case, name, seconds, "s")


def memory(heights: tuple[int, ...]) -> Iterator[Row]:
    smallest = 0
    for height in heights:
        case = f"{height:,} rows"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.parquet"
            in_a_process(write_rows, path, height)
            anonymous, seconds, report = in_a_process(measured, path, Path(folder) / "cache")
            note = f"{path.stat().st_size / 1e6:,.0f} MB of parquet; {report}"
        smallest = smallest or anonymous
        yield row("data", case, "peak anonymous memory over imports", anonymous / 2**20, "MiB", note=note)
        yield row("data", case, "preparing", height / seconds, "rows/s")
    case = f"{heights[-1]:,} rows over {heights[0]:,}"
    yield row("data", case, "peak anonymous memory", anonymous / smallest, "ratio", target="<= 1.25")


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def write_rows(path: Path, height: int) -> None:
    """Pieces of the standard library, each with its number so that no two are equal."""
    pieces = [text[:250] for text in pl.read_parquet(sample_path())["source"].head(2000)]
    with pq.ParquetWriter(path, pa.schema({"source": pa.string(), "number": pa.int64()}), compression="zstd") as file:
        for start in range(0, height, 50_000):
            numbers = range(start, min(height, start + 50_000))
            texts = [f"{pieces[i % len(pieces)]}# {i}\n" for i in numbers]
            file.write_table(pa.table({"source": texts, "number": numbers}))


def measured(path: Path, cache: Path) -> tuple[int, float, str]:
    """(peak bytes of anonymous memory beyond that before, seconds, the report)."""
    tokenizer = train_tokenizer(pl.read_parquet(sample_path())["source"].head(500).to_list())
    tokenizer(["warm"])
    before, peaks, done = status_bytes(os.getpid())["anonymous"], Counter[str](), threading.Event()
    watching = threading.Thread(target=watch_memory, args=(os.getpid(), peaks, done, 0.01))
    watching.start()
    started = time.perf_counter()
    made = prepare_fim(path, tokenizer, cache, eval_rows=100)
    seconds = time.perf_counter() - started
    done.set()
    watching.join()
    return peaks["anonymous"] - before, seconds, made.train.report()


def prepare_fim(path: Path, tokenizer: Any, cache: Path, eval_rows: int = 0) -> Prepared:
    controls = read_controls(tokenizer)

    def tokenize(rows: pl.DataFrame, first_row: int) -> Chunk:
        return fim_sft_chunk(rows.select("source"), first_row, controls=controls, config=CONFIG)

    options = CONFIG.model_dump(mode="json")
    source = Source(path.name, [path], {"source": "source"}, tokenize, files_identity([path]), options)
    return prepare([source], Selection(eval_rows), {"tokenizer": tokenizer_identity(tokenizer)}, cache_dir=cache)


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
