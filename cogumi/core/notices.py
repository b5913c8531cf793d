"""What a notebook or a terminal shows while a function works."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

showing = threading.Lock()  # a function called by one that shows its line shows none


@contextmanager
def show_seconds(what: str) -> Iterator[None]:
    """Show `what` in the cell's output at once, and how long the block or decorated function took at its end."""
    if not is_notebook() or not showing.acquire(blocking=False):
        yield
        return
    from IPython.display import display

    began, line = time.monotonic(), display({"text/plain": f"{what} ..."}, raw=True, display_id=True)
    try:
        yield
    finally:
        line.update({"text/plain": f"{what}: {time.monotonic() - began:.0f} s"}, raw=True)
        showing.release()


def show_stage(wanted: bool, what: str) -> None:
    """Print on standard error, if it is a terminal, what begins now; a notebook has its line of `show_seconds`."""
    if wanted and sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)


@contextmanager
def show_import() -> Iterator[None]:
    """Show the line for a block that imports torch and transformers, unless they are imported already."""
    with nullcontext() if "torch" in sys.modules else show_seconds("torch and transformers are being imported"):
        yield


def is_notebook() -> bool:
    """Return whether IPython runs in a kernel, as in a notebook, and not in a terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
