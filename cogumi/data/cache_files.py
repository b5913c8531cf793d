"""Prepared data on the disk: the key of its directory, the directory itself, the arrow file of a part, the lengths."""

import hashlib
import json
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from cogumi.core.disk_space import space_of
from cogumi.core.durability import lock_directory, sync_path, write_error
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes
from cogumi.data.rows import Dropped, Tokenize, count_dropped

log = logging.getLogger("cogumi")
LIBRARIES = ("tokenizers", "transformers", "trl", "polars", "pyarrow", "datasets")
RECORD = "prepared.json"
WAIT_SECONDS = 0.5


def cache_key(parts: Mapping[str, Any]) -> str:
    """24 hex digits for these values and nothing else. Raises TypeError for one that is not JSON: it has no one spelling."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def code_and_libraries() -> dict[str, str]:
    """What prepares the data: the text of this package, and the versions of the libraries that it calls."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return {"cogumi.data": digest.hexdigest()} | {name: version(name) for name in LIBRARIES}


def tokenizer_identity(tokenizer: Any) -> str:
    """A hash of all that decides which ids a text or a conversation becomes."""
    if tokenizer.is_fast:
        model: Any = json.loads(tokenizer.backend_tokenizer.to_str())
        model |= {"padding": None, "truncation": None}  # what the last call asked for
    else:
        model = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    parts = {
        "model": model,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "special ids": sorted(tokenizer.all_special_ids),
        "chat_template": tokenizer.chat_template,
        "adds": [getattr(tokenizer, f"add_{each}_token", None) for each in ("bos", "eos")],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------- directory


def is_complete(directory: Path) -> bool:
    """Whether all files are there with the length they had; what a disk lost is prepared again."""
    if not (directory / RECORD).exists():
        return False
    sizes = json.loads((directory / RECORD).read_text(encoding="utf-8"))["sizes"]
    if sizes == file_sizes(directory):
        return True
    log.warning("prepared data in %s is not whole any more: it is prepared again", directory)
    shutil.rmtree(directory)
    return False


def file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of the prepared files, without the record, and without what `datasets` keeps beside them."""
    files = [directory / f"{part}.arrow" for part in ("train", "held_out")]
    return {file.name: file.stat().st_size for file in files if file.exists()}


@contextmanager
def alone(home: Path, key: str) -> Iterator[Path | None]:
    """An empty directory to write into while no other process does, or None where another has finished meanwhile."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        error = write_error(home)
    except OSError as refused:
        error = refused
    if error:
        fix = "set XDG_CACHE_HOME to another directory"
        raise UsageError(f"prepared data cannot be written there ({error.strerror})", place=home, fix=fix)
    remove_leftovers(home)
    unfinished, told = home / f"{key}.unfinished", False
    while not (home / key).exists():
        unfinished.mkdir(exist_ok=True)
        number = unfinished.stat().st_ino
        with lock_directory(unfinished) as held:
            # The process that had the lock before may have renamed the directory, or removed it.
            if held is not False and unfinished.exists() and unfinished.stat().st_ino == number:
                for left in unfinished.iterdir():
                    left.unlink()
                try:
                    yield unfinished
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
                return
        if not told:
            log.info("another process prepares the same data: waiting for it")
            told = True
        time.sleep(WAIT_SECONDS)
    yield None


def remove_leftovers(home: Path) -> None:
    """Remove what processes left that were killed: their locks are free."""
    for left in home.glob("*.unfinished"):
        try:
            with lock_directory(left) as held:
                if held:
                    shutil.rmtree(left)
        except FileNotFoundError:  # renamed or removed by another process
            continue


# ---------------------------------------------------------------------------------------------------------- arrow file


class ExamplesWriter:
    """Takes the rows of one part (trained on, or held out) and writes the examples that they become to an arrow stream.

    expected_rows: how many will come, by which the first batch says whether the disk has room for them.
    """

    def __init__(self, path: Path, expected_rows: int) -> None:
        self.path, self.expected_rows = path, expected_rows
        self.rows = self.truncated = self.learned = 0
        self.dropped: dict[str, Dropped] = {}
        self.lengths = Lengths()
        self.file: Any = None
        self.schema: pa.Schema | None = None

    def add(self, tokenize: Tokenize, rows: pl.DataFrame, at: npt.NDArray[np.int64]) -> None:
        """Write the examples made of rows at these places of the source, and count what became of the others."""
        chunk = tokenize(rows, self.rows)
        table = chunk.table.replace_schema_metadata(None)
        lost = sum(dropped.count for dropped in chunk.dropped.values())
        if len(table) + lost != len(at):
            raise RuntimeError(f"{len(at)} rows became {len(table)} examples and {lost} dropped")
        for reason, dropped in chunk.dropped.items():
            # `tokenize` numbers the chosen rows; a report names the place in the source.
            place = int(at[dropped.row - self.rows])
            count_dropped(self.dropped, reason, place, dropped.excerpt, dropped.count)
        self.rows += len(at)
        self.truncated += chunk.truncated
        if not len(table):
            return
        self.lengths.update(token_lengths(table).tolist())
        if "completion_mask" in table.column_names:
            self.learned += sum(int(np.count_nonzero(part.flatten())) for part in table["completion_mask"].chunks)
        needed, free = table.nbytes // len(at) * self.expected_rows, space_of(self.path.parent).free
        if self.file is None and needed > free:
            raise UsageError(
                f"prepared data will take about {format_bytes(needed)} and {format_bytes(free)} are free",
                place=self.path.parents[1],
                fix="free some, set XDG_CACHE_HOME to another disk, or use fewer rows (data.max_rows)",
            )
        self.write(table)

    def write(self, table: pa.Table) -> None:
        if self.schema is None:
            self.schema, self.file = table.schema, pa.ipc.new_stream(str(self.path), table.schema)
        elif table.schema != self.schema:
            try:
                schema = pa.unify_schemas([self.schema, table.schema], promote_options="permissive")
            except pa.ArrowException as error:
                raise UsageError(f"a column holds two kinds of values: {error}", fix="write them alike") from error
            if schema != self.schema:
                self.rewrite(schema)
            table = table.select(schema.names).cast(schema)
        self.file.write_table(table.combine_chunks())

    def rewrite(self, schema: pa.Schema) -> None:
        """What is written so far, in the types that later rows need: a column may have begun with nulls alone."""
        self.file.close()
        before = self.path.rename(self.path.with_suffix(".before"))
        self.file, self.schema = pa.ipc.new_stream(str(self.path), schema), schema
        with pa.memory_map(str(before)) as mapped:
            for batch in pa.ipc.open_stream(mapped):
                self.file.write_table(pa.Table.from_batches([batch]).cast(schema))
        before.unlink()

    def close(self, name: str) -> dict[str, Any]:
        """The record of this part. Raises UsageError where no row was usable."""
        if self.file is None:
            longer = any(reason.startswith("longer than") for reason in self.dropped)
            allow = ", or allow longer examples (of gspo: lower train.max_completion_length)" if longer else ""
            raise UsageError(describe_counts(name, 0, self.dropped), fix=f"give other rows{allow}")
        self.file.close()
        sync_path(self.path)
        return {
            "name": name,
            "dropped": {reason: [each.count, each.row, each.excerpt] for reason, each in self.dropped.items()},
            "truncated": self.truncated,
            "lengths": sorted(self.lengths.items()),
            "learned": self.learned,
        }


def describe_counts(name: str, used: int, dropped: Mapping[str, Dropped]) -> str:
    """ "sample.parquet: 9,421 rows, 9,100 used; dropped 300 longer than 512 tokens, 21 null"."""
    total = used + sum(each.count for each in dropped.values())
    reasons = ", ".join(f"{each.count:,} {reason}" for reason, each in dropped.items())
    return f"{name}: {total:,} rows, {used:,} used" + (f"; dropped {reasons}" if reasons else "")


# ------------------------------------------------------------------------------------------------------------- lengths


class Lengths(Counter[int]):
    """Examples by their number of tokens. Of a preference pair: the prompt with the longer answer."""

    @property
    def examples(self) -> int:
        return self.total()

    @property
    def tokens(self) -> int:
        return sum(length * count for length, count in self.items())

    @property
    def mean(self) -> float:
        return self.tokens / max(1, self.examples)

    def quantile(self, share: float) -> int:
        """The shortest length that at least this share of the examples does not exceed; 0 where there are none."""
        wanted, so_far = max(1, math.ceil(share * self.examples)), 0
        for length, count in sorted(self.items()):
            so_far += count
            if so_far >= wanted:
                return length
        return 0

    def buckets(self, most: int) -> list[tuple[int, int, int]]:
        """(first length, last length, examples) of at most so many buckets of one width, up to the longest example."""
        if not self:
            return []
        width = max(1, math.ceil((max(self) + 1) / most))
        counts: Counter[int] = Counter()
        for length, count in self.items():
            counts[length // width] += count
        return [(at * width, (at + 1) * width - 1, counts[at]) for at in range(max(counts) + 1)]


def token_lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    """Tokens of each example of a chunk; none where the chunk holds text, which a trainer tokenizes."""

    def lengths(column: str) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = pc.list_value_length(table[column]).to_numpy().astype(np.int64)
        return found

    if "input_ids" in table.column_names:
        return lengths("input_ids")
    if "chosen_ids" in table.column_names:
        return lengths("prompt_ids") + np.maximum(lengths("chosen_ids"), lengths("rejected_ids"))
    return np.empty(0, np.int64)
