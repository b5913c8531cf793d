"""A run that ends when its time or its money is spent: with a checkpoint, from which a larger budget goes on."""

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.config import CogumiSection
from cogumi.errors import UsageError
from cogumi.run_status import BUDGET_SPENT
from cogumi.rundir import read_json
from cogumi.training.heartbeat import Progress
from cogumi.training.meter import HEARTBEAT, Meter
from cogumi.words import duration

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
