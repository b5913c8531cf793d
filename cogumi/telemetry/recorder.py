"""Record a training: metrics.jsonl, a progress bar and lines in run.log, rollouts and samples, log and status."""

import logging
import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from cogumi.core.durability import NO_SPACE
from cogumi.core.errors import FINISHED_AND_SAVED, TRACEBACK_IN, EndedByWatch, RefusedAtSetup, UserCodeError
from cogumi.core.formatting import format_duration
from cogumi.core.random_state import kept_random_state
from cogumi.core.redact import RedactingFormatter, VisibleFormatter, redact_text
from cogumi.core.run_directory import (
    DECISIONS,
    ROLLOUTS,
    SAMPLES_FILE,
    append_jsonl,
    json_line,
    read_jsonl,
    read_section,
    this_process,
    write_atomic,
    write_json,
)
from cogumi.core.signatures import known_cause_of
from cogumi.data.chat import transcript_of
from cogumi.merge.stream import available_cores
from cogumi.models.completion import complete_with_ends
from cogumi.patches.trl_internals import logged_completions, observe_rollouts
from cogumi.stack.gpu_health import read_gpu_health
from cogumi.stack.ranks import Ranks
from cogumi.telemetry.heartbeat import Heartbeat
from cogumi.telemetry.status import HUNG, read_json_or_empty, relative_path
from cogumi.telemetry.throughput import PAUSED_STAGE, ROLLOUT, Meter, Throughput

log = logging.getLogger("cogumi")
LINE_SECONDS = 30.0
# A step is starved if it takes SLOW_STEP times the median of the first PACE_STEPS ones while the load exceeds the cores.
PACE_STEPS, SLOW_STEP, MIN_SLOW_SECONDS, STARVED_LOG_SECONDS = 3, 2.5, 1.0, 600.0
# What the bar and the log show of a logged row.
FORMATS = {
    "loss": "loss {:.3g}", "eval_loss": "eval_loss {:.3g}", "reward": "reward {:.3g}", "grad_norm": "grad {:.3g}",
    "learning_rate": "lr {:.3g}", "perf/tokens_per_second": "{:,.0f} tokens/s", "perf/mfu": "MFU {:.0%}",
    "perf/gpu_memory_gb": "{:.0f} GB", "perf/cost": "${:.2f}",
}  # fmt: skip


