"""Standard output and error break during a training: the terminal is closed, or Ctrl-C ends the `tee` they are piped to.

A training is worth more than what it shows, so it continues without a screen.
"""

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TextIO

log = logging.getLogger(__name__)

BROKEN = (errno.EPIPE, errno.EIO)  # a pipe that nothing reads, a terminal that is closed


@contextmanager
def outliving_the_screen() -> Iterator[None]:
    """While in the block, a write to a broken standard output or error raises nothing: the stream is switched off.

    The methods of the streams themselves are replaced, as logging handlers and progress bars hold on to a stream.
    """
    with ExitStack() as undo:
        for name in ("stdout", "stderr"):
            stream: TextIO | None = getattr(sys, name)
            if stream is not None:
                for method in ("flush", "write"):
                    undo.callback(restore, stream, method, vars(stream).get(method))
                    setattr(stream, method, forgiving(stream, f"sys.{name}", getattr(stream, method)))
                undo.callback(stream.flush)  # first: what is still in its buffer may be what cannot be written
        yield


def forgiving(stream: TextIO, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(do)
    def done(*text: str) -> Any:
        try:
            return do(*text)
        except OSError as error:
            if error.errno not in BROKEN:
                raise
            switch_off(stream)
            log.warning("%s is switched off (%s), and the training continues", name, error.strerror)
            return len(*text) if text else None

    return done


def switch_off(stream: TextIO) -> None:
    """Let all that has the stream's file descriptor, C++ libraries included, write to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def restore(stream: TextIO, method: str, before: Any) -> None:
    delattr(stream, method)
    if before is not None:
        setattr(stream, method, before)
