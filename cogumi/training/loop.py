"""The training itself, with everything that watches it.

A training under way does what files in its run directory ask for. CHECKPOINT asks for a checkpoint. PAUSE asks for a
checkpoint and a wait between two steps, until the file PAUSED is removed. A red flag may ask for a pause as well.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from cogumi.checkpoints.disk_forecast import outlook
from cogumi.checkpoints.protection import protect, run_keep_limit
from cogumi.compile.compile_callback import CompileCallback
from cogumi.config.schema import CogumiSection, RunConfig
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.core.formatting import format_duration, one_line
from cogumi.core.run_directory import CHECKPOINT, DECISIONS, FORECAST, PAUSE, PAUSED, read_jsonl, write_section
from cogumi.disk.callback import DiskMonitorCallback
from cogumi.health.sentinel import EarlyEnd, Sentinel, judge_moved, sample_weights
from cogumi.health.verdict import Check, judge_gspo, judge_training
from cogumi.methods import dpo
from cogumi.methods.building import budget_reached
from cogumi.methods.examples import Examples
from cogumi.telemetry import trackers
from cogumi.telemetry.heartbeat import Heartbeat, Progress
from cogumi.telemetry.recorder import Telemetry, set_status, terminal_loggers, truncate_metrics
from cogumi.telemetry.samples import Rollouts, Samples, preserve_rng_and_mode
from cogumi.telemetry.status import BUDGET_SPENT
from cogumi.telemetry.throughput import Meter
from cogumi.training.resumption import was_evaluated

log = logging.getLogger("cogumi")
TIMES = 10  # at most so often on the way
SHARE = 0.02  # of the computing of the training, at most, for what is measured on the way
PASSES = 3  # of a training step: forward, and backward at twice its cost
LOOK_SECONDS = 1.0  # between two looks at the directory, which may be on a slow disk
PAUSE_SECONDS = 0.5
FORESEEN_AFTER = 10  # steps: before that the pace is not known well enough to speak of the end


class HeldOutLoss(TrainerCallback):
    """Asks for an evaluation at each tenth of the steps, or more rarely, so that it stays cheap."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.every = trainer, 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        rows = len(self.trainer.eval_dataset)
        step = args.train_batch_size * args.gradient_accumulation_steps * PASSES
        self.every = max(math.ceil(state.max_steps / TIMES), math.ceil(rows / step / SHARE))
        times = (state.max_steps - 1) // self.every
        on_the_way = f"every {self.every} steps " if times else ""
        cost = f"about {100 * (times + 2) * rows / step / state.max_steps:.1f} % of the computing (data.eval_rows)"
        log.info("held-out loss: %d rows before the first step, %sand at the end, %s", rows, on_the_way, cost)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            control.should_evaluate = True  # after the step's own row is logged


class BudgetCallback(TrainerCallback):
    """Ends the training, with a checkpoint, after the step in which `cogumi.max_hours` or `cogumi.max_cost` is reached.
    Both count all parts of a run, from the first reading of the data on."""

    def __init__(self, options: CogumiSection, meter: Meter, progress: Progress) -> None:
        self.options, self.meter, self.progress = options, meter, progress
        self.spent: str | None = None
        self.steps = 0
        self.foreseen = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.steps += 1
        left = self.progress.eta_seconds
        if not self.foreseen and left is not None and self.steps >= FORESEEN_AFTER:
            self.foreseen = True
            if said := budget_reached(self.options, self.meter.elapsed() + left):
                time_left = format_duration(left)
                log.warning("at this pace the training ends in %s, and before that the budget: %s", time_left, said)
        said = budget_reached(self.options, self.meter.elapsed())
        if said is not None and state.global_step < state.max_steps:
            self.spent = f"{said} after step {state.global_step} of {state.max_steps}"
            log.warning("the budget is spent: %s; the training ends with a checkpoint. Raise it to resume", self.spent)
            control.should_save = control.should_training_stop = True