class StepTimer:
    """Measures the seconds of a step, with reading its data, without saving or evaluation; `eta` includes those.

    The clock stops in a pause and in a rollout, which serves several steps and is counted by `Throughput`.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter, self.steps = meter, 0
        self.mark = self.first = 0.0  # when the last step ended or its data began to be read; when the first one ended

    def clock(self) -> float:
        return time.monotonic() - sum(self.meter.seconds().get(stage, 0.0) for stage in (PAUSED_STAGE, ROLLOUT))

    def begin_step(self) -> None:
        self.mark = self.clock()

    def end_step(self) -> float:
        now = self.clock()
        seconds, self.mark = now - self.mark, now
        self.steps += 1
        self.first = now if self.steps == 1 else self.first
        return seconds

    def eta(self, steps_left: int) -> float | None:
        """Return seconds at the mean pace since the first step, which warms up; None before the second."""
        return steps_left * (self.mark - self.first) / (self.steps - 1) if self.steps > 1 else None


class Telemetry(TrainerCallback):
    """Follows one trainer: adds perf/... to its rows with a loss, writes them into the run directory, and shows them.

    perf/tokens_per_second counts no padding, perf/mfu is a share, perf/gpu_memory_gb the peak of reserved memory. ranks: the
    processes of the training, over which tokens are summed up.
    """

    def __init__(self, trainer: Any, heart: Heartbeat, name: str, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.heart, self.run_dir, self.meter, self.name = heart, heart.run_dir, heart.meter, name
        self.bar: tqdm | None = None
        self.evaluation_bar: tqdm | None = None
        self.first_seconds: list[float] = []  # of the first steps
        self.slow_logged = -math.inf
        self.pace = StepTimer(self.meter)
        self.throughput = heart.throughput = Throughput(trainer, heart.meter, self.ranks)
        if self.throughput.no_mfu and self.ranks.leads:
            log.debug("no MFU: %s", self.throughput.no_mfu)
        self.last_line = 0.0
        self.unwritten: list[dict[str, Any]] = []
        self.full = False
        trainer.evaluate = self.stage_beside("eval")(trainer.evaluate)
        # Replaces transformers' own progress output; before the reporters, which then read complete rows.
        trainer.pop_callback(ProgressCallback)
        trainer.pop_callback(PrinterCallback)
        trainer.callback_handler.callbacks.insert(0, self)

    @contextmanager
    def stage_beside(self, stage: str) -> Iterator[None]:
        """Count the block as a stage between two steps that is no part of either."""
        with self.meter.stage_inside(stage):
            yield
        self.pace.begin_step()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        truncate_metrics(self.run_dir, state)
        for name in (SAMPLES_FILE, ROLLOUTS):
            drop_later_rows(self.run_dir / name, state.global_step)
        self.heart.progress.step, self.heart.progress.steps = state.global_step, state.max_steps
        self.pace.begin_step()
        self.bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc=self.name,
            unit="step",
            mininterval=0.5,
            disable=None if self.ranks.leads else True,
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        seconds = self.pace.end_step()
        self.throughput.total.step_seconds += seconds
        self.warn_if_starved(state.global_step, seconds)
        progress = self.heart.progress
        progress.step, progress.steps, progress.step_time = state.global_step, state.max_steps, time.time()
        progress.eta_seconds = self.eta(state.global_step, state.max_steps)
        assert self.bar is not None
        self.bar.update(state.global_step - self.bar.n)

    def warn_if_starved(self, step: int, seconds: float) -> None:
        """Log a step that takes much longer than the first ones while the machine has more work than cores."""
        if len(self.first_seconds) < PACE_STEPS:
            self.first_seconds.append(seconds)
        usual, load, cores = statistics.median(self.first_seconds), os.getloadavg()[0], available_cores()
        is_due = self.ranks.leads and time.monotonic() - self.slow_logged > STARVED_LOG_SECONDS
        if is_due and seconds > max(SLOW_STEP * usual, MIN_SLOW_SECONDS) and load > cores:
            self.slow_logged = time.monotonic()
            text = "step %d took %.3g s, the first ones %.3g s: load average %.1f on %d cores; end what else runs on this machine"
            log.warning(text, step, seconds, usual, load, cores)

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        if self.evaluation_bar is None:
            options = {"desc": "held-out loss", "unit": "batch", "disable": None if self.ranks.leads else True}
            self.evaluation_bar = tqdm(total=len(eval_dataloader), leave=False, **options)
            self.evaluation_line = time.monotonic()
        bar = self.evaluation_bar
        bar.update()
        bar.n += bool(bar.disable)  # in a pipe it does not count; on a terminal tqdm leaves None
        if bar.disable and self.ranks.leads and time.monotonic() - self.evaluation_line >= LINE_SECONDS:
            self.evaluation_line = time.monotonic()
            log.info("held-out loss: batch %d of %d", bar.n, bar.total)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self.evaluation_bar is not None:
            self.evaluation_bar.close()
            self.evaluation_bar = None

    def eta(self, step: int, steps: int) -> float | None:
        """Return seconds from one step to another, with the rollouts that begin between them; None before the second step."""
        seconds, done = self.pace.eta(steps - step), self.throughput.total
        if seconds is None or not done.rollouts:
            return seconds
        begun, all_rollouts = (math.ceil(number / self.throughput.steps_per_rollout) for number in (step, steps))
        return seconds + (all_rollouts - begun) * done.rollout_seconds / done.rollouts

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.throughput.read()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.pace.begin_step()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            logs |= self.performance()
        self.unwritten.append({"step": state.global_step, "time": time.time(), **logs})
        self.write_unless_full(self.write_rows)
        summary = ", ".join(words.format(logs[key]) for key, words in FORMATS.items() if logs.get(key) is not None)
        if self.bar is not None:
            self.bar.set_postfix_str(summary, refresh=False)
        now, left = time.monotonic(), state.max_steps - state.global_step
        if self.ranks.leads and "loss" in logs and (now - self.last_line >= LINE_SECONDS or left <= 0):
            seconds = self.heart.progress.eta_seconds
            to_go = f", {format_duration(seconds)} to go" if seconds and left > 0 else ""
            log.info("step %d/%d, %s%s", state.global_step, state.max_steps, summary, to_go)
            self.last_line = now
        self.pace.begin_step()

    def performance(self) -> dict[str, float]:
        done, progress = self.throughput.window(), self.heart.progress
        progress.tokens_per_second, progress.mfu = self.throughput.tokens_per_second(done), self.throughput.mfu(done)
        row = {"perf/tokens_per_second": progress.tokens_per_second, "perf/mfu": progress.mfu, **self.heart.gpu_row()}
        row |= self.heart.mirror_lag()
        row["perf/cost"] = self.meter.cost()
        if self.name == "sft":  # TRL 1.15 counts one row of a packed batch, and from nothing where a run resumes
            row["num_tokens"] = int(self.throughput.total.tokens)
        if torch.cuda.is_available():
            row["perf/gpu_memory_gb"] = self.ranks.largest(torch.cuda.max_memory_reserved()) / 1e9
        return {key: value for key, value in row.items() if value is not None}

    def write_rows(self) -> None:
        while self.unwritten:
            append_jsonl(self.run_dir / "metrics.jsonl", self.unwritten[0])
            del self.unwritten[0]

    def write_unless_full(self, write: Callable[[], None]) -> None:
        """Write, or on a full disk leave it for later: a training does not end because a line about it is lost."""
        try:
            write()
            self.full = False
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            if not self.full:
                log.error("metrics wait in memory until there is space again: %s", error)
            self.full = True

    def close(self) -> None:
        self.write_unless_full(self.write_rows)
        if self.bar is not None:
            self.bar.close()


# -------------------------------------------------------------------------------------------------- completions

ROLLOUT_EXAMPLES = 4  # completions shown of a rollout
MAX_CHARACTERS = 4000  # of a prompt, its end; of a completion, its beginning
SAMPLE_PROMPTS = 4
MAX_LOOKS, MIN_LOOK_STEPS = 10, 50  # if the config does not say: at most so many looks, so many steps apart


def record_rollouts(trainer: Any, telemetry: Telemetry) -> None:
    """Have each rollout of a trainer written down, from what TRL keeps for its table of completions."""
    numbers: dict[str, int] = {}  # of rows, by their prompts

    def record(make: Callable[[Any], Any], inputs: Any) -> Any:
        batch = make(inputs)
        if trainer.model.training:
            if not numbers:
                for number, prompt in enumerate(trainer.train_dataset["prompt"]):
                    numbers.setdefault(transcript_of(prompt), number)
            row = {"step": trainer.state.global_step + 1, **rollout_row(trainer, numbers)}
            telemetry.write_unless_full(lambda: append_jsonl(telemetry.run_dir / ROLLOUTS, row))
        return batch

    observe_rollouts(trainer, record)


def rollout_row(trainer: Any, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return the row of the rollout that a trainer just made; a reward is NaN if no function scored the completion.

    numbers: of the training data's rows, by prompt; of rows with the same prompt the first. What rewards were given of
    another process's completions is not known here.
    """
    logs, weights = logged_completions(trainer), trainer.reward_weights.tolist()
    rewards = {name: [round(value, 6) for value in values] for name, values in logs["rewards"].items()}
    total = [weighted_sum(scores, weights) for scores in zip(*rewards.values(), strict=True)]
    prompts, completions = [*map(transcript_of, logs["prompt"])], [*map(transcript_of, logs["completion"])]
    graded = getattr(trainer, "cogumi_graded", [])
    shown = [
        {
            "row": numbers.get(prompts[n]),
            "prompt": prompts[n][-MAX_CHARACTERS:],
            "completion": completions[n][:MAX_CHARACTERS],
            "graded": transcript_of(graded[n])[:MAX_CHARACTERS] if n < len(graded) else None,
            "reward": total[n],
            "rewards": {name: values[n] for name, values in rewards.items()},
        }
        for n in spread_by_reward(total)
    ]
    return {"reward": total, "rewards": rewards, "shown": shown}


