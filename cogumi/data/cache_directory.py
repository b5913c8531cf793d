"""The directories of prepared data: one a key, whole or not there, whoever is killed and however many prepare at once."""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from cogumi.durable import locked, why_unwritable
from cogumi.errors import UsageError

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
