"""Progress lines for notebooks and terminals while a function works."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

showing = threading.Lock()  # a function called by one that shows its line shows none


@contextmanager
def show_seconds(activity: str) -> Iterator[None]:
    """Show `activity` in the cell's output at once, and how long the block or decorated function took at its end."""
    if not is_notebook() or not showing.acquire(blocking=False):
        yield
        return
    from IPython.display import display

    began, line = time.monotonic(), display({"text/plain": f"{activity} ..."}, raw=True, display_id=True)
    try:
        yield
    finally:
        line.update({"text/plain": f"{activity}: {time.monotonic() - began:.0f} s"}, raw=True)
        showing.release()


def show_stage(is_shown: bool, activity: str) -> None:
    """Print an activity to standard error, if that is a terminal; a notebook has its line of `show_seconds`."""
    if is_shown and sys.stderr.isatty():
        print(f"{activity} ...", file=sys.stderr, flush=True)


def show_import() -> AbstractContextManager[None]:
    """Show the line for a block that imports torch and transformers, unless they are imported already."""
    return nullcontext() if "torch" in sys.modules else show_seconds("torch and transformers are being imported")


def is_notebook() -> bool:
    """Return whether IPython runs in a kernel, as in a notebook, and not in a terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
