"""Prepare examples once, in an on-disk cache that a trainer memory-maps, keyed by everything that shapes them.

Rows are read twice: their hashes choose what is held out and trained on (`cogumi.data.selection`), then the chosen rows
become examples in arrow files. Neither pass holds more than a batch. The directory is written aside and renamed, so it is
whole or absent. `datasets` puts files that TRL derives (packed rows) beside the examples.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import platformdirs
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from tqdm.auto import tqdm

from cogumi.core.durability import NO_SPACE, lock_directory, sync_path, write_synced
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes
from cogumi.core.liveness import beat
from cogumi.data.rows import (
    OPTIONAL_FIELDS,
    RECORD_COLUMN,
    Dropped,
    KindsDiffer,
    Lengths,
    Tokenize,
    decode_rows,
    excerpt_of,
    token_lengths,
)
from cogumi.data.selection import (
    COPY,
    HELD_OUT,
    LIKE_HELD_OUT,
    SAME_QUESTION,
    TRAIN,
    UNUSED,
    Read,
    RowHashes,
    Selection,
    States,
    choose_rows,
    count_states,
    example_hashes,
)
from cogumi.data.sources import ORIGINALS, batches

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger("cogumi")

LIBRARIES = ("tokenizers", "transformers", "trl", "polars", "pyarrow", "datasets")
RECORD = "prepared.json"
EQUAL = {
    COPY: "equal to an earlier row",
    LIKE_HELD_OUT: "equal to a held-out row",
    SAME_QUESTION: "with the question of a held-out row",
}

CHUNK_COUNTS = ("truncated", "rows_without_reasoning", "extra_examples", "text_rows")
EXTRA_EXAMPLES = (
    "more examples than rows: further pieces of documents longer than train.max_length, or earlier turns as the chat "
    "template shows them at inference (with train.completion_only_loss: true only last turns are learned)"
)


@dataclass(frozen=True)
class Source:
    """Files of the same columns, and the function that makes examples of their rows."""

    name: str
    files: Sequence[Path]
    columns: Mapping[str, str]
    """Field that `tokenize` knows -> column of the files."""
    tokenize: Tokenize
    identity: Any
    """Identifies the content of the files, as JSON: a hub commit and file names, or `sources.files_identity`."""
    options: Any
    """Everything that decides the result of `tokenize` for a row, as JSON: the format and its settings."""
    weight: float = 1.0
    """Its share of the examples; 0: all rows are held out."""
    keeps_records: bool = False
    """True: `tokenize` also gets each original row, in the column `record`."""
    read: Read | None = None
    """Finds rows of one question or example; None: by their columns."""
    unused: Sequence[str] = ()
    """Columns of the files that nothing is made of."""
    notes: Sequence[str] = ()
    """Lines that begin a report of the source."""

    def batches(self, files: Sequence[Path] | None = None, records: bool = False) -> Iterator[pl.DataFrame]:
        """Iterate over the rows of all files, or of `files`, by field; `records` adds original rows if they are kept."""
        extra = {RECORD_COLUMN: ORIGINALS} if records and self.keeps_records else {}
        optional = [self.columns[name] for name in OPTIONAL_FIELDS if name in self.columns]
        for rows in batches(files or self.files, list(dict.fromkeys(self.columns.values())), bool(extra), optional):
            yield rows.select(**self.columns, **extra)


@dataclass(frozen=True)
class Data:
    """Examples, and an account of every row that was to make one."""

    dataset: "Dataset"
    """Memory-mapped columns of `Chunk.table`, the encoded ones decoded."""
    name: str
    dropped: Mapping[str, Dropped]
    truncated: int
    duplicates: int
    """Rows equal to an earlier one; also among `dropped` with `data.deduplicate`."""
    sharing: int
    """Rows with the question of another row and another answer."""
    lengths: Lengths
    learned: int = 0
    """Tokens with a completion mask of 1; 0 without a mask."""
    rows_without_reasoning: int = 0
    extra_examples: int = 0
    text_rows: int = 0
    """These as in `Chunk`."""
    note: str = ""

    @property
    def total(self) -> int:
        """Number of rows: examples and dropped ones."""
        return len(self.dataset) - self.extra_examples + sum(dropped.count for dropped in self.dropped.values())

    def report(self) -> str:
        """Describe the rows: "sample.parquet: 9,421 rows, 9,100 used; dropped 300 longer than 512 tokens, 21 null"."""
        line = describe_counts(self.name, len(self.dataset) - self.extra_examples, self.dropped)
        if self.extra_examples:
            line += f"; {self.extra_examples:,} {EXTRA_EXAMPLES}"
        if self.truncated:
            line += f"; truncated {self.truncated:,}"
        if self.duplicates and EQUAL[COPY] not in self.dropped:
            line += f"; {self.duplicates:,} equal to an earlier row are kept (data.deduplicate: true drops them)"
        if self.sharing:
            line += f"; {self.sharing:,} share their question with another row"
        return f"{line} ({self.note})" if self.note else line

    def examples_dropped(self) -> list[str]:
        """Return one line per reason, with the first row dropped for it."""
        return [
            f"{self.name}: {dropped.count:,} {reason}, the first is {dropped.place}: {dropped.excerpt}"
            for reason, dropped in self.dropped.items()
        ]

    def refuse_bad_rows(self) -> None:
        """Raise UsageError with the first row that was dropped for its content (data.bad_rows: fail)."""
        harmless = ("longer than", *EQUAL.values())
        bad = [(reason, dropped) for reason, dropped in self.dropped.items() if not reason.startswith(harmless)]
        if bad:
            (reason, first), count = bad[0], sum(dropped.count for _, dropped in bad)
            message = f"{count:,} bad rows, {first.count:,} of them {reason}; the first is {first.place}"
            fix = "repair them, or drop them with data.bad_rows: drop"
            raise UsageError(f"{message}: {first.excerpt}", place=self.name, fix=fix)


@dataclass(frozen=True)
class Prepared:
    """The data that a run trains on and is evaluated on."""

    train: Data
    held_out: Data | None
    key: str
    directory: Path
    sources: Sequence[str]
    """One line per source of a mixture: how much of it is used."""
    split: str
    """Hash of the choice of each row."""


def prepare(
    sources: Sequence[Source],
    selection: Selection,
    parts: Mapping[str, Any],
    *,
    bad_rows: str = "drop",
    cache_dir: str | Path | None = None,
) -> Prepared:
    """Return the examples of `sources`, from the cache if the same ones were prepared before.

    `parts` is whatever else shapes the examples, as JSON: `tokenizer_identity` above all. Raises UsageError if a source
    cannot be read, the disk is full, no row is left to train on, or bad_rows="fail" and rows were dropped for their content.
    """
    home = Path(cache_dir or Path(platformdirs.user_cache_dir("cogumi")) / "prepared")
    described = [
        [source.name, source.identity, source.options, dict(source.columns), source.weight] for source in sources
    ]
    content = {"sources": described, "selection": asdict(selection), "parts": parts, "code": code_and_libraries()}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    directory = home / key
    is_cached = directory.exists()
    if not is_cached:
        with exclusive_build(home, key) as unfinished:
            if unfinished is not None:
                _write(sources, selection, unfinished)
                os.rename(unfinished, directory)
                sync_path(home)
    size = format_bytes(sum(path.stat().st_size for path in directory.iterdir()))
    log.info("prepared data %s %s (%s)", "from cache" if is_cached else "is kept in", directory, size)

    record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    loaded = {part: _load_part(directory, record[part]) for part in ("train", "held_out") if record[part]}
    if bad_rows == "fail":
        for data in loaded.values():
            data.refuse_bad_rows()
    return Prepared(loaded["train"], loaded.get("held_out"), key, directory, record["sources"], record["split"])


def code_and_libraries() -> dict[str, str]:
    """Return a hash of this package's source and the versions of the libraries that it calls."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return {"cogumi.data": digest.hexdigest()} | {name: version(name) for name in LIBRARIES}


