"""What a training shows: metrics.jsonl, one progress bar, and a line in run.log every so often; run.log and status.json."""

import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from cogumi.core.durability import NO_SPACE
from cogumi.core.errors import FINISHED_AND_SAVED, RefusedAtSetup
from cogumi.core.formatting import count, format_duration
from cogumi.core.redact import RedactingFormatter, VisibleFormatter, redact_text
from cogumi.core.run_directory import append_jsonl, json_line, read_jsonl, this_process, write_atomic, write_json
from cogumi.telemetry.heartbeat import Heartbeat
from cogumi.telemetry.status import read_json_or_empty
from cogumi.telemetry.throughput import Throughput

log = logging.getLogger("cogumi")
LINE_SECONDS = 30.0


class StepTimer:
    """Measures the seconds of a step, and estimates the seconds to the end of the training.

    A step includes reading its data, but not what lies between steps (saving, evaluation). The estimate includes both.
    cycle: after how many steps the work repeats. In GSPO one of several steps makes the rollout that all train on.
    """

    def __init__(self, cycle: int = 1) -> None:
        self.cycle, self.steps, self.excluded = cycle, 0, 0.0
        self.mark = self.began = 0.0
        self.cycles: list[float] = []  # when the first one ended, and the last

    def clock(self) -> float:
        return time.monotonic() - self.excluded

    def begin(self) -> None:
        self.mark = self.began = self.clock()

    def step_ended(self) -> float:
        """The seconds that the step took."""
        now = self.clock()
        seconds, self.mark = now - self.mark, now
        self.steps += 1
        if self.steps % self.cycle == 0:
            self.cycles = [*self.cycles[:1], now]
        return seconds

    def between_ended(self) -> None:
        self.mark = self.clock()

    def exclude(self, seconds: float) -> None:
        """The training has waited for so long, and it counts as no time at all."""
        self.excluded += seconds

    def eta(self, steps_left: int) -> float | None:
        """At the pace of the whole cycles after the first, which warms up; None before the first step."""
        if not self.steps:
            return None
        later = self.steps // self.cycle * self.cycle - self.cycle
        if later > 0:
            return steps_left * (self.cycles[-1] - self.cycles[0]) / later
        return steps_left * (self.mark - self.began) / self.steps


