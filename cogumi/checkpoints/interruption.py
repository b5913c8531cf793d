"""What ends a training before its last step: signals, and a hang that is noticed.

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


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """While in the block, SIGTERM and SIGHUP raise SystemExit where they would kill: what is begun is put in order."""
    here = threading.current_thread() is threading.main_thread()
    deadly = [each for each in SIGNALS if here and signal.getsignal(each) is signal.SIG_DFL]
    for each in deadly:
        signal.signal(each, raise_exit)
    try:
        yield
    finally:
        for each in deadly:
            signal.signal(each, signal.SIG_DFL)


def raise_exit(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the second of a closed terminal is not to disturb what follows
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
        """While in the block, signals end it in good order; afterwards what they ask for is done.

        Handlers belong to the main thread: in another one nothing is changed. Raises KeyboardInterrupt after
        SIGINT, SystemExit(143) after SIGTERM and SystemExit(129) after SIGHUP, once the handlers that were there before
        have been called. A SIGHUP that is ignored (nohup) stays so.
        """
        self.received, self.process = None, os.getpid()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
        self.before = {each: signal.signal(each, self.handle) for each in heard}
        try:
            yield
        finally:
            for each, handler in self.before.items():
                signal.signal(each, signal.SIG_DFL if handler is None else handler)
        if self.received is not None:
            self.follow_signal(self.received)

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

    def follow_signal(self, number: int) -> None:
        handler = self.before.get(number)  # of a signal that another process of the training has heard
        if callable(handler) and handler is not signal.default_int_handler:  # a scheduler's may requeue the job
            handler(number, None)
        raise KeyboardInterrupt(FINISHED_AND_SAVED) if number == signal.SIGINT else SystemExit(128 + number)


HUNG_POLICIES = ("continue", "stop")
# Below this nothing is called hung: a full checkpoint is written to a slow volume for minutes, a first evaluation computes
# its metrics in silence. Five minutes of a rented H100 cost a fifth of a dollar, a training stopped by mistake far more.
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

    def reset(self) -> None:
        """As before a training."""
        # How long this process had run when the watch looked last, and when that was.
        self.mark = 0.0, time.monotonic()
        self.steps: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.longest = 0.0
        self.seen = self.reported = False
        self.step: int | None = None
        self.asked_at: float | None = None
        self.restart_silence()

    def restart_silence(self) -> None:
        """Count from now, and take what was before for no measure of anything."""
        self.last_sign = self.now()
        self.last_step: float | None = None

    def now(self) -> float:
        """Seconds in which this process ran. Those in which it was stopped (Ctrl-Z, docker pause) count as two ticks."""
        ran, looked = self.mark
        return ran + min(time.monotonic() - looked, 2 * self.floor / TICKS)

    def alive(self) -> None:
        """A sign of life. The silence before the first is no measure: a resumed run may have been skipping data."""
        now = self.now()
        if self.seen:
            self.longest = max(self.longest, now - self.last_sign)
        self.last_sign, self.seen = now, True

    def note_step(self, step: int) -> None:
        """An optimizer step is done. step: its number."""
        self.alive()
        if self.last_step is not None:
            self.steps.append(self.last_sign - self.last_step)
        self.last_step, self.step = self.last_sign, step

    @contextmanager
    def excused(self) -> Iterator[None]:
        """While in the block, silence is as it should be; afterwards it counts from then."""
        self.excuses += 1
        try:
            yield
        finally:
            self.restart_silence()
            self.excuses -= 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while in the block, from a thread of its own."""
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
        while not ending.wait(self.floor / TICKS):
            self.mark = self.now(), time.monotonic()
            if not self.excuses:
                self.judge(self.mark[0])

    @property
    def armed(self) -> bool:
        return len(self.steps) >= ENOUGH_STEPS

    @property
    def limit(self) -> float:
        """The silence from which the training is hung, in seconds."""
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
            run_with_timeout(self.report, limit)
        elif self.reported and not hung:
            log.warning("the training continues, at step %s", self.step)
        self.reported = hung
        if hung and self.policy == "stop" and self.armed and self.asked_at is None:
            self.asked_at = now
            # To the main thread, whose call it is to interrupt: one that another thread gets is not seen while that waits.
            # And once: a second one would end the process before it has saved.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def report(self, limit: float) -> None:
        after = "before the first step was done" if self.step is None else f"after step {self.step}"
        hung = f"the training hangs: no sign of life {after} for more than {limit:.1f} s"
        # Before the line of log: what hangs may be a handler of logging, whose lock is taken then.
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {hung}; its stacks:\n{format_stacks()}\n"
        try:
            with self.log_path.open("a", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            log.warning("%s cannot be written (%s): stacks go to standard error", self.log_path, error.strerror)
            os.write(2, text.encode())
        asked = "; it is asked to end" if self.policy == "stop" and self.armed else ""
        log.error("%s; the stacks are in %s%s", hung, self.log_path, asked)


def run_with_timeout(function: Callable[..., Any], *args: Any) -> None:
    """Call a function and wait for it, some seconds at most: where a disk is what hangs, writing to it hangs too."""
    thread = threading.Thread(target=function, args=args, name="cogumi-watchdog-writes", daemon=True)
    thread.start()
    thread.join(WRITING_SECONDS)


def format_stacks() -> str:
    """Where each thread is, without the lines of the sources. Not faulthandler's, which holds the lock while a disk hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, top in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):\n")
        for frame, line in traceback.walk_stack(top):
            lines.append(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n')
    return "".join(lines)
