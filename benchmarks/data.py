"""Preparing data: against datasets.map one row at a time, and the memory of it from 10^5 to 10^7 rows.

Speed: the same parquet file to equal FIM examples, which is checked before anything is timed. Ours reads it twice, hashes
every row, looks for duplicates and writes arrow files that are waited for; the peer keeps what it makes in memory.

Memory: a fresh process prepares rows of 100 to 300 bytes, all different, and a thread of it reads its anonymous memory from
/proc a hundred times a second: what is over the number from before the call, with all imports done. File-backed pages (the
hashes, 8 bytes a row, and the choice, 1 byte) are named apart: the kernel takes them back when it wants to.
"""

import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fim_data import row_at_a_time, starcoder_like
from benchmarks.harness import Row, interleave, missing, ratio, row, summary
from cogumi.data.cache import Prepared, Source, prepare
from cogumi.data.cache_files import tokenizer_identity
from cogumi.data.fim import FimConfig
from cogumi.data.rows import Chunk, Dropped
from cogumi.data.selection import Selection
from cogumi.data.source_files import files_identity
from cogumi.data.stdlib_sample import sample_path, write_sample
from tests.fim_examples import tokenize_for_sft

CASE = "stdlib parquet -> tokenized FIM on the disk"
CONFIG = FimConfig(fim_rate=0.9)
ROWS = (10**5, 10**6, 10**7)
STATUS = Path("/proc/self/status")


def run(quick: bool = False) -> Iterator[Row]:
    """`quick`: 2 repetitions instead of 5, and up to 3 * 10^5 rows."""
    yield from throughput(2 if quick else 5)
    yield from memory((10**5, 3 * 10**5) if quick else ROWS)


def throughput(repeats: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        sample = write_sample(Path(folder) / "sample.parquet")
        tokenizer = starcoder_like(pl.read_parquet(sample)["source"].to_list())
        made: list[Prepared] = []

        def ours() -> None:
            made.append(prepare_fim(sample, tokenizer, Path(folder) / f"cache-{len(made)}"))

        def cached() -> None:
            prepare_fim(sample, tokenizer, Path(folder) / "cache-0")

        def peer() -> datasets.Dataset:
            return row_at_a_time(sample, tokenizer, CONFIG)

        datasets.disable_caching()
        datasets.disable_progress_bars()
        try:
            expected = peer()
            ours()
            equal = made[0].train.dataset.to_dict() == expected.to_dict()
            times = interleave({"ours": ours, "cached": cached, "peer": peer}, repeats, warmup=0)
        finally:
            datasets.enable_progress_bars()
            datasets.enable_caching()
        report = made[0].train.report()
    speedup, low, high = ratio(times, "peer", "ours")
    yield row(
        "data",
        CASE,
        "rows/s vs datasets.map row at a time",
        speedup,
        "ratio",
        spread=(low, high),
        target=">= 5",
        ok=equal and speedup >= 5,
        note=f"{report}; outputs {'equal' if equal else 'DIFFER'}",
    )
    for name, called in (("ours", "cogumi"), ("cached", "cogumi, from the cache"), ("peer", "datasets.map")):
        seconds, spread = summary(times[name])
        yield row("data", CASE, called, seconds, "s", spread=spread)


def memory(heights: tuple[int, ...]) -> Iterator[Row]:
    if "RssAnon" not in (STATUS.read_text() if STATUS.exists() else ""):
        yield missing("data", "memory", "/proc/self/status with RssAnon")
        return
    smallest = 0
    for height in heights:
        case = f"{height:,} rows"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.parquet"
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                process.submit(write_rows, path, height).result()
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                anonymous, mapped, seconds, report = process.submit(measured, path, Path(folder) / "cache").result()
            size = path.stat().st_size
        smallest = smallest or anonymous
        yield row(
            "data",
            case,
            "peak anonymous memory over imports",
            anonymous / 2**20,
            "MiB",
            note=f"{size / 1e6:,.0f} MB of parquet; {report}",
        )
        yield row("data", case, "peak of file-backed pages over imports", mapped / 2**20, "MiB")
        yield row("data", case, "preparing", height / seconds, "rows/s")
    yield row(
        "data",
        f"{heights[-1]:,} rows over {heights[0]:,}",
        "peak anonymous memory",
        anonymous / smallest,
        "ratio",
        target="<= 1.25",
    )


def write_rows(path: Path, height: int) -> None:
    """Pieces of the standard library, each with its number so that no two are equal."""
    pieces = [text[:250] for text in pl.read_parquet(sample_path())["source"].head(2000)]
    with pq.ParquetWriter(path, pa.schema({"source": pa.string(), "number": pa.int64()}), compression="zstd") as file:
        for start in range(0, height, 50_000):
            numbers = range(start, min(height, start + 50_000))
            texts = [f"{pieces[i % len(pieces)]}# {i}\n" for i in numbers]
            file.write_table(pa.table({"source": texts, "number": numbers}))


def measured(path: Path, cache: Path) -> tuple[int, int, float, str]:
    """(peak bytes of anonymous memory, of file-backed pages, both beyond those before; seconds; the report)."""
    tokenizer = starcoder_like(pl.read_parquet(sample_path())["source"].head(500).to_list())
    tokenizer(["warm"])
    before, peaks, done = resident(), [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peaks[:] = map(max, peaks, resident())

    watching = threading.Thread(target=watch)
    watching.start()
    started = time.perf_counter()
    made = prepare_fim(path, tokenizer, cache, eval_rows=100)
    seconds = time.perf_counter() - started
    done.set()
    watching.join()
    return peaks[0] - before[0], peaks[1] - before[1], seconds, made.train.report()


def resident() -> tuple[int, int]:
    """Bytes of (anonymous memory, file-backed pages) of this process."""
    status = STATUS.read_text()
    anonymous, mapped = (re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE) for name in ("RssAnon", "RssFile"))
    assert anonymous is not None
    assert mapped is not None
    return int(anonymous[1]) * 1024, int(mapped[1]) * 1024


def prepare_fim(path: Path, tokenizer: Any, cache: Path, eval_rows: int = 0) -> Prepared:
    def tokenize(rows: pl.DataFrame, first_row: int) -> Chunk:
        data = tokenize_for_sft(rows, tokenizer, CONFIG, first_row=first_row)
        dropped = {reason: Dropped(count, first_row, "") for reason, count in data.dropped.items()}
        return Chunk(data.dataset.data.table, dropped)

    options = CONFIG.model_dump(mode="json")
    source = Source(path.name, [path], {"source": "source"}, tokenize, files_identity([path]), options, text_only=True)
    return prepare([source], Selection(eval_rows), {"tokenizer": tokenizer_identity(tokenizer)}, cache_dir=cache)