class Telemetry(TrainerCallback):
    """Follows one trainer: adds perf/... to what it logs, writes that into the run directory, and shows it.

    Each row with a loss has those that are known, for every reporter. perf/tokens_per_second counts no padding.
    perf/mfu is a share. perf/gpu_memory_gb is the most that was reserved, in 10^9 bytes. perf/cost is the cost so far.
    """

    SHOWN = ("loss", "eval_loss", "reward", "grad_norm")

    def __init__(self, trainer: Any, heart: Heartbeat, name: str) -> None:
        self.heart, self.run_dir, self.meter, self.name = heart, heart.run_dir, heart.meter, name
        self.bar: tqdm | None = None
        self.pace = StepTimer(steps_per_rollout(trainer))
        self.throughput = heart.throughput = Throughput(trainer, heart.meter)
        if self.throughput.no_mfu:
            log.info("no MFU: %s", self.throughput.no_mfu)
        self.last_line = 0.0
        self.shown: dict[str, str] = {}
        self.unwritten: list[dict[str, Any]] = []
        self.full = False
        trainer.evaluate = self.timed_stage("eval")(trainer.evaluate)
        # In place of transformers' own progress output, and before the reporters, which then read a row that is whole.
        trainer.pop_callback(ProgressCallback)
        trainer.pop_callback(PrinterCallback)
        trainer.callback_handler.callbacks.insert(0, self)

    @contextmanager
    def timed_stage(self, stage: str) -> Iterator[None]:
        """Work between two steps that is no part of either."""
        with self.meter.stage_inside(stage):
            yield
        self.pace.between_ended()

    @contextmanager
    def untimed_stage(self, stage: str) -> Iterator[None]:
        """A pause, or work that the rest of the run will not have again: no part of a step, and nothing that is to go."""
        began = time.monotonic()
        with self.meter.stage_inside(stage):
            yield
        self.pace.exclude(time.monotonic() - began)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        truncate_metrics(self.run_dir, state)
        self.heart.progress.step, self.heart.progress.steps = state.global_step, state.max_steps
        self.pace.begin()
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.name, unit="step", mininterval=0.5)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.throughput.total.step_seconds += self.pace.step_ended()
        progress = self.heart.progress
        progress.step, progress.steps, progress.step_time = state.global_step, state.max_steps, time.time()
        progress.eta_seconds = self.pace.eta(state.max_steps - state.global_step)
        assert self.bar is not None
        self.bar.update(state.global_step - self.bar.n)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.pace.between_ended()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            logs |= self.performance()
        self.unwritten.append({"step": state.global_step, "time": time.time(), **logs})
        self.write_unless_full(self.write_rows)
        self.shown |= {k: f"{float(logs[k]):.4g}" for k in self.SHOWN if logs.get(k) is not None}
        if self.bar is not None:
            self.bar.set_postfix(self.shown, refresh=False)
        now = time.monotonic()
        if "loss" in logs and (now - self.last_line >= LINE_SECONDS or state.global_step >= state.max_steps):
            log.info("%s", self.line(state, logs))
            self.last_line = now
        self.pace.between_ended()

    def performance(self) -> dict[str, float]:
        """What the steps since the last such row came to."""
        done, progress = self.throughput.window(), self.heart.progress
        progress.tokens_per_second, progress.mfu = self.throughput.tokens_per_second(done), self.throughput.mfu(done)
        found = {"perf/tokens_per_second": progress.tokens_per_second, "perf/mfu": progress.mfu}
        found["perf/cost"] = self.meter.cost()
        if self.name == "sft":  # TRL 1.15 counts one row of a packed batch, and from nothing where a run resumes
            found["num_tokens"] = int(self.throughput.total.tokens)
        if torch.cuda.is_available():
            found["perf/gpu_memory_gb"] = torch.cuda.max_memory_reserved() / 1e9
        return {key: value for key, value in found.items() if value is not None}

    def line(self, state: TrainerState, logs: dict[str, Any]) -> str:
        """`step 120/1000, loss 1.23, grad 0.8, lr 1e-04, 12.3k tok/s, MFU 41 %, mem 61/80 GB, eta 1 h 12 min, $3.10 of $8.90`"""
        words: dict[str, Callable[[Any], str]] = {
            "loss": lambda value: f"loss {float(value):.3g}",
            "reward": lambda value: f"reward {float(value):.3g}",
            "grad_norm": lambda value: f"grad {float(value):.3g}",
            "learning_rate": lambda value: f"lr {float(value):.3g}",
            "perf/tokens_per_second": lambda value: f"{count(value)} tok/s",
            "perf/mfu": lambda value: f"MFU {value:.0%}",
            "perf/gpu_memory_gb": lambda value: f"mem {value:.0f}/{torch.cuda.mem_get_info()[1] / 1e9:.0f} GB",
        }
        said = [f"step {state.global_step}/{state.max_steps}"]
        said += [say(logs[key]) for key, say in words.items() if logs.get(key) is not None]
        left = self.heart.progress.eta_seconds
        if left is not None and state.global_step < state.max_steps:
            said.append(f"eta {format_duration(left)}")
        if "perf/cost" in logs:
            at_end = f" of ${self.meter.cost(left):.2f}" if left else ""
            said.append(f"${logs['perf/cost']:.2f}{at_end}")
        return ", ".join(said)

    def write_rows(self) -> None:
        while self.unwritten:
            append_jsonl(self.run_dir / "metrics.jsonl", self.unwritten[0])
            del self.unwritten[0]

    def write_unless_full(self, write: Callable[[], None]) -> None:
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
        self.write_unless_full(self.write_rows)
        if self.bar is not None:
            self.bar.close()


