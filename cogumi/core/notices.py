"""Progress lines for notebooks and terminals while a function works."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

LOAD_REPORT = "LOAD REPORT"  # a table of transformers; `load_model` refuses or names in one line what is wrong
USELESS = ("Ignoring clean_up_tokenization_spaces", "The tokenizer has new PAD/BOS/EOS tokens")
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


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide bars of datasets, outside a terminal those of loading too, and warnings that no user can act on."""
    import datasets
    from transformers.utils import logging as transformers_logging

    with ExitStack() as undo:
        # Root's handlers as well: where the variable CI is set, transformers propagates its records.
        for handler in (*logging.getLogger("transformers").handlers, *logging.root.handlers):
            handler.addFilter(is_useful)
            undo.callback(handler.removeFilter, is_useful)
        if datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            undo.callback(datasets.enable_progress_bars)
        if transformers_logging.is_progress_bar_enabled() and not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()
            undo.callback(transformers_logging.enable_progress_bar)
        yield


def is_useful(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not message.startswith(USELESS) and LOAD_REPORT not in message


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
