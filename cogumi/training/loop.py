"""Train, with everything that watches a training.

A training under way does what files in its run directory ask for. CHECKPOINT asks for a checkpoint. PAUSE asks for a
checkpoint and a wait between two steps, until the file PAUSED is removed. A red flag may ask for a pause as well.
"""

import logging
import math
import os
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from cogumi.checkpoints.protection import DEFAULT_KEEP, keep_limit, protect
from cogumi.checkpoints.verify import last_good_checkpoint
from cogumi.compile.layers import compile_trainer
from cogumi.config.schema import RunConfig
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.core.formatting import format_duration, one_line
from cogumi.core.run_directory import (
    CHECKPOINT,
    DECISIONS,
    FORECAST,
    PAUSE,
    PAUSED,
    SAMPLES_FILE,
    STOP,
    read_jsonl,
    read_section,
    write_section,
)
from cogumi.disk.callback import DiskMonitorCallback
from cogumi.forecast.disk_forecast import count_saves, forecast_trainer
from cogumi.health.data_checks import count_planned_examples, spread
from cogumi.health.sentinel import EarlyEnd, Sentinel, judge_moved
from cogumi.health.verdict import Check, attempt, judge_divergence, judge_gspo, judge_training
from cogumi.merge.adapter_files import write_base_record
from cogumi.methods import dpo
from cogumi.methods.examples import CHANGED, DATA, Examples
from cogumi.stack.ranks import Ranks
from cogumi.telemetry import recorder, trackers
from cogumi.telemetry.heartbeat import Heartbeat, compare_rollouts
from cogumi.telemetry.mirrored_run import pack_run
from cogumi.telemetry.status import BUDGET_SPENT, NON_FINITE
from cogumi.telemetry.throughput import PAUSED_STAGE
from cogumi.training.resume import budget_reached

log = logging.getLogger("cogumi")
MAX_EVALUATIONS = 10  # between the first and the last step
MAX_EVALUATION_TIME_SHARE = 0.02  # of the training's computing
FLOPS_MULTIPLIER = 3  # of a training step: forward, and backward at twice its cost
PAID_SHARE = 0.05  # of the training's computing: for the held-out losses before and after it, or for samples each time
MIN_EVALUATION_ROWS, MIN_SAMPLE_TOKENS, MAX_SAMPLE_TOKENS = 8, 24, 64
SAVES = "saves"  # of decisions.json: the interval of saves by time
MAX_SAVE_SHARE = 0.02  # of the time, which is held before MAX_LOST_SECONDS
MAX_LOST_SECONDS, MIN_SAVE_SECONDS, SAVES_PER_RUN = 600.0, 60.0, 20
SAVED_BYTES_PER_SECOND = 1e9  # until a save was measured
LOOK_SECONDS = 1.0  # between two looks at the directory, which may be on a slow disk
PAUSE_SECONDS = 0.5
UNSAVED_SECONDS = 600.0  # from which a run without a checkpoint before its end is warned of