def weighted_sum(rewards: tuple[float, ...], weights: list[float]) -> float:
    """Add rewards up as TRL does: those that are numbers; NaN if none is."""
    scored = [reward * weight for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return round(math.fsum(scored), 6) if scored else math.nan


def spread_by_reward(rewards: list[float]) -> list[int]:
    ranked = sorted((n for n, reward in enumerate(rewards) if not math.isnan(reward)), key=rewards.__getitem__)
    if len(ranked) <= ROLLOUT_EXAMPLES:
        return ranked
    return [ranked[round((len(ranked) - 1) * n / (ROLLOUT_EXAMPLES - 1))] for n in range(ROLLOUT_EXAMPLES)]


class Samples(TrainerCallback):
    """Writes samples after every `every` steps; None: at tenths of the steps. first: also before the first step."""

    def __init__(
        self,
        telemetry: Telemetry,
        tokenizer: Any,
        prompts: Dataset,
        every: int | None,
        options: Mapping[str, Any],
        first: bool = False,
    ) -> None:
        self.first, self.every = first, every
        self.telemetry, self.tokenizer, self.prompts, self.options = telemetry, tokenizer, prompts, options

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if self.first and state.global_step == 0:
            with self.telemetry.stage_beside("samples"):
                write_samples(self.telemetry.run_dir, model, self.tokenizer, self.prompts, 0, self.options)
        if self.every is None:
            self.every = max(MIN_LOOK_STEPS, math.ceil(state.max_steps / MAX_LOOKS))
        on_the_way = f"every {self.every} steps " if 0 < self.every < state.max_steps else ""
        when = f"before the first step, {on_the_way}and at the end (cogumi.samples_every)"
        if self.telemetry.ranks.leads:
            when += f", up to {self.options['max_new_tokens']} tokens each"
            log.info("samples: %d held-out prompts %s", min(SAMPLE_PROMPTS, len(self.prompts)), when)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **_: Any) -> None:
        step = state.global_step
        if self.every and step % self.every == 0 and step < state.max_steps:
            with self.telemetry.stage_beside("samples"):
                write_samples(self.telemetry.run_dir, model, self.tokenizer, self.prompts, step, self.options)


