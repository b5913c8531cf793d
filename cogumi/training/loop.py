"""The training itself, with everything that watches it.

Where `train.eval_strategy` says nothing it is measured at each tenth of the steps, or more rarely, so that it stays cheap.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.checkpoints.disk_forecast import outlook
from cogumi.checkpoints.protection import kept_by_runs, protect
from cogumi.compile.compile_callback import Compiling
from cogumi.config.schema import RunConfig
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import DECISIONS, FORECAST, read_jsonl, write_section
from cogumi.disk.callback import DiskMonitorCallback
from cogumi.health import full_finetune
from cogumi.health.sentinel import Ended, Sentinel
from cogumi.health.verdict import Check, judge_adapter, judge_gspo, judge_training
from cogumi.methods import dpo
from cogumi.methods.examples import Examples
from cogumi.methods.limits import Budget
from cogumi.models.adapters import largest_change
from cogumi.telemetry import trackers
from cogumi.telemetry.heartbeat import Heartbeat
from cogumi.telemetry.recorder import Telemetry, on_screen, set_status, take_up_metrics
from cogumi.telemetry.samples import Rollouts, Samples, as_before
from cogumi.telemetry.stage_timer import Meter
from cogumi.telemetry.status import BUDGET_SPENT
from cogumi.training.control_files import Waiting
from cogumi.training.resumption import was_evaluated

log = logging.getLogger("cogumi")
TIMES = 10  # at most so often on the way
SHARE = 0.02  # of the computing of the training, at most, for what is measured on the way
PASSES = 3  # of a training step: forward, and backward at twice its cost


class HeldOut(TrainerCallback):
    """Asks for an evaluation after every so many steps."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.every = trainer, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        rows = len(self.trainer.eval_dataset)
        step = args.train_batch_size * args.gradient_accumulation_steps * PASSES
        self.every = max(math.ceil(state.max_steps / TIMES), math.ceil(rows / step / SHARE))
        times = (state.max_steps - 1) // self.every
        log.info(
            "held-out loss: %d rows before the first step, %sand at the end, about %.1f %% of the computing%s (data.eval_rows)",
            rows, f"every {self.every} steps " if times else "", 100 * (times + 2) * rows / step / state.max_steps,
            ", without the compilation before the first (train.torch_compile)" if args.torch_compile else "",
        )  # fmt: skip

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            control.should_evaluate = True  # after the step's own row is logged


def evaluate_without_trace(trainer: Any) -> None:
    """Have a trainer put back random states and modes after each evaluation."""
    evaluate = trainer.evaluate

    @wraps(evaluate)
    def as_if_not(*args: Any, **kwargs: Any) -> Any:
        with as_before(trainer.model):
            return evaluate(*args, **kwargs)

    trainer.evaluate = as_if_not


# ----------------------------------------------------------------------------------------------------------------- loop


@dataclass(frozen=True)
class Fitted:
    """How a training went. `ended`: why it stopped, with a checkpoint, before its last step; None where it did not."""

    checks: list[Check]
    sentinel: Sentinel
    ended: Ended | None


