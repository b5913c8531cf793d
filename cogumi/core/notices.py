"""A line in a notebook while a function works: what it does, and for how long. A terminal has lines of its own."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

TICK_SECONDS = 1.0
at_work = threading.Lock()  # a function that calls another one has said enough


@contextmanager
def show_seconds(what: str) -> Iterator[None]:
    """Show `what` and the seconds so far in the cell's output, at once and until the block, or decorated function, ends."""
    if not is_notebook() or not at_work.acquire(blocking=False):
        yield
        return
    from IPython.display import display

    began, over = time.monotonic(), threading.Event()
    line = display({"text/plain": f"{what} ..."}, raw=True, display_id=True)

    def tick() -> None:
        while not over.wait(TICK_SECONDS):
            line.update({"text/plain": f"{what} ... {time.monotonic() - began:.0f} s"}, raw=True)

    ticking = threading.Thread(target=tick, name="cogumi working", daemon=True)
    ticking.start()
    try:
        yield
    finally:
        over.set()
        ticking.join()
        line.update({"text/plain": f"{what}: {time.monotonic() - began:.0f} s"}, raw=True)
        at_work.release()


@contextmanager
def show_import() -> Iterator[None]:
    """The line for a block that imports torch and transformers, unless they are there already."""
    with nullcontext() if "torch" in sys.modules else show_seconds("torch and transformers are being imported"):
        yield


def is_notebook() -> bool:
    """Whether this is a notebook, and not a terminal: then IPython has a kernel."""
    return current_kernel() is not None


def current_kernel() -> Any | None:
    """The kernel that this process is, if it is one."""
    python = sys.modules.get("IPython")
    return getattr(python.get_ipython(), "kernel", None) if python is not None else None