def write_samples(
    run_dir: Path, model: Any, tokenizer: Any, prompts: Dataset, step: int, options: Mapping[str, Any]
) -> None:
    """Add completions of the first prompts to samples.jsonl, in place of rows of this step and of later ones.

    prompts: `prompt` (text), `prompt_ids`, and the expected answer. options: of `complete_with_ends`.
    """
    drop_later_rows(run_dir / SAMPLES_FILE, step - 1)
    examples = prompts.select(range(min(SAMPLE_PROMPTS, len(prompts))))
    with preserve_rng_and_mode(model):
        written = complete_with_ends(model, tokenizer, list(examples["prompt_ids"]), **options)
    shown = examples.select_columns(
        [name for name in examples.column_names if name not in ("prompt_ids", "answer_ids")]
    )
    for example, (completion, ended) in zip(shown, written, strict=True):
        append_jsonl(run_dir / SAMPLES_FILE, {"step": step, **example, "completion": completion, "ended": ended})


@contextmanager
def preserve_rng_and_mode(model: nn.Module) -> Iterator[None]:
    """Restore, after the block, every random state and the training mode of every module."""
    modes = {module: module.training for module in model.modules()}
    try:
        with kept_random_state():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


# ------------------------------------------------------------------------------------------ run.log and status.json


