"""Rules for every method: finite numbers, steps, the learning rate, gradients, the adapter, the loader, speed, memory."""

import math
import statistics
from typing import Any

from cogumi.training.flags import Flag, Level, Rule, Run
from cogumi.training.trend import noise

SETTLED_STEPS = 10  # before these a gradient norm is of a model that has not begun to move, or of a warm-up
NO_RATE = 0.1  # Adam moves each weight by about the rate in a step, and weights are some hundredths
SPEED_ROWS = 10  # that a stretch of the run's own speed is the median of
WAIT_ROWS = 20


def finite_numbers(run: Run) -> Flag:
    """The first logged row with a loss or a gradient norm that is not a number."""
    threshold = "every loss and gradient norm is finite"
    for row in run.rows:
        bad = [key for key in ("loss", "grad_norm") if is_not_finite(row.get(key))]
        broken = row.get("seen/broken")
        if not bad and not broken:
            continue
        # The trainer puts the average of the steps before in the place of a loss that is NaN (logging_nan_inf_filter).
        what = " and ".join({"loss": "the loss", "grad_norm": "the gradient norm"}[key] for key in bad)
        evidence = f"step {row['step']}: {what or 'a weight'} is not finite" + (f"; so is {broken}" if broken else "")
        cause, knob = "one step's numbers overflowed, or its batch holds values that are none", "train.learning_rate"
        if run.setting.fp16:
            knob = "train.bf16: true, instead of train.fp16"
        if isinstance(broken, str) and broken.startswith("frozen "):
            cause, knob = "the base model's weights are broken: they were never trained here", "model.name"
        elif climbed(run, int(row["step"])):
            cause, knob = "the learning rate is too high: the loss climbed before it broke", "train.learning_rate"
        elif run.setting.learning_rate >= NO_RATE:
            cause, knob = f"the learning rate is too high: {run.setting.learning_rate:g}", "train.learning_rate"
        return Flag("finite numbers", "red", evidence, threshold, cause, knob)
    return Flag("finite numbers", "green", f"steps {first_step(run)} to {run.step}", threshold)


def is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def climbed(run: Run, before: int) -> bool:
    """Whether the loss had left the range of its start by then."""
    values = run.series("loss", [row for row in run.rows if int(row["step"]) < before])[1]
    return len(values) >= 3 and max(values) > values[0] + max(5 * noise(values), run.thresholds.loss_rise * values[0])


def first_step(run: Run) -> int:
    return int(run.rows[0]["step"]) if run.rows else 0


def steps_complete(run: Run) -> Flag | None:
    """Optimizer steps that fp16's loss scaling skipped: the scale is halved each time, and some at the start are usual."""
    seen = sum(run.series("seen/steps", run.latest)[1])
    if not seen:
        return None
    skipped = sum(run.series("seen/skipped", run.latest)[1])
    part, red = skipped / seen, run.thresholds.skipped_steps
    level: Level = "red" if part > red and skipped >= 5 else "yellow" if part > red / 5 else "green"
    return Flag(
        "steps complete",
        level,
        f"{seen:.0f} steps to step {run.step}, {skipped:.0f} of them skipped",
        f"<= {red:.0%} skipped",
        "gradients overflow fp16 however small the loss scale",
        "train.bf16: true, instead of train.fp16",
    )


def learning_rate(run: Run) -> Flag | None:
    """A rate that is zero, a warm-up that outlasts the run, a schedule that has ended before the run has."""
    steps, rates = run.series("learning_rate")
    setting = run.setting
    if not rates:
        return None
    name, threshold = "learning-rate schedule", "above 0 until the last steps, its peak within the run"
    if setting.max_steps > 1 and setting.warmup_steps >= setting.max_steps:
        return Flag(
            name,
            "red",
            f"{setting.warmup_steps} steps of warm-up in a run of {setting.max_steps}",
            threshold,
            "the rate never reaches its peak",
            "train.warmup_steps",
        )
    idle = [step for step, rate in zip(steps, rates, strict=True) if rate == 0 and step > 1]
    left = setting.max_steps - run.step
    if len(idle) >= 3 and idle[-1] == steps[-1] and left > 0:
        return Flag(
            name,
            "red",
            f"the rate is 0 since step {since(steps, rates)}, with {left} steps to go",
            threshold,
            "the schedule ends before the run does, or the rate was set to 0",
            "train.lr_scheduler_type and train.learning_rate",
        )
    return Flag(name, "green", f"{rates[-1]:.3g} at step {steps[-1]}, at most {max(rates):.3g}", threshold)


def since(steps: list[int], rates: list[float]) -> int:
    """The first step of the zeros at the end."""
    last_moving = max((i for i, rate in enumerate(rates) if rate > 0), default=-1)
    return steps[last_moving + 1]


