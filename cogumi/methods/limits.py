"""Where a run ends by itself: after a sanity check, or when its time or money is spent."""

import dataclasses
import logging
import math
from itertools import count
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.config.binding import config_class
from cogumi.config.schema import TRL_CONFIGS, CogumiSection, RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import duration
from cogumi.core.run_directory import read_json
from cogumi.health.flags_sft import ENOUGH_ROWS
from cogumi.methods.arguments import METHODS
from cogumi.telemetry.heartbeat import Progress
from cogumi.telemetry.stage_timer import HEARTBEAT, Meter
from cogumi.telemetry.status import BUDGET_SPENT


def refuse_blind_check(run: RunConfig) -> None:
    """Raise UsageError for a sanity check that can log too few rows for another answer than not shown."""
    sanity = run.cogumi.sanity
    if sanity is None:
        return
    settings, longest = logging_settings(run) | {"sanity": sanity}, int(run.train.get("max_steps") or 0)
    steps = min(sanity, longest) if longest > 0 else sanity
    found = rows_to_judge(settings, steps)
    if found is None or found >= ENOUGH_ROWS:
        return
    what = "rollouts" if run.cogumi.method == "gspo" else "rows"
    raise UsageError(
        f"cogumi.sanity {sanity} would log {found} {what}, and {ENOUGH_ROWS} are needed to judge",
        fix=f"set {what_logs_enough(settings, steps, longest)}",
    )


def what_logs_enough(settings: dict[str, Any], steps: int, longest: int) -> str:
    """The keys to change for ENOUGH_ROWS in so many steps; or, where these are too few, with more steps."""
    if settings["logging_strategy"] == "no":
        return f"train.logging_strategy to steps, and cogumi.sanity to {ENOUGH_ROWS} or more"

    def is_enough(steps: int, every: int) -> bool:
        return (rows_to_judge(settings | {"logging_steps": every}, steps) or 0) >= ENOUGH_ROWS

    # The first step is logged besides.
    for every in range(steps // (ENOUGH_ROWS - 1), 0, -1):
        if is_enough(steps, every):
            return f"train.logging_steps to {every} or less"
    enough = next(more for more in count(steps) if is_enough(more, 1))
    said = [f"cogumi.sanity to {enough} or more"] * (settings["sanity"] < enough)
    said += ["train.logging_steps to 1"] * (settings["logging_steps"] != 1)
    said += [f"train.max_steps to {enough} or more"] * (0 < longest < enough)
    return ", ".join(said)


def logging_settings(run: RunConfig) -> dict[str, Any]:
    """What decides how many rows are logged, with TRL's defaults. TRL's own object is not made: it sets up the device."""
    # So that the shortest run has a loss to judge (cogumi.methods.arguments).
    given = {"logging_first_step": True, **METHODS[run.cogumi.method].arguments(run)}
    fields = dataclasses.fields(config_class(TRL_CONFIGS[run.cogumi.method]))
    settings = {field.name: field.default for field in fields} | {k: v for k, v in given.items() if v is not None}
    strategy = settings["logging_strategy"]
    return settings | {"logging_strategy": str(getattr(strategy, "value", strategy))}


def rows_to_judge(settings: dict[str, Any], steps: int) -> int | None:
    """How many rows `diagnosis.safe_to_scale` would have after so many steps: those of losses, or for GRPO those of rollouts.

    None where that is known when the data is there: a logging strategy of epochs, a share of the steps of some epochs.
    """
    if settings["logging_strategy"] != "steps":
        return 0 if settings["logging_strategy"] == "no" else None
    every = settings["logging_steps"]
    if every < 1:
        if settings["max_steps"] <= 0:
            return None
        every = math.ceil(settings["max_steps"] * every)
    logged = [
        step for step in range(1, steps + 1) if step % every == 0 or (step == 1 and settings["logging_first_step"])
    ]
    if "steps_per_generation" not in settings:
        return len(logged)
    batches = settings["gradient_accumulation_steps"]  # of one optimizer step
    between = settings["steps_per_generation"] or (
        settings["generation_batch_size"] // settings["per_device_train_batch_size"]
        if settings["generation_batch_size"]
        else batches
    )
    between *= settings["num_iterations"]
    return len({math.ceil(step * batches / between) for step in logged})


# --------------------------------------------------------------------------------------------------------------- budget


log = logging.getLogger("cogumi")
FORESEEN_AFTER = 10  # steps: before that the pace is not known well enough to speak of the end


class Budget(TrainerCallback):
    """Ends the training after the step in which `cogumi.max_hours` or `cogumi.max_cost` is reached, and has it saved.

    Both count all parts of a run, from the first reading of the data on. What comes after the training (adapter,
    verdict) takes its time beyond that; the merge is left for when the run is over.
    """

    def __init__(self, options: CogumiSection, meter: Meter, progress: Progress) -> None:
        self.max_hours, self.max_cost, self.meter, self.progress = options.max_hours, options.max_cost, meter, progress
        self.spent: str | None = None
        self.steps = 0
        self.foreseen = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.steps += 1
        self.foresee()
        said = reached(self.meter.elapsed(), self.meter.cost(), self.max_hours, self.max_cost)
        if said is not None and state.global_step < state.max_steps:
            self.spent = f"{said} after step {state.global_step} of {state.max_steps}"
            log.warning("the budget is spent: %s; the training ends with a checkpoint. Raise it to go on", self.spent)
            control.should_save = control.should_training_stop = True

    def foresee(self) -> None:
        """Say once, early, that the budget will not do."""
        left = self.progress.eta_seconds
        if self.foreseen or left is None or self.steps < FORESEEN_AFTER:
            return
        self.foreseen = True
        said = reached(self.meter.elapsed() + left, self.meter.cost(left), self.max_hours, self.max_cost)
        if said is not None:
            log.warning("at this pace the training ends in %s, and before that the budget: %s", duration(left), said)


def reached(seconds: float, cost: float | None, max_hours: float | None, max_cost: float | None) -> str | None:
    """Which limit is reached, in words; None if none is."""
    if max_hours is not None and seconds >= max_hours * 3600:
        return f"{seconds / 3600:.2f} h of cogumi.max_hours {max_hours:g}"
    if max_cost is not None and cost is not None and cost >= max_cost:
        return f"${cost:.{2 if cost >= 1 else 4}f} of cogumi.max_cost {max_cost:g}"
    return None


def refuse_impossible(options: CogumiSection) -> None:
    """Raise UsageError for a budget in money where nobody said what an hour costs."""
    if options.max_cost is not None and options.price_per_hour is None:
        raise UsageError(
            f"cogumi.max_cost {options.max_cost:g}: no hourly price to count by",
            fix="set cogumi.price_per_hour as well",
        )


def refuse_spent(run_dir: Path, options: CogumiSection) -> None:
    """Raise UsageError for a run that its budget has ended, started again with no more of it: it would end at once."""
    if read_json(run_dir / "status.json").get("state") != BUDGET_SPENT or not (run_dir / HEARTBEAT).exists():
        return
    seconds = read_json(run_dir / HEARTBEAT).get("elapsed_seconds", 0.0)
    cost = None if options.price_per_hour is None else seconds / 3600 * options.price_per_hour
    said = reached(seconds, cost, options.max_hours, options.max_cost)
    if said is not None:
        raise UsageError(f"the budget of this run is spent ({said})", place=run_dir, fix="raise it to go on")