class ControlCallback(TrainerCallback):
    """Does what is asked for by files. paused: in whose block time is no part of a step. excused: in whose block the training
    may be silent. asked_to_end: whether a signal has come. Goes before callbacks that take the time of a step."""

    def __init__(
        self,
        trainer: Any,
        directory: Path,
        paused: Callable[[], AbstractContextManager[None]],
        excused: Callable[[], AbstractContextManager[None]],
        asked_to_end: Callable[[], bool],
    ) -> None:
        self.trainer, self.directory = trainer, directory
        self.paused, self.excused, self.asked_to_end = paused, excused, asked_to_end
        self.reason: str | None = None
        self.looked = 0.0

    def pause(self, reason: str) -> None:
        """Have the training wait before its next step."""
        self.reason = reason

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        forget_requests(self.directory)  # what came too late

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS or state.global_step >= state.max_steps:
            return
        self.looked = now
        # What they ask for is about to be done, so they are removed.
        if remove_request(self.directory / PAUSE):
            control.should_save = True
            self.pause("asked to wait")
        if remove_request(self.directory / CHECKPOINT):
            log.info("step %d: a checkpoint, as asked", state.global_step)
            control.should_save = True

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait, where a checkpoint was just written, until the file is removed or a signal asks the training to end."""
        if self.reason is None:
            return
        step, path = state.global_step, self.directory / PAUSED
        text, self.reason = f"step {step}: {self.reason}\n", None
        protection = getattr(self.trainer, "cogumi_protection", None)
        if protection is not None:
            protection.saver.settle()  # the checkpoint of this step is there when the file is
        how = "`cogumi unpause`, or removing this file, ends the pause. A process that is ended now can be resumed."
        path.write_text(f"{text}{how}\n")
        set_status(self.directory, "paused", reason=text.strip())
        log.warning("training is paused after step %d; `cogumi unpause %s` ends the pause", step, self.directory)
        with self.excused(), self.paused():
            while path.exists() and not self.asked_to_end():
                time.sleep(PAUSE_SECONDS)
        if not remove_request(path):
            log.warning("the pause is over; training continues")
        set_status(self.directory, "running", stage="train")


def remove_request(path: Path) -> bool:
    """Remove the file; whether it was there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def forget_requests(directory: Path) -> None:
    for name in (CHECKPOINT, PAUSE, PAUSED):
        remove_request(directory / name)


@dataclass(frozen=True)
class TrainingOutcome:
    """How a training went. `ended`: why it stopped, with a checkpoint, before its last step; None where it did not."""

    checks: list[Check]
    sentinel: Sentinel
    ended: EarlyEnd | None


