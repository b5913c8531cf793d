"""SIGTERM, SIGHUP and SIGINT during a training: finish the step, save, then do what the signal asks for.

A provider that takes a machine back sends SIGTERM and waits for some seconds; a terminal that is closed sends SIGHUP, more
than once where a shell passes it on; Ctrl-C in a notebook is SIGINT.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cogumi.core.errors import FINISHED_AND_SAVED

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def ending_in_good_order() -> Iterator[None]:
    """While in the block, SIGTERM and SIGHUP raise SystemExit where they would kill: what is begun is put in order."""
    here = threading.current_thread() is threading.main_thread()
    deadly = [each for each in SIGNALS if here and signal.getsignal(each) is signal.SIG_DFL]
    for each in deadly:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in deadly:
            signal.signal(each, signal.SIG_DFL)


def end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the second of a closed terminal is not to disturb what follows
    raise SystemExit(128 + number)


class Preemption:
    """Whether a signal has come: the training stops after the step in which it does."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While in the block, signals end it in good order; afterwards what they ask for is done.

        Handlers belong to the main thread: in another one nothing is changed. Raises KeyboardInterrupt after
        SIGINT, SystemExit(143) after SIGTERM and SystemExit(129) after SIGHUP, once the handlers that were there before
        have been called. A SIGHUP that is ignored (nohup) stays so.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.received = None
        heard = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
        self.before = {each: signal.signal(each, self.handle) for each in heard}
        try:
            yield
        finally:
            for each, handler in self.before.items():
                signal.signal(each, signal.SIG_DFL if handler is None else handler)
        if self.received is not None:
            self.do_as_asked(self.received)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            again = "" if number == signal.SIGHUP else "; the same signal again ends it at once, without saving"
            log.warning(
                "%s: this step will be finished and saved, then the training ends%s", signal.Signals(number).name, again
            )
        elif number == signal.SIGHUP:
            return
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            os._exit(128 + number)

    def do_as_asked(self, number: int) -> None:
        handler = self.before[number]
        if callable(handler) and handler is not signal.default_int_handler:  # a scheduler's may requeue the job
            handler(number, None)
        raise KeyboardInterrupt(FINISHED_AND_SAVED) if number == signal.SIGINT else SystemExit(128 + number)
