"""Rules for supervised fine-tuning: what is learned of the batches, and what the loss does."""

import statistics

from cogumi.health.flags import Batches, Flag, Level, Rule, Run, Words, share
from cogumi.health.flags_common import is_untrained
from cogumi.health.trend import fall, noise, smooth, trend

ENOUGH_ROWS = 8
TREND_STEPS = 50  # before these a loss that does not fall may still be warming up
WORSE = 1.3  # times the entropy of the frequencies above which a first loss is of a model that expects something else
RESTS = 10  # rows of which the second half must not fall, for a loss to be at rest
FALLS = 2.0  # standard deviations of a trend from which a loss is not at rest: less than a change of its own needs
SHORT_ANSWERS = 32  # learned tokens to an end token up to which a sample of twice as many is to reach its end
TELLS = 2.0  # Student's t from which a difference between own and other prompts is more than noise
BELONGS = (
    3.0  # likewise of the words they share: from here completions belong to their prompts, whatever the model says
)
# t of pieces of the prompts, and share of words, from which completions that belong to their prompts would show it
TOGETHER, SAME_KIND = 4.0, 0.25


def learned_tokens(run: Run) -> Flag | None:
    """Examples of which nothing is learned, among those looked at before the run and in the steps since."""
    steps, empty = sum(run.series("seen/steps")[1]), sum(run.series("seen/empty")[1])
    if run.batches is None and not steps:
        return None
    parts, evidence = [share(empty, steps)] if steps else [], []
    if run.batches is not None:
        parts.append(share(run.batches.masked, run.batches.examples))
        evidence.append(f"{run.batches.masked} of {run.batches.examples} examples without a learned token")
    if steps:
        evidence.append(f"{empty:.0f} of {steps:.0f} steps without one")
    worst, red = max(parts), run.thresholds.masked_rows
    return Flag(
        "learned tokens",
        "red" if worst > red else "yellow" if worst > 0 else "green",
        ", ".join(evidence),
        f"none, red > {red:.0%}",
        "every token of these examples is masked, so nothing is learned of them",
        "data.columns",
    )


def padding(run: Run) -> Flag | None:
    """Padding that is learned, or a padding token that the text itself uses."""
    seen = run.batches
    if seen is None:
        return None
    threshold = "no padding is learned, no text holds the padding token"
    if seen.pads_learned:
        return Flag(
            "padding",
            "red",
            f"{seen.pads_learned} padded places of {seen.examples} examples are learned",
            threshold,
            "the collator labels padding, so the model learns to write it",
            "the trainer's data_collator",
        )
    if seen.pad_is_end and not seen.ends and seen.learned:
        return Flag(
            "padding",
            "red",
            f"the padding token is the end token, and none of {seen.learned} learned tokens ends a text",
            threshold,
            "end tokens are masked as if they were padding, so the model never learns to stop",
            "the tokenizer's pad_token",
        )
    level: Level = "yellow" if seen.pads_in_text and not seen.pad_is_end else "green"
    return Flag(
        "padding",
        level,
        f"{seen.pads_in_text} places in the text of {seen.examples} examples hold the padding token",
        threshold,
        "the padding token is also a word of the text",
        "the tokenizer's pad_token",
    )


def end_tokens(run: Run) -> Flag | None:
    """Do completions end; are they cut at the longest length."""
    seen = run.batches
    if seen is None or not seen.learned:
        return None
    cut, red = share(seen.cut, seen.examples), run.thresholds.cut_rows
    evidence = f"{seen.ends} end tokens learned in {seen.examples} examples, {seen.cut} cut at train.max_length"
    threshold = f"some, and <= {red / 6:.0%} cut, red > {red:.0%}"
    if cut > red / 6:
        cause, level = "examples are longer than the budget", "red" if cut > red else "yellow"
        return Flag("end tokens", "red" if level == "red" else "yellow", evidence, threshold, cause, "train.max_length")
    cause = "the examples hold no end token, so the model does not learn to stop"
    level = "green" if seen.ends else "yellow"
    return Flag("end tokens", "yellow" if level == "yellow" else "green", evidence, threshold, cause, "data.format")


