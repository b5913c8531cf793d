"""A run's signs of life: status.json, heartbeat.json, metrics.jsonl, run.log and one progress bar."""

import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from cogumi.durable import NO_SPACE
from cogumi.errors import FINISHED_AND_SAVED, RefusedAtSetup
from cogumi.rundir import append_jsonl, write_json
from cogumi.training.unfinished import take_up_metrics

log = logging.getLogger("cogumi")
HEARTBEAT_SECONDS = 1.0


class Telemetry(TrainerCallback):
    """Writes what the trainer logs into the run directory and shows it in one bar."""

    SHOWN = ("loss", "eval_loss", "reward", "grad_norm")

    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir, self.name = run_dir, name
        self.bar: tqdm | None = None
        self.last_heartbeat = 0.0
        self.shown: dict[str, str] = {}
        self.unwritten: list[dict[str, Any]] = []
        self.full = False

    def attach(self, trainer: Any) -> None:
        """Take the place of transformers' own progress output, which prints every logged dictionary."""
        trainer.pop_callback(ProgressCallback)
        trainer.pop_callback(PrinterCallback)
        trainer.add_callback(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        take_up_metrics(self.run_dir, state)
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.name, unit="step", mininterval=0.5)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.bar is not None
        self.bar.update(state.global_step - self.bar.n)
        if time.monotonic() - self.last_heartbeat >= HEARTBEAT_SECONDS or state.global_step == state.max_steps:
            beat = {"step": state.global_step, "steps": state.max_steps, "time": time.time()}
            self.unless_full(lambda: write_json(self.run_dir / "heartbeat.json", beat))
            self.last_heartbeat = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.unwritten.append({"step": state.global_step, "time": time.time(), **(logs or {})})
        self.unless_full(self.write_rows)
        self.shown |= {k: f"{float(logs[k]):.4g}" for k in self.SHOWN if logs and logs.get(k) is not None}
        if self.bar is not None:
            self.bar.set_postfix(self.shown, refresh=False)

    def write_rows(self) -> None:
        while self.unwritten:
            append_jsonl(self.run_dir / "metrics.jsonl", self.unwritten[0])
            del self.unwritten[0]

    def unless_full(self, write: Callable[[], None]) -> None:
        """Write, or on a full disk leave it for later: a training does not end for want of a line about it."""
        try:
            write()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            if not self.full:
                log.error("metrics wait in memory until there is space again: %s", error)
            self.full = True
        else:
            self.full = False

    def close(self) -> None:
        self.unless_full(self.write_rows)
        if self.bar is not None:
            self.bar.close()


@contextmanager
def recorded(run_dir: Path, goes_on: bool = False) -> Iterator[None]:
    """Log lines go to run.log, and to the screen if nobody else shows them; status.json says how the run ended.

    goes_on: there was something of this run in the directory before, which is kept whatever happens.
    """
    to_file = logging.FileHandler(run_dir / "run.log", encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [to_file] if log.hasHandlers() else [to_file, logging.StreamHandler(sys.stdout)]
    level = log.level
    log.setLevel(level or logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    except BaseException as error:
        if isinstance(error, RefusedAtSetup) and not goes_on:
            shutil.rmtree(run_dir)  # nothing in it is worth keeping, and the corrected run may want its name
            raise
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        terminated = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
        if terminated or FINISHED_AND_SAVED in error.args:
            state = "preempted"
        ended = f"a signal ended it: {FINISHED_AND_SAVED}; started again with the same words it goes on"
        reason = ended if state == "preempted" else f"{type(error).__name__}: {error}"
        log.error("%s: %s", state, reason)
        try:
            set_status(run_dir, state, reason=reason)
        except OSError as unwritten:  # a full disk must not hide what went wrong first
            log.error("status.json could not be written: %s", unwritten)
        raise
    finally:
        for handler in handlers:
            log.removeHandler(handler)
        log.setLevel(level)
        to_file.close()


def on_screen() -> list[logging.Logger]:
    """The loggers of ours that print on a terminal."""
    streams = (sys.stdout, sys.stderr)
    return [
        logger
        for logger in (logging.root, log)
        if any(isinstance(each, logging.StreamHandler) and each.stream in streams for each in logger.handlers)
    ]


def set_status(run_dir: Path, state: str, **more: Any) -> None:
    write_json(run_dir / "status.json", {"state": state, "time": time.time(), **more})
