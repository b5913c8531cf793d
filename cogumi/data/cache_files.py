"""The cache of prepared data on the disk: its keys, its directory, and the lengths of its examples."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs
import pyarrow as pa
import pyarrow.compute as pc

from cogumi.core.durability import locked, why_unwritable
from cogumi.core.errors import UsageError

EDGE_BYTES = 2**20
"""Of a local file's start and end, hashed: who changes a file and sets its time back is found out most of the time."""
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


def files_identity(files: Sequence[Path]) -> list[list[Any]]:
    """Of each file: where it really is, its size, when it was written, and a hash of its first and last MiB."""
    return [[str(file.resolve()), *_stat(file), _edges(file)] for file in files]


def _stat(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _edges(file: Path) -> str:
    with file.open("rb") as data:
        digest = hashlib.sha256(data.read(EDGE_BYTES))
        data.seek(max(EDGE_BYTES, file.stat().st_size - EDGE_BYTES))
        digest.update(data.read())
    return digest.hexdigest()


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


# ------------------------------------------------------------------------------------------------------ cache directory


log = logging.getLogger("cogumi")

RECORD = "prepared.json"
WAIT_SECONDS = 0.5


def prepared_home() -> Path:
    """Where prepared data is kept: one directory a key, to be deleted whole by whoever wants the space."""
    return Path(platformdirs.user_cache_dir("cogumi")) / "prepared"


def is_whole(directory: Path) -> bool:
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
    """An empty directory to write into while nobody else does, or None where somebody else has finished meanwhile."""
    begin(home)
    sweep(home)
    unfinished, told = home / f"{key}.unfinished", False
    while True:
        if (home / key).exists():
            yield None
            return
        unfinished.mkdir(exist_ok=True)
        number = unfinished.stat().st_ino
        with locked(unfinished) as held:
            # Whoever had the lock before may have renamed the directory, or removed it.
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


def begin(home: Path) -> None:
    """Make the directory. Raises UsageError where it takes no files."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        error = why_unwritable(home)
    except OSError as refused:
        error = refused
    if error:
        raise UsageError(
            f"prepared data cannot be written there ({error.strerror})",
            place=home,
            fix="set XDG_CACHE_HOME to another directory",
        )


def sweep(home: Path) -> None:
    """Remove what processes left that were killed: nobody holds its lock."""
    for left in home.glob("*.unfinished"):
        try:
            with locked(left) as held:
                if held:
                    shutil.rmtree(left)
        except FileNotFoundError:  # renamed or swept by another process
            continue


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


# -------------------------------------------------------------------------------------------------------------- lengths


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


def lengths_of(table: pa.Table) -> npt.NDArray[np.int64]:
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