class RunLog(logging.FileHandler):
    """run.log. If it cannot be written (disk full or read-only), that is printed once."""

    reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.reported:
            self.reported = True
            print(f"cogumi: {self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # of the buffer, which was reported; it must not replace the run's own error
            if not self.reported:
                raise


@contextmanager
def record_run(run_dir: Path, resumed: bool = False) -> Iterator[None]:
    """Write log lines to run.log and the run's end to status.json; print them too if the root logger has no handler.

    resumed: the directory holds an earlier part of this run, which is kept.
    """
    to_file = RunLog(run_dir / "run.log", encoding="utf-8")
    to_file.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s"))
    on_stdout = logging.StreamHandler(sys.stdout)
    on_stdout.setFormatter(VisibleFormatter())
    handlers: list[logging.Handler] = [to_file] if log.hasHandlers() else [to_file, on_stdout]
    on_stdout.setLevel(logging.INFO)  # run.log alone has the details
    level = log.level
    log.setLevel(logging.DEBUG if level in (logging.NOTSET, logging.INFO) else level)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    except BaseException as error:
        if isinstance(error, RefusedAtSetup) and not resumed:
            shutil.rmtree(run_dir)  # it holds no training, and the corrected run may want its name
            raise
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        reason = f"{type(error).__name__}: {error}"
        if by := requested_by(error):
            stage = read_json_or_empty(run_dir / "status.json").get("stage")
            when = FINISHED_AND_SAVED if stage == "train" else f"before or after the training (stage: {stage})"
            state, reason = "stopped", f"asked to by {by}: {when}"
        if isinstance(error, EndedByWatch):
            state, reason = error.state, error.reason
        log.log(logging.WARNING if state == "stopped" else logging.ERROR, "%s: %s", state, reason)
        known: dict[str, Any] = known_cause_of(error) if state == "failed" else {}
        if state == HUNG:
            known["retriable"] = True
        if "cause" in known:
            log.error("known cause: %s Fix: %s", known["cause"], known["fix"])
        if state == "failed":
            log.debug("the traceback:", exc_info=error)
            if "cause" in known or isinstance(error, UserCodeError):
                place = relative_path(str(run_dir / "run.log"))
                has_saved = any((run_dir / "checkpoints").glob("checkpoint-*"))
                again = "continues the run" if has_saved else "starts the run again"
                error.add_note(f"{TRACEBACK_IN}{place}; once the cause is mended, the same command {again}")
        if torch.cuda.is_initialized() and (health := read_gpu_health(torch.cuda.get_device_properties().uuid)):
            known["gpu_memory"] = {str(pid): size for pid, size in health.processes.items()}
        try:
            set_status(run_dir, state, reason=redact_text(reason), **known)
        except OSError as unwritten:  # a full disk must not hide what went wrong first
            log.error("status.json could not be written: %s", unwritten)
        raise
    finally:
        for handler in handlers:
            log.removeHandler(handler)
        log.setLevel(level)
        to_file.close()


def requested_by(error: BaseException) -> str:
    """Return what asked the run to end, if it was asked and has saved everything; else ""."""
    if FINISHED_AND_SAVED in error.args:
        return "Ctrl-C"
    signals = {128 + signal.SIGTERM: "SIGTERM", 128 + signal.SIGHUP: "SIGHUP (the terminal was closed)"}
    return signals.get(error.code, "") if isinstance(error, SystemExit) else ""  # type: ignore[arg-type]


def terminal_loggers() -> list[logging.Logger]:
    streams = sys.stdout, sys.stderr
    return [
        logger
        for logger in (logging.root, log)
        if any(getattr(handler, "stream", None) in streams for handler in logger.handlers)
    ]


def set_status(run_dir: Path, state: str, **more: Any) -> None:
    try:
        urls = read_section(run_dir / DECISIONS, "trackers").get("urls")
        more |= {"trackers": urls} if urls else {}
        write_json(run_dir / "status.json", {"state": state, "time": time.time(), **this_process(), **more})
    except OSError as error:  # only the end of a run has to be written
        if error.errno not in NO_SPACE or state not in ("running", "paused"):
            raise
        log.error("status.json stays as it was: %s", error)


def enter_stage(heart: Heartbeat, stage: str, activity: str = "") -> None:
    """Begin a stage: its seconds are counted, the run's status names it, and the log says what it does."""
    heart.meter.enter(stage)
    set_status(heart.run_dir, "running", stage=stage)
    if activity:
        log.info("%s ...", activity)


@contextmanager
def stage_inside(heart: Heartbeat, stage: str, activity: str) -> Iterator[None]:
    """Make the block a stage, and return to the one before."""
    outer = heart.meter.stage
    enter_stage(heart, stage, activity)
    yield
    enter_stage(heart, outer)


def truncate_metrics(run_dir: Path, state: Any) -> None:
    """Drop the metrics after the step that the training resumes from, since those are logged again.

    On a machine that fetched its checkpoint from a mirror, write what that checkpoint remembers.
    """
    path = run_dir / "metrics.jsonl"
    rows = read_jsonl(path)
    if not any("loss" in row for row in rows):
        rows += state.log_history
    # The summary of a training that a signal ended covers a part of it.
    remaining = [row for row in rows if row["step"] <= state.global_step and "train_runtime" not in row]
    text = "".join(map(json_line, remaining))
    if text and not (path.exists() and text == path.read_text(encoding="utf-8")):
        write_atomic(path, text)


def drop_later_rows(path: Path, step: int) -> None:
    """Drop the rows of steps after this one, from which the training is made again."""
    rows = read_jsonl(path)
    remaining = [row for row in rows if row["step"] <= step]
    if len(remaining) < len(rows):
        write_atomic(path, "".join(map(json_line, remaining)))
