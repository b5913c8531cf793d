"""The rules: each reads a run's history and returns its flag, or None while there is too little to judge.

Limits without a source are those that separate the broken and whole runs of tests/verdict_cases.py.
"""

import math
import statistics
from typing import Any

from cogumi.health.flags import (
    HELD_OUT_COMPLETIONS,
    AnswerOverlap,
    Flag,
    Level,
    Row,
    Rule,
    RunHistory,
    fall,
    level_above,
    noise,
    share,
    smooth,
    students_t,
    trend,
)

# limit                      value         unit                                                    source, if not the suite
SETTLED_STEP = 10  #                       step; before it the model has hardly moved, or warms up
FEW_LOSS_ROWS = 8  #                       logged losses
UNSETTLED_STEPS = 50  #                    steps; before them a loss may still be warming up
TREND_Z = 3.0  #                           standard deviations of Mann and Kendall's test
LOSS_RISE_SHARE = 0.1  #                   of the first loss
LOSS_FALL_SHARE = 0.03  #                  of the first loss, in a hundred steps; a tenth is usual
DIVERGED_NATS, DIVERGED_SHARE = 1.0, 0.5  # by which the last losses of a broken run are above the first one
FIRST_FIGURES = 4  #                       step after which a run is first judged by its figures
SMALL_UPDATE = 0.1  #                      of the spacing of bfloat16 weights: the whole run's update stays below   none
OVERFLOWING_RATE = 0.1  #                  learning rate; Adam moves a weight by it, and weights are hundredths
WAIT_ROWS = 20
WAIT_SHARES = 0.2, 0.5  #                  yellow, red: of the time
SLOWED_SHARE, OTHERS_GB = 0.2, 1.0  #       of the looks at a GPU; GB that are not this run's           none
MIRROR_LAG_SECONDS = 1200.0  #               two saves by time, ten minutes apart                     none
UNTRAINED_SHARE = 0.05  #                  of log(vocabulary): distance within which a first loss is that of guessing
MASKED_SHARE = 0.1  #                      red: of the examples
PAIR_T = 2.0  #                            Student's t: own and other prompts differ beyond noise
WORD_OVERLAP_T = 3.0  #                    Student's t of shared words: completions belong to their prompts
TELLING_T, ALIKE_SHARE = 4.0, 0.25  #      Student's t, share of words: shared words would show what belongs together
KNOWN_TEXT_SHARE = 0.5  #                  of the frequencies' entropy: a model below it would use a prompt that belongs
PAIR_GAIN_SHARE = 0.02  #                  of the loss: own prompts help
WORSE_THAN_FREQUENCIES = 1.3  #            of their entropy: a first loss above it is of a model that expects other text
AT_FREQUENCIES = 0.93  #                   of their entropy: a resting loss above it knows only frequencies
MIN_PLATEAU_ROWS, PLATEAU_Z = 10, 2.0  #   rows; z of the trend of their second half
SCATTER_SHARES = 0.12, 0.2  #              yellow, red: of the loss, from step to step
SMALL_BATCH_EXAMPLES = 8  #                examples a step
PREFERENCE_ROWS = 10
CHANCE_Z = 2.0  #                          standard deviations of a coin's accuracy
LOSS_ABOVE_LOG2_T = 3.0  #                 Student's t; it is tested at every fifth step
PAIR_CORRELATION = 0.3  #                  from here both answers of a pair are about their prompt
POLICY_ROWS = 10
ROLLOUTS, MIN_ROLLOUTS = 8, 4  #           rollouts: averaged over, needed
EQUAL_REWARDS = 1e-5  #                    deviation of equal rewards: TRL 1.15 asks for 0, which float32 misses for 0.7
DEAD_COMPLETIONS = 64  #                   without reward; so many fail by chance once in 20 at a success rate of 5 %
KL_STEPS, MIN_KL_STEPS = 16, 5
CLIPPED_SHARE = 0.5  #                     yellow: of the ratios, on steps after an update            none
MOSTLY_CLIPPED, FEW_CLIPPED_ROWS = 0.9, 3  # of the ratios on each such step: so few steps are enough then
SCALED_DOWN = 0.5  #                       yellow: median of policy/clip_coefficient                  none
TRUNCATED_SHARE = 0.3  #                   yellow: of the completions                              axolotl
ENTROPY_NATS, ENTROPY_SHARE = 0.05, 0.2  # nats a token, of the start                              axolotl
FAILED_CALL_SHARES = 0.2, 0.5  #           yellow, red: of tool calls                              none
ENDLESS_SHARES = 0.3, 0.8  #               yellow, red: of episodes that a budget cut              as TRUNCATED_SHARE
UNSCORED_SHARES = 0.02, 0.2  #             yellow, red: of completions                             none
LAG_SHARES = 0.02, 0.05  #                 yellow, red: of the trainer's change; 0.05 to 0.2 if only the head stays old
SAMPLER_NATS = 0.1, 0.3  #                 yellow, red: nats a token; 0.02 in bfloat16             docs/rollouts.md
BUDGETS = {
    "turns": "train.max_tool_calling_iterations, higher",
    "tokens": "train.max_completion_length, higher",
    "seconds": "cogumi.episode_seconds, higher",
}


