"""A run's process, one or one of several: `python -m cogumi.runs.rank OUTCOME`, started by `cogumi.runs.rank_launcher`."""

import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.liveness import end_process_after
from cogumi.core.signatures import EXIT_RETRY, exit_status
from cogumi.runs.entry import train_here

log = logging.getLogger("cogumi")


def main() -> None:
    """Train the run that comes on standard input."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger().handlers[0].setLevel(logging.INFO)  # run.log alone has the details
    logging.getLogger("cogumi").setLevel(logging.INFO)
    run = pickle.load(sys.stdin.buffer)
    threading.Thread(target=end_with_parent, args=(os.dup(0),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    leads = os.environ.get("RANK", "0") == "0"
    result, error, status = None, None, 0
    try:
        result = train_here(run)
    except BaseException as raised:  # a signal's as well: the process that started this one raises what the first does
        if not leads and not isinstance(raised, UsageError):
            raise
        error, status = raised, exit_status(raised)
        if status in (1, EXIT_RETRY):  # the process that started this one raises it, and has no frames of this one
            error.add_note(traceback.format_exc())
    if leads:
        Path(sys.argv[1]).write_bytes(dump_outcome(result, error))
    sys.exit(status)


def end_with_parent(pipe: int) -> None:
    """Wait until the process that started this one is gone, killed perhaps, and then save a checkpoint and end."""
    while os.read(pipe, 1):
        pass
    log.error("the command that started this process is gone: it saves a checkpoint and ends")
    os.kill(os.getpid(), signal.SIGTERM)


def dump_outcome(result: Any, error: BaseException | None) -> bytes:
    """Pickle the result of a run and its error; what cannot be pickled becomes a RuntimeError with its text."""
    try:
        return pickle.dumps((None if error is not None else pickle.dumps(result), error))
    except Exception as unpicklable:  # noqa: BLE001  whatever the error of a library, or a result, holds
        text = "".join(traceback.format_exception(error)) if error is not None else f"no result: {unpicklable}"
        return pickle.dumps((None, RuntimeError(text)))


if __name__ == "__main__":
    with end_process_after():
        main()
