"""Signs of life of a run, and a limit for the end of its process."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_SECONDS = 15.0  # for a process whose work is done
FLUSH_SECONDS = 0.5
signs = 0


def beat() -> None:
    """Note that a run gets on: bytes arrived, rows were read, a stage began. `RunWatch` looks at it each second."""
    global signs
    signs += 1


@contextmanager
def end_process_after() -> Iterator[None]:
    """Let this process live for EXIT_SECONDS after the block, whatever thread or exit function it waits for then."""
    status = 1
    try:
        yield
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        threading.Thread(target=end_late_process, args=[status], name="cogumi-exit", daemon=True).start()


def end_late_process(status: int) -> None:
    time.sleep(EXIT_SECONDS)
    late = f"cogumi: this process should have ended {EXIT_SECONDS:.0f} s ago; it ends now, with exit status {status}\n"
    os.write(2, late.encode())
    faulthandler.dump_traceback(2)
    threading.Thread(target=sys.stdout.flush, daemon=True).start()  # what reads it may hang as well
    time.sleep(FLUSH_SECONDS)
    os._exit(status)