# ------------------------------------------------------------------------------------------------------------ every method


def finite_numbers(run: RunHistory) -> Flag:
    """Find the first logged row with a loss or a gradient norm that is not a number."""
    name = "finite numbers"
    for row in run.rows:
        words = {"loss": "the loss", "grad_norm": "the gradient norm"}
        bad = [word for key, word in words.items() if is_not_finite(row.get(key))]
        broken = str(row.get("seen/broken") or "")
        if not bad and not broken:
            continue
        # For a loss that is NaN the trainer logs the average of the steps before (logging_nan_inf_filter).
        evidence = f"step {row['step']}: {' and '.join(bad) or 'a weight'} is not finite"
        evidence += f"; so is {broken}" if broken else ""
        cause, knob = "one step's numbers overflowed", "train.learning_rate"
        before = run.series("loss", [earlier for earlier in run.rows if earlier["step"] < row["step"]])[1]
        if broken.startswith("frozen "):
            cause, knob = "the base model's weights are broken", "model.name"
        elif len(before) >= 3 and max(before) > before[0] + max(5 * noise(before), LOSS_RISE_SHARE * before[0]):
            cause = "the learning rate is too high, as the loss climbed before it broke"
        elif run.setting.learning_rate >= OVERFLOWING_RATE:
            cause = f"the learning rate is too high, at {run.setting.learning_rate:g}"
        elif run.setting.fp16:
            knob = "train.bf16: true, instead of train.fp16"
        return Flag(name, "red", evidence, cause, knob)
    first = int(run.rows[0]["step"]) if run.rows else 0
    return Flag(name, "green", f"steps {first} to {run.step}")


def is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def learning_rate(run: RunHistory) -> Flag | None:
    """Find a warm-up that outlasts the run."""
    steps, rates = run.series("learning_rate")
    warmup, max_steps = run.setting.warmup_steps, run.setting.max_steps
    if not rates:
        return None
    name = "learning-rate schedule"
    if 1 < max_steps <= warmup:
        evidence = f"{warmup} steps of warm-up in a run of {max_steps}"
        return Flag(name, "red", evidence, "the rate never reaches its peak", "train.warmup_steps")
    return Flag(name, "green", f"{rates[-1]:.3g} at step {steps[-1]}, at most {max(rates):.3g}")


def gradient_norm(run: RunHistory) -> Flag | None:
    """Judge the median norm before clipping; exactly 0 is a fault of its own, and most often another flag says whose."""
    name, is_rl = "gradient norm", run.setting.method == "gspo"
    high = run.thresholds.rl_grad_norm_high if is_rl else run.thresholds.grad_norm_high
    steps, norms = run.series("grad_norm", run.latest)
    if len(norms) < 3:
        return None
    median = statistics.median(norms[-20:])
    evidence = f"median {median:.3g} of steps {steps[-20:][0]} to {steps[-1]}"
    if median == 0:
        return Flag(name, "red", evidence, "no gradient reaches a trainable weight", "lora.target_modules")
    if median <= high:
        return Flag(name, "green", evidence)
    red = (50 if is_rl else 10) * high  # the scale of an RL loss depends on its normalizer
    return Flag(name, level_above(median, high, red), evidence, "updates are too large", "train.learning_rate, lower")


def adapter_moves(run: RunHistory) -> Flag | None:
    """Judge whether the trained weights changed since the first step, although the rate was above zero."""
    name, (steps, moved) = "adapter moves", run.series("seen/moved")
    # At the start of a long warm-up the rate is so small that a bfloat16 weight may rightly stay where it is.
    if not moved or (moved[-1] == 0 and (run.step < SETTLED_STEP or not any(run.series("learning_rate")[1]))):
        return None
    evidence = f"by at most {moved[-1]:.2e} to step {steps[-1]}"
    if moved[-1] > 0:
        return Flag(name, "green", evidence)
    cause, knob = "no gradient reaches the adapter, as if its output were multiplied by 0", "lora.lora_alpha"
    if any(norms := run.series("grad_norm")[1]):
        cause, knob = "the optimizer does not hold the weights that get gradients, so they are frozen", "train.optim"
        evidence += f", with gradients up to {max(norms):.2e}"
    return Flag(name, "red", evidence, cause, knob)


