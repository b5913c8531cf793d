"""How fast a mirror goes, and when it stops."""

import threading
import time

# How much may go at once after a pause: what the rate allows in this many seconds.
BURST_SECONDS = 1.0


class GivenUp(Exception):
    """Nobody waits for the mirror any more."""


class Pace:
    """A token bucket: lets through at most `rate` bytes a second, and nothing any more once it was stopped."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.stopped = threading.Event()
        self.clock = time.monotonic
        self.lock = threading.Lock()
        self.paid_until = self.clock()

    def let(self, size: int) -> None:
        """Return when `size` more bytes may go. Raises GivenUp once stopped."""
        if self.rate is not None:
            with self.lock:
                now = self.clock()
                self.paid_until = max(self.paid_until, now - BURST_SECONDS) + size / self.rate
                wait = self.paid_until - now
            if wait > 0:
                self.stopped.wait(wait)
        if self.stopped.is_set():
            raise GivenUp