class RunLog(logging.FileHandler):
    """run.log. Where it takes no line (a full disk, one that became read-only) that is said once, in one line."""

    said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.said:
            self.said = True
            print(f"cogumi: {self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)


@contextmanager
def record_run(run_dir: Path, resumed: bool = False) -> Iterator[None]:
    """Write log lines to run.log and the run's end to status.json. Without a handler of the root logger's, lines are
    printed too. resumed: the directory holds an earlier part of this run, which is kept."""
    to_file = RunLog(run_dir / "run.log", encoding="utf-8")
    to_file.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s"))
    on_stdout = logging.StreamHandler(sys.stdout)
    on_stdout.setFormatter(VisibleFormatter())
    handlers: list[logging.Handler] = [to_file] if log.hasHandlers() else [to_file, on_stdout]
    level = log.level
    log.setLevel(level or logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    except BaseException as error:
        if isinstance(error, RefusedAtSetup) and not resumed:
            shutil.rmtree(run_dir)  # nothing in it is worth keeping, and the corrected run may want its name
            raise
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        reason = f"{type(error).__name__}: {error}"
        if by := requested_by(error):
            stage = read_json_or_empty(run_dir / "status.json").get("stage")
            when = FINISHED_AND_SAVED if stage == "train" else f"before or after the training (stage: {stage})"
            state, reason = "stopped", f"asked to by {by}: {when}"
        log.log(logging.WARNING if state == "stopped" else logging.ERROR, "%s: %s", state, reason)
        try:
            set_status(run_dir, state, reason=redact_text(reason))
        except OSError as unwritten:  # a full disk must not hide what went wrong first
            log.error("status.json could not be written: %s", unwritten)
        raise
    finally:
        for handler in handlers:
            log.removeHandler(handler)
        log.setLevel(level)
        to_file.close()


def requested_by(error: BaseException) -> str:
    """What asked the run to end, where it was asked and has put everything in order; else ""."""
    if FINISHED_AND_SAVED in error.args:
        return "Ctrl-C"
    asked = {128 + signal.SIGTERM: "SIGTERM", 128 + signal.SIGHUP: "SIGHUP (the terminal was closed)"}
    return asked.get(error.code, "") if isinstance(error, SystemExit) else ""  # type: ignore[arg-type]


def steps_per_rollout(trainer: Any) -> int:
    """After how many optimizer steps a trainer generates again; 1 for one that never does."""
    args = trainer.args
    if getattr(args, "steps_per_generation", None) is None:  # a key of GRPOConfig
        return 1
    return max(1, args.steps_per_generation * trainer.num_iterations // args.gradient_accumulation_steps)


def terminal_loggers() -> list[logging.Logger]:
    """The loggers of ours that print on a terminal."""
    return [logger for logger in (logging.root, log) if any(map(is_terminal, logger.handlers))]


def is_terminal(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)


def set_status(run_dir: Path, state: str, **more: Any) -> None:
    try:
        write_json(run_dir / "status.json", {"state": state, "time": time.time(), **this_process(), **more})
    except OSError as error:  # how a run ends is not left unsaid
        if error.errno not in NO_SPACE or state not in ("running", "paused"):
            raise
        log.error("status.json stays as it was: %s", error)


def truncate_metrics(run_dir: Path, state: Any) -> None:
    """Let the metrics end at the step that the training resumes from: what was logged later is logged again.

    On a machine that fetched its checkpoint from a mirror they are what that checkpoint remembers.
    """
    path = run_dir / "metrics.jsonl"
    rows = read_jsonl(path)
    if not any("loss" in row for row in rows):
        rows += state.log_history
    # A summary at the end of a training that a signal ended is of a part of it.
    kept = [row for row in rows if row["step"] <= state.global_step and "train_runtime" not in row]
    text = "".join(map(json_line, kept))
    if text and not (path.exists() and text == path.read_text(encoding="utf-8")):
        write_atomic(path, text)