def update_size(run: RunHistory) -> Flag | None:
    """Judge rate x steps, by which Adam moves a weight, against bfloat16's spacing, until the loss falls or the reward rises."""
    steps, rate, is_rl = run.setting.max_steps, run.setting.learning_rate, run.setting.method == "gspo"
    size = run.setting.update_size
    if not size or run.step < min(FIRST_FIGURES, steps):
        return None
    values = [-reward for reward in run.series("reward", rollouts(run))[1]] if is_rl else run.series("loss")[1]
    level: Level = "green"
    evidence = f"{steps} steps at {rate:g} move weights by {size:.2g} of their bfloat16 spacing"
    if size < SMALL_UPDATE and not (held_out_fell(run) or (values and fall(values).is_by(LOSS_FALL_SHARE))):
        evidence += f"; {'no rise of the reward' if is_rl else 'no fall of the loss'} is seen by step {run.step}"
        if len(run.held_out) > 1:
            evidence += ", the held-out loss went from {:.3f} to {:.3f}".format(*run.held_out)
        level = "yellow"
    cause = "the learning rate is too small for so few steps"
    return Flag("update size", level, evidence, cause, "train.learning_rate, higher")


def held_out_fell(run: RunHistory) -> bool:
    """Return whether the loss of the held-out rows fell: they are the same each time, so no batch's noise is in it."""
    return len(run.held_out) > 1 and run.held_out[-1] <= run.held_out[0] * (1 - LOSS_FALL_SHARE)


def held_out_completions(run: RunHistory) -> Flag | None:
    """Judge whether most completions of held-out prompts are text, neither empty, nor blank, nor a loop.

    Red once half of the steps are done, unless those of the base are no text either, or it was never trained.
    """
    now = run.written[-1] if run.written else None
    if now is None or not now.step:
        return None
    name, evidence = HELD_OUT_COMPLETIONS, f"{now.count} completions after step {now.step}"
    if 2 * now.unusable <= now.count:
        return Flag(name, "green", f"{now.count - now.unusable} of {evidence} are text")
    kinds = {"empty": now.empty, "blank": now.blank, "repeating themselves": now.loops}
    evidence = f"{now.unusable} of {evidence} are " + " or ".join(kind for kind, count in kinds.items() if count)
    before = next((counts for counts in run.written if not counts.step), None)
    is_weak = before is not None and 2 * before.unusable > before.count
    cause, knob = "the training has taught the model to write nothing", "train.learning_rate, lower"
    if before is not None and is_weak:
        cause = f"the base is too weak, as {before.unusable} of its {before.count} are no text either"
        knob = "model.name"
    elif now.loops > max(now.empty, now.blank):
        cause = "the training has taught the model to repeat itself"
    elif run.batches is not None and run.batches.ends:
        often = max(1, round(run.batches.learned / run.batches.ends))
        cause = f"the model ends at once, as one learned token in {often} is the end token"
        knob = "train.max_steps, higher"
    is_early = 2 * now.step < run.setting.max_steps
    return Flag(name, "yellow" if is_weak or is_early or is_untrained(run) else "red", evidence, cause, knob)


def is_untrained(run: RunHistory) -> bool:
    """Return whether the first losses of an SFT run are those of guessing among all tokens."""
    losses, vocabulary = run.series("loss")[1][:3], run.setting.vocabulary
    if run.setting.method != "sft" or not losses or vocabulary < 2:
        return False
    return abs(statistics.median(losses) / math.log(vocabulary) - 1) < UNTRAINED_SHARE


def waiting_for_data(run: RunHistory) -> Flag | None:
    rows = [row for row in run.latest if int(row["step"]) > 2][-WAIT_ROWS:]  # the first batches start the workers
    seconds, waited = run.series("seen/seconds", rows)[1], run.series("seen/wait", rows)[1]
    if len(seconds) < 5 or not sum(seconds):
        return None
    part = sum(waited) / sum(seconds)
    evidence = f"{part:.0%} of the time of steps {rows[0]['step']} to {rows[-1]['step']}"
    why = "the loader is slower than the model", "train.dataloader_num_workers"
    return Flag("waiting for data", level_above(part, *WAIT_SHARES), evidence, *why)


def gpu(run: RunHistory) -> Flag | None:
    """Look for clocks that heat or power hold down, uncorrected memory errors, and memory of other processes."""
    rows = run.rows[-WAIT_ROWS:]
    keys = "slowed", "temperature", "ecc_errors", "others_gb"
    slowed, heat, errors, others = (run.series(f"perf/gpu_{key}", rows)[1] for key in keys)
    if not slowed:
        return None
    part, ecc = statistics.fmean(slowed), sum(errors[-1:])
    troubles = [f"heat or power held its clocks down {part:.0%} of the time"] if part > SLOWED_SHARE else []
    troubles += [f"{ecc:.0f} uncorrected ECC errors"] if ecc else []
    troubles += [f"other processes hold {size:.1f} GB of its memory" for size in others[-1:] if size > OTHERS_GB]
    evidence = f"up to {max(heat, default=0):.0f} °C in steps {rows[0]['step']} to {rows[-1]['step']}"
    why = (" and ".join(troubles), "the machine") if troubles else ("", "")
    return Flag("GPU", "yellow" if troubles else "green", evidence, *why)


