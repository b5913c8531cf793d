"""A progress bar with bytes, speed and time left, for whoever watches a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from cogumi.working import in_a_kernel

Advance = Callable[[int], None]


@contextmanager
def progress_bar(wanted: bool, name: str, total: int) -> Iterator[Advance]:
    """A bar over `total` bytes; yields a function that takes the bytes just done, from any thread.

    Nothing is shown where stderr is no terminal and this is no notebook.
    """
    if wanted and in_a_kernel():
        from tqdm.auto import tqdm

        with tqdm(desc=name, total=total, unit="B", unit_scale=True) as bar:
            yield bar.update
        return
    if not (wanted and sys.stderr.isatty()):
        yield lambda count: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(name, total=total)
        yield lambda count: shown.update(task, advance=count)


def spoken(count: int) -> str:
    """Bytes in the unit a person would use: 13.49 GB, 240 kB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{-(-count // 1000)} kB"