def gradient_norm(run: Run) -> Flag | None:
    """The median norm before clipping; exactly 0 is a fault of its own, and most often another flag says whose."""
    steps, norms = run.series("grad_norm", run.latest)
    if len(norms) < 3:
        return None
    rl, limits = run.setting.method == "gspo", run.thresholds
    low = limits.rl_grad_norm_low if rl else limits.grad_norm_low
    high = limits.rl_grad_norm_high if rl else limits.grad_norm_high
    far = 100 if rl else 10  # an RL loss's scale depends on its normaliser, so only orders of magnitude mean something
    median = statistics.median(norms[-20:])
    evidence, threshold = f"median {median:.3g} of steps {steps[-20:][0]} to {steps[-1]}", f"{low:g} to {high:g}"
    if median == 0:
        cause = "no gradient reaches a trainable weight"
        return Flag("gradient norm", "red", evidence, "> 0", cause, "lora.target_modules, lora.lora_alpha")
    if median > high:
        level: Level = "red" if median > far * high else "yellow"
        return Flag("gradient norm", level, evidence, threshold, "updates are too large", "train.learning_rate, lower")
    if median < low:
        level = "red" if median < low / 100 else "yellow"
        cause = "little is left to learn from these examples, or the loss is divided by too much"
        return Flag("gradient norm", level, evidence, threshold, cause, "train.learning_rate, higher")
    return Flag("gradient norm", "green", evidence, threshold)


def adapter_moves(run: Run) -> Flag | None:
    """Whether the trained weights are any other than before the first step, though the rate was above zero."""
    steps, moved = run.series("seen/moved")
    # At the start of a long warm-up the rate is so small that a bfloat16 weight may rightly stay where it is.
    if not moved or (moved[-1] == 0 and (run.step < SETTLED_STEPS or not any(run.series("learning_rate")[1]))):
        return None
    evidence = f"by at most {moved[-1]:.2e} to step {steps[-1]}"
    if moved[-1] > 0:
        return Flag("adapter moves", "green", evidence, "> 0")
    norms = run.series("grad_norm")[1]
    if any(norm > 0 for norm in norms):
        cause = "the optimizer does not hold the weights that get gradients, so they are frozen"
        return Flag(
            "adapter moves",
            "red",
            f"{evidence}, with gradients up to {max(norms):.2e}",
            "> 0",
            cause,
            "train.optim, lora",
        )
    cause = "no gradient reaches the adapter: it is frozen, or its output is multiplied by 0"
    return Flag("adapter moves", "red", evidence, "> 0", cause, "lora.lora_alpha, lora.target_modules")


def waiting_for_data(run: Run) -> Flag | None:
    """The share of the time spent in waiting for the loader."""
    rows = [row for row in run.latest if int(row["step"]) > 2][-WAIT_ROWS:]  # the first batches start the workers
    seconds, waited = run.series("seen/seconds", rows)[1], run.series("seen/wait", rows)[1]
    if len(seconds) < 5 or not sum(seconds):
        return None
    part, limits = sum(waited) / sum(seconds), run.thresholds
    level: Level = "red" if part > limits.data_wait_red else "yellow" if part > limits.data_wait_yellow else "green"
    return Flag(
        "waiting for data",
        level,
        f"{part:.0%} of the time of steps {rows[0]['step']} to {rows[-1]['step']}",
        f"<= {limits.data_wait_yellow:.0%}, red > {limits.data_wait_red:.0%}",
        "the loader is slower than the model: rows are read or tokenized while it waits",
        "train.dataloader_num_workers",
    )


def tokens_per_second(run: Run) -> Flag | None:
    """The latest rows' speed against the best stretch that is still remembered."""
    speeds = [
        (int(row["step"]), row["seen/tokens"] / row["seen/token_seconds"])
        for row in run.rows
        if row.get("seen/tokens") and row.get("seen/token_seconds")
    ]
    if len(speeds) < 3 * SPEED_ROWS:
        return None
    stretches = [
        statistics.median(speed for _, speed in speeds[i : i + SPEED_ROWS])
        for i in range(0, len(speeds) - SPEED_ROWS + 1, SPEED_ROWS)
    ]
    now, best = statistics.median(speed for _, speed in speeds[-2 * SPEED_ROWS :]), max(stretches)
    slower, limits = best / now, run.thresholds
    level: Level = "red" if slower > limits.slowdown_red else "yellow" if slower > limits.slowdown_yellow else "green"
    return Flag(
        "tokens per second",
        level,
        f"{now:,.0f} in steps {speeds[-2 * SPEED_ROWS][0]} to {speeds[-1][0]}, at best {best:,.0f}",
        f"slower by at most {limits.slowdown_yellow:g}, red by {limits.slowdown_red:g}",
        "something else uses the machine, the card throttles, or memory is exhausted and allocated again and again",
        "train.per_device_train_batch_size, lower; other processes",
    )


def memory(run: Run) -> Flag | None:
    """The share of memory in use, at its highest since the row before."""
    steps, used = run.series("seen/memory", run.latest)
    if not used:
        return None
    most, limits = max(used), run.thresholds
    level: Level = "red" if most > limits.memory_red else "yellow" if most > limits.memory_yellow else "green"
    return Flag(
        "memory",
        level,
        f"{most:.0%} at step {steps[used.index(most)]}",
        f"<= {limits.memory_yellow:.0%}, red > {limits.memory_red:.0%}",
        "a longer batch than those so far will not fit",
        "train.per_device_train_batch_size, with train.gradient_accumulation_steps to keep the step's size",
    )


COMMON: tuple[Rule, ...] = (
    finite_numbers,
    steps_complete,
    learning_rate,
    gradient_norm,
    adapter_moves,
    waiting_for_data,
    tokens_per_second,
    memory,
)
