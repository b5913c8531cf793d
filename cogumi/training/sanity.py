"""Whether a sanity check (`cogumi.sanity`) can log enough rows for an answer: asked before there is a run."""

import dataclasses
import math
from itertools import count
from typing import Any

from cogumi.config import TRL_CONFIGS, RunConfig
from cogumi.config_binding import config_class
from cogumi.errors import UsageError
from cogumi.training.arguments import METHODS
from cogumi.training.flags_sft import ENOUGH_ROWS


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
    # So that the shortest run has a loss to judge (cogumi.training.arguments).
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