def fit(
    run: RunConfig, trainer: Any, tokenizer: PreTrainedTokenizerBase, examples: Examples, heart: Heartbeat
) -> Fitted:
    """Train, with the held-out loss before and after where the method has one, and judge what was logged."""
    run_dir, options = run.run_dir, run.cogumi
    start = full_finetune.sample_of(trainer.model) if options.tuning == "full" else {}
    telemetry = Telemetry(heart, options.method)
    telemetry.attach(trainer)
    trackers.write_into(run_dir, trainer)
    trackers.begin_wandb(trainer)
    budget = Budget(options, heart.meter, heart.progress)
    trainer.add_callback(budget)
    trainer.add_callback(DiskMonitorCallback(log_path=run_dir / "disk.jsonl"))
    protect(
        trainer,
        keep=kept_by_runs(trainer.args.save_total_limit),
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
        with excused(), telemetry.once("compile"):
            yield
        set_status(run_dir, "running", stage="train")

    samples_every = 0 if options.method == "gspo" and options.samples_every is None else options.samples_every
    if samples_every != 0 and examples.prompts is not None:
        samples = Samples(
            run_dir, tokenizer, examples.prompts, samples_every, telemetry.aside, heart.meter.seconds, options.stop
        )
        trainer.add_callback(samples)
    measure_loss = examples.held_out is not None and options.method != "gspo"
    if measure_loss:
        evaluate_without_trace(trainer)
    if measure_loss and run.train.get("eval_strategy") is None:
        trainer.add_callback(HeldOut(trainer))
    if options.method == "gspo":
        trainer.add_callback(Rollouts(trainer, run_dir, telemetry.unless_full))
    waiting = Waiting(trainer, run_dir, partial(telemetry.once, "paused"), excused, interrupted)
    sentinel = Sentinel(
        trainer,
        run_dir,
        options.method,
        options.flags,
        options.on_red,
        options.sanity,
        excused,
        waiting.pause,
    )
    trainer.add_callback(waiting)
    trainer.add_callback(sentinel)
    sentinel.begin()  # before layers are compiled, which its shapes would cost time
    compiling = Compiling(trainer, options.compile, run_dir / DECISIONS, while_compiling, interrupted)
    trainer.add_callback(compiling)
    try:
        compiling.begin()
    except UsageError as error:
        raise RefusedAtSetup.like(error) from error
    if measure_loss and not was_evaluated(run_dir, 0):
        trainer.evaluate()
    with closing(telemetry), logging_redirect_tqdm(on_screen()):  # lines above the bar, not in it
        try:
            say_what_the_disks_get(run, trainer)
            trainer.train()
        except (ValueError, ImportError, UsageError) as error:
            if trainer.state.global_step > 0:
                raise
            if isinstance(error, UsageError):  # what there is to resume from: another training's, or all of it damaged
                raise RefusedAtSetup.like(error) from error
            # Libraries look at some settings only when they are first used: a learning rate, a loss's name.
            raise RefusedAtSetup(f"refused before the first step: {one_line(error)}", key="train") from error
    state = trainer.state
    ended = sentinel.ended or (None if budget.spent is None else Ended(BUDGET_SPENT, budget.spent))
    # One that ended early goes on later, and is to have logged then what it would have without stopping.
    if measure_loss and ended is None and not was_evaluated(run_dir, state.global_step):
        trainer.evaluate()
    say_what_watching_took(heart.meter, trainer.args.torch_compile)
    trackers.close(trainer)
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    if not any("loss" in row for row in metrics):  # its end was fetched from a mirror
        take_up_metrics(run_dir, state)
        metrics = read_jsonl(run_dir / "metrics.jsonl")
    checks = judge_training(metrics, state.global_step, state.max_steps, ended is not None)
    checks.append(
        full_finetune.judge_moved(trainer.model, start) if options.tuning == "full" else adapter_moved(run, trainer)
    )
    if options.method == "dpo":
        checks += dpo.judge_dpo(metrics, trainer.args)
    if options.method == "gspo":
        checks += judge_gspo(metrics, run_dir)
    return Fitted(checks, sentinel, ended)


def adapter_moved(run: RunConfig, trainer: Any) -> Check:
    start = run.model.adapter
    measured = "max |B|" if start is None else f"largest change from {start}"
    return judge_adapter(largest_change(trainer.model, start), measured)


def say_what_watching_took(meter: Meter, compiled: bool) -> None:
    """What evaluation and samples have cost, of the time since training began."""
    spent = meter.seconds()
    watching = {
        name: spent[stage] for stage, name in (("eval", "held-out loss"), ("samples", "samples")) if stage in spent
    }
    if watching:
        said = " and ".join(f"{name} {seconds:.1f} s" for name, seconds in watching.items())
        share = sum(watching.values()) / (sum(watching.values()) + spent.get("train", 0.0))
        compilation = ", the compilation that they waited for included" if compiled else ""
        log.info("%s: %.1f %% of the time of the training%s", said, 100 * share, compilation)


def say_what_the_disks_get(run: RunConfig, trainer: Any) -> None:
    """Before the first step: how large checkpoints and the merged model will be, and whether there is room for them."""
    whole = run.cogumi.tuning == "full"
    merged = run.run_dir / "merged" if run.cogumi.merge or whole else None
    try:
        found = outlook(
            trainer,
            keep=trainer.cogumi_protection.saver.keep,
            adapter_into=None if whole else run.run_dir / "adapter",
            merged_into=merged,
        )
    except UsageError as error:  # an optimizer that tells its size only after a step
        log.warning("disk: %s", error)
        return
    write_section(run.run_dir / FORECAST, "disks", {"fits": found.fits, "lines": found.lines})
    for line in found.lines:
        log.log(logging.INFO if found.fits else logging.WARNING, "disk: %s", line)
