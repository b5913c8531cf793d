"""Progress bars with bytes, speed and time left, for whoever watches a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Advance = Callable[[int], None]


@contextmanager
def progress_bars(wanted: bool, **totals: int) -> Iterator[list[Advance]]:
    """One bar for each name, with its total of bytes; yields functions, in that order, that take the bytes just done.

    They may be called from any thread. Nothing is shown when stderr is not a terminal, nor for a total of 0.
    """
    if not (wanted and sys.stderr.isatty()):
        yield [lambda count: None for _ in totals]
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks = [shown.add_task(name, total=total, visible=total > 0) for name, total in totals.items()]
        yield [lambda count, task=task: shown.update(task, advance=count) for task in tasks]  # type: ignore[misc]


def spoken(count: int) -> str:
    """Bytes in the unit a person would use: 13.49 GB, 240 kB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{-(-count // 1000)} kB"