def mirror(run: RunHistory) -> Flag | None:
    """Judge how long the mirror has been behind the newest checkpoint here."""
    steps, seconds = run.series("perf/mirror_lag_seconds")
    if not seconds:
        return None
    behind = run.series("perf/mirror_lag_steps")[1][-1]
    evidence = f"at step {steps[-1]} it is {behind:.0f} steps and {seconds[-1]:.0f} s behind the newest checkpoint"
    if seconds[-1] <= MIRROR_LAG_SECONDS:
        return Flag("mirror", "green", evidence)
    return Flag("mirror", "yellow", evidence, "checkpoints are not there in time", "cogumi.mirror, or its connection")


# ---------------------------------------------------------------------------------------------------------------- sft, dpo


def learned_tokens(run: RunHistory) -> Flag | None:
    """Count examples of which nothing is learned."""
    batches = run.batches
    if batches is None:
        return None
    evidence = f"{batches.masked} of {batches.examples} examples without a learned token"
    why = "every token of these examples is masked, so nothing is learned of them", "data.columns"
    level = level_above(share(batches.masked, batches.examples), 0, MASKED_SHARE)
    return Flag("learned tokens", level, evidence, *why)


def padding(run: RunHistory) -> Flag | None:
    """Find padding that is learned, or end tokens that are not, since they are masked as padding."""
    batches = run.batches
    if batches is None:
        return None
    if batches.pad_is_end and not batches.ends and batches.learned:
        evidence = f"the padding token is the end token, and none of {batches.learned} learned tokens ends a text"
        cause = "end tokens are masked as if they were padding, so the model never learns to stop"
        return Flag("padding", "red", evidence, cause, "the tokenizer's pad_token")
    evidence = f"{batches.pads_learned} padded places of {batches.examples} examples are learned"
    why = "the collator labels padding, so the model learns to write it", "the trainer's data_collator"
    return Flag("padding", "red" if batches.pads_learned else "green", evidence, *why)


def prompt_and_completion(run: RunHistory) -> Flag | None:
    """Judge whether prompts help to predict their completions, by the base, or by the trained model if the base cannot tell.

    Red if the model knows the text so well that it would use prompts that belong, or if no words are shared.
    """
    batches = run.batches
    if batches is None or batches.pairs is None:
        return None
    first, words, later = batches.pairs, batches.words, batches.pairs_now
    pairs = first if later is None or first.t >= PAIR_T else later
    evidence = (
        f"completions cost {pairs.own:.3f} nats a token after their own prompt and {pairs.other:.3f} after another's "
        f"(t = {pairs.t:.1f}, step {pairs.step})"
    )
    level: Level = "green"
    cause = ""
    is_shuffled = pairs.own < KNOWN_TEXT_SHARE * batches.entropy
    is_unused = share(pairs.other - pairs.own, pairs.other) < PAIR_GAIN_SHARE and pairs.t < PAIR_T
    if words is not None:
        evidence += f", and share words with their own with t = {words.t:.1f}"
        # Labels or numbers would not share words with their prompts, whatever their order.
        is_shuffled |= words.t_within >= TELLING_T and words.alike >= ALIKE_SHARE and words.t < PAIR_T
        is_unused &= words.t < WORD_OVERLAP_T
    if is_unused and is_shuffled:
        level, cause = "red", "completions do not belong to their prompts, as if the rows were shuffled"
    elif is_unused and later is not None:  # a base that cannot tell them yet says nothing of the data
        level, cause = "yellow", "the trained model does not use the prompts"
    return Flag("prompt and completion", level, evidence, cause, "data.columns")