def samples_end(run: Run) -> Flag | None:
    """Whether samples reach the end token once half of the steps are done. A sample is of 64 tokens at most."""
    now, seen = run.written[-1] if run.written else None, run.batches
    if now is None or not now.step or 2 * now.step < run.setting.max_steps or seen is None or not seen.learned:
        return None
    often = seen.learned / seen.ends if seen.ends else 0.0
    evidence = f"{now.ended} of {now.count} samples reach the end token after step {now.step}"
    if now.ended or often > SHORT_ANSWERS:
        return Flag("samples end", "green", evidence, "at least one")
    if seen.ends:
        cause = f"the model has not learned to stop, though one learned token in {often:.0f} is the end token"
        return Flag("samples end", "yellow", evidence, "at least one", cause, "train.max_steps, higher")
    cause = "no learned token is the end token, so the model does not learn to stop"
    return Flag("samples end", "red", evidence, "at least one", cause, "data.format")


def prompt_and_completion(run: Run) -> Flag | None:
    """Do prompts help to predict their completions: what the base knows of that, or the trained model where it knows none.

    A model that gains nothing from the prompts is weak, or the prompts are others'. Red where the second is shown: the
    model knows the text so well that it would use them, or completions share no words with their prompts though they are
    written in the same words and pieces of the prompts share them. Where they do share words, they belong.
    """
    if run.batches is None or run.batches.pairs is None:
        return None
    first, least, words = run.batches.pairs, run.thresholds.pair_gain, run.batches.words
    asked = run.batches.pairs_now
    pairs = first if asked is None or first.t >= TELLS else asked
    gain = share(pairs.other - pairs.own, pairs.other)
    evidence = (
        f"completions cost {pairs.own:.3f} nats a token after their own prompt and {pairs.other:.3f} after another's "
        f"(t = {pairs.t:.1f}, step {pairs.step})"
    )
    if words is not None:
        evidence += f", and share words with their own with t = {words.t:.1f}"
    threshold = f"cheaper by >= {least:.0%}, or t >= {TELLS:g}; red where model or words (t < {TELLS:g}) could tell"
    level: Level = "green"
    cause, knob = "", "data.columns"
    if gain < least and pairs.t < TELLS and not (words is not None and words.t >= BELONGS):
        knows = pairs.own < run.thresholds.knows_text * run.batches.entropy
        if knows or (words is not None and could_share(words) and words.t < TELLS):
            level, cause = "red", "completions do not belong to their prompts, as if the rows were shuffled"
        elif asked is not None:  # a base that cannot tell them yet says nothing of the data
            level, cause = "yellow", "the trained model does not use the prompts"
    return Flag("prompt and completion", level, evidence, threshold, cause, knob)


def could_share(words: Words) -> bool:
    """Whether completions that belong to their prompts would show it in their words: labels or numbers would not."""
    return words.t_within >= TOGETHER and words.alike >= SAME_KIND


