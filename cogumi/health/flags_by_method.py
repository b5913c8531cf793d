"""Rules of each method: what SFT and DPO learn of their batches and what the loss does, preferences, a policy's rewards.

Limits without a source are what the suite of whole and broken runs in benchmarks/verdict.py separates. Those of groups
without variance, truncation and entropy are of axolotl's training-stability page.
"""

import math
import statistics

from cogumi.health.flags import (
    AnswerOverlap,
    Flag,
    Level,
    Row,
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
TELLS = 2.0  # Student's t from which a difference between own and other prompts is more than noise
BELONGS = 3.0  # of the words they share: from here completions belong to their prompts, whatever the model says
# t of pieces of the prompts, and share of words, from which completions that belong to their prompts would show it
TOGETHER, SAME_KIND = 4.0, 0.25


def learned_tokens(run: RunHistory) -> Flag | None:
    """Examples of which nothing is learned."""
    seen = run.batches
    if seen is None:
        return None
    evidence = f"{seen.masked} of {seen.examples} examples without a learned token"
    why = "every token of these examples is masked, so nothing is learned of them", "data.columns"
    level = level_above(share(seen.masked, seen.examples), 0, MASKED)
    return Flag("learned tokens", level, evidence, *why)


def padding(run: RunHistory) -> Flag | None:
    """Padding that is learned, or end tokens that are not, since they are masked as padding."""
    seen = run.batches
    if seen is None:
        return None
    if seen.pad_is_end and not seen.ends and seen.learned:
        evidence = f"the padding token is the end token, and none of {seen.learned} learned tokens ends a text"
        cause = "end tokens are masked as if they were padding, so the model never learns to stop"
        return Flag("padding", "red", evidence, cause, "the tokenizer's pad_token")
    evidence = f"{seen.pads_learned} padded places of {seen.examples} examples are learned"
    why = "the collator labels padding, so the model learns to write it", "the trainer's data_collator"
    return Flag("padding", "red" if seen.pads_learned else "green", evidence, *why)


def end_tokens(run: RunHistory) -> Flag | None:
    seen = run.batches
    if seen is None or not seen.learned:
        return None
    evidence = f"{seen.ends} end tokens learned in {seen.examples} examples"
    why = "the examples hold no end token, so the model does not learn to stop", "data.format"
    return Flag("end tokens", "green" if seen.ends else "yellow", evidence, *why)


def prompt_and_completion(run: RunHistory) -> Flag | None:
    """Do prompts help to predict their completions? The base is asked, or the trained model where the base cannot tell.
    Red where the model knows the text so well that it would use prompts that belong, or where no words are shared."""
    if run.batches is None or run.batches.pairs is None:
        return None
    first, words, asked = run.batches.pairs, run.batches.words, run.batches.pairs_now
    pairs = first if asked is None or first.t >= TELLS else asked
    evidence = (
        f"completions cost {pairs.own:.3f} nats a token after their own prompt and {pairs.other:.3f} after another's "
        f"(t = {pairs.t:.1f}, step {pairs.step})"
    )
    level: Level = "green"
    cause = ""
    shuffled = pairs.own < KNOWS_TEXT * run.batches.entropy
    unused = share(pairs.other - pairs.own, pairs.other) < PAIR_GAIN and pairs.t < TELLS
    if words is not None:
        evidence += f", and share words with their own with t = {words.t:.1f}"
        # Labels or numbers would not share words with their prompts, whatever their order.
        shuffled |= words.t_within >= TOGETHER and words.alike >= SAME_KIND and words.t < TELLS
        unused &= words.t < BELONGS
    if unused and shuffled:
        level, cause = "red", "completions do not belong to their prompts, as if the rows were shuffled"
    elif unused and asked is not None:  # a base that cannot tell them yet says nothing of the data
        level, cause = "yellow", "the trained model does not use the prompts"
    return Flag("prompt and completion", level, evidence, cause, "data.columns")


def loss_trend(run: RunHistory) -> Flag | None:
    """Up and stays up: diverging. Not down within a hundred steps: nothing is learned."""
    steps, losses = run.series("loss")
    if len(losses) < ENOUGH_ROWS:
        return None
    scatter, start = noise(losses), min(losses[0], statistics.median(losses[:3]))
    end, peak = statistics.median(losses[-max(5, len(losses) // 4) :]), max(smooth(losses))
    margin, has_fallen = max(5 * scatter, LOSS_RISE * start), end <= start * (1 - LOSS_FALL)
    evidence = (
        f"{start:.3f} at first, at most {peak:.3f} (smoothed), {end:.3f} by step {steps[-1]} (noise {scatter:.3f})"
    )
    level: Level = "green"
    cause, knob = "the learning rate is too high", "train.learning_rate, to a tenth"
    latest = run.series("loss", run.latest[len(run.latest) // 2 :])
    rising = trend(*latest)
    if peak > start + margin:
        level = "yellow" if has_fallen else "red"
    elif len(latest[1]) >= 2 * ENOUGH_ROWS and rising.z > TREND_Z and rising.change(latest[0]) > margin:
        evidence = f"up by {rising.change(latest[0]):.3f} from step {latest[0][0]} to {steps[-1]} (z = {rising.z:.1f})"
        level, knob = "red", "train.learning_rate, to a third"
    elif steps[-1] >= max(100, run.setting.warmup_steps + TREND_STEPS) and not has_fallen:
        level, cause, knob = "yellow", "the loss hardly falls", "train.learning_rate, higher"
    return Flag("loss trend", level, evidence, cause, knob)


def token_frequencies(run: RunHistory) -> Flag | None:
    """A loss at rest where a model is that knows nothing but how often each token occurs. Red where it began far above that, or
    where it lost what the base knew."""
    steps, losses = run.series("loss")
    batches = run.batches
    if batches is None or batches.entropy <= 0 or len(losses) < RESTS or steps[-1] < TREND_STEPS:
        return None
    half = run.series("loss", [row for row in run.rows if int(row["step"]) > run.step // 2])
    start, end, falling = statistics.median(losses[:3]), statistics.median(half[1]), trend(*half)
    limit = AT_FREQUENCIES * batches.entropy
    # It does not fall beyond noise, and at its slope as many steps again would not take it below.
    rests = end > limit and falling.z > -FALLS and end + min(0.0, falling.change(half[0])) > limit
    level: Level = "yellow" if rests else "green"
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
    return Flag("token frequencies", level, evidence, cause, knob)


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
    why = "the batch is too small, so its gradient is mostly chance", "train.gradient_accumulation_steps, higher"
    return Flag("loss noise", level, evidence, *why)


# ------------------------------------------------------------------------------------------------------------------ dpo

PREFERENCE_ROWS = 10
COIN = 2.0  # standard deviations within which an accuracy is a coin's
ABOVE = 3.0  # Student's t from which a loss is above log 2: it is asked at every fifth step
BOTH = 0.3  # correlation from which both answers of a pair are about their prompt


def preferences(run: RunHistory) -> Flag | None:
    """Accuracy on pairs not trained on yet, in the second half of the steps: better than a coin?
    The loss of a model that has not moved is log 2 (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). Red where the loss is
    above that beyond chance: by LOSS_RISE where words show that the chosen answers belong."""
    steps = run.series("rewards/accuracies")[0]
    if len(steps) < PREFERENCE_ROWS or steps[-1] < TREND_STEPS:
        return None
    half = [row for row in run.rows if int(row["step"]) > steps[-1] // 2]
    right, losses = statistics.fmean(run.series("rewards/accuracies", half)[1]), run.series("loss", half)[1]
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
    return Flag("preferences", level, evidence, cause, knob)


def are_mixed_up(answers: AnswerOverlap) -> bool:
    """Whether one answer of each pair belongs to its prompt, and is as often the rejected one as the chosen."""
    return abs(answers.t) < TELLS and answers.t_either >= TOGETHER and answers.together < BOTH


# ----------------------------------------------------------------------------------------------------------------- gspo

POLICY_ROWS = 10  # of rewards or entropies
ROLLOUTS = 8  # that shares of groups and completions are averaged over
FIRST_ROLLOUTS = 4
# Deviation of all rewards of a rollout, over its prompts too, at which they are equal. TRL 1.15 asks for exactly 0, which
# float32 misses for a reward such as 0.7; its rounding divided by its own deviation is then what is learned.
EQUAL = 1e-5
NOTHING_EARNED = 64  # completions in a row that earn nothing, from which the reward is called dead
STEPS = 16  # that figures of every step are averaged over
TRUNCATED = 0.3  # yellow share of completions that are cut at their longest
ENTROPY, KEPT = 0.05, 0.2  # nats a token, and share of its start, that the entropy is to keep
CLIPPED = 0.5  # yellow share of ratios outside the clip on steps off the policy
REWARD_FALL = 0.25  # red share of its start that the reward falls by, beyond noise


def rollouts(run: RunHistory) -> list[Row]:
    """The rows of steps that sampled completions; the others of a rollout lack a reward."""
    return [row for row in run.rows if "reward" in row]


def reward_varies(run: RunHistory) -> Flag | None:
    """The share of groups whose rewards are all equal: their advantages are 0."""
    rows = rollouts(run)[-ROLLOUTS:]
    if not rows:
        return None
    limit, knob = run.thresholds.zero_variance, "cogumi.rewards"
    name = "reward varies"
    where = f"of steps {rows[0]['step']} to {rows[-1]['step']}"
    rewards = run.series("reward", rows)[1]
    if not rewards:
        evidence = f"not one completion {where} was scored"
        return Flag(name, "red", evidence, "every reward function returns None or NaN", knob)
    part = statistics.fmean(run.series("frac_reward_zero_std", rows)[1] or [0.0])
    varies = any(deviation > EQUAL * max(1.0, abs(max(rewards))) for deviation in run.series("reward_std", rows)[1])
    part = part if varies or "reward_std" not in rows[-1] else 1.0
    # Rewards that are equal over all prompts need no average. Completions that all earn nothing may be rare luck: of 64, one
    # in twenty would have earned something even where success is as rare as 5 %.
    nothing = not any(rewards) and len(rows) * run.setting.rollout < NOTHING_EARNED
    constant = not varies and "reward_std" in rows[-1] and not nothing
    if len(rows) < FIRST_ROLLOUTS and not constant:
        return None
    evidence = f"{part:.0%} of the groups {where} have one reward for all, {rewards[-1]:.3g} on average"
    cause = "the reward is constant and does not depend on the completion"
    if varies:
        cause, knob = "prompts are solved always or never", "data.source"
    elif not any(rewards):
        cause = "no completion earns anything, so the reward is dead for these prompts"
    return Flag(name, level_above(part, 0.75 * limit, limit), evidence, cause, knob)


def reward_trend(run: RunHistory) -> Flag | None:
    steps, rewards = run.series("reward")
    if len(rewards) < POLICY_ROWS:
        return None
    start, end, found = statistics.median(rewards[:3]), statistics.median(rewards[-5:]), trend(steps, rewards)
    falls = found.z < -TREND_Z and start - end > max(REWARD_FALL * abs(start), 2 * noise(rewards))
    evidence = f"{start:.3g} at first, {end:.3g} by step {steps[-1]} (z = {found.z:.1f})"
    why = "updates are too large, so the policy loses what it knew", "train.learning_rate, lower"
    return Flag("reward trend", "red" if falls else "green", evidence, *why)


def completions_end(run: RunHistory) -> Flag | None:
    key, rows = "completions/clipped_ratio", rollouts(run)
    cut, red = run.series(key, rows[-ROLLOUTS:])[1], run.thresholds.truncated_red
    yellow = TRUNCATED if red < 1 else 1.0
    if len(cut) < FIRST_ROLLOUTS:
        return None
    part = statistics.fmean(cut)
    level = level_above(part, yellow, red)
    begin = statistics.fmean(run.series(key)[1][:FIRST_ROLLOUTS])
    cause = "completions are cut before they end" if part < 1 else "no completion ends before it is cut"
    knob = "train.max_completion_length, higher"
    if begin < (yellow + red) / 2:
        cause, knob = "the policy learns to write without an end", "cogumi.rewards"
        lately = run.series(key, rows[-2 * ROLLOUTS :])[1]
        if level == "red" and (len(lately) < 2 * ROLLOUTS or min(lately) <= red):
            level = "yellow"  # it began otherwise: what changed it is the better answer, and shows soon
    lengths = run.series("completions/mean_length", rows[-ROLLOUTS:])[1]
    length = f", {lengths[-1]:.0f} tokens long on average" if lengths else ""
    stretch = f"steps {rows[-ROLLOUTS:][0]['step']} to {rows[-1]['step']}"
    evidence = f"{part:.0%} of the completions of {stretch} are cut{length}, {begin:.0%} at first"
    return Flag("completions end", level, evidence, cause, knob)


def entropy(run: RunHistory) -> Flag | None:
    """Nats per token of the policy on its own completions, against where it began."""
    steps, values = run.series("entropy")
    if len(values) < POLICY_ROWS:
        return None
    start, now = statistics.median(values[:5]), statistics.median(values[-5:])
    kept = KEPT * start
    level: Level = "yellow" if now < 2 * kept or now < ENTROPY else "green"
    if now < kept and (now < ENTROPY or now < kept / 2):
        level = "red"
    evidence = f"{start:.3g} nats a token at first, {now:.3g} by step {steps[-1]}"
    return Flag("entropy", level, evidence, "the policy collapses to one answer", "train.learning_rate, lower")


def kl_to_the_sampler(run: RunHistory) -> Flag | None:
    """How far updates carry the policy from the one that wrote the completions (ratio - log ratio - 1). The first steps count
    as well: a rate that is far too high destroys the policy in them, and its entropy next."""
    steps, values = run.series("policy/kl_new_old", run.rows[-STEPS:])
    if len(values) < 5:
        return None
    worst, red = statistics.fmean(values), run.thresholds.kl_red
    evidence = f"{worst:.3g} nats a token in steps {steps[0]} to {steps[-1]}"
    why = "the learning rate is too high for one update", "train.learning_rate, lower"
    return Flag("KL to the sampler", level_above(worst, red / 10, red), evidence, *why)


def clip_fraction(run: RunHistory) -> Flag | None:
    """The share of ratios outside the clip once an update came between, and that which rounding alone puts there."""
    stale = [row for row in run.rows if row.get("policy/staleness")][-STEPS:]
    steps, shares = run.series("policy/clipped_ratio_fraction", stale)
    if len(shares) < 5:
        return None
    part, rounding = statistics.fmean(shares), run.series("policy/clipped_by_rounding")[1]
    alone = f", {rounding[0]:.0%} by rounding alone" if rounding else ""
    evidence = f"{part:.0%} of the ratios of steps {steps[0]} to {steps[-1]} are outside the clip{alone}"
    why = "updates move the ratios by more than the clip", "train.learning_rate, lower"
    if rounding and rounding[0] > part / 2:
        why = "rounding moves the ratios by more than the clip", "train.epsilon, left out to follow the noise"
    return Flag("clip fraction", level_above(part, CLIPPED, 1.0), evidence, *why)


SFT = (learned_tokens, padding, end_tokens, prompt_and_completion, loss_trend, token_frequencies, loss_noise)
DPO = (learned_tokens, padding, loss_trend, preferences)
RL = (kl_to_the_sampler, clip_fraction, entropy, reward_varies, completions_end, reward_trend)
