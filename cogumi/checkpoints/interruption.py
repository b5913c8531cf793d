"""End a training before its last step: signals, and a watchdog for hangs.

At SIGTERM, SIGHUP and SIGINT the training saves its last finished step, then does what the signal asks for. A provider
that takes a machine back sends SIGTERM and waits for some seconds. A terminal that is closed sends SIGHUP, more than
once where a shell passes it on. Ctrl-C in a notebook is SIGINT.

A training hangs when its last sign of life is too long ago: a step, a batch of an evaluation, a log. Three times count: a
floor, 20 times the median step, and three times the longest silence so far. The largest of them decides.
"""

import logging
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from cogumi.core.errors import FINISHED_AND_SAVED, UsageError

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
asked_to_exit: list[int] = []  # signals whose SystemExit a library may have swallowed, as bare excepts of dill do


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit instead of killing the process, so that cleanup runs."""
    is_main = threading.current_thread() is threading.main_thread()
    deadly = [number for number in SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in deadly:
        signal.signal(number, raise_exit)
    try:
        yield
    finally:
        asked_to_exit.clear()
        for number in deadly:
            signal.signal(number, signal.SIG_DFL)


def raise_exit(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the second of a closed terminal is not to disturb what follows
    asked_to_exit.append(number)
    raise SystemExit(128 + number)


class StepInterrupted(BaseException):
    """A signal came where the training can end without finishing its step. No Exception: user code must not catch it."""


class Preemption:
    """Records the first signal. Where the training is `interruptible`, SIGTERM and SIGHUP end its step at once.

    SIGINT waits for a `check`: a notebook lives on, and an engine or worker left in the middle of an answer with it.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}
        self.process, self.interruptible = 0, False

    def check(self, interruptible: bool = False) -> None:
        self.interruptible |= interruptible
        if self.interruptible and self.received is not None:
            self.interruptible = False
            raise StepInterrupted

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals in the block, and obey them afterwards.

        Raises KeyboardInterrupt after SIGINT, SystemExit(143) after SIGTERM and SystemExit(129) after SIGHUP, once the
        previous handlers have been called. An ignored SIGHUP (nohup) stays ignored. Does nothing outside the main thread.
        """
        self.received, self.process = None, os.getpid()
        if asked_to_exit:
            raise SystemExit(128 + asked_to_exit[0])
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.before = {
            number: signal.signal(number, self.handle)
            for number in SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in self.before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if (received := self.received) is not None:
            handler = self.before.get(received)  # None: another process of the training received the signal
            if callable(handler) and handler is not signal.default_int_handler:  # a scheduler's may requeue the job
                handler(received, None)
            raise KeyboardInterrupt(FINISHED_AND_SAVED) if received == signal.SIGINT else SystemExit(128 + received)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            again = "" if number == signal.SIGHUP else "; the same signal again ends it at once, without saving"
            name = signal.Signals(number).name
            log.warning("%s: the last finished step is saved, then the training ends%s", name, again)
            if number != signal.SIGINT and os.getpid() == self.process:  # a worker that was forked inherits the handler
                self.check()
        elif number == signal.SIGHUP:
            return
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            os._exit(128 + number)


HUNG_POLICIES = ("continue", "stop")
# Writing a full checkpoint to a slow volume, or a first evaluation, may take minutes without a sign of life.
FLOOR_SECONDS = 300.0
# Before there is a median: compilation, or skipping to where a resumed run was, may take half an hour.
FIRST_TIMES_FLOOR = 6
ENOUGH_STEPS = 3
WINDOW_STEPS = 101  # A median over the latest: sequence lengths and generations change over a run.
TIMES_MEDIAN = 20
TIMES_LONGEST = 3
TICKS = 20  # looks in one floor: a hang is noticed a twentieth of it late
WRITING_SECONDS = 10.0


class Watchdog:
    """Notices a training that hangs: `with watchdog.watching(): trainer.train()`; callbacks call `alive` and `note_step`.

    log_path: the file that stacks are added to; standard error where it cannot be written. policy: "continue" writes the
    stacks and a line of log, and waits. "stop" also asks the training to end as SIGTERM does. If no sign of life comes
    within the same time again, it ends the process with status 143. No training is stopped before its first steps are
    done, because it is not known how long they take. floor: seconds. Raises UsageError for another policy.
    """

    def __init__(self, log_path: str | Path, policy: str, floor: float = FLOOR_SECONDS) -> None:
        if policy not in HUNG_POLICIES:
            raise UsageError(f"the policy for a hung training is {policy!r}, and not one of {', '.join(HUNG_POLICIES)}")
        self.log_path, self.policy, self.floor = Path(log_path), policy, floor
        self.excuses = 0
        self.reset()

    @property
    def tick(self) -> float:
        return self.floor / TICKS

    def reset(self) -> None:
        # How long this process had run at the last check, and when that was.
        self.mark = 0.0, time.monotonic()
        self.forget()

    def forget(self) -> None:
        """Forget the steps of an earlier training."""
        self.steps: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.longest = 0.0
        self.seen = self.reported = False
        self.step: int | None = None
        self.asked_at: float | None = None
        self.restart_silence()

    def restart_silence(self) -> None:
        """Count silence from now on, without measuring what was before."""
        self.last_sign = self.now()
        self.last_step: float | None = None

    def now(self) -> float:
        """Return the seconds in which this process ran; a stop (Ctrl-Z, docker pause) counts as two ticks."""
        ran, looked = self.mark
        return ran + min(time.monotonic() - looked, 2 * self.tick)

    def alive(self) -> None:
        """Note a sign of life. The silence before the first is not measured: a resumed run may have skipped data."""
        now = self.now()
        if self.seen:
            self.longest = max(self.longest, now - self.last_sign)
        self.last_sign, self.seen = now, True

    def note_step(self, step: int) -> None:
        self.alive()
        if self.last_step is not None:
            self.steps.append(self.last_sign - self.last_step)
        self.last_step, self.step = self.last_sign, step

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Allow silence in the block; afterwards it counts from then."""
        self.excuses += 1
        try:
            yield
        finally:
            self.restart_silence()
            self.excuses -= 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.reset()
        ending = threading.Event()
        thread = threading.Thread(target=self.watch, args=[ending], name="cogumi-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def watch(self, ending: threading.Event) -> None:
        while not ending.wait(self.tick):
            self.mark = self.now(), time.monotonic()
            self.look(self.mark[0])

    def look(self, now: float) -> None:
        if not self.excuses:
            self.judge(now)

    @property
    def armed(self) -> bool:
        return len(self.steps) >= ENOUGH_STEPS

    @property
    def limit(self) -> float:
        """Return the seconds of silence after which the training counts as hung."""
        typical = TIMES_MEDIAN * statistics.median([*self.steps]) if self.armed else FIRST_TIMES_FLOOR * self.floor
        return max(self.floor, typical, TIMES_LONGEST * self.longest)

    def judge(self, now: float) -> None:
        limit = self.limit
        if self.asked_at is not None and now - max(self.asked_at, self.last_sign) > limit:
            line = f"the training was asked to end and shows no sign of life for {limit:.0f} s more: exit status 143"
            run_with_timeout(log.error, line)
            run_with_timeout(logging.shutdown)
            os._exit(128 + signal.SIGTERM)
        hung = now - self.last_sign > limit
        if hung and not self.reported:
            run_with_timeout(self.report, self.describe(limit), "; it is asked to end" if self.stops else "")
        elif self.reported and not hung:
            log.warning("it continues%s", "" if self.step is None else f", at step {self.step}")
        self.reported = hung
        if hung and self.stops and self.asked_at is None:
            self.asked_at = now
            self.stop(limit)

    @property
    def stops(self) -> bool:
        return self.policy == "stop" and self.armed

    def stop(self, limit: float) -> None:
        """Ask the training to end, once: a second signal would end the process before it has saved."""
        # To the main thread, whose call it is to interrupt: one that another thread gets is not seen while that waits.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def describe(self, limit: float) -> str:
        after = "before the first step was done" if self.step is None else f"after step {self.step}"
        return f"the training hangs: no sign of life {after} for more than {limit:.1f} s"

    def report(self, hung: str, then: str) -> None:
        """Write the stacks of all threads to the log's file, and a line of log with what follows."""
        # Before the line of log: what hangs may be a handler of logging, whose lock is taken then.
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {hung}; its stacks:\n{format_stacks()}\n"
        try:
            with self.log_path.open("a", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            log.warning("%s cannot be written (%s): stacks go to standard error", self.log_path, error.strerror)
            os.write(2, text.encode())
        log.error("%s; the stacks are in %s%s", hung, self.log_path, then)


def run_with_timeout(function: Callable[..., Any], *args: Any) -> None:
    """Call a function and wait at most WRITING_SECONDS for it: if a disk hangs, writing to it hangs too."""
    thread = threading.Thread(target=function, args=args, name="cogumi-watchdog-writes", daemon=True)
    thread.start()
    thread.join(WRITING_SECONDS)


def format_stacks() -> str:
    """Format the stack of each thread without source lines; faulthandler would hold the lock while a disk hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, top in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):\n")
        for frame, line in traceback.walk_stack(top):
            lines.append(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n')
    return "".join(lines)