def tokenizer_identity(tokenizer: Any) -> str:
    """Hash everything that decides the ids of a text or a conversation."""
    if tokenizer.is_fast:
        model: Any = json.loads(tokenizer.backend_tokenizer.to_str())
        model |= {"padding": None, "truncation": None}  # left over from the last call
    else:
        model = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    parts = {
        "model": model,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "special ids": sorted(tokenizer.all_special_ids),
        "chat_template": tokenizer.chat_template,
        "adds": [getattr(tokenizer, f"add_{end}_token", None) for end in ("bos", "eos")],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _load_part(directory: Path, record: dict[str, Any]) -> Data:
    from datasets import Dataset, concatenate_datasets

    dropped = {reason: Dropped(*counted) for reason, counted in record.pop("dropped").items()}
    lengths = Lengths(dict(record.pop("lengths")))
    # One file per source. Columns that a source lacks are filled with None.
    files = [Dataset.from_file(str(directory / file)) for file in record.pop("files")]
    dataset = files[0] if len(files) == 1 else concatenate_datasets(files)
    return Data(decode_rows(dataset, record.pop("encoded")), dropped=dropped, lengths=lengths, **record)


@contextmanager
def exclusive_build(home: Path, key: str) -> Iterator[Path | None]:
    """Yield an empty directory to write into while no other process does; None if another one finished meanwhile."""
    for leftover in home.glob("*.unfinished"):  # a killed process's lock is free; another process may remove it first
        with suppress(FileNotFoundError), lock_directory(leftover) as is_locked:
            if is_locked:
                shutil.rmtree(leftover)
    unfinished, is_waiting = home / f"{key}.unfinished", False
    while not (home / key).exists():
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"prepared data cannot be written there ({error.strerror})"
            raise UsageError(message, place=home, fix="set XDG_CACHE_HOME to another directory") from error
        inode = unfinished.stat().st_ino
        with lock_directory(unfinished) as is_locked:
            # The process that held the lock before may have renamed or removed the directory.
            if is_locked is not False and unfinished.exists() and unfinished.stat().st_ino == inode:
                for leftover in unfinished.iterdir():
                    leftover.unlink()
                try:
                    yield unfinished
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
                return
        if not is_waiting:
            log.info("another process prepares the same data: waiting for it")
        is_waiting = True
        time.sleep(0.5)
    yield None


# ---------------------------------------------------------------------------------------------------------- two passes


class ExamplesWriter:
    """Write the examples of one part (train or held_out) to one arrow stream per source, and count dropped rows."""

    def __init__(self, directory: Path, part: str, sources: Sequence[Source]) -> None:
        self.directory, self.part, self.sources = directory, part, sources
        is_mixture = sum(source.weight > 0 for source in sources) > 1
        self.names = [source.name if is_mixture else "" for source in sources]
        self.files: dict[str, Any] = {}
        self.rows = 0
        self.counts: Counter[str] = Counter()
        """Fields of `Data` that are sums over the chunks."""
        self.dropped: dict[str, Dropped] = {}
        self.encoded: dict[str, bool] = {}  # by column
        self.lengths = Lengths()

    def count(self, reason: str, dropped: Dropped) -> None:
        before = self.dropped.get(reason)
        self.dropped[reason] = replace(before, count=before.count + dropped.count) if before else dropped

    def add(self, number: int, rows: pl.DataFrame, at: npt.NDArray[np.int64]) -> None:
        """Write the examples of rows of source `number`, where their numbers are `at`, and count the dropped ones."""
        name = self.names[number]
        try:
            chunk = self.sources[number].tokenize(rows, self.rows)
        except KindsDiffer as error:  # `tokenize` numbers the chosen rows; a report names the place in the source
            text, messages = (int(at[row - self.rows]) for row in error.rows)
            raise KindsDiffer(text, messages, name) from None
        table = chunk.table.replace_schema_metadata(None)
        lost = sum(dropped.count for dropped in chunk.dropped.values())
        if len(table) + lost - chunk.extra_examples != len(at):
            raise RuntimeError(f"{len(at)} rows became {len(table)} examples and {lost} dropped")
        for reason, dropped in chunk.dropped.items():
            self.count(reason, replace(dropped, row=int(at[dropped.row - self.rows]), source=name))
        self.rows += len(at)
        self.counts.update({name: getattr(chunk, name) for name in CHUNK_COUNTS})
        if not len(table):
            return
        for name in table.column_names:
            is_encoded = name in chunk.encoded
            if self.encoded.setdefault(name, is_encoded) != is_encoded:
                kinds = ("text", "messages") if name == "prompt" else ("text", "another field")
                before, after = kinds if is_encoded else kinds[::-1]
                place = Dropped(0, int(at[0]), "", self.names[number]).place
                message = f"`{name}` is {before} before {place} and {after} from there on"
                raise UsageError(message, key="data.source", fix="write them alike")
        self.lengths.update(token_lengths(table))
        if "completion_mask" in table.column_names:
            self.counts["learned"] += pc.sum(pc.list_flatten(table["completion_mask"])).as_py() or 0
        file = f"{self.part}.arrow" if number == 0 else f"{self.part}-{number}.arrow"
        if file not in self.files:
            self.files[file] = pa.ipc.new_stream(str(self.directory / file), table.schema)
        self.files[file].write_table(table.combine_chunks())

    def close(self, name: str) -> dict[str, Any]:
        """Return the record of this part. Raises UsageError if no row was usable."""
        if not self.files:
            longer = any(reason.startswith("longer than") for reason in self.dropped)
            allow = ", or allow longer examples (of gspo: lower train.max_completion_length)" if longer else ""
            first = "".join(f" ({dropped.place}: {dropped.excerpt})" for dropped in [*self.dropped.values()][:1])
            raise UsageError(describe_counts(name, 0, self.dropped) + first, fix=f"give other rows{allow}")
        for file, stream in self.files.items():
            stream.close()
            sync_path(self.directory / file)
        return {
            "name": name,
            "files": list(self.files),
            "dropped": {reason: astuple(drop) for reason, drop in self.dropped.items()},
            "encoded": [name for name, is_encoded in self.encoded.items() if is_encoded],
            "lengths": sorted(self.lengths.items()),
            **self.counts,
        }


def describe_counts(name: str, used: int, dropped: Mapping[str, Dropped]) -> str:
    total = used + sum(drop.count for drop in dropped.values())
    reasons = ", ".join(f"{drop.count:,} {reason}" for reason, drop in dropped.items())
    return f"{name}: {total:,} rows, {used:,} used" + (f"; dropped {reasons}" if reasons else "")


def _write(sources: Sequence[Source], selection: Selection, out: Path) -> None:
    try:
        counts, (duplicates, sharing), states = _select(sources, selection, out)
        train, held_out = _tokenize(sources, states, out)
        used = sum(count[TRAIN] for count in counts)
        trained = [source for source in sources if source.weight]
        eval_sources = [source for source in sources if not source.weight]
        of_trained = counts[: len(trained)]  # the file of data.eval_source is the last
        name = trained[0].name if len(trained) == 1 else f"{len(trained)} sources"
        held_out_name = f"{eval_sources[0].name} (data.eval_source)" if eval_sources else "held out (data.eval_rows)"
        is_part = any(count[UNUSED] for count in of_trained)
        note = f"{used:,} of {sum(map(sum, of_trained)):,} rows chosen" if is_part else ""
        has_held_out = eval_sources or selection.eval_rows or held_out.files
        if not has_held_out:  # a default that makes no example refuses no run
            for reason, dropped in held_out.dropped.items():
                train.count(reason, dropped)
        record = {
            "train": train.close(name) | {"duplicates": duplicates, "sharing": sharing, "note": note},
            "held_out": held_out.close(held_out_name) | {"duplicates": 0, "sharing": 0} if has_held_out else None,
            "split": hashlib.blake2b(states.data, digest_size=12).hexdigest(),
            "sources": [
                f"{source.name}: {count[TRAIN]:,} of {sum(count):,} rows ({count[TRAIN] / sum(count):.0%})"
                + (f", {count[HELD_OUT]:,} held out" if count[HELD_OUT] else "")
                for source, count in zip(sources, counts, strict=True)
                if len(trained) > 1 and source.weight
            ],
        }
        for temporary in ("examples", "questions", "states"):
            (out / temporary).unlink()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        fix = "free some, or set XDG_CACHE_HOME to another disk"
        raise UsageError("the disk is full", place=out.parent, fix=fix) from error
    write_synced(out / RECORD, json.dumps(record).encode())
    sync_path(out)


def _select(
    sources: Sequence[Source], selection: Selection, out: Path
) -> tuple[list[list[int]], tuple[int, int], States]:
    """Choose rows by their hashes: (counts of states by source, as `choose_rows`, state of each row of all sources)."""
    heights, is_same = [0] * len(sources), True
    with (out / "examples").open("wb") as examples, (out / "questions").open("wb") as questions:
        for number, _, _, rows in _numbered(sources, "choosing rows", None, records=False):
            batch = example_hashes(rows, sources[number].read, selection.seed)
            for file, part in zip((examples, questions), batch, strict=True):
                file.write(part.tobytes())
            is_same &= batch.questions is batch.examples
            heights[number] += rows.height
    for source, height in zip(sources, heights, strict=True):
        if not height:
            raise UsageError("it has no rows", place=source.name, fix="check what wrote it, or give another file")
    bounds = [0, *np.cumsum(heights).tolist()]
    first = np.memmap(out / "examples", np.uint64, "r")
    hashes = RowHashes(first, first if is_same else np.memmap(out / "questions", np.uint64, "r+"))
    states = np.memmap(out / "states", np.uint8, "w+", shape=(bounds[-1],))
    copies = choose_rows(hashes, states, bounds, [source.weight for source in sources], selection)
    counts = [count_states(states[start:stop]) for start, stop in pairwise(bounds)]
    if any(count[TRAIN] for count in counts):
        return counts, copies, states
    for source, count in zip(sources, counts, strict=True):
        other = "data.deduplicate=false keeps copies" if count[COPY] else "give other rows as data.eval_source"
        if source.weight and not count[UNUSED]:
            raise UsageError(
                f"of its {sum(count):,} rows {count[HELD_OUT]:,} are held out (data.eval_rows), "
                f"{count[LIKE_HELD_OUT] + count[SAME_QUESTION]:,} are equal to held-out rows and {count[COPY]:,} to earlier "
                "ones: none is left to train on",
                place=source.name,
                fix="lower data.eval_rows" if count[HELD_OUT] else other,
            )
    return counts, copies, states


def _tokenize(sources: Sequence[Source], states: States, out: Path) -> tuple[ExamplesWriter, ExamplesWriter]:
    """Make examples of the chosen rows: (those trained on, those held out)."""
    train, held_out = (ExamplesWriter(out, part, sources) for part in ("train", "held_out"))
    for number, place, first_row, rows in _numbered(sources, "preparing", len(states), records=True):
        batch_states = np.asarray(states[place])
        for state, reason in EQUAL.items():
            equal = np.flatnonzero(batch_states == state)
            if len(equal):
                first = int(equal[0])
                shown = rows.drop(RECORD_COLUMN, strict=False).row(first)
                part = train if sources[number].weight else held_out
                dropped = Dropped(len(equal), first_row + first, excerpt_of(shown), part.names[number])
                part.count(reason, dropped)
        for state, part in ((TRAIN, train), (HELD_OUT, held_out)):
            chosen = np.flatnonzero(batch_states == state)
            if len(chosen):
                part.add(number, rows[chosen], first_row + chosen)
    return train, held_out


def _numbered(
    sources: Sequence[Source], doing: str, total: int | None, records: bool
) -> Iterator[tuple[int, slice, int, pl.DataFrame]]:
    """Iterate over (number of the source, place among all rows, first row of the source's from 1, rows by field)."""
    row = 0
    with tqdm(desc=doing, unit=" rows", total=total, delay=5, mininterval=1) as bar:
        for number, source in enumerate(sources):
            start = row
            for frame in source.batches(records=records):
                yield number, slice(row, row + frame.height), row - start + 1, frame
                row += frame.height
                bar.update(frame.height)
                beat()