class Agreement(TrainerCallback):
    """Make all processes save, evaluate and stop as rank 0 decides. The last of the callbacks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        answers = [control.should_save, control.should_evaluate, control.should_training_stop]
        control.should_save, control.should_evaluate, control.should_training_stop = self.ranks.agree(answers)

    on_log = on_step_end


class ControlCallback(TrainerCallback):
    """Between steps: evaluate on `rows` held-out rows, end a training whose budget is spent, obey request files.

    Goes before callbacks that measure the time of a step.
    """

    def __init__(self, trainer: Any, run: RunConfig, telemetry: recorder.Telemetry, rows: int = 0) -> None:
        self.trainer, self.options, self.telemetry, self.rows = trainer, run.cogumi, telemetry, rows
        self.saves_by_time = run.saves_by_time
        self.every = 0  # steps between two held-out losses
        self.ended: EarlyEnd | None = None
        self.reason: str | None = None  # to wait before the next step
        self.looked = 0.0

    def pause(self, reason: str) -> None:
        self.reason = reason

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.rows:
            rows = args.train_batch_size * args.gradient_accumulation_steps
            step = getattr(self.trainer, "examples_per_step", rows) * FLOPS_MULTIPLIER
            self.every = max(
                math.ceil(state.max_steps / MAX_EVALUATIONS), math.ceil(self.rows / step / MAX_EVALUATION_TIME_SHARE)
            )
            on_the_way = f"every {self.every} steps " if self.every < state.max_steps else ""
            when = f"before the first step, {on_the_way}and at the end (data.eval_rows)"
            if self.telemetry.ranks.leads:
                log.info("held-out loss: %d rows %s", self.rows, when)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        forget_requests(self.telemetry.run_dir)  # what came too late

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        now, step = time.monotonic(), state.global_step
        if step >= state.max_steps:
            return
        if self.telemetry.pace.steps == 2 and self.telemetry.throughput.total.rollouts and self.telemetry.ranks.leads:
            self.log_outlook(step, min(state.max_steps, self.options.sanity or state.max_steps))
        if not self.saves_by_time:
            self.warn_if_unsaved(args.save_strategy.value, state)
        if self.every and step % self.every == 0:
            control.should_evaluate = True  # after the step's own row is logged
        if spent_budget := budget_reached(self.options, self.telemetry.meter.elapsed()):
            spent = f"{spent_budget} after step {step} of {state.max_steps}"
            self.ended = EarlyEnd(BUDGET_SPENT, spent)
            log.warning("the budget is spent: %s; the training ends with a checkpoint. Raise it to resume", spent)
            control.should_save = control.should_training_stop = True
        if now - self.looked < LOOK_SECONDS:
            return
        self.looked = now
        # What they ask for is about to be done, so they are removed.
        if remove_request(self.telemetry.run_dir / PAUSE):
            control.should_save = True
            self.pause("asked to wait")
        if remove_request(self.telemetry.run_dir / CHECKPOINT):
            log.info("step %d: a checkpoint, as asked", step)
            control.should_save = True

    def warn_if_unsaved(self, strategy: str, state: TrainerState) -> None:
        """Log after the first steps that a long run writes no checkpoint before its end, which only a signal would cause."""
        if self.telemetry.pace.steps != recorder.PACE_STEPS or not self.telemetry.ranks.leads:
            return
        steps, seconds = state.max_steps, self.telemetry.eta(0, state.max_steps) or 0.0
        saves = {"no": 0, "epoch": state.num_train_epochs}.get(strategy, count_saves(self.trainer, 0))
        if saves is None or saves > 1 or seconds < UNSAVED_SECONDS:
            return
        setting = f"save_steps: {state.save_steps}" if strategy == "steps" else f"save_strategy: {strategy}"
        text = "train.%s writes no checkpoint before the end of %d steps, in about %s; set train.save_strategy: steps and %s"
        log.warning(text, setting, steps, format_duration(seconds), f"train.save_steps: {math.ceil(steps / 10)}")

    def log_outlook(self, step: int, steps: int) -> None:
        """Log the run's time and cost, and where its budget ends it, from the first two steps and their rollouts."""
        telemetry, meter = self.telemetry, self.telemetry.meter
        left = {end: telemetry.eta(step, end) or 0.0 for end in range(step, steps + 1)}
        reached = {end: budget_reached(self.options, meter.elapsed() + seconds) for end, seconds in left.items()}
        last = next((end for end, spent in reached.items() if spent), steps)
        rollout, cost = compare_rollouts(telemetry.run_dir, telemetry.throughput.total), meter.cost(left[steps])
        forecast = "{forecast_seconds:.3g} s forecast (factor {factor:.3g})" if rollout["factor"] else "not forecast"
        outlook = f"rollout: {{measured_seconds:.3g}} s measured, {forecast}: this run will take about ".format(
            **rollout
        )
        outlook += format_duration(meter.elapsed() + left[steps]) + ("" if cost is None else f", cost ${cost:,.2f}")
        outlook += f", ends at about step {last} of {steps} ({reached[last]})" if last < steps else ""
        log.log(logging.WARNING if last < steps else logging.INFO, "%s", outlook)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait after a requested checkpoint until the file is removed or a signal asks the training to end."""
        reason, self.reason = self.reason, None
        if reason is None or not self.telemetry.ranks.leads:  # the others wait for the first at their next exchange
            return
        directory, protection, step = self.telemetry.run_dir, self.trainer.cogumi_protection, state.global_step
        path, reason = directory / PAUSED, f"step {step}: {reason}"
        protection.saver.settle()  # the checkpoint of this step is there when the file is
        how = "`cogumi unpause`, or removing this file, ends the pause. A process that is ended now can be resumed."
        path.write_text(f"{reason}\n{how}\n")
        recorder.set_status(directory, "paused", reason=reason)
        log.warning("training is paused after step %d; `cogumi unpause %s` ends the pause", step, directory)
        try:
            with protection.watchdog.excused(), self.telemetry.meter.stage_inside(PAUSED_STAGE):
                while path.exists() and protection.preemption.received is None:
                    time.sleep(PAUSE_SECONDS)
        finally:
            if not remove_request(path):
                log.warning("the pause is over; training continues")
            recorder.set_status(directory, "running", stage="train")


class SaveTimer(TrainerCallback):
    """Save by the clock where the configuration does not say when: twenty times a run, one to ten minutes apart.

    Saves that would take more than 2 % of the time are further apart. Rank 0 decides, and `Agreement` tells the others.
    """

    def __init__(self, trainer: Any, telemetry: recorder.Telemetry) -> None:
        self.saver, self.telemetry, self.logged = trainer.cogumi_protection.saver, telemetry, math.inf
        self.kept = read_section(telemetry.run_dir / DECISIONS, SAVES)  # by the earlier parts of this run

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.save_steps, self.last = 0, time.monotonic()  # TRL's default, a number of steps, saves nothing

    def on_save(self, *_: Any, **__: Any) -> None:
        self.last = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step, eta, run_dir = state.global_step, self.telemetry.eta, self.telemetry.run_dir
        next_step, left = eta(step, step + 1), eta(step, state.max_steps)
        if not next_step or not left or not self.telemetry.ranks.leads:
            return
        share_of_run = left * state.max_steps / (state.max_steps - step) / SAVES_PER_RUN
        interval = self.kept.get("interval_seconds") or min(MAX_LOST_SECONDS, max(MIN_SAVE_SECONDS, share_of_run))
        cost = fmean(self.saver.write_seconds or [self.kept.get("save_seconds") or 0.0])
        cost = cost or read_section(run_dir / FORECAST, "disks")["checkpoint"] / SAVED_BYTES_PER_SECOND
        cheapest, elapsed = cost / MAX_SAVE_SHARE, time.monotonic() - self.last
        lost = max(interval, cheapest, next_step)
        if not 0.8 < lost / self.logged < 1.25:
            self.logged, limit = lost, "; oftener would cost more" if lost == cheapest > interval else ""
            self.kept = {"interval_seconds": interval, "save_seconds": cost, "lost_seconds_at_most": lost}
            self.telemetry.write_unless_full(lambda: write_section(run_dir / DECISIONS, SAVES, self.kept))
            text = "saves by time (train.save_steps is not set): one takes %.2g s, %.1f %% of the time; at most %s are lost%s"
            level = logging.INFO if left > lost else logging.DEBUG
            log.log(level, text, cost, 100 * cost / lost, format_duration(lost), limit)
        # The next step may end too late. A commit under way would have to be waited for.
        if elapsed >= cheapest and elapsed + next_step > interval and self.saver.pending is None:
            control.should_save = True


def remove_request(path: Path) -> bool:
    """Remove the file; return whether there was one."""
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def forget_requests(directory: Path) -> None:
    for name in (CHECKPOINT, PAUSE, PAUSED, STOP):
        remove_request(directory / name)


@dataclass(frozen=True)
class TrainingOutcome:
    """How a training went. ended: why it stopped, with a checkpoint, before its last step; None if it did not."""

    checks: list[Check]
    sentinel: Sentinel
    ended: EarlyEnd | None


def fit(
    run: RunConfig,
    trainer: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    heart: Heartbeat,
    ranks: Ranks | None = None,
) -> TrainingOutcome:
    """Train, with the held-out loss before the first step if the method has one. `judge_fit` follows.

    Each process of a training calls this; rank 0 decides for all.
    """
    ranks = ranks or Ranks()
    run_dir, options, rl = run.run_dir, run.cogumi, run.cogumi.method == "gspo"
    tf32 = run.train.get("tf32")
    if rl or tf32 is not None:  # transformers' switch acts once a process and value, and a backend's own setting wins
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    telemetry = recorder.Telemetry(trainer, heart, options.method, ranks)
    trackers.set_tensorboard_directory(run_dir, trainer)
    trackers.begin_trackers(run_dir, trainer)
    if os.environ.get("LOCAL_RANK", "0") in ("0", "-1"):  # one process of a machine watches its disks
        trainer.add_callback(DiskMonitorCallback(log_path=run_dir / "disk.jsonl"))
    trainer.cogumi_watchdog = heart.watch
    protect(
        trainer,
        keep=keep_limit(trainer.args.save_total_limit) or DEFAULT_KEEP,
        on_full=options.on_full,
        mirror=options.mirror,
        on_hung=options.on_hung,
        log_path=run_dir / "run.log",
    )
    protection = trainer.cogumi_protection
    protection.saver.describe_adapter = lambda place: write_base_record(place, trainer.model, run.model.revision)
    excused = protection.watchdog.excused
    if (mirror := protection.saver.mirror) is not None:
        heart.stalled, heart.mirror_lag = mirror.stalled, mirror.lag
        protection.saver.pack_run = partial(pack_run, run_dir)
    samples_every = 0 if rl and options.samples_every is None else options.samples_every
    first = trainer.is_fsdp_enabled and ranks.tell(not (run_dir / SAMPLES_FILE).exists())  # by all processes together
    if (samples_every != 0 or first) and examples.prompts is not None:
        shown = examples.prompts, samples_every, sample_options(run, trainer), first
        trainer.add_callback(recorder.Samples(telemetry, tokenizer, *shown))
    if rl:
        recorder.record_rollouts(trainer, telemetry)
    measure_loss = examples.held_out is not None and not rl
    if measure_loss:
        if run.train.get("eval_strategy") is None:
            limit_held_out(run_dir, trainer, ranks)
        rows = len(trainer.eval_dataset)
        shared = rows - rows % ranks.count or rows
        if shared < rows:
            trainer.eval_dataset = trainer.eval_dataset.select(range(shared))
        trainer.args.per_device_eval_batch_size = even_batch(
            shared, trainer.args.per_device_eval_batch_size, ranks.count
        )
        trainer.evaluate = recorder.preserve_rng_and_mode(trainer.model)(trainer.evaluate)
    on_the_way = measure_loss and run.train.get("eval_strategy") is None
    control = ControlCallback(trainer, run, telemetry, len(trainer.eval_dataset) if on_the_way else 0)
    sentinel = Sentinel(
        trainer, run_dir, options.method, options.flags, options.on_red, options.sanity, excused, control.pause, ranks
    )
    trainer.add_callback(control)
    trainer.add_callback(sentinel)
    if run.saves_by_time:
        trainer.add_callback(SaveTimer(trainer, telemetry))
    if ranks.count > 1:
        trainer.add_callback(Agreement(ranks))
    if not trainer.is_fsdp_enabled:
        with recorder.stage_inside(heart, "data checks", "checking the batches, and completions against their prompts"):
            sentinel.begin()  # before layers are compiled, which its shapes would cost time
    try:
        compile_trainer(trainer, options.compile, run_dir / DECISIONS, telemetry.write_unless_full)
    except UsageError as error:
        raise RefusedAtSetup.like(error) from error
    if measure_loss and not ranks.tell(was_evaluated(run_dir, 0)):
        if ranks.count == 1:
            activity = f"held-out loss before the first step, of {len(trainer.eval_dataset)} rows"
            with recorder.stage_inside(heart, "eval", activity):
                trainer.evaluate()
        else:  # once the model is wrapped (`cogumi.patches.trl_internals.forget_evaluation`)
            trainer.args.eval_on_start = True
    with closing(telemetry), logging_redirect_tqdm(recorder.terminal_loggers()):  # lines above the bar, not in it
        try:
            if ranks.leads:
                with recorder.stage_inside(heart, "disk forecast", ""):
                    log_disk_forecast(run, trainer)
            summary = trainer.train().metrics
            if not any("train_runtime" in row for row in read_jsonl(run_dir / "metrics.jsonl")):  # it trained no step
                trainer.log(summary)
        except (ValueError, ImportError, UsageError) as error:
            if trainer.state.global_step > 0:
                raise
            if isinstance(error, UsageError):  # what there is to resume from: another training's, or all of it damaged
                raise RefusedAtSetup.like(error) from error
            # Libraries look at some settings only when they are first used: a learning rate, a loss's name.
            raise RefusedAtSetup(f"refused before the first step: {one_line(error)}", key="train") from error
    if fault := protection.finite.ended or protection.finite.find_fault():
        last = last_good_checkpoint(trainer.args.output_dir) if ranks.leads else None
        last_finite = f"the last finite checkpoint is {last.name}" if last else "no checkpoint was written before"
        sentinel.ended = EarlyEnd(NON_FINITE, f"{fault}; {last_finite}")
    return TrainingOutcome([], sentinel, ranks.tell(sentinel.ended or control.ended))


def judge_fit(run: RunConfig, trainer: Any, fitted: TrainingOutcome, ranks: Ranks) -> None:
    """Measure the held-out loss, and add the checks of a training whose adapter is saved. Each process calls this."""
    run_dir, options, state, checks = run.run_dir, run.cogumi, trainer.state, fitted.checks
    # One that ended early is resumed later, and is to have logged then what it would have without stopping.
    measure_loss = trainer.eval_dataset is not None and options.method != "gspo" and fitted.ended is None
    if ranks.tell(measure_loss and not was_evaluated(run_dir, state.global_step)):
        log.info("held-out loss after the last step, of %d rows ...", len(trainer.eval_dataset))
        checks += attempt("held-out loss", trainer.evaluate)
    trackers.close_tensorboard(trainer)
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    if measure_loss and len(held_out := [row["eval_loss"] for row in metrics if "eval_loss" in row]) > 1:
        log.info("held-out loss: %.3f before the first step, %.3f after the last", held_out[0], held_out[-1])
    if not any("loss" in row for row in metrics):  # its end was fetched from a mirror
        recorder.truncate_metrics(run_dir, state)
        metrics = read_jsonl(run_dir / "metrics.jsonl")
    if read_section(run_dir / DECISIONS, DATA).get(CHANGED):
        figure, fix = (
            "changed since the run began",
            "begin a new run to compare losses before and after on the same rows",
        )
        checks.append(Check("held-out rows", figure, "those of the first step", True, fix, warning=True))
    checks += attempt("steps", judge_training, metrics, state.global_step, state.max_steps, fitted.ended is not None)
    lost = trainer.cogumi_protection.saver.lost_best
    if lost and trainer.args.load_best_model_at_end and not state.best_model_checkpoint:
        figure, fix = f"{lost} is not there any more, and the last weights stay", "take an earlier one of checkpoints/"
        checks.append(Check("best checkpoint", figure, "loaded at the end (train.load_best_model_at_end)", False, fix))
    has_gradient = any(row.get("grad_norm") for row in metrics)
    checks += attempt("weights", judge_moved, trainer.model, fitted.sentinel.start, options.tuning, has_gradient)
    if options.method == "dpo":
        checks += attempt("reference", dpo.judge_dpo, metrics, trainer.args)
    if options.method == "gspo":
        checks += attempt("rewards", judge_gspo, metrics, run_dir)
    else:
        checks += attempt("loss", judge_divergence, metrics)


def sample_options(run: RunConfig, trainer: Any) -> dict[str, Any]:
    """Return the stops and the length of samples. A token reads all weights, which takes the time of a short example."""
    paid = int(PAID_SHARE * FLOPS_MULTIPLIER * count_planned_examples(trainer))
    is_short = run.cogumi.method != "gspo" and paid < MAX_SAMPLE_TOKENS  # whose rollouts cost more than any sample
    return {"stops": run.cogumi.stop, "max_new_tokens": max(MIN_SAMPLE_TOKENS, paid) if is_short else MAX_SAMPLE_TOKENS}


def limit_held_out(run_dir: Path, trainer: Any, ranks: Ranks) -> None:
    """Choose the held-out rows, spread over all, of which a short training pays for the loss before and after it."""
    passes, rows = FLOPS_MULTIPLIER * count_planned_examples(trainer) * ranks.count, len(trainer.eval_dataset)
    place = run_dir / DECISIONS, "held_out_loss"
    decided = ranks.decide(lambda: read_section(*place).get("measured"))
    measured = decided or max(MIN_EVALUATION_ROWS, int(PAID_SHARE * passes / 2))
    is_older = ranks.decide(lambda: was_evaluated(run_dir, 0) and not decided)  # than this limit
    if measured < rows and not is_older:
        trainer.eval_dataset = trainer.eval_dataset.select(spread(rows, measured))
        ranks.decide(lambda: write_section(*place, {"measured": measured, "held_out": rows}))
        text = (
            "held-out losses of %d of the %d rows, %.0f %% of the training's computing; train.eval_strategy takes all"
        )
        log.log(logging.INFO if ranks.leads else logging.DEBUG, text, measured, rows, 200 * measured / passes)


def even_batch(rows: int, batch: int, count: int) -> int:
    """Return the largest batch up to `batch` in which `count` processes see all rows once; `batch` if there is none."""
    return next((size for size in range(batch, 0, -1) if rows % (size * count) == 0), batch) if count > 1 else batch


def log_disk_forecast(run: RunConfig, trainer: Any) -> None:
    """Log how large checkpoints and the merged model will be, and whether they fit, before the first step."""
    is_full = run.cogumi.tuning == "full"
    forecast = forecast_trainer(
        trainer,
        by_time=run.saves_by_time,
        keep=trainer.cogumi_protection.saver.keep,
        adapter_into=None if is_full else run.run_dir / "adapter",
        merged_into=run.run_dir / "merged" if run.cogumi.merge or is_full else None,
        merge_dtype=run.merge_dtype,
    )
    disks = {"fits": forecast.fits, "lines": forecast.lines, "checkpoint": forecast.checkpoint}
    write_section(run.run_dir / FORECAST, "disks", disks)
    for line in forecast.lines:
        log.log(logging.INFO if forecast.fits else logging.WARNING, "disk: %s", line)


def was_evaluated(run_dir: Path, step: int) -> bool:
    return any("eval_loss" in row and row["step"] == step for row in read_jsonl(run_dir / "metrics.jsonl"))