def loss_trend(run: RunHistory) -> Flag | None:
    """Judge the loss: up and stays up is diverging; not down within a hundred steps is learning nothing."""
    steps, losses = run.series("loss")
    if len(losses) < FEW_LOSS_ROWS:
        return None
    scatter, start = noise(losses), min(losses[0], statistics.median(losses[:3]))
    end, peak = statistics.median(losses[-max(5, len(losses) // 4) :]), max(smooth(losses))
    margin, has_fallen = max(5 * scatter, LOSS_RISE_SHARE * start), end <= start * (1 - LOSS_FALL_SHARE)
    evidence = (
        f"{start:.3f} at first, at most {peak:.3f} (smoothed), {end:.3f} by step {steps[-1]} (noise {scatter:.3f})"
    )
    level: Level = "green"
    cause, knob = "the learning rate is too high", "train.learning_rate, to a tenth"
    latest = run.series("loss", run.latest[len(run.latest) // 2 :])
    rising = trend(*latest)
    if peak > start + margin or end > start + max(DIVERGED_NATS, DIVERGED_SHARE * start):  # however it swings
        level = "yellow" if has_fallen else "red"
    elif len(latest[1]) >= 2 * FEW_LOSS_ROWS and rising.z > TREND_Z and rising.change(latest[0]) > margin:
        evidence = f"up by {rising.change(latest[0]):.3f} from step {latest[0][0]} to {steps[-1]} (z = {rising.z:.1f})"
        level, knob = "red", "train.learning_rate, to a third"
    elif steps[-1] >= max(100, run.setting.warmup_steps + UNSETTLED_STEPS) and not has_fallen:
        level, cause, knob = "yellow", "the loss hardly falls", "train.learning_rate, higher"
    return Flag("loss trend", level, evidence, cause, knob)


def token_frequencies(run: RunHistory) -> Flag | None:
    """Find a loss that rests where a model is that knows nothing but how often each token occurs.

    Red if it began far above that, or if it lost what the base knew.
    """
    steps, losses = run.series("loss")
    batches = run.batches
    if batches is None or batches.entropy <= 0 or len(losses) < MIN_PLATEAU_ROWS or steps[-1] < UNSETTLED_STEPS:
        return None
    half = run.series("loss", [row for row in run.rows if int(row["step"]) > run.step // 2])
    start, end, falling = statistics.median(losses[:3]), statistics.median(half[1]), trend(*half)
    limit = AT_FREQUENCIES * batches.entropy
    # It does not fall beyond noise, and at its slope as many steps again would not take it below.
    rests = end > limit and falling.z > -PLATEAU_Z and end + min(0.0, falling.change(half[0])) > limit
    level: Level = "yellow" if rests else "green"
    cause, knob = "little but the tokens' frequencies is learned so far", "train.max_steps, higher"
    base_told = batches.pairs is not None and batches.pairs.t >= PAIR_T  # the base knew a completion's own prompt
    still_tells = base_told and (batches.pairs_now is None or batches.pairs_now.t >= PAIR_T)
    if level == "yellow" and not still_tells:
        if start > WORSE_THAN_FREQUENCIES * batches.entropy and not is_untrained(run):
            level, knob = "red", "the trainer's data_collator"
            cause = "the labels are in another order than the text, so only their frequencies can be learned"
        elif start < end * (1 - LOSS_FALL_SHARE) or base_told:
            level, cause = "red", "the learning rate is too high, and what the base knew is gone"
            knob = "train.learning_rate, to a tenth"
    evidence = (
        f"loss {start:.3f} by step {steps[2]}, {end:.3f} in steps {half[0][0]} to {steps[-1]} (trend z = {falling.z:.1f}); "
        f"the learned tokens' frequencies alone give {batches.entropy:.3f}"
    )
    return Flag("token frequencies", level, evidence, cause, knob)


def loss_noise(run: RunHistory) -> Flag | None:
    """Judge the scatter of the loss from one optimizer step to the next, as a share of the loss."""
    losses = run.series("loss", run.latest)[1]
    if len(losses) < FEW_LOSS_ROWS:
        return None
    steps_per_row = statistics.median(run.series("seen/steps", run.latest)[1] or [1.0])
    part, examples = share(noise(losses) * steps_per_row**0.5, statistics.median(losses)), run.setting.examples_per_step
    level = level_above(part, *SCATTER_SHARES)
    if level == "red" and examples >= SMALL_BATCH_EXAMPLES:
        level = "yellow"
    if held_out_fell(run) or fall(run.series("loss")[1]).is_by(LOSS_FALL_SHARE):
        level = "green"  # as a loss becomes small, its scatter is more and more of it
    evidence = f"{part:.0%} of the loss from step to step, with {examples} examples a step"
    why = "the batch is too small, so its gradient is mostly chance", "train.gradient_accumulation_steps, higher"
    return Flag("loss noise", level, evidence, *why)


def preferences(run: RunHistory) -> Flag | None:
    """Judge the accuracy on pairs not trained on yet, in the second half of the steps, against a coin's.

    The loss of a model that has not moved is log 2 (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). Red if the loss is above
    that beyond chance: by LOSS_RISE_SHARE if words show that the chosen answers belong.
    """
    steps = run.series("rewards/accuracies")[0]
    if len(steps) < PREFERENCE_ROWS or steps[-1] < UNSETTLED_STEPS:
        return None
    half = [row for row in run.rows if int(row["step"]) > steps[-1] // 2]
    right, losses = statistics.fmean(run.series("rewards/accuracies", half)[1]), run.series("loss", half)[1]
    loss, answers = statistics.fmean(losses), None if run.batches is None else run.batches.answers
    pairs = run.setting.examples_per_step * (steps[-1] - steps[-1] // 2)
    z = (right - 0.5) / (0.5 / math.sqrt(pairs))
    stretch = f"steps {steps[-1] // 2 + 1} to {steps[-1]}"
    evidence = f"{right:.1%} of some {pairs} pairs right in {stretch} (z = {z:.1f}), loss {loss:.3f}"
    level: Level = "green" if z > CHANCE_Z else "yellow"
    cause, knob = "the answers are not told apart yet", "train.learning_rate, higher"
    if z <= CHANCE_Z:
        # Other losses than the sigmoid start elsewhere.
        above = students_t([loss - math.log(2) for loss in losses]) if run.setting.loss == "sigmoid" else 0.0
        words_differ = answers is not None and answers.t >= WORD_OVERLAP_T
        if above > LOSS_ABOVE_LOG2_T and loss > math.log(2) * (1 + LOSS_RISE_SHARE):
            level, cause = "red", "the learning rate is too high, so margins swing either way"
            knob = "train.learning_rate, to a tenth"
        elif (answers is not None and are_mixed_up(answers)) or (above > LOSS_ABOVE_LOG2_T and not words_differ):
            level, cause = "red", "chosen and rejected are mixed up, or differ by nothing that can be learned"
            knob = "data.columns"
        if answers is not None:
            evidence += f"; {answers.pairs} chosen answers share more words with their prompts with t = {answers.t:.1f}"
    return Flag("preferences", level, evidence, cause, knob)


def are_mixed_up(answers: AnswerOverlap) -> bool:
    """Return whether one answer of each pair belongs to its prompt, and is as often the rejected one as the chosen."""
    return abs(answers.t) < PAIR_T and answers.t_either >= TELLING_T and answers.correlation < PAIR_CORRELATION


# -------------------------------------------------------------------------------------------------------------------- gspo


def rollouts(run: RunHistory) -> list[Row]:
    """Return the rows of steps that sampled completions; the other steps of a rollout log no reward."""
    return [row for row in run.rows if "reward" in row]


def kl_to_the_sampler(run: RunHistory) -> Flag | None:
    """Judge how far updates carry the policy from the one that wrote the completions (ratio - log ratio - 1).

    The first steps count as well: a rate that is far too high destroys the policy in them, and its entropy next.
    """
    steps, values = run.series("policy/kl_new_old", run.rows[-KL_STEPS:])
    if len(values) < MIN_KL_STEPS:
        return None
    mean, red = statistics.fmean(values), run.thresholds.kl_red
    evidence = f"{mean:.3g} nats a token in steps {steps[0]} to {steps[-1]}"
    why = "the learning rate is too high for one update", "train.learning_rate, lower"
    return Flag("KL to the sampler", level_above(mean, red / 10, red), evidence, *why)


def clip_fraction(run: RunHistory) -> Flag | None:
    """Judge the share of ratios outside the clip on steps after an update, beside the share that rounding alone puts there."""
    stale = [row for row in run.rows if row.get("policy/staleness")][-KL_STEPS:]
    steps, shares = run.series("policy/clipped_ratio_fraction", stale)
    if len(shares) < (FEW_CLIPPED_ROWS if shares and min(shares) > MOSTLY_CLIPPED else MIN_KL_STEPS):
        return None
    clipped, by_rounding = statistics.fmean(shares), run.series("policy/clipped_by_rounding")[1]
    evidence = f"{clipped:.0%} of the ratios of steps {steps[0]} to {steps[-1]} are outside the clip"
    is_small = 0 < run.setting.update_size < SMALL_UPDATE  # a lower rate would learn nothing
    why = (
        "updates move the ratios by more than the clip",
        f"train.{'epsilon, higher' if is_small else 'learning_rate, lower'}",
    )
    if by_rounding:
        evidence += f", {by_rounding[0]:.0%} by rounding alone"
        if by_rounding[0] > clipped / 2:
            why = "rounding moves the ratios by more than the clip", "train.epsilon, left out to follow the noise"
    return Flag("clip fraction", level_above(clipped, CLIPPED_SHARE, 1.0), evidence, *why)


def gradient_clipping(run: RunHistory) -> Flag | None:
    """Judge by how much train.max_grad_norm scales most steps' gradients down."""
    steps, coefficients = run.series("policy/clip_coefficient", run.rows[-KL_STEPS:])
    if len(coefficients) < MIN_KL_STEPS:
        return None
    median = statistics.median(coefficients)
    evidence = f"gradients of steps {steps[0]} to {steps[-1]} were scaled by {median:.2g} in the median"
    cause = "most gradients exceed train.max_grad_norm, so their sizes no longer weigh the steps"
    level: Level = "yellow" if median < SCALED_DOWN else "green"
    return Flag("gradient clipping", level, evidence, cause, "train.max_grad_norm, higher")


def entropy(run: RunHistory) -> Flag | None:
    """Judge the nats per token of the policy on its own completions, against where it began."""
    steps, values = run.series("entropy")
    if len(values) < POLICY_ROWS:
        return None
    start, now = statistics.median(values[:5]), statistics.median(values[-5:])
    low = ENTROPY_SHARE * start
    level: Level = "yellow" if now < 2 * low or now < ENTROPY_NATS else "green"
    if now < low and (now < ENTROPY_NATS or now < low / 2):
        level = "red"
    evidence = f"{start:.3g} nats a token at first, {now:.3g} by step {steps[-1]}"
    return Flag("entropy", level, evidence, "the policy collapses to one answer", "train.learning_rate, lower")


def reward_varies(run: RunHistory) -> Flag | None:
    """Judge the share of groups whose rewards are all equal: their advantages are 0."""
    rows = rollouts(run)[-ROLLOUTS:]
    if not rows:
        return None
    limit, knob, name = run.thresholds.zero_variance, "cogumi.rewards", "reward varies"
    where = f"of steps {rows[0]['step']} to {rows[-1]['step']}"
    rewards = run.series("reward", rows)[1]
    if not rewards:
        evidence = f"not one completion {where} was scored"
        return Flag(name, "red", evidence, "every reward function returns None or NaN", knob)
    part = statistics.fmean(run.series("frac_reward_zero_std", rows)[1] or [0.0])
    deviations = run.series("reward_std", rows)[1]
    varies = any(deviation > EQUAL_REWARDS * max(1.0, abs(max(rewards))) for deviation in deviations)
    part = part if varies or "reward_std" not in rows[-1] else 1.0
    # Rewards that are equal over all prompts need no average; completions that all earn nothing may be rare luck.
    is_short = not any(rewards) and len(rows) * run.setting.rollout < DEAD_COMPLETIONS
    is_constant = not varies and "reward_std" in rows[-1] and not is_short
    if len(rows) < MIN_ROLLOUTS and not is_constant:
        return None
    evidence = f"{part:.0%} of the groups {where} have one reward for all, {rewards[-1]:.3g} on average"
    cause = "the reward is constant and does not depend on the completion"
    if varies:
        cause, knob = "prompts are solved always or never", "data.source"
    elif not any(rewards):
        cause = "no completion earns anything, so the reward is dead for these prompts"
    return Flag(name, level_above(part, 0.75 * limit, limit), evidence, cause, knob)


def completions_end(run: RunHistory) -> Flag | None:
    """Judge the share of completions that are cut at their longest."""
    key, rows = "completions/clipped_ratio", rollouts(run)
    cut, red = run.series(key, rows[-ROLLOUTS:])[1], run.thresholds.truncated_red
    yellow = TRUNCATED_SHARE if red < 1 else 1.0
    if len(cut) < MIN_ROLLOUTS:
        return None
    part = statistics.fmean(cut)
    level = level_above(part, yellow, red)
    start = statistics.fmean(run.series(key)[1][:MIN_ROLLOUTS])
    cause = "completions are cut before they end" if part < 1 else "no completion ends before it is cut"
    knob = "train.max_completion_length, higher"
    pooled, drawn = (part + start) / 2, MIN_ROLLOUTS * max(1, run.setting.rollout)
    change = (part - start) / math.sqrt(2 * pooled * (1 - pooled) / drawn) if 0 < pooled < 1 else 0.0
    if change < -CHANCE_Z:
        level = "yellow" if level == "red" else level
        cause = "completions are still cut before they end, although fewer than at first"
    elif change > CHANCE_Z and start < (yellow + red) / 2:
        cause, knob = "the policy learns to write without an end", "cogumi.rewards"
        recent = run.series(key, rows[-2 * ROLLOUTS :])[1]
        if level == "red" and (len(recent) < 2 * ROLLOUTS or min(recent) <= red):
            level = "yellow"  # it began otherwise: the flag of what changed it is the better answer, and comes soon
    lengths = run.series("completions/mean_length", rows[-ROLLOUTS:])[1]
    length = f", {lengths[-1]:.0f} tokens long on average" if lengths else ""
    stretch = f"steps {rows[-ROLLOUTS:][0]['step']} to {rows[-1]['step']}"
    evidence = f"{part:.0%} of the completions of {stretch} are cut{length}, {start:.0%} at first"
    return Flag("completions end", level, evidence, cause, knob)


# ------------------------------------------------------------------------------- gspo with environments, tools or a sampler


def tool_calls(run: RunHistory) -> Flag | None:
    """Judge whether tools are called, and calls succeed."""
    rows = rollouts(run)[-ROLLOUTS:]
    calls = run.series("tools/call_frequency", rows)[1]
    if len(calls) < MIN_ROLLOUTS:
        return None
    failed = statistics.fmean(run.series("tools/failure_frequency", rows)[1] or [0.0])
    evidence = f"{statistics.fmean(calls):.2f} calls a completion, {failed:.0%} of them fail"
    if not any(calls):
        cause = "no tool is ever called, so the policy cannot learn to"
        return Flag("tool calls", "red", evidence, cause, "a model that was trained to call tools")
    cause = "calls name no tool, have wrong arguments, or the tool raises"
    return Flag(
        "tool calls", level_above(failed, *FAILED_CALL_SHARES), evidence, cause, "the docstrings of cogumi.tools"
    )


def episodes_end(run: RunHistory) -> Flag | None:
    """Judge the share of episodes that a budget of turns, tokens or seconds cut."""
    rows = rollouts(run)[-ROLLOUTS:]
    cut = run.series("episodes/without_end", rows)[1]
    if len(cut) < MIN_ROLLOUTS:
        return None
    parts = {name: statistics.fmean(run.series(f"episodes/cut_by_{name}", rows)[1] or [0.0]) for name in BUDGETS}
    budget = max(parts, key=parts.__getitem__)
    reasons = ", ".join(f"{part:.0%} by their {name}" for name, part in parts.items() if part) or "none by a budget"
    evidence = f"{statistics.fmean(cut):.0%} of the episodes are cut: {reasons}"
    cause = f"the budget of {budget} is too small for these episodes, or the policy does not end them"
    level = level_above(statistics.fmean(cut), *ENDLESS_SHARES)
    return Flag("episodes end", level, evidence, cause, BUDGETS[budget])


def scored(run: RunHistory) -> Flag | None:
    """Judge the share of completions without any reward: what should have scored them crashed or ran out of time."""
    rows = rollouts(run)[-ROLLOUTS:]
    missing = run.series("rewards/not_scored", rows)[1]
    if not missing:
        return None
    part = sum(missing) / len(rows)
    evidence = f"{part:.1%} of the completions of steps {rows[0]['step']} to {rows[-1]['step']} were not scored"
    cause = "a reward returned NaN for them (a program crashed or ran out of time), and they have no advantage"
    why = cause, "the reward, or the limits of what it runs"
    return Flag("scored", level_above(part, *UNSCORED_SHARES), evidence, *why)


def sampler_weights(run: RunHistory) -> Flag | None:
    """Judge whether the sampler's log-probabilities moved with the trainer's (rl/sampling.py)."""
    steps, lags = run.series("sampling/probe/lag", rollouts(run)[-ROLLOUTS:])
    if not lags:
        return None
    moved = dict(zip(*run.series("sampling/probe/moved", rollouts(run)[-ROLLOUTS:]), strict=True)).get(steps[-1], 0.0)
    evidence = f"at step {steps[-1]} it lacks {lags[-1]:.0%} of the {moved:.2g} nats a token that the trainer moved by"
    cause = "the sampler's weights are those of an earlier step, so completions are not the policy's"
    knob = "train.use_vllm: false, which samples with the trainer"
    return Flag("sampler's weights", level_above(lags[-1], *LAG_SHARES), evidence, cause, knob)


def sampler_difference(run: RunHistory) -> Flag | None:
    """Judge how far the log-probabilities of a rollout's tokens are apart, by TRL's figure or by cogumi's probe texts."""
    rows = rollouts(run)[-ROLLOUTS:]
    steps, values = run.series("sampling/sampling_logp_difference/mean", rows)
    if not values:
        steps, values = run.series("sampling/probe/difference", rows)
    if not values:
        return None
    mean = statistics.fmean(values)
    evidence = f"{mean:.2g} nats a token between them in steps {steps[0]} to {steps[-1]}"
    cause = "the two engines compute different log-probabilities from the same weights"
    return Flag("sampler and trainer", level_above(mean, *SAMPLER_NATS), evidence, cause, "model.dtype: float16")


COMMON: tuple[Rule, ...] = (
    finite_numbers, learning_rate, gradient_norm, adapter_moves, update_size, held_out_completions, waiting_for_data, gpu,
    mirror,
)  # fmt: skip
RULES: dict[str, tuple[Rule, ...]] = {
    "sft": (*COMMON, learned_tokens, padding, prompt_and_completion, loss_trend, token_frequencies, loss_noise),
    "dpo": (*COMMON, learned_tokens, padding, loss_trend, preferences),
    "gspo": (
        *(*COMMON, kl_to_the_sampler, clip_fraction, gradient_clipping, entropy, reward_varies, completions_end),
        *(tool_calls, episodes_end, scored, sampler_weights, sampler_difference),
    ),
}
