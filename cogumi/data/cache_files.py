"""Prepared data on the disk: the key of its directory, the directory itself, the arrow file of a part, the lengths."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from cogumi.data.rows import Chunk, Dropped, Tokenize

log = logging.getLogger("cogumi")
Indices = npt.NDArray[np.int64]

# ---------------------------------------------------------------------------------------------------------------- keys

LIBRARIES = ("tokenizers", "transformers", "trl", "polars", "pyarrow", "datasets")


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
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # What the last call asked for.
        backend.pop("padding", None)
        backend.pop("truncation", None)
        model: Any = backend
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

RECORD = "prepared.json"
WAIT_SECONDS = 0.5


def is_complete(directory: Path) -> bool:
    """Whether all files are there with the length they had; what a disk lost is prepared again."""
    try:
        sizes = json.loads((directory / RECORD).read_text(encoding="utf-8"))["sizes"]
    except FileNotFoundError:
        return False
    whole = all((directory / name).is_file() and (directory / name).stat().st_size == sizes[name] for name in sizes)
    if not whole:
        log.warning("prepared data in %s is not whole any more: it is prepared again", directory)
        shutil.rmtree(directory)
    return whole


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
        self.path = path
        self.expected_rows = expected_rows
        self.position = 0
        self.total = self.truncated = self.learned = 0
        self.dropped: dict[str, Dropped] = {}
        self.counts = np.zeros(LONGEST + 1, np.int64)
        self.file: Any = None
        self.schema: pa.Schema | None = None

    def drop(self, reason: str, at: Indices, first: str) -> None:
        """Count rows that are not to become examples. at: their places in the source; first: what the first holds."""
        if len(at):
            self.total += len(at)
            self.count(reason, Dropped(len(at), int(at[0]), first))

    def count(self, reason: str, dropped: Dropped) -> None:
        self.dropped[reason] = self.dropped[reason] + dropped if reason in self.dropped else dropped

    def add(self, tokenize: Tokenize, rows: pl.DataFrame, at: Indices) -> None:
        """Write the examples made of rows at these places of the source, and count what became of the others."""
        chunk: Chunk = tokenize(rows, self.position)
        table = chunk.table.replace_schema_metadata(None)
        lost = sum(dropped.count for dropped in chunk.dropped.values())
        if len(table) + lost != len(at):
            raise RuntimeError(f"{len(at)} rows became {len(table)} examples and {lost} dropped")
        self.total += len(at)
        self.truncated += chunk.truncated
        for reason, dropped in chunk.dropped.items():
            # `tokenize` numbers the chosen rows; a report names the place in the source.
            self.count(reason, Dropped(dropped.count, int(at[dropped.row - self.position]), dropped.excerpt))
        self.position += len(at)
        if len(table):
            self.counts += np.bincount(np.minimum(token_lengths(table), LONGEST), minlength=LONGEST + 1)
            if "completion_mask" in table.column_names:
                masks = table["completion_mask"].chunks
                self.learned += sum(int(np.count_nonzero(part.flatten())) for part in masks)
            if self.expected_rows:
                self.check_disk(table.nbytes / len(at))
            self.write(table)

    def write(self, table: pa.Table) -> None:
        if self.schema is None:
            self.schema = table.schema
            self.file = pa.ipc.new_stream(str(self.path), self.schema)
        elif table.schema != self.schema:
            schema = unify_schemas(self.schema, table.schema)
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

    def check_disk(self, bytes_a_row: float) -> None:
        """Refuse, by the first chunk, what will not fit on the disk."""
        needed = int(bytes_a_row * self.expected_rows)
        self.expected_rows = 0
        free = space_of(self.path.parent).free
        if needed > free:
            raise UsageError(
                f"prepared data will take about {format_bytes(needed)} and {format_bytes(free)} are free",
                place=self.path.parents[1],
                fix="free some, set XDG_CACHE_HOME to another disk, or use fewer rows (data.max_rows)",
            )

    def close(self, name: str, duplicates: int, note: str) -> dict[str, Any]:
        """The record of this part. Raises UsageError where no row was usable."""
        if self.file is None:
            longer = any(reason.startswith("longer than") for reason in self.dropped)
            allow = ", or allow longer examples (of gspo: lower train.max_completion_length)" if longer else ""
            raise UsageError(describe_counts(name, self.total, 0, self.dropped), fix=f"give other rows{allow}")
        self.file.close()
        sync_path(self.path)
        return {
            "name": name,
            "total": self.total,
            "dropped": {reason: [each.count, each.row, each.excerpt] for reason, each in self.dropped.items()},
            "truncated": self.truncated,
            "duplicates": duplicates,
            "lengths": Lengths(self.counts).pairs(),
            "learned": self.learned,
            "note": note,
        }


def unify_schemas(before: pa.Schema, now: pa.Schema) -> pa.Schema:
    """The types that hold both chunks' values; UsageError names a column for which there are none."""
    fields = []
    for name in before.names:
        pair = [pa.schema([schema.field(name)]) for schema in (before, now)]
        try:
            fields.append(pa.unify_schemas(pair, promote_options="permissive").field(name))
        except pa.ArrowException as error:
            kinds = " and ".join(str(schema.field(name).type) for schema in pair)
            raise UsageError(f"column {name!r} holds {kinds} in different rows", fix="write them alike") from error
    return pa.schema(fields)


