"""Flags of preference and policy-gradient trainings."""

import math
import statistics

from cogumi.health.data_checks import students_t
from cogumi.health.flags import Answers, Flag, Level, Row, Rule, Run
from cogumi.health.flags_sft import BELONGS, TELLS, TOGETHER, TREND_STEPS, learned_tokens, loss_trend, padding
from cogumi.health.trend import noise, trend
from cogumi.rl.watch import PREFIX

ENOUGH_ROWS = 10
COIN = 2.0  # standard deviations within which an accuracy is a coin's
ABOVE = 3.0  # Student's t from which a loss is above log 2: it is asked at every fifth step
BOTH = 0.3  # correlation from which both answers of a pair are about their prompt


def preferences(run: Run) -> Flag | None:
    """Accuracy on pairs not trained on yet, in the second half of the steps: better than a coin?

    The loss of a model that has not moved is log 2 (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). A coin's accuracy is
    of pairs that are mixed up, of a rate too low, or of a model that cannot tell them yet, and the loss is near log 2 in
    all three. Red where something shows which: by their words, one answer of a pair is its prompt's and as often the
    rejected one; or the loss is above log 2 beyond chance, so that what was learned of some pairs is wrong for others.
    """
    steps = run.series("rewards/accuracies")[0]
    if len(steps) < ENOUGH_ROWS or steps[-1] < TREND_STEPS:
        return None
    half = [row for row in run.rows if int(row["step"]) > steps[-1] // 2]
    right = statistics.fmean(run.series("rewards/accuracies", half)[1])
    losses = run.series("loss", half)[1]
    loss, answers = statistics.fmean(losses), None if run.batches is None else run.batches.answers
    pairs = run.setting.examples_per_step * (steps[-1] - steps[-1] // 2)
    z = (right - 0.5) / (0.5 / math.sqrt(pairs))
    evidence = (
        f"{right:.1%} of some {pairs} pairs right in steps {steps[-1] // 2 + 1} to {steps[-1]} (z = {z:.1f}), "
        f"loss {loss:.3f}"
    )
    level: Level = "green" if z > COIN else "yellow"
    cause, knob = (
        "the answers are not told apart yet",
        "train.learning_rate, higher",
    )
    if z <= COIN:
        # Other losses than the sigmoid start elsewhere.
        above = students_t([each - math.log(2) for each in losses]) if run.setting.loss == "sigmoid" else 0.0
        if above > ABOVE and loss > math.log(2) * (1 + run.thresholds.loss_rise):
            level, cause = "red", "the learning rate is too high, so margins swing either way"
            knob = "train.learning_rate, to a tenth"
        elif (answers is not None and are_mixed_up(answers)) or (above > ABOVE and not tell_apart(answers)):
            level, cause = "red", "chosen and rejected are mixed up, or differ by nothing that can be learned"
            knob = "data.columns"
        if answers is not None:
            evidence += f"; {answers.pairs} chosen answers share more words with their prompts with t = {answers.t:.1f}"
    threshold = f"more than a coin (z > {COIN:g}), red with a loss above log 2 or words that say why"
    return Flag("preferences", level, evidence, threshold, cause, knob)


def tell_apart(answers: Answers | None) -> bool:
    return answers is not None and answers.t >= BELONGS


def are_mixed_up(answers: Answers) -> bool:
    """Whether one answer of each pair belongs to its prompt, and is as often the rejected one as the chosen."""
    return abs(answers.t) < TELLS and answers.t_either >= TOGETHER and answers.together < BOTH


def chosen_likelihood(run: Run) -> Flag | None:
    """Whether the chosen answers become less likely, with the rejected ones (Razin et al. 2024, arXiv:2410.08847)."""
    steps, values = run.series("logps/chosen")
    if len(values) < ENOUGH_ROWS:
        return None
    found = trend(steps, values)
    change, start = found.change(steps), statistics.median(values[:3])
    falls = found.z < -run.thresholds.trend_z and change < -0.2 * abs(start)
    return Flag(
        "chosen likelihood",
        "yellow" if falls else "green",
        f"log-probability {start:.4g} at first, changed by {change:.3g} to step {steps[-1]} (z = {found.z:.1f})",
        "not down by a fifth",
        "both answers become unlikely, and only the margin grows",
        "train.beta, higher",
    )


DPO: tuple[Rule, ...] = (learned_tokens, padding, loss_trend, preferences, chosen_likelihood)


# ------------------------------------------------------------------------------------------------------------- flags rl


ROLLOUTS = 8  # that shares of groups and completions are averaged over
FIRST_ROLLOUTS = 4
# Deviation of all rewards of a rollout, over its prompts too, at which they are equal. TRL 1.15 asks for exactly 0, which
# float32 misses for a reward such as 0.7; its rounding divided by its own deviation is then what is learned.
EQUAL = 1e-5
NOTHING_EARNED = 64  # completions in a row that earn nothing, from which the reward is called dead
STEPS = 16  # that figures of every step are averaged over


def rollouts(run: Run) -> list[Row]:
    """The rows of steps that sampled completions; the others of a rollout lack a reward."""
    return [row for row in run.rows if "reward" in row]


def reward_varies(run: Run) -> Flag | None:
    """The share of groups whose rewards are all the same: their advantages are 0."""
    rows = rollouts(run)[-ROLLOUTS:]
    if not rows:
        return None
    limit = run.thresholds.zero_variance
    where = f"of steps {rows[0]['step']} to {rows[-1]['step']}"
    threshold = f"<= {limit:.0%} of groups without variance"
    rewards = run.series("reward", rows)[1]
    if not rewards:
        return Flag(
            "reward varies",
            "red",
            f"not one completion {where} was scored",
            threshold,
            "every reward function returns None or NaN",
            "cogumi.rewards",
        )
    part = statistics.fmean(run.series("frac_reward_zero_std", rows)[1] or [0.0])
    varies = any(deviation > EQUAL * max(1.0, abs(max(rewards))) for deviation in run.series("reward_std", rows)[1])
    part = part if varies or "reward_std" not in rows[-1] else 1.0
    # Rewards that are equal over all prompts need no average. Completions that all earn nothing may be rare luck: of 64, one
    # in twenty would have earned something even where success is as rare as 5 %.
    nothing = not any(rewards) and len(rows) * run.setting.rollout < NOTHING_EARNED
    constant = not varies and "reward_std" in rows[-1] and not nothing
    if len(rows) < FIRST_ROLLOUTS and not constant:
        return None
    level: Level = "red" if part > limit else "yellow" if part > 0.75 * limit else "green"
    evidence = f"{part:.0%} of the groups {where} have one reward for all, {rewards[-1]:.3g} on average"
    if varies:
        cause, knob = "prompts are solved always or never", "data.source"
    elif not any(rewards):
        cause, knob = "no completion earns anything, so the reward is dead for these prompts", "cogumi.rewards"
    else:
        cause, knob = "the reward is constant and does not depend on the completion", "cogumi.rewards"
    return Flag("reward varies", level, evidence, threshold, cause, knob)


def reward_trend(run: Run) -> Flag | None:
    steps, rewards = run.series("reward")
    if len(rewards) < 10:
        return None
    limits, start = run.thresholds, statistics.median(rewards[:3])
    end, found = statistics.median(rewards[-5:]), trend(steps, rewards)
    falls = found.z < -limits.trend_z and start - end > max(limits.reward_fall * abs(start), 2 * noise(rewards))
    return Flag(
        "reward trend",
        "red" if falls else "green",
        f"{start:.3g} at first, {end:.3g} by step {steps[-1]} (z = {found.z:.1f})",
        f"not down by more than {limits.reward_fall:.0%}",
        "updates are too large, so the policy loses what it knew",
        "train.learning_rate, lower",
    )


def completions_end(run: Run) -> Flag | None:
    """The share of completions that were cut at the longest length."""
    rows = rollouts(run)[-ROLLOUTS:]
    cut = run.series("completions/clipped_ratio", rows)[1]
    if len(cut) < FIRST_ROLLOUTS:
        return None
    part, limits = statistics.fmean(cut), run.thresholds
    level: Level = "red" if part > limits.truncated_red else "yellow" if part > limits.truncated_yellow else "green"
    begin = statistics.fmean(run.series("completions/clipped_ratio")[1][:FIRST_ROLLOUTS])
    cause = "completions are cut before they end" if part < 1 else "no completion ends before it is cut"
    knob = "train.max_completion_length, higher"
    if begin < (limits.truncated_yellow + limits.truncated_red) / 2:
        cause, knob = "the policy learns to write without an end", "cogumi.rewards"
        lately = run.series("completions/clipped_ratio", rollouts(run)[-2 * ROLLOUTS :])[1]
        if level == "red" and (len(lately) < 2 * ROLLOUTS or min(lately) <= limits.truncated_red):
            level = "yellow"  # it began otherwise: what changed it is the better answer, and shows soon
    lengths = run.series("completions/mean_length", rows)[1]
    length = f", {lengths[-1]:.0f} tokens long on average" if lengths else ""
    return Flag(
        "completions end",
        level,
        f"{part:.0%} of the completions of steps {rows[0]['step']} to {rows[-1]['step']} are cut{length}, {begin:.0%} at first",
        f"<= {limits.truncated_yellow:.0%}, red > {limits.truncated_red:.0%}",
        cause,
        knob,
    )


def entropy(run: Run) -> Flag | None:
    """Nats per token of the policy on its own completions, against where it began."""
    steps, values = run.series("entropy")
    if len(values) < 10:
        return None
    limits, start, now = run.thresholds, statistics.median(values[:5]), statistics.median(values[-5:])
    kept = limits.entropy_kept * start
    level: Level = "red" if now < kept and (now < limits.entropy_low or now < kept / 2) else "green"
    if level == "green" and (now < 2 * kept or now < limits.entropy_low):
        level = "yellow"
    return Flag(
        "entropy",
        level,
        f"{start:.3g} nats a token at first, {now:.3g} by step {steps[-1]}",
        f">= {limits.entropy_low:g}, and {limits.entropy_kept:.0%} of its start",
        "the policy collapses to one answer",
        "train.learning_rate, lower",
    )


def clip_fraction(run: Run) -> Flag | None:
    """The share of ratios outside the clip, over on-policy and off-policy steps alike."""
    rows = run.latest[-STEPS:]
    key = f"{PREFIX}clipped_ratio_fraction"
    if not any(key in row for row in rows):
        key = "clip_ratio/region_mean"
    steps, values = run.series(key, rows)
    if len(values) < STEPS:
        return None
    part, limits = statistics.fmean(values), run.thresholds
    level: Level = "red" if part > limits.clipped_red else "yellow" if part > limits.clipped_yellow else "green"
    return Flag(
        "clip fraction",
        level,
        f"{part:.1%} of the ratios of steps {steps[0]} to {steps[-1]} are outside",
        f"<= {limits.clipped_yellow:.1%}, red > {limits.clipped_red:.1%}",
        "the sampler and the trainer compute different probabilities",
        "train.epsilon, train.epsilon_high",
    )


def kl_to_the_sampler(run: Run) -> Flag | None:
    """How far updates carry the policy from the one that wrote the completions (ratio - log ratio - 1).

    The first steps count as well: a rate that is far too high destroys the policy in them, and its entropy next.
    """
    steps, values = run.series(f"{PREFIX}kl_new_old", run.rows[-STEPS:])
    if len(values) < 5:
        return None
    worst, limits = statistics.fmean(values), run.thresholds
    level: Level = "red" if worst > limits.kl_red else "yellow" if worst > limits.kl_yellow else "green"
    return Flag(
        "KL to the sampler",
        level,
        f"{worst:.3g} nats a token in steps {steps[0]} to {steps[-1]}",
        f"<= {limits.kl_yellow:g}, red > {limits.kl_red:g}",
        "the learning rate is too high for one update",
        "train.learning_rate, lower",
    )


def kl_to_the_reference(run: Run) -> Flag | None:
    steps, values = run.series("kl", run.latest[-STEPS:])
    if run.setting.beta <= 0 or len(values) < 5:
        return None
    now, limit = statistics.median(values), run.thresholds.reference_kl
    return Flag(
        "KL to the reference",
        "red" if now > limit else "yellow" if now > limit / 10 else "green",
        f"{now:.3g} in steps {steps[0]} to {steps[-1]}",
        f"<= {limit / 10:g}, red > {limit:g}",
        "the policy has left the reference that train.beta ties it to",
        "train.beta, higher",
    )


RL: tuple[Rule, ...] = (
    kl_to_the_sampler,
    entropy,
    reward_varies,
    completions_end,
    reward_trend,
    clip_fraction,
    kl_to_the_reference,
)
