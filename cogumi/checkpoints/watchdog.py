"""A training that hangs is noticed: the stacks of all threads go to the run's log, and the policy says what follows.

Hung is what has shown no sign of life (a step, a substep, a batch of an evaluation, a log) for longer than each of: a
floor; N times the median step; three times the longest silence of this training so far. The last is what keeps a step
of GSPO that generates for minutes, among many that take seconds, and a slow evaluation from being called hung.
"""

import faulthandler
import logging
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from weakref import ref

import psutil
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.core.errors import UsageError

log = logging.getLogger(__name__)

HUNG_POLICIES = ("continue", "stop")

# Below this nothing is called hung: a full checkpoint is written to a slow volume for minutes, a first evaluation computes
# its metrics in silence. Five minutes of a rented H100 cost a fifth of a dollar, a training stopped by mistake far more.
FLOOR_SECONDS = 300.0
# Before there is a median: compilation, or skipping to where a resumed run was, may take half an hour.
FIRST_TIMES_FLOOR = 6
ENOUGH_STEPS = 3
WINDOW_STEPS = 101  # A median over the latest: sequence lengths and generations change over a run.
TIMES_LONGEST = 3
TICKS = 20  # looks in one floor: a hang is noticed a twentieth of it late
SAYING_SECONDS = 10.0


