"""From files to examples on the disk that a trainer maps into memory, kept under a key of all that shapes them.

Rows are read twice: their hashes choose what is held out and trained on (`cogumi.data.selection`), then the chosen rows
become examples in arrow files. Neither pass holds more than a batch. The directory is written aside and renamed: it is
there whole, or not at all. `datasets` puts what TRL makes of the files (packed rows) beside them.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import platformdirs
import polars as pl
from tqdm.auto import tqdm

from cogumi.core.durability import NO_SPACE, lock_directory, sync_path, write_synced
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes
from cogumi.data.records import RECORD_COLUMN, decode_rows
from cogumi.data.rows import Dropped, ExamplesWriter, Lengths, Tokenize, count_dropped, describe_counts
from cogumi.data.selection import (
    COPY,
    HELD_OUT,
    LIKE_HELD_OUT,
    TRAIN,
    UNUSED,
    Selection,
    States,
    choose_rows,
    count_states,
    row_hashes,
)
from cogumi.data.sources import ORIGINALS, batches

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger("cogumi")

LIBRARIES = ("tokenizers", "transformers", "trl", "polars", "pyarrow", "datasets")
RECORD = "prepared.json"
EQUAL = {COPY: "equal to an earlier row", LIKE_HELD_OUT: "equal to a held-out row"}


@dataclass(frozen=True)
class Source:
    """Files of the same columns, and what makes examples of their rows."""

    name: str
    files: Sequence[Path]
    columns: Mapping[str, str]
    """Field that `tokenize` knows -> column of the files."""
    tokenize: Tokenize
    identity: Any
    """What the files hold, as JSON: a hub commit with their names, or `source_files.files_identity`."""
    options: Any
    """What decides what `tokenize` makes of a row, as JSON: the format and its settings."""
    weight: float = 1.0
    keeps_records: bool = False
    """Whether `tokenize` is given each row as it was read, too, in the column `record`."""

    def batches(self, files: Sequence[Path] | None = None, records: bool = False) -> Iterator[pl.DataFrame]:
        """The rows of its files, or of these, by field. records: with the rows as they were read, if they are to be kept."""
        kept = {RECORD_COLUMN: ORIGINALS} if records and self.keeps_records else {}
        for rows in batches(files or self.files, list(dict.fromkeys(self.columns.values())), bool(kept)):
            yield rows.select(**self.columns, **kept)


@dataclass(frozen=True)
class Data:
    """Examples, and what became of every row that was to make one."""

    dataset: "Dataset"
    """Mapped from its arrow file; the columns of `Chunk.table`, of which those that are encoded are decoded."""
    name: str
    dropped: Mapping[str, Dropped]
    truncated: int
    duplicates: int
    """Rows equal to an earlier one; among `dropped` where they were to be."""
    lengths: Lengths
    learned: int
    """Tokens with a completion mask of 1; 0 where there is no mask."""
    thoughtless: int = 0
    """Examples of conversations whose last answer has no thought, or an empty one."""
    note: str = ""

    @property
    def total(self) -> int:
        """Rows: examples, and what was dropped."""
        return len(self.dataset) + sum(each.count for each in self.dropped.values())

    def report(self) -> str:
        """One line: "sample.parquet: 9,421 rows, 9,100 used; dropped 300 longer than 512 tokens, 21 null"."""
        line = describe_counts(self.name, len(self.dataset), self.dropped)
        if self.truncated:
            line += f"; truncated {self.truncated:,}"
        if self.duplicates and EQUAL[COPY] not in self.dropped:
            line += f"; {self.duplicates:,} equal to an earlier row are kept (data.deduplicate: true drops them)"
        return f"{line} ({self.note})" if self.note else line

    def examples_dropped(self) -> list[str]:
        """A line for each reason, with the first row that was dropped for it."""
        return [
            f"{self.name}: {dropped.count:,} {reason}, the first is row {dropped.row:,}: {dropped.excerpt}"
            for reason, dropped in self.dropped.items()
        ]

    def refuse_bad_rows(self) -> None:
        """Raise UsageError with the first of the rows that were dropped for what they hold (data.bad_rows: fail)."""
        harmless = ("longer than", *EQUAL.values())
        bad = [(reason, each) for reason, each in self.dropped.items() if not reason.startswith(harmless)]
        if bad:
            (reason, first), count = bad[0], sum(each.count for _, each in bad)
            where = f"the first is row {first.row:,}: {first.excerpt}"
            what = f"{count:,} bad rows, {first.count:,} of them {reason}; {where}"
            raise UsageError(what, place=self.name, fix="repair them, or drop them with data.bad_rows: drop")


@dataclass(frozen=True)
class Prepared:
    """What a run trains on and is evaluated on."""

    train: Data
    held_out: Data | None
    key: str
    directory: Path
    sources: Sequence[str]
    """A line for each source, where there are several: how much of it is used."""


def prepare(
    sources: Sequence[Source],
    selection: Selection,
    parts: Mapping[str, Any],
    *,
    bad_rows: str = "drop",
    cache_dir: str | Path | None = None,
) -> Prepared:
    """The examples of `sources`, from the cache where these very ones were prepared before.

    parts: what shapes them beyond sources, selection, code and libraries, as JSON: `tokenizer_identity` above all.
    bad_rows: "fail" refuses rows that were dropped for what they hold. cache_dir: in the user's cache by default.

    Raises UsageError for a source that cannot be read, a full disk, no row to train on, and bad rows to be refused.
    """
    home = Path(cache_dir or Path(platformdirs.user_cache_dir("cogumi")) / "prepared")
    described = [[each.name, each.identity, each.options, dict(each.columns), each.weight] for each in sources]
    whole = {"sources": described, "selection": asdict(selection), "parts": parts, "code": code_and_libraries()}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    directory = home / key
    known = directory.exists()
    if not known:
        with alone(home, key) as unfinished:
            if unfinished is not None:
                _write(sources, selection, unfinished)
                os.rename(unfinished, directory)
                sync_path(home)
    size = format_bytes(sum(path.stat().st_size for path in directory.iterdir()))
    log.info("prepared data %s %s (%s)", "from cache" if known else "is kept in", directory, size)

    record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    parts_of = {part: _load_part(directory, part, record[part]) for part in ("train", "held_out") if record[part]}
    if bad_rows == "fail":
        for data in parts_of.values():
            data.refuse_bad_rows()
    return Prepared(parts_of["train"], parts_of.get("held_out"), key, directory, record["sources"])


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


def _load_part(directory: Path, part: str, record: dict[str, Any]) -> Data:
    from datasets import Dataset

    dropped = {reason: Dropped(*each) for reason, each in record.pop("dropped").items()}
    lengths = Lengths(dict(record.pop("lengths")))
    dataset = decode_rows(Dataset.from_file(str(directory / f"{part}.arrow")), record.pop("encoded"))
    return Data(dataset, dropped=dropped, lengths=lengths, **record)


# ----------------------------------------------------------------------------------------------------------- directory


@contextmanager
def alone(home: Path, key: str) -> Iterator[Path | None]:
    """An empty directory to write into while no other process does, or None where another has finished meanwhile."""
    for left in home.glob("*.unfinished"):  # of killed processes, whose locks are free; another may remove it first
        with suppress(FileNotFoundError), lock_directory(left) as held:
            if held:
                shutil.rmtree(left)
    unfinished, waits = home / f"{key}.unfinished", False
    while not (home / key).exists():
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fix = "set XDG_CACHE_HOME to another directory"
            raise UsageError(
                f"prepared data cannot be written there ({error.strerror})", place=home, fix=fix
            ) from error
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
        if not waits:
            log.info("another process prepares the same data: waiting for it")
        waits = True
        time.sleep(0.5)
    yield None


# ---------------------------------------------------------------------------------------------------------- two passes


def _write(sources: Sequence[Source], selection: Selection, out: Path) -> None:
    try:
        counts, duplicates, states = _select(sources, selection, out)
        train, held_out = _tokenize(sources, states, out)
        used = sum(each[TRAIN] for each in counts)
        left = used + sum(each[UNUSED] + each[COPY] for each in counts)
        name = sources[0].name if len(sources) == 1 else f"{len(sources)} sources"
        note = f"{used:,} of {len(states):,} rows chosen" if used < left else ""
        wanted = selection.eval_rows or held_out.file is not None  # a default that makes no example refuses no run
        record = {
            "train": train.close(name) | {"duplicates": duplicates, "note": note},
            "held_out": held_out.close("held out (data.eval_rows)") | {"duplicates": 0} if wanted else None,
            "sources": [
                f"{source.name}: {count[TRAIN]:,} of {sum(count):,} rows ({count[TRAIN] / sum(count):.0%})"
                + (f", {count[HELD_OUT]:,} held out" if count[HELD_OUT] else "")
                for source, count in zip(sources, counts, strict=True)
                if len(sources) > 1
            ],
        }
        for passing in ("hashes", "states"):
            (out / passing).unlink()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        fix = "free some, or set XDG_CACHE_HOME to another disk"
        raise UsageError("the disk is full", place=out.parent, fix=fix) from error
    write_synced(out / RECORD, json.dumps(record).encode())
    sync_path(out)


def _select(sources: Sequence[Source], selection: Selection, out: Path) -> tuple[list[list[int]], int, States]:
    """(counts of states by source, duplicates, what becomes of each row of all sources): the first pass."""
    rows_of = [0] * len(sources)
    with (out / "hashes").open("wb") as file:
        for number, _, rows in _numbered(sources, "choosing rows", None, records=False):
            file.write(row_hashes(rows, selection.seed).tobytes())
            rows_of[number] += rows.height
    for source, height in zip(sources, rows_of, strict=True):
        if not height:
            raise UsageError("it has no rows", place=source.name, fix="check what wrote it, or give another file")
    bounds = [0, *np.cumsum(rows_of).tolist()]
    hashes = np.memmap(out / "hashes", np.uint64, "r")
    states = np.memmap(out / "states", np.uint8, "w+", shape=(bounds[-1],))
    duplicates = choose_rows(hashes, states, bounds, [source.weight for source in sources], selection)
    counts = [count_states(states[start:stop]) for start, stop in pairwise(bounds)]
    if any(count[TRAIN] for count in counts):
        return counts, duplicates, states
    for source, count in zip(sources, counts, strict=True):
        if not count[UNUSED]:
            raise UsageError(
                f"of its {sum(count):,} rows {count[HELD_OUT]:,} are held out (data.eval_rows), "
                f"{count[LIKE_HELD_OUT]:,} are equal to those and {count[COPY]:,} to earlier ones: none is left to train on",
                place=source.name,
                fix="lower data.eval_rows" if count[HELD_OUT] else "data.deduplicate=false keeps copies",
            )
    return counts, duplicates, states


def _tokenize(sources: Sequence[Source], states: States, out: Path) -> tuple[ExamplesWriter, ExamplesWriter]:
    """(what is trained on, what is held out): the second pass makes examples of the chosen rows."""
    train, held_out = ExamplesWriter(out / "train.arrow"), ExamplesWriter(out / "held_out.arrow")
    for number, first_row, rows in _numbered(sources, "preparing", len(states), records=True):
        here = np.asarray(states[first_row : first_row + rows.height])
        for state, reason in EQUAL.items():
            equal = np.flatnonzero(here == state)
            if len(equal):
                first = int(equal[0])
                shown = rows.drop(RECORD_COLUMN, strict=False).row(first)
                count_dropped(train.dropped, reason, first_row + first, shown, len(equal))
        for state, part in ((TRAIN, train), (HELD_OUT, held_out)):
            chosen = np.flatnonzero(here == state)
            if len(chosen):
                part.add(sources[number].tokenize, rows[chosen], first_row + chosen)
    return train, held_out


def _numbered(
    sources: Sequence[Source], doing: str, total: int | None, records: bool
) -> Iterator[tuple[int, int, pl.DataFrame]]:
    """(number of the source, place of the first row among the rows of all sources, rows by field), batch by batch."""
    row = 0
    with tqdm(desc=doing, unit=" rows", total=total, delay=5, mininterval=1) as bar:
        for number, source in enumerate(sources):
            for frame in source.batches(records=records):
                yield number, row, frame
                row += frame.height
                bar.update(frame.height)