def describe_counts(name: str, total: int, used: int, dropped: Mapping[str, Dropped]) -> str:
    """ "sample.parquet: 9,421 rows, 9,100 used; dropped 300 longer than 512 tokens, 21 null"."""
    reasons = ", ".join(f"{each.count:,} {reason}" for reason, each in dropped.items())
    return f"{name}: {total:,} rows, {used:,} used" + (f"; dropped {reasons}" if reasons else "")


# ------------------------------------------------------------------------------------------------------------- lengths

LONGEST = 2**17
"""In tokens; what is longer counts as this."""


@dataclass(frozen=True)
class Lengths:
    """counts[n]: examples of n tokens. Of a preference pair: the prompt with the longer answer."""

    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> "Lengths":
        """From (length, examples) pairs, as `pairs` gives them."""
        counts = np.zeros(LONGEST + 1, np.int64)
        for length, number in pairs:
            counts[length] += number
        return cls(counts)

    def pairs(self) -> list[tuple[int, int]]:
        """(length, examples) of the lengths that occur, ascending."""
        return [(int(length), int(self.counts[length])) for length in np.flatnonzero(self.counts)]

    @property
    def examples(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.counts @ np.arange(len(self.counts)))

    @property
    def mean(self) -> float:
        return self.tokens / max(1, self.examples)

    def quantile(self, share: float) -> int:
        """The shortest length that at least this share of the examples does not exceed; 0 where there are none."""
        up_to = np.cumsum(self.counts)
        return int(np.searchsorted(up_to, max(1, np.ceil(share * up_to[-1])))) if up_to[-1] else 0

    def buckets(self, width: int) -> list[tuple[int, int, int]]:
        """(first length, last length, examples) of buckets of this width, up to the longest example."""
        last = self.quantile(1.0)
        return [
            (start, start + width - 1, int(self.counts[start : start + width].sum()))
            for start in range(0, last + 1, width)
        ]


def token_lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    """Tokens of each example of a chunk; none where the chunk holds text, which a trainer tokenizes."""
    if "input_ids" in table.column_names:
        return _list_lengths(table, "input_ids")
    if "chosen_ids" in table.column_names:
        answers = np.maximum(_list_lengths(table, "chosen_ids"), _list_lengths(table, "rejected_ids"))
        return _list_lengths(table, "prompt_ids") + answers
    return np.empty(0, np.int64)


def _list_lengths(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = pc.list_value_length(table[column]).to_numpy().astype(np.int64)
    return lengths