class Watchdog:
    """Notices a training that hangs: `with watchdog.watching(): trainer.train()`, with `Pulse(watchdog)` among its callbacks.

    log_path: the file that stacks are added to; standard error where it cannot be written. times: how many times the
    median step without a sign of life is a hang. policy: "continue" writes the stacks and a line of log, again each time
    that the silence has doubled, and waits. "stop" does the same, then asks the training to end as SIGTERM does, and where
    that brings no sign of life within the same time again, ends the process with status 143; in a notebook that is
    the kernel. Before the first steps are done no training is stopped: nobody knows how long they take. floor: seconds.

    A C function that holds the interpreter lock stops the thread that watches as well. Its stacks are written by a timer
    of faulthandler; nothing in the process can end it. faulthandler has one timer a process and tells nobody whether it
    is set: one set before this training is replaced (as pytest's faulthandler_timeout), one set later is let be.

    Raises UsageError for a policy or a number that is none.
    """

    def __init__(self, log_path: str | Path, times: float, policy: str, floor: float = FLOOR_SECONDS) -> None:
        if policy not in HUNG_POLICIES:
            raise UsageError(f"the policy for a hung training is {policy!r}, and not one of {', '.join(HUNG_POLICIES)}")
        if not (times > 1 and floor > 0):
            raise UsageError(
                f"a hang of {times} times the median step, {floor} s at least: give more than 1, and than 0 s"
            )
        self.log_path, self.times, self.policy, self.floor = Path(log_path), times, policy, floor
        self.excuses = 0
        self.forget_all()

    def forget_all(self) -> None:
        """As before a training."""
        self.steps: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.new_steps: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.longest = self.new_longest = 0.0
        self.seen = False
        self.step: int | None = None
        self.words = 0
        self.asked_at: float | None = None
        self.forget_last()

    def forget_last(self) -> None:
        """Count from now, and take what was before for no measure of anything."""
        self.last_sign = time.monotonic()
        self.last_step: float | None = None

    # ------------------------------------------------------------------------------------------------- the training says

    def alive(self) -> None:
        """A sign of life. The silence before the first is no measure: a resumed run may have been skipping data."""
        now = time.monotonic()
        if self.seen and now - self.last_sign > self.new_longest:
            self.new_longest = now - self.last_sign
        self.last_sign, self.seen = now, True

    def step_done(self, step: int) -> None:
        """An optimizer step is done. step: its number."""
        self.alive()
        if self.last_step is not None:
            self.new_steps.append(self.last_sign - self.last_step)
        self.last_step, self.step = self.last_sign, step

    @contextmanager
    def excused(self) -> Iterator[None]:
        """While in the block, silence is as it should be; afterwards it counts from then."""
        self.excuses += 1
        try:
            yield
        finally:
            self.forget_last()
            self.excuses -= 1

    # ------------------------------------------------------------------------------------------------ the thread watches

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while in the block, from a thread of its own."""
        self.forget_all()
        ending, was_there = threading.Event(), self.log_path.exists()
        with opened(self.log_path) as stream:
            thread = threading.Thread(target=self.watch, args=[ending, stream], name="cogumi-watchdog", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ending.set()
                thread.join()
                disarm()
                if not was_there and self.log_path.exists() and self.log_path.stat().st_size == 0:
                    self.log_path.unlink()

    def watch(self, ending: threading.Event, stream: FileIO) -> None:
        tick = self.floor / TICKS
        arm(self.limit, stream)
        looked = time.monotonic()
        while not ending.wait(tick):
            now = time.monotonic()  # the one time of this look: the process may be stopped at any line of it
            slept, looked = now - looked, now
            # The clock goes on while the process is stopped (Ctrl-Z, docker pause), and not while the machine sleeps.
            if slept > 2 * tick:
                self.do_not_count(slept - tick, now)
            self.learn()
            self.judge(now)
            arm(self.limit, stream)

    def do_not_count(self, lost: float, now: float) -> None:
        """This thread did not run, so the training did not either, or a C function kept both waiting."""
        if lost > self.limit:
            log.warning(
                "nothing ran for %.0f s: the process was stopped and goes on, or a C function held the interpreter lock "
                "(stacks under 'Timeout' in %s are from then)",
                lost,
                self.log_path,
            )
        self.last_sign = min(now, self.last_sign + lost)
        self.last_step = None if self.last_step is None else min(now, self.last_step + lost)
        self.asked_at = None if self.asked_at is None else min(now, self.asked_at + lost)
        # The training may have measured it before it was known here. What is shorter cannot hold it.
        self.new_longest -= lost if self.new_longest > lost else 0
        for _ in range(len(self.new_steps)):
            each = self.new_steps.popleft()
            self.new_steps.append(each - lost if each > lost else each)

    def learn(self) -> None:
        """Take over what was measured since the last look: only now is it known how much of it nothing ran."""
        self.longest, self.new_longest = max(self.longest, self.new_longest), 0.0
        while self.new_steps:
            self.steps.append(self.new_steps.popleft())

    @property
    def armed(self) -> bool:
        return len(self.steps) >= ENOUGH_STEPS

    @property
    def limit(self) -> float:
        """The silence from which the training is hung, in seconds."""
        typical = self.times * statistics.median(self.steps) if self.armed else FIRST_TIMES_FLOOR * self.floor
        return max(self.floor, typical, TIMES_LONGEST * self.longest)

    def judge(self, now: float) -> None:
        silence, limit = now - self.last_sign, self.limit
        if self.excuses:
            return
        if self.asked_at is not None and now - max(self.asked_at, self.last_sign) > limit:
            self.end(limit)
        if silence <= limit:
            if self.words:
                log.warning("the training goes on, at step %s", self.step)
            self.words = 0
            return
        if silence > limit * 2**self.words:
            self.words += 1
            in_time(self.say, silence, limit)
        if self.policy == "stop" and self.armed and self.asked_at is None:
            self.asked_at = now
            # To the main thread, whose call it is to interrupt: one that another thread gets is not seen while that waits.
            # And once: a second one would end the process before it has saved.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def say(self, silence: float, limit: float) -> None:
        after = "before the first step was done" if self.step is None else f"after step {self.step}"
        hung = f"the training hangs: no sign of life for {silence:.1f} s {after}, and {limit:.1f} s is the limit"
        # Before the line of log: what hangs may be a handler of logging, whose lock nobody else gets then.
        write_stacks(self.log_path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {hung}; its stacks:\n")
        asked = "; it is asked to end" if self.policy == "stop" and self.armed else ""
        log.error("%s; the stacks are in %s%s", hung, self.log_path, asked)

    def end(self, limit: float) -> None:
        number = 128 + signal.SIGTERM
        line = f"the training was asked to end and shows no sign of life for {limit:.0f} s more: exit status {number}"
        in_time(log.error, line)
        in_time(logging.shutdown)
        os._exit(number)


class Pulse(TrainerCallback):
    """Tells a Watchdog what the trainer does. Not on_save: a callback that has it makes protect's saves wait for the disk."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.watchdog.alive()

    on_substep_end = on_prediction_step = on_evaluate = on_log = on_step_begin

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.watchdog.step_done(state.global_step)


