"""Handle to a run in another process. Loads no torch: reading a run takes milliseconds and no GPU memory."""

import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cogumi.core.errors import UsageError
from cogumi.core.formatting import escape_controls
from cogumi.core.notices import show_seconds
from cogumi.core.redact import VisibleFormatter
from cogumi.core.run_directory import CHECKPOINT, PAUSE, PAUSED, START, STOP, is_running, read_jsonl, same_process
from cogumi.core.worker import kill_with_children
from cogumi.telemetry import status as run_status

if TYPE_CHECKING:
    from cogumi.notebook.chat import Answers

log = logging.getLogger("cogumi")
POLL_SECONDS = 0.25
CLOSING_SECONDS = 180.0  # for report, trackers and mirror, each of which has a limit of its own
SUPERVISOR_SECONDS = 2.0  # that a supervisor may take to write how its process ended


@dataclass(frozen=True)
class Run:
    """Handle to a run, in this or another process."""

    run_dir: Path

    def __str__(self) -> str:
        return run_status.format_headline(self.status())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # as the last word of a cell
        printer.text(str(self))

    def status(self) -> run_status.Status:
        """How it stands now. Raises UsageError where the directory holds no run any more."""
        return run_status.status_of(self.run_dir)

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged so far, in order; each row with its step and time."""
        return read_jsonl(self.run_dir / "metrics.jsonl")

    def dashboard(self) -> None:
        """Show the run, also one that has ended: in a notebook a panel with buttons, elsewhere one screen of text.

        The panel is drawn until the run has ended and does not block. Its buttons are answered while no cell runs.
        """
        from cogumi.notebook.panel import show_panel

        show_panel(self)

    def chat(
        self,
        message: str | None = None,
        only: str | Sequence[str] = (),
        temperature: float = 0.0,
        max_new_tokens: int | None = None,
    ) -> "Answers | None":
        """Talk to the base and to what was trained, side by side: with widgets in a notebook, elsewhere in the terminal.

        message: answer it alone, and return the answers, which a notebook shows side by side. only: of base, adapter and
        merged those to ask; by default the base, and merged or else the adapter. temperature: 0 is greedy. max_new_tokens: None
        is the run's own. Raises UsageError where the run has saved nothing yet.
        """
        from cogumi.evaluation.saved_models import read_setup
        from cogumi.notebook import chat as chats

        only = (only,) if isinstance(only, str) else only
        chat = chats.open_chat(read_setup(self.run_dir, only, temperature, max_new_tokens))
        if message is not None:
            return chats.answer_once(chat, message)
        chats.talk(chat)
        return None

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write report.html into its directory, or the file `out`: all there is to know of the run. Returns its path."""
        from cogumi.notebook.panel import write_report

        return write_report(self.run_dir, out)

    def logs(self, last: int = 50) -> str:
        """The last lines of what the run said: decisions with their reasons, warnings, and the traceback if it failed."""
        return "\n".join(run_status.tail_lines(Path(self.status().log), size=last * 1000)[-last:])

    def follow(self, last: int = 20) -> Iterator[str]:
        """The last lines of the log, and then each piece of text as it is written, until the run has ended."""
        for status in self._statuses(math.inf):
            if Path(status.log).exists():
                break
        with Path(status.log).open(encoding="utf-8", errors="replace", newline="") as file:
            text = "".join(file.readlines()[-last:] if last else [])
            while True:
                if text:
                    yield text
                ended = self.status().ended  # before reading: what was written up to its end is read
                text = file.read()
                if ended and not text:
                    return
                if not text:
                    time.sleep(POLL_SECONDS)

    def wait(self, timeout: float | None = None) -> run_status.Status:
        """Wait until the run has ended, and show how far it is. An interrupt ends the waiting, never the run.

        What follows its verdict (the report, the end of its mirror) is waited for as well where it has a process of its own.
        timeout: in seconds; raises TimeoutError where the run is still at work after them.
        """
        from tqdm.auto import tqdm

        statuses = self._statuses(math.inf if timeout is None else time.monotonic() + timeout)
        with show_seconds(f"{self.run_dir.name}: the first step is being waited for"):
            # tqdm draws a bar only if the total is known when it is made.
            status = next(reached for reached in statuses if reached.steps is not None or reached.ended)
        hidden = True if status.steps is None else None  # None: in a terminal only; True: the run ended before a step
        name, done = escape_controls(self.run_dir.name), status.step or 0
        with tqdm(desc=name, unit="step", total=status.steps, initial=done, disable=hidden) as bar:
            for status in statuses:
                bar.total = status.steps
                bar.set_postfix_str(status.stage or status.state, refresh=False)
                bar.update((status.step or 0) - bar.n)
        started = run_status.read_json_or_empty(self.run_dir / START)
        if is_running(started):  # with cogumi.restarts it is the parent of the one that trained
            detached = replace(status, **{key: started[key] for key in ("pid", "host", "began")})
            wait_for_end(detached, CLOSING_SECONDS)
        return status

    def _statuses(self, until: float) -> Iterator[run_status.Status]:
        """Yield the status, again and again until the run has ended. Raises TimeoutError after `until`."""
        while True:
            status = self.status()
            yield status
            if status.ended:
                return
            if time.monotonic() > until:
                raise TimeoutError(f"{run_status.format_headline(status)}; it is still at work")
            time.sleep(POLL_SECONDS)

    def stop(self, kill_after: float | None = None) -> run_status.Status:
        """Ask the run to save its last finished step and end (SIGTERM); wait until it has, and say what was saved.

        A run that is asked twice ends at once, without saving. kill_after: end it with SIGKILL if it takes longer, in
        seconds. Raises UsageError if it is not certain which process that is, or if it is on another machine.
        """
        status = self.status()
        with show_log():
            if status.ended:
                log.info("%s; there is nothing to stop", run_status.format_headline(status))
                return status
            process = self.ask_to_stop()
            log.info("%s: asked to save its last finished step and end (asked again, it ends at once)", self.run_dir)
            if not wait_for_end(status, kill_after):
                log.warning("%s: still there after %g s; it is killed", self.run_dir, kill_after)
                (self.run_dir / STOP).touch()
                kill_with_children(process.pid)
                wait_for_end(status, None)
            status = self.status()
            log.info("%s", run_status.format_sentence(status))
        return status

    def ask_to_stop(self) -> psutil.Process:
        """`stop` without its waiting. Raises UsageError if it is not certain which process is the run's."""
        status = self.status()
        if not is_running(status.process):
            if status.host and status.alive is None:
                wrong = f"its process {status.pid} is on {status.host}"
                raise UsageError(wrong, place=status.run_dir, fix="stop it there")
            wrong = f"{status.run_dir} is held by a process, but not by number {status.pid}, which its status names"
            raise UsageError(wrong, fix="end that one where it was started")
        process = psutil.Process(status.process["pid"])
        with suppress(psutil.NoSuchProcess):  # it has ended just now
            process.terminate()
        return process

    def checkpoint(self) -> None:
        """Ask the run for a checkpoint after the step that it is at. Raises UsageError where it has ended, or is paused."""
        self._request(CHECKPOINT)

    def pause(self) -> None:
        """Ask the run to save after this step and to wait until `unpause()`, with all that it holds of the machine.

        Raises UsageError where it has ended, or is paused already.
        """
        self._request(PAUSE)

    def unpause(self) -> None:
        """End a pause, and take back one that the run has not come to. Raises UsageError where there is neither."""
        status, paths = self._status_at_work(), [self.run_dir / name for name in (PAUSE, PAUSED)]
        if not any(path.exists() for path in paths):
            raise UsageError(run_status.format_headline(status), fix="it is not paused")
        for path in paths:
            path.unlink(missing_ok=True)

    def _request(self, name: str) -> None:
        status = self._status_at_work()
        if (self.run_dir / PAUSED).exists():
            raise UsageError(
                run_status.format_headline(status), fix="it waits already: `cogumi unpause` ends the pause"
            )
        (self.run_dir / name).touch()

    def _status_at_work(self) -> run_status.Status:
        """Return the status. Raises UsageError if the run has ended."""
        status = self.status()
        if status.ended:
            but = f"; {run_status.describe_resume(status)}" if status.state in run_status.BROKEN_OFF else ""
            raise UsageError(run_status.format_headline(status), fix=f"this run is not training{but}")
        return status


def attach(run_dir: str | os.PathLike[str]) -> Run:
    """The run in a directory, under way or over. Raises UsageError, with the nearest name, where there is none."""
    path = Path(run_dir)
    run_status.status_of(path)
    return Run(path.absolute())


def wait_for_end(status: run_status.Status, seconds: float | None) -> bool:
    """Wait until the process of a status is over, and its supervisor, if it has one, has said how. False: it takes longer."""
    until = math.inf if seconds is None else time.monotonic() + seconds
    while is_running(status.process):
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_SECONDS)
    until = time.monotonic() + SUPERVISOR_SECONDS
    while time.monotonic() < until:
        started = run_status.read_json_or_empty(Path(status.run_dir) / START)
        if not same_process(started, status.process) or "exit" in started:
            break
        time.sleep(POLL_SECONDS / 5)
    return True


@contextmanager
def show_log() -> Iterator[None]:
    """Print log lines while in the block, unless the root logger has a handler, as it has in a script and not in a notebook."""
    if log.hasHandlers():
        yield
        return
    level, handler = log.level, logging.StreamHandler(sys.stdout)
    handler.setFormatter(VisibleFormatter())
    handler.setLevel(logging.INFO)
    log.addHandler(handler)
    log.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