def loss_trend(run: Run) -> Flag | None:
    """Up and stays up: diverging. Not down within a hundred steps: nothing is learned."""
    steps, losses = run.series("loss")
    if len(losses) < ENOUGH_ROWS:
        return None
    limits, scatter = run.thresholds, noise(losses)
    start = min(losses[0], statistics.median(losses[:3]))
    end = statistics.median(losses[-max(5, len(losses) // 4) :])
    peak = max(smooth(losses))
    evidence = (
        f"{start:.3f} at step {steps[0]}, at most {peak:.3f}, {end:.3f} by step {steps[-1]} (noise {scatter:.3f})"
    )
    margin = max(5 * scatter, limits.loss_rise * start)
    threshold = f"not up by more than {margin:.3f}, down by {limits.loss_fall:.0%} in 100 steps"
    too_high = "the learning rate is too high"
    if peak > start + margin:
        stays = end > start * (1 - limits.loss_fall)
        level: Level = "red" if stays else "yellow"
        return Flag("loss trend", level, evidence, threshold, too_high, "train.learning_rate, to a tenth")
    latest = run.series("loss", run.latest[len(run.latest) // 2 :])
    rising = trend(*latest)
    if len(latest[1]) >= 2 * ENOUGH_ROWS and rising.z > limits.trend_z and rising.change(latest[0]) > margin:
        evidence = f"up by {rising.change(latest[0]):.3f} from step {latest[0][0]} to {steps[-1]} (z = {rising.z:.1f})"
        return Flag("loss trend", "red", evidence, threshold, too_high, "train.learning_rate, to a third")
    if steps[-1] >= max(100, run.setting.warmup_steps + TREND_STEPS) and end > start * (1 - limits.loss_fall):
        cause = "the loss hardly falls"
        return Flag("loss trend", "yellow", evidence, threshold, cause, "train.learning_rate, higher")
    return Flag("loss trend", "green", evidence, threshold)


def rests_at_frequencies(run: Run) -> bool:
    """Whether the loss of the second half of the steps is that of the tokens' frequencies, and not on its way down: it does
    not fall beyond noise, nor would as long a stretch again, at its slope, take it below."""
    steps, losses = run.series("loss")
    if run.batches is None or not run.batches.entropy or len(losses) < RESTS or steps[-1] < TREND_STEPS:
        return False
    half = second_half(run)
    limit, falling, end = run.thresholds.frequency_share * run.batches.entropy, trend(*half), statistics.median(half[1])
    return end > limit and falling.z > -FALLS and end + min(0.0, falling.change(half[0])) > limit


def second_half(run: Run) -> tuple[list[int], list[float]]:
    return run.series("loss", [row for row in run.rows if int(row["step"]) > run.step // 2])


def token_frequencies(run: Run) -> Flag | None:
    """A loss at rest where a model is that knows nothing but how often each token occurs.

    One that began above that, and worse than a model that was never trained, was taught against what it knew: its labels
    are not the text's. One that rose to it, or whose base used the prompts that it now does not, lost what it knew. Others
    never came from there (untrained weights, a rate too low), or the text has no more to it.
    """
    steps, losses = run.series("loss")
    batches = run.batches
    if batches is None or not batches.entropy or len(losses) < RESTS or steps[-1] < TREND_STEPS:
        return None
    half, start = second_half(run), statistics.median(losses[:3])
    end, falling = statistics.median(half[1]), trend(*half)
    level: Level = "green"
    cause, knob = "little but the tokens' frequencies is learned so far", "train.max_steps, higher"
    rests = rests_at_frequencies(run)
    if rests:
        level = "yellow"
    if rests and not still_tells(batches):
        if start > WORSE * batches.entropy and not is_untrained(run):
            level = "red"
            cause = "the labels are in another order than the text, so only their frequencies can be learned"
            knob = "the trainer's data_collator"
        elif start < end * (1 - run.thresholds.loss_fall) or forgot(batches):
            level, cause = "red", "the learning rate is too high, and what the base knew is gone"
            knob = "train.learning_rate, to a tenth"
    return Flag(
        "token frequencies",
        level,
        f"loss {start:.3f} by step {steps[2]}, {end:.3f} in steps {half[0][0]} to {steps[-1]} (trend z = {falling.z:.1f}); "
        f"the learned tokens' frequencies alone give {batches.entropy:.3f}",
        f"< {run.thresholds.frequency_share:.0%} of that, or falling",
        cause,
        knob,
    )


def still_tells(batches: Batches) -> bool:
    """Whether the base could tell a completion's own prompt from another's, and nothing says that the model now cannot."""
    before, now = batches.pairs, batches.pairs_now
    return before is not None and before.t >= TELLS and (now is None or now.t >= TELLS)


def forgot(batches: Batches) -> bool:
    return batches.pairs is not None and batches.pairs.t >= TELLS and not still_tells(batches)


def loss_noise(run: Run) -> Flag | None:
    """The scatter of the loss from one optimizer step to the next, as a share of the loss."""
    losses = run.series("loss", run.latest)[1]
    if len(losses) < ENOUGH_ROWS:
        return None
    logged = max(
        1.0, statistics.median(run.series("seen/steps", run.latest)[1] or [1.0])
    )  # a row averages so many steps
    level_of_loss = statistics.median(losses)
    part, limits = share(noise(losses) * logged**0.5, level_of_loss), run.thresholds
    few = run.setting.examples_per_step < limits.few_examples
    level: Level = "red" if part > limits.noise_red and few else "yellow" if part > limits.noise_yellow else "green"
    if fall(run.series("loss")[1]).is_by(limits.loss_fall):
        level = "green"  # as a loss becomes small, its scatter is more and more of it
    return Flag(
        "loss noise",
        level,
        f"{part:.0%} of the loss from step to step, with {run.setting.examples_per_step} examples a step",
        f"<= {limits.noise_yellow:.0%}, red > {limits.noise_red:.0%} with fewer than {limits.few_examples} examples",
        "the batch is too small, so its gradient is mostly chance",
        "train.gradient_accumulation_steps, higher",
    )


SFT: tuple[Rule, ...] = (
    learned_tokens,
    padding,
    end_tokens,
    samples_end,
    prompt_and_completion,
    loss_trend,
    token_frequencies,
    loss_noise,
)