def in_time(function: Callable[..., Any], *args: Any) -> None:
    """Call a function and wait for it, some seconds at most: where a disk is what hangs, writing to it hangs too."""
    thread = threading.Thread(target=function, args=args, name="cogumi-watchdog-says", daemon=True)
    thread.start()
    thread.join(SAYING_SECONDS)


# ------------------------------------------------------------------------------------------------------------- what is said


def opened(path: Path) -> FileIO:
    """A file to add to, or standard error where it cannot be: a full disk ends no training, nor its watch."""
    try:
        return FileIO(path, "ab")
    except OSError as error:
        log.warning("%s cannot be written (%s): stacks go to standard error", path, error.strerror)
        return FileIO(os.dup(2), "ab")


def write_stacks(path: Path, heading: str) -> None:
    """Add to a file where each thread of this process is, and what each process below it waits for."""
    text = (heading + stacks() + "".join(f"{line}\n" for line in processes())).encode()
    with opened(path) as stream, FileIO(os.dup(2), "ab") as other:
        try:
            stream.write(text)
        except OSError as error:
            log.warning("%s cannot be written (%s): stacks go to standard error", path, error.strerror)
            other.write(text)


def stacks() -> str:
    """By way of memory: faulthandler writes with the interpreter lock held, and a disk may be what hangs."""
    with open(os.memfd_create("stacks"), "r+b") if sys.platform == "linux" else TemporaryFile() as memory:
        faulthandler.dump_traceback(memory, all_threads=True)
        memory.seek(0)
        return memory.read().decode("ascii")


def processes() -> Iterator[str]:
    """This process and those below it: a hang is often in a worker of a DataLoader, or in waiting for one that is gone."""
    this = psutil.Process()
    for each in [this, *this.children(recursive=True)]:
        try:
            waits = Path(f"/proc/{each.pid}/wchan")  # the function of the kernel that it sleeps in; "0" where it runs
            where = f" in {waits.read_text()}" if waits.exists() else ""
            yield f"Process {each.pid} ({each.name()}): {each.status()}{where}"
        except (psutil.Error, OSError) as error:
            yield f"Process {each.pid}: {error}"


# -------------------------------------------------------------------------- the timer that needs no interpreter lock to fire

# What faulthandler was given last: it holds the only reference, so a dead one here says that somebody else set the timer.
given: ref[FileIO] | None = None
setting = threading.Lock()


def arm(seconds: float, stream: FileIO) -> None:
    """Have faulthandler write all stacks unless this is called again in time."""
    global given
    with setting:
        if given is not None and given() is None:
            return
        file = FileIO(stream.fileno(), "ab", closefd=False)
        faulthandler.dump_traceback_later(seconds, file=file)
        given = ref(file)


def disarm() -> None:
    with setting:
        cancel()


def cancel() -> None:
    global given
    if given is not None and given() is not None:
        faulthandler.cancel_dump_traceback_later()
        given = None


def before_fork() -> None:
    """A child that is forked while the timer is set waits for it for ever when it exits (CPython 3.11 and 3.12)."""
    setting.acquire()
    cancel()


os.register_at_fork(before=before_fork, after_in_parent=setting.release, after_in_child=setting.release)
