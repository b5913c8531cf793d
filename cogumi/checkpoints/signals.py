"""SIGTERM and SIGINT during a training: finish the step, save, then do what the signal asks for.

A provider that takes a machine back sends SIGTERM and waits for some seconds; Ctrl-C in a notebook is SIGINT.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cogumi.errors import FINISHED_AND_SAVED

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Whether a signal has come: the training stops after the step in which it does."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While in the block, signals end it in good order; afterwards what they ask for is done.

        Handlers belong to the main thread: in another one nothing is changed. Raises KeyboardInterrupt after
        SIGINT and SystemExit(143) after SIGTERM, once the handlers that were there before have been called.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.received = None
        self.before = {each: signal.signal(each, self.handle) for each in SIGNALS}
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
            log.warning(
                "%s: what is under way is finished, and the training saved and ended; once more to end at once",
                signal.Signals(number).name,
            )
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            os._exit(128 + number)

    def do_as_asked(self, number: int) -> None:
        handler = self.before[number]
        if callable(handler) and handler is not signal.default_int_handler:  # a scheduler's may requeue the job
            handler(number, None)
        raise KeyboardInterrupt(FINISHED_AND_SAVED) if number == signal.SIGINT else SystemExit(128 + number)