def fit(
    run: RunConfig, trainer: Any, tokenizer: PreTrainedTokenizerBase, examples: Examples, heart: Heartbeat
) -> TrainingOutcome:
    """Train, with the held-out loss before and after where the method has one, and judge what was logged."""
    run_dir, options = run.run_dir, run.cogumi
    start = sample_weights(trainer.model)
    telemetry = Telemetry(trainer, heart, options.method)
    trackers.set_tensorboard_directory(run_dir, trainer)
    trackers.begin_wandb(trainer)
    budget = BudgetCallback(options, heart.meter, heart.progress)
    trainer.add_callback(budget)
    trainer.add_callback(DiskMonitorCallback(log_path=run_dir / "disk.jsonl"))
    protect(
        trainer,
        keep=run_keep_limit(trainer.args.save_total_limit),
        on_full=options.on_full,
        fallback=options.fallback,
        mirror=options.mirror,
        on_hung=options.on_hung,
        log_path=run_dir / "run.log",
    )
    protection = trainer.cogumi_protection
    excused = protection.watchdog.excused
    if protection.saver.mirror is not None:
        heart.stalled = protection.saver.mirror.stalled

    def interrupted() -> bool:
        return protection.preemption.received is not None

    @contextmanager
    def while_compiling() -> Iterator[None]:
        set_status(run_dir, "running", stage="compile")
        with excused(), telemetry.untimed_stage("compile"):
            yield
        set_status(run_dir, "running", stage="train")

    samples_every = 0 if options.method == "gspo" and options.samples_every is None else options.samples_every
    if samples_every != 0 and examples.prompts is not None:
        aside = telemetry.timed_stage
        trainer.add_callback(Samples(run_dir, tokenizer, examples.prompts, samples_every, aside, heart, options.stop))
    measure_loss = examples.held_out is not None and options.method != "gspo"
    if measure_loss:
        trainer.evaluate = preserve_rng_and_mode(trainer.model)(trainer.evaluate)
        if run.train.get("eval_strategy") is None:
            trainer.add_callback(HeldOutLoss(trainer))
    if options.method == "gspo":
        trainer.add_callback(Rollouts(trainer, run_dir, telemetry.write_unless_full))
    waiting = ControlCallback(trainer, run_dir, partial(telemetry.untimed_stage, "paused"), excused, interrupted)
    sentinel = Sentinel(
        trainer, run_dir, options.method, options.flags, options.on_red, options.sanity, excused, waiting.pause
    )
    trainer.add_callback(waiting)
    trainer.add_callback(sentinel)
    sentinel.begin()  # before layers are compiled, which its shapes would cost time
    compiling = CompileCallback(trainer, options.compile, run_dir / DECISIONS, while_compiling, interrupted)
    trainer.add_callback(compiling)
    try:
        compiling.begin()
    except UsageError as error:
        raise RefusedAtSetup.like(error) from error
    if measure_loss and not was_evaluated(run_dir, 0):
        trainer.evaluate()
    with closing(telemetry), logging_redirect_tqdm(terminal_loggers()):  # lines above the bar, not in it
        try:
            log_disk_forecast(run, trainer)
            trainer.train()
        except (ValueError, ImportError, UsageError) as error:
            if trainer.state.global_step > 0:
                raise
            if isinstance(error, UsageError):  # what there is to resume from: another training's, or all of it damaged
                raise RefusedAtSetup.like(error) from error
            # Libraries look at some settings only when they are first used: a learning rate, a loss's name.
            raise RefusedAtSetup(f"refused before the first step: {one_line(error)}", key="train") from error
    state = trainer.state
    ended = sentinel.ended or (None if budget.spent is None else EarlyEnd(BUDGET_SPENT, budget.spent))
    # One that ended early is resumed later, and is to have logged then what it would have without stopping.
    if measure_loss and ended is None and not was_evaluated(run_dir, state.global_step):
        trainer.evaluate()
    trackers.close_tensorboard(trainer)
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    if not any("loss" in row for row in metrics):  # its end was fetched from a mirror
        truncate_metrics(run_dir, state)
        metrics = read_jsonl(run_dir / "metrics.jsonl")
    checks = judge_training(metrics, state.global_step, state.max_steps, ended is not None)
    checks.append(judge_moved(trainer.model, start, options.tuning))
    if options.method == "dpo":
        checks += dpo.judge_dpo(metrics, trainer.args)
    if options.method == "gspo":
        checks += judge_gspo(metrics, run_dir)
    return TrainingOutcome(checks, sentinel, ended)


def log_disk_forecast(run: RunConfig, trainer: Any) -> None:
    """Before the first step: how large checkpoints and the merged model will be, and whether there is room for them."""
    whole = run.cogumi.tuning == "full"
    try:
        found = outlook(
            trainer,
            keep=trainer.cogumi_protection.saver.keep,
            adapter_into=None if whole else run.run_dir / "adapter",
            merged_into=run.run_dir / "merged" if run.cogumi.merge or whole else None,
        )
    except UsageError as error:  # an optimizer that tells its size only after a step
        log.warning("disk: %s", error)
        return
    write_section(run.run_dir / FORECAST, "disks", {"fits": found.fits, "lines": found.lines})
    for line in found.lines:
        log.log(logging.INFO if found.fits else logging.WARNING, "disk: %s", line)
