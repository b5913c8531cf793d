"""Rules for every method: finite numbers, rates, gradients, the adapter, completions, waiting for data."""

import math
import statistics
from typing import Any

from cogumi.health.flags import Flag, RunHistory, level_above, noise

SETTLED_STEPS = 10  # before these a gradient norm is of a model that has not begun to move, or of a warm-up
NO_RATE = 0.1  # Adam moves each weight by about the rate in a step, and weights are some hundredths
WAIT_ROWS = 20
LOSS_RISE = 0.1  # share of its start that a loss is to climb by, which benchmarks/verdict.py was read off
WAITING = 0.2, 0.5  # yellow and red share of the time that is spent in waiting for the next batch
UNTRAINED = 0.05  # share of log(vocabulary) within which a first loss is of weights that were never trained


def finite_numbers(run: RunHistory) -> Flag:
    """The first logged row with a loss or a gradient norm that is not a number."""
    name = "finite numbers"
    for row in run.rows:
        words = {"loss": "the loss", "grad_norm": "the gradient norm"}
        bad = [word for key, word in words.items() if is_not_finite(row.get(key))]
        broken = str(row.get("seen/broken") or "")
        if not bad and not broken:
            continue
        # The trainer puts the average of the steps before in the place of a loss that is NaN (logging_nan_inf_filter).
        what = " and ".join(bad) or "a weight"
        evidence = f"step {row['step']}: {what} is not finite" + (f"; so is {broken}" if broken else "")
        cause, knob = "one step's numbers overflowed", "train.learning_rate"
        before = run.series("loss", [each for each in run.rows if each["step"] < row["step"]])[1]
        if broken.startswith("frozen "):
            cause, knob = "the base model's weights are broken", "model.name"
        elif len(before) >= 3 and max(before) > before[0] + max(5 * noise(before), LOSS_RISE * before[0]):
            cause = "the learning rate is too high, as the loss climbed before it broke"
        elif run.setting.learning_rate >= NO_RATE:
            cause = f"the learning rate is too high, at {run.setting.learning_rate:g}"
        elif run.setting.fp16:
            knob = "train.bf16: true, instead of train.fp16"
        return Flag(name, "red", evidence, cause, knob)
    first = int(run.rows[0]["step"]) if run.rows else 0
    return Flag(name, "green", f"steps {first} to {run.step}")


def is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def learning_rate(run: RunHistory) -> Flag | None:
    """A warm-up that outlasts the run."""
    steps, rates = run.series("learning_rate")
    warmup, longest = run.setting.warmup_steps, run.setting.max_steps
    if not rates:
        return None
    name = "learning-rate schedule"
    if 1 < longest <= warmup:
        evidence = f"{warmup} steps of warm-up in a run of {longest}"
        return Flag(name, "red", evidence, "the rate never reaches its peak", "train.warmup_steps")
    return Flag(name, "green", f"{rates[-1]:.3g} at step {steps[-1]}, at most {max(rates):.3g}")


def gradient_norm(run: RunHistory) -> Flag | None:
    """The median norm before clipping; exactly 0 is a fault of its own, and most often another flag says whose."""
    name, rl = "gradient norm", run.setting.method == "gspo"
    high = run.thresholds.rl_grad_norm_high if rl else run.thresholds.grad_norm_high
    steps, norms = run.series("grad_norm", run.latest)
    if len(norms) < 3:
        return None
    median = statistics.median(norms[-20:])
    evidence = f"median {median:.3g} of steps {steps[-20:][0]} to {steps[-1]}"
    if median == 0:
        return Flag(name, "red", evidence, "no gradient reaches a trainable weight", "lora.target_modules")
    if median > high:
        far = 100 if rl else 10  # an RL loss's scale depends on its normaliser
        level = level_above(median, high, far * high)
        return Flag(name, level, evidence, "updates are too large", "train.learning_rate, lower")
    return Flag(name, "green", evidence)


def adapter_moves(run: RunHistory) -> Flag | None:
    """Whether the trained weights are any other than before the first step, though the rate was above zero."""
    name, (steps, moved) = "adapter moves", run.series("seen/moved")
    # At the start of a long warm-up the rate is so small that a bfloat16 weight may rightly stay where it is.
    if not moved or (moved[-1] == 0 and (run.step < SETTLED_STEPS or not any(run.series("learning_rate")[1]))):
        return None
    evidence = f"by at most {moved[-1]:.2e} to step {steps[-1]}"
    if moved[-1] > 0:
        return Flag(name, "green", evidence)
    cause, knob = "no gradient reaches the adapter, as if its output were multiplied by 0", "lora.lora_alpha"
    if any(norms := run.series("grad_norm")[1]):
        cause, knob = "the optimizer does not hold the weights that get gradients, so they are frozen", "train.optim"
        evidence += f", with gradients up to {max(norms):.2e}"
    return Flag(name, "red", evidence, cause, knob)


def held_out_completions(run: RunHistory) -> Flag | None:
    """Whether most completions of held-out prompts are neither empty, nor blank, nor a loop. Red once half of the steps are
    done, unless those of the base are too, or it was never trained."""
    now = run.written[-1] if run.written else None
    if now is None or not now.step:
        return None
    kinds = {"empty": now.empty, "blank": now.blank, "repeating themselves": now.loops}
    name = "held-out completions"
    evidence = f"{now.count} completions after step {now.step}"
    if 2 * now.unusable <= now.count:
        return Flag(name, "green", f"{now.count - now.unusable} of {evidence} are text")
    evidence = f"{now.unusable} of {evidence} are " + " or ".join(kind for kind, many in kinds.items() if many)
    before = next((each for each in run.written if not each.step), None)
    weak = f"{before.unusable} of its {before.count}" if before and 2 * before.unusable > before.count else ""
    cause, knob = "the training has taught the model to write nothing", "train.learning_rate, lower"
    if weak:
        cause, knob = f"the base is too weak, as {weak} are no text either", "model.name"
    elif now.loops > max(now.empty, now.blank):
        cause = "the training has taught the model to repeat itself"
    elif run.batches is not None and run.batches.ends:
        often = max(1, round(run.batches.learned / run.batches.ends))
        cause = f"the model ends at once, as one learned token in {often} is the end token"
        knob = "train.max_steps, higher"
    early = 2 * now.step < run.setting.max_steps
    return Flag(name, "yellow" if weak or early or is_untrained(run) else "red", evidence, cause, knob)


def is_untrained(run: RunHistory) -> bool:
    """Whether the first losses of an SFT run are those of guessing among all tokens."""
    losses, vocabulary = run.series("loss")[1][:3], run.setting.vocabulary
    if run.setting.method != "sft" or not losses or vocabulary < 2:
        return False
    return abs(statistics.median(losses) / math.log(vocabulary) - 1) < UNTRAINED


def waiting_for_data(run: RunHistory) -> Flag | None:
    rows = [row for row in run.latest if int(row["step"]) > 2][-WAIT_ROWS:]  # the first batches start the workers
    seconds, waited = run.series("seen/seconds", rows)[1], run.series("seen/wait", rows)[1]
    if len(seconds) < 5 or not sum(seconds):
        return None
    part = sum(waited) / sum(seconds)
    evidence = f"{part:.0%} of the time of steps {rows[0]['step']} to {rows[-1]['step']}"
    why = "the loader is slower than the model", "train.dataloader_num_workers"
    return Flag("waiting for data", level_above(part, *WAITING), evidence, *why)


COMMON = (finite_numbers, learning_rate, gradient_norm, adapter_moves, held_out_completions, waiting_for_data)
