"""Rules of a policy's training (gspo): rewards, completions, entropy, ratios, KL.

Limits of groups without variance, truncation and entropy are those of axolotl's training-stability page. The others
separate the whole from the broken runs of the suite in benchmarks/verdict.py.
"""

import statistics

from cogumi.health.flags import Flag, Level, Row, RunHistory, level_above, noise, trend
from cogumi.health.flags_sft import TREND_Z

ENOUGH_ROWS = 10  # of rewards or entropies
ROLLOUTS = 8  # that shares of groups and completions are averaged over
FIRST_ROLLOUTS = 4
# Deviation of all rewards of a rollout, over its prompts too, at which they are equal. TRL 1.15 asks for exactly 0, which
# float32 misses for a reward such as 0.7; its rounding divided by its own deviation is then what is learned.
EQUAL = 1e-5
NOTHING_EARNED = 64  # completions in a row that earn nothing, from which the reward is called dead
STEPS = 16  # that figures of every step are averaged over
TRUNCATED = 0.3  # yellow share of completions that are cut at their longest
ENTROPY, KEPT = 0.05, 0.2  # nats a token, and share of its start, that the entropy is to keep
REWARD_FALL = 0.25  # red share of its start that the reward falls by, beyond noise
OUTSIDE = 0.95, 0.995  # yellow and red share of ratios outside the clip: at sequence level a few tenths are usual
REFERENCE_KL = 10.0


def rollouts(run: RunHistory) -> list[Row]:
    """The rows of steps that sampled completions; the others of a rollout lack a reward."""
    return [row for row in run.rows if "reward" in row]


def reward_varies(run: RunHistory) -> Flag | None:
    """The share of groups whose rewards are all equal: their advantages are 0."""
    rows = rollouts(run)[-ROLLOUTS:]
    if not rows:
        return None
    limit, knob = run.thresholds.zero_variance, "cogumi.rewards"
    name, threshold = "reward varies", f"<= {limit:.0%} of groups without variance"
    where = f"of steps {rows[0]['step']} to {rows[-1]['step']}"
    rewards = run.series("reward", rows)[1]
    if not rewards:
        evidence = f"not one completion {where} was scored"
        return Flag(name, "red", evidence, threshold, "every reward function returns None or NaN", knob)
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
    return Flag(name, level_above(part, 0.75 * limit, limit), evidence, threshold, cause, knob)


def reward_trend(run: RunHistory) -> Flag | None:
    steps, rewards = run.series("reward")
    if len(rewards) < ENOUGH_ROWS:
        return None
    start, end, found = statistics.median(rewards[:3]), statistics.median(rewards[-5:]), trend(steps, rewards)
    falls = found.z < -TREND_Z and start - end > max(REWARD_FALL * abs(start), 2 * noise(rewards))
    evidence = f"{start:.3g} at first, {end:.3g} by step {steps[-1]} (z = {found.z:.1f})"
    threshold = f"not down by more than {REWARD_FALL:.0%}"
    why = "updates are too large, so the policy loses what it knew", "train.learning_rate, lower"
    return Flag("reward trend", "red" if falls else "green", evidence, threshold, *why)


def completions_end(run: RunHistory) -> Flag | None:
    """The share of completions that were cut at the longest length."""
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
    return Flag("completions end", level, evidence, f"<= {yellow:.0%}, red > {red:.0%}", cause, knob)


def entropy(run: RunHistory) -> Flag | None:
    """Nats per token of the policy on its own completions, against where it began."""
    steps, values = run.series("entropy")
    if len(values) < ENOUGH_ROWS:
        return None
    start, now = statistics.median(values[:5]), statistics.median(values[-5:])
    kept = KEPT * start
    level: Level = "yellow" if now < 2 * kept or now < ENTROPY else "green"
    if now < kept and (now < ENTROPY or now < kept / 2):
        level = "red"
    evidence = f"{start:.3g} nats a token at first, {now:.3g} by step {steps[-1]}"
    threshold = f">= {ENTROPY:g}, and {KEPT:.0%} of its start"
    why = "the policy collapses to one answer", "train.learning_rate, lower"
    return Flag("entropy", level, evidence, threshold, *why)


def clip_fraction(run: RunHistory) -> Flag | None:
    """The share of ratios outside the clip, over on-policy and off-policy steps alike."""
    rows = run.latest[-STEPS:]
    key = "policy/clipped_ratio_fraction"
    if not any(key in row for row in rows):
        key = "clip_ratio/region_mean"
    steps, values = run.series(key, rows)
    if len(values) < STEPS:
        return None
    part = statistics.fmean(values)
    evidence = f"{part:.1%} of the ratios of steps {steps[0]} to {steps[-1]} are outside"
    threshold = f"<= {OUTSIDE[0]:.1%}, red > {OUTSIDE[1]:.1%}"
    why = "the sampler and the trainer compute different probabilities", "train.epsilon, train.epsilon_high"
    return Flag("clip fraction", level_above(part, *OUTSIDE), evidence, threshold, *why)


def kl_to_the_sampler(run: RunHistory) -> Flag | None:
    """How far updates carry the policy from the one that wrote the completions (ratio - log ratio - 1).

    The first steps count as well: a rate that is far too high destroys the policy in them, and its entropy next.
    """
    steps, values = run.series("policy/kl_new_old", run.rows[-STEPS:])
    if len(values) < 5:
        return None
    worst, red = statistics.fmean(values), run.thresholds.kl_red
    evidence = f"{worst:.3g} nats a token in steps {steps[0]} to {steps[-1]}"
    threshold = f"<= {red / 10:g}, red > {red:g}"
    why = "the learning rate is too high for one update", "train.learning_rate, lower"
    return Flag("KL to the sampler", level_above(worst, red / 10, red), evidence, threshold, *why)


def kl_to_the_reference(run: RunHistory) -> Flag | None:
    steps, values = run.series("kl", run.latest[-STEPS:])
    if run.setting.beta <= 0 or len(values) < 5:
        return None
    now = statistics.median(values)
    evidence = f"{now:.3g} in steps {steps[0]} to {steps[-1]}"
    threshold = f"<= {REFERENCE_KL / 10:g}, red > {REFERENCE_KL:g}"
    why = "the policy has left the reference that train.beta ties it to", "train.beta, higher"
    return Flag("KL to the reference", level_above(now, REFERENCE_KL / 10, REFERENCE_KL), evidence, threshold, *why)


RL = (kl_to_the_sampler, entropy, reward_varies, completions_end, reward_trend, clip_fraction, kl_to_the_reference)
