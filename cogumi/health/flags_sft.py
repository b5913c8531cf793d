"""Rules of SFT and DPO: what is learned of the batches, what the loss does, preferences.

Limits without a source are what the suite of whole and broken runs in benchmarks/verdict.py separates.
"""

import math
import statistics

from cogumi.health.flags import (
    AnswerOverlap,
    Flag,
    Level,
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
from cogumi.health.flags_common import LOSS_RISE, is_untrained

ENOUGH_ROWS = 8  # of a loss
TREND_STEPS = 50  # before these a loss that does not fall may still be warming up
TREND_Z = 3.0  # standard deviations from which a trend (Mann and Kendall's test) is more than noise
LOSS_FALL = 0.03  # share of its start that a loss is to fall by in a hundred steps; a tenth is usual
WORSE = 1.3  # times the entropy of the frequencies above which a first loss is of a model that expects something else
AT_FREQUENCIES = 0.93  # share of that entropy above which a loss at rest knows nothing else
KNOWS_TEXT = 0.5  # share of it below which a model knows the text so well that it would use a prompt that belongs
PAIR_GAIN = 0.02  # share that completions are easier to predict from their own prompt than from another's
RESTS = 10  # rows of which the second half must not fall, for a loss to be at rest
FALLS = 2.0  # standard deviations of a trend from which a loss is not at rest: less than a change of its own needs
SCATTER = 0.12, 0.2  # yellow and red share of itself that a loss scatters by from step to step
FEW_EXAMPLES = 8  # in an optimizer step, below which scatter is the batch's fault
MASKED = 0.1  # red share of examples without one learned token
CUT = 0.05, 0.3  # yellow and red share of examples that are cut at train.max_length
SHORT_ANSWERS = 32  # learned tokens to an end token up to which a sample of twice as many is to reach its end
TELLS = 2.0  # Student's t from which a difference between own and other prompts is more than noise
BELONGS = 3.0  # of the words they share: from here completions belong to their prompts, whatever the model says
# t of pieces of the prompts, and share of words, from which completions that belong to their prompts would show it
TOGETHER, SAME_KIND = 4.0, 0.25


def learned_tokens(run: RunHistory) -> Flag | None:
    """Examples of which nothing is learned, among those that were checked before the run and in the steps since."""
    steps, empty = sum(run.series("seen/steps")[1]), sum(run.series("seen/empty")[1])
    if run.batches is None and not steps:
        return None
    found = {f"{empty:.0f} of {steps:.0f} steps without a learned token": share(empty, steps)} if steps else {}
    if seen := run.batches:
        found[f"{seen.masked} of {seen.examples} examples without a learned token"] = share(seen.masked, seen.examples)
    level, evidence = level_above(max(found.values()), 0, MASKED), ", ".join(found)
    why = "every token of these examples is masked, so nothing is learned of them", "data.columns"
    return Flag("learned tokens", level, evidence, f"none, red > {MASKED:.0%}", *why)


def padding(run: RunHistory) -> Flag | None:
    """Padding that is learned, or a padding token that the text itself uses."""
    seen = run.batches
    if seen is None:
        return None
    name, threshold = "padding", "no padding is learned, no text holds the padding token"
    knob = "the tokenizer's pad_token"
    if seen.pads_learned:
        evidence = f"{seen.pads_learned} padded places of {seen.examples} examples are learned"
        cause = "the collator labels padding, so the model learns to write it"
        return Flag(name, "red", evidence, threshold, cause, "the trainer's data_collator")
    if seen.pad_is_end and not seen.ends and seen.learned:
        evidence = f"the padding token is the end token, and none of {seen.learned} learned tokens ends a text"
        cause = "end tokens are masked as if they were padding, so the model never learns to stop"
        return Flag(name, "red", evidence, threshold, cause, knob)
    level: Level = "yellow" if seen.pads_in_text and not seen.pad_is_end else "green"
    evidence = f"{seen.pads_in_text} places in the text of {seen.examples} examples hold the padding token"
    return Flag(name, level, evidence, threshold, "the padding token is also a word of the text", knob)


def end_tokens(run: RunHistory) -> Flag | None:
    """Do completions end; are they cut at the longest length."""
    seen = run.batches
    if seen is None or not seen.learned:
        return None
    level = level_above(share(seen.cut, seen.examples), *CUT)
    cause, knob = "examples are longer than the budget", "train.max_length"
    if level == "green":
        level = "green" if seen.ends else "yellow"
        cause, knob = "the examples hold no end token, so the model does not learn to stop", "data.format"
    evidence = f"{seen.ends} end tokens learned in {seen.examples} examples, {seen.cut} cut at train.max_length"
    return Flag("end tokens", level, evidence, f"some, and <= {CUT[0]:.0%} cut, red > {CUT[1]:.0%}", cause, knob)


def samples_end(run: RunHistory) -> Flag | None:
    """Whether samples reach the end token once half of the steps are done. A sample is of 64 tokens at most."""
    now, seen = run.written[-1] if run.written else None, run.batches
    if now is None or not now.step or 2 * now.step < run.setting.max_steps or seen is None or not seen.learned:
        return None
    often = seen.learned / seen.ends if seen.ends else 0.0
    name, evidence = "samples end", f"{now.ended} of {now.count} samples reach the end token after step {now.step}"
    if now.ended or often > SHORT_ANSWERS:
        return Flag(name, "green", evidence, "at least one")
    if seen.ends:
        cause = f"the model has not learned to stop, though one learned token in {often:.0f} is the end token"
        return Flag(name, "yellow", evidence, "at least one", cause, "train.max_steps, higher")
    cause = "no learned token is the end token, so the model does not learn to stop"
    return Flag(name, "red", evidence, "at least one", cause, "data.format")


def prompt_and_completion(run: RunHistory) -> Flag | None:
    """Do prompts help to predict their completions? The base is asked, or the trained model where the base cannot tell.

    Red where the model knows the text so well that it would use prompts that belong. Red also where completions share
    no words with their prompts, though both are written in the same words. Where they share words, they belong.
    """
    if run.batches is None or run.batches.pairs is None:
        return None
    first, words, asked = run.batches.pairs, run.batches.words, run.batches.pairs_now
    pairs = first if asked is None or first.t >= TELLS else asked
    gain = share(pairs.other - pairs.own, pairs.other)
    evidence = (
        f"completions cost {pairs.own:.3f} nats a token after their own prompt and {pairs.other:.3f} after another's "
        f"(t = {pairs.t:.1f}, step {pairs.step})"
    )
    if words is not None:
        evidence += f", and share words with their own with t = {words.t:.1f}"
    threshold = f"cheaper by >= {PAIR_GAIN:.0%}, or t >= {TELLS:g}; red where model or words (t < {TELLS:g}) could tell"
    level: Level = "green"
    cause = ""
    if gain < PAIR_GAIN and pairs.t < TELLS and not (words is not None and words.t >= BELONGS):
        knows = pairs.own < KNOWS_TEXT * run.batches.entropy
        # Labels or numbers would not share words with their prompts, whatever their order.
        could_share = words is not None and words.t_within >= TOGETHER and words.alike >= SAME_KIND
        if knows or (could_share and words is not None and words.t < TELLS):
            level, cause = "red", "completions do not belong to their prompts, as if the rows were shuffled"
        elif asked is not None:  # a base that cannot tell them yet says nothing of the data
            level, cause = "yellow", "the trained model does not use the prompts"
    return Flag("prompt and completion", level, evidence, threshold, cause, "data.columns")


def loss_trend(run: RunHistory) -> Flag | None:
    """Up and stays up: diverging. Not down within a hundred steps: nothing is learned."""
    steps, losses = run.series("loss")
    if len(losses) < ENOUGH_ROWS:
        return None
    name, scatter = "loss trend", noise(losses)
    start = min(losses[0], statistics.median(losses[:3]))
    end = statistics.median(losses[-max(5, len(losses) // 4) :])
    peak = max(smooth(losses))
    evidence = (
        f"{start:.3f} at first, at most {peak:.3f} (smoothed), {end:.3f} by step {steps[-1]} (noise {scatter:.3f})"
    )
    margin = max(5 * scatter, LOSS_RISE * start)
    threshold = f"not up by more than {margin:.3f}, down by {LOSS_FALL:.0%} in 100 steps"
    too_high, has_fallen = "the learning rate is too high", end <= start * (1 - LOSS_FALL)
    if peak > start + margin:
        level: Level = "yellow" if has_fallen else "red"
        return Flag(name, level, evidence, threshold, too_high, "train.learning_rate, to a tenth")
    latest = run.series("loss", run.latest[len(run.latest) // 2 :])
    rising = trend(*latest)
    if len(latest[1]) >= 2 * ENOUGH_ROWS and rising.z > TREND_Z and rising.change(latest[0]) > margin:
        evidence = f"up by {rising.change(latest[0]):.3f} from step {latest[0][0]} to {steps[-1]} (z = {rising.z:.1f})"
        return Flag(name, "red", evidence, threshold, too_high, "train.learning_rate, to a third")
    if steps[-1] >= max(100, run.setting.warmup_steps + TREND_STEPS) and not has_fallen:
        return Flag(name, "yellow", evidence, threshold, "the loss hardly falls", "train.learning_rate, higher")
    return Flag(name, "green", evidence, threshold)


def is_at_frequencies(run: RunHistory) -> bool:
    """Whether the loss of the second half of the steps rests at that of the tokens' frequencies.
    It does not fall beyond noise, and at its slope as many steps again would not take it below."""
    steps, losses = run.series("loss")
    if run.batches is None or not run.batches.entropy or len(losses) < RESTS or steps[-1] < TREND_STEPS:
        return False
    half = second_half(run)
    limit, falling, end = AT_FREQUENCIES * run.batches.entropy, trend(*half), statistics.median(half[1])
    return end > limit and falling.z > -FALLS and end + min(0.0, falling.change(half[0])) > limit


def second_half(run: RunHistory) -> tuple[list[int], list[float]]:
    return run.series("loss", [row for row in run.rows if int(row["step"]) > run.step // 2])


def token_frequencies(run: RunHistory) -> Flag | None:
    """A loss at rest where a model is that knows nothing but how often each token occurs.

    Red where it began above that, and worse than an untrained model: its labels are not the text's. Red where it rose to it, or
    the base used the prompts that it now does not: it lost what it knew. Else the text may have no more to it.
    """
    steps, losses = run.series("loss")
    batches = run.batches
    if batches is None or not batches.entropy or len(losses) < RESTS or steps[-1] < TREND_STEPS:
        return None
    half, start = second_half(run), statistics.median(losses[:3])
    end, falling = statistics.median(half[1]), trend(*half)
    level: Level = "yellow" if is_at_frequencies(run) else "green"
    cause, knob = "little but the tokens' frequencies is learned so far", "train.max_steps, higher"
    told = batches.pairs is not None and batches.pairs.t >= TELLS  # the base could tell a completion's own prompt
    still_tells = told and (batches.pairs_now is None or batches.pairs_now.t >= TELLS)
    if level == "yellow" and not still_tells:
        if start > WORSE * batches.entropy and not is_untrained(run):
            level, knob = "red", "the trainer's data_collator"
            cause = "the labels are in another order than the text, so only their frequencies can be learned"
        elif start < end * (1 - LOSS_FALL) or told:
            level, cause = "red", "the learning rate is too high, and what the base knew is gone"
            knob = "train.learning_rate, to a tenth"
    evidence = (
        f"loss {start:.3f} by step {steps[2]}, {end:.3f} in steps {half[0][0]} to {steps[-1]} (trend z = {falling.z:.1f}); "
        f"the learned tokens' frequencies alone give {batches.entropy:.3f}"
    )
    threshold = f"< {AT_FREQUENCIES:.0%} of that, or falling"
    return Flag("token frequencies", level, evidence, threshold, cause, knob)


def loss_noise(run: RunHistory) -> Flag | None:
    """The scatter of the loss from one optimizer step to the next, as a share of the loss."""
    losses = run.series("loss", run.latest)[1]
    if len(losses) < ENOUGH_ROWS:
        return None
    logged = statistics.median(run.series("seen/steps", run.latest)[1] or [1.0])  # a row averages so many steps
    part, examples = share(noise(losses) * logged**0.5, statistics.median(losses)), run.setting.examples_per_step
    level = level_above(part, *SCATTER)
    if level == "red" and examples >= FEW_EXAMPLES:
        level = "yellow"
    if fall(run.series("loss")[1]).is_by(LOSS_FALL):
        level = "green"  # as a loss becomes small, its scatter is more and more of it
    evidence = f"{part:.0%} of the loss from step to step, with {examples} examples a step"
    threshold = f"<= {SCATTER[0]:.0%}, red > {SCATTER[1]:.0%} with fewer than {FEW_EXAMPLES} examples"
    why = "the batch is too small, so its gradient is mostly chance", "train.gradient_accumulation_steps, higher"
    return Flag("loss noise", level, evidence, threshold, *why)


OF_BATCHES = (learned_tokens, padding, end_tokens, samples_end, prompt_and_completion)
SFT: tuple[Rule, ...] = (*OF_BATCHES, loss_trend, token_frequencies, loss_noise)

# ------------------------------------------------------------------------------------------------------------------ dpo

PREFERENCE_ROWS = 10
COIN = 2.0  # standard deviations within which an accuracy is a coin's
ABOVE = 3.0  # Student's t from which a loss is above log 2: it is asked at every fifth step
BOTH = 0.3  # correlation from which both answers of a pair are about their prompt


def preferences(run: RunHistory) -> Flag | None:
    """Accuracy on pairs not trained on yet, in the second half of the steps: better than a coin?

    The loss of a model that has not moved is log 2 (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). Red where one
    answer of each pair belongs to its prompt by its words, and is as often the rejected one. Red also where the loss is
    above log 2 beyond chance, as what is learned of some pairs is wrong for others. Where words show that the chosen
    answers belong, the loss must be above by LOSS_RISE. Else the model may not tell the answers apart yet.
    """
    steps = run.series("rewards/accuracies")[0]
    if len(steps) < PREFERENCE_ROWS or steps[-1] < TREND_STEPS:
        return None
    half = [row for row in run.rows if int(row["step"]) > steps[-1] // 2]
    right = statistics.fmean(run.series("rewards/accuracies", half)[1])
    losses = run.series("loss", half)[1]
    loss, answers = statistics.fmean(losses), None if run.batches is None else run.batches.answers
    pairs = run.setting.examples_per_step * (steps[-1] - steps[-1] // 2)
    z = (right - 0.5) / (0.5 / math.sqrt(pairs))
    stretch = f"steps {steps[-1] // 2 + 1} to {steps[-1]}"
    evidence = f"{right:.1%} of some {pairs} pairs right in {stretch} (z = {z:.1f}), loss {loss:.3f}"
    level: Level = "green" if z > COIN else "yellow"
    cause, knob = "the answers are not told apart yet", "train.learning_rate, higher"
    if z <= COIN:
        # Other losses than the sigmoid start elsewhere.
        above = students_t([each - math.log(2) for each in losses]) if run.setting.loss == "sigmoid" else 0.0
        tell_apart = answers is not None and answers.t >= BELONGS
        if above > ABOVE and loss > math.log(2) * (1 + LOSS_RISE):
            level, cause = "red", "the learning rate is too high, so margins swing either way"
            knob = "train.learning_rate, to a tenth"
        elif (answers is not None and are_mixed_up(answers)) or (above > ABOVE and not tell_apart):
            level, cause = "red", "chosen and rejected are mixed up, or differ by nothing that can be learned"
            knob = "data.columns"
        if answers is not None:
            evidence += f"; {answers.pairs} chosen answers share more words with their prompts with t = {answers.t:.1f}"
    threshold = f"more than a coin (z > {COIN:g}), red with a loss above log 2 or words that say why"
    return Flag("preferences", level, evidence, threshold, cause, knob)


def are_mixed_up(answers: AnswerOverlap) -> bool:
    """Whether one answer of each pair belongs to its prompt, and is as often the rejected one as the chosen."""
    return abs(answers.t) < TELLS and answers.t_either >= TOGETHER and answers.together < BOTH


def chosen_likelihood(run: RunHistory) -> Flag | None:
    """Whether the chosen answers become less likely, with the rejected ones (Razin et al. 2024, arXiv:2410.08847)."""
    steps, values = run.series("logps/chosen")
    if len(values) < PREFERENCE_ROWS:
        return None
    found, start = trend(steps, values), statistics.median(values[:3])
    change = found.change(steps)
    evidence = f"log-probability {start:.4g} at first, changed by {change:.3g} to step {steps[-1]} (z = {found.z:.1f})"
    threshold = "not down by a fifth"
    why = "both answers become unlikely, and only the margin grows", "train.beta, higher"
    level: Level = "yellow" if found.z < -TREND_Z and change < -0.2 * abs(start) else "green"
    return Flag("chosen likelihood", level, evidence, threshold, *why)


DPO: tuple[Rule, ...] = (learned_tokens, padding, loss_trend, preferences, chosen_likelihood)
