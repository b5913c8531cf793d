"""Rules of a policy whose completions another engine samples: its weights, its arithmetic, and what corrects for both.

The rows are of cogumi/rl/sampler_check.py. Limits without a source are between the runs of docs/mismatch.md.
"""

import statistics

from cogumi.health.flags import Flag, RunHistory, level_above
from cogumi.health.flags_by_method import ROLLOUTS, rollouts

# Yellow and red share of what the trainer's log-probabilities moved by, that the sampler's did not: 0 with all weights, a
# twentieth to a fifth where the LM head alone stays old.
LAG = 0.02, 0.05
# Yellow and red mean difference of two engines of the same weights, in nats a token: 0.02 in bfloat16 on the small base.
DIFFERENCE = 0.1, 0.3
# Yellow and red share of the correction's weights that have no effect: mis has 0.5 at 4 steps of age, and 0.9 at 16
# (docs/mismatch.md).
LOST = 0.5, 0.9


def sampler_weights(run: RunHistory) -> Flag | None:
    """Whether the sampler's log-probabilities moved with the trainer's; from `sampling/probe/lag` of the latest rollouts."""
    steps, lags = run.series("sampling/probe/lag", rollouts(run)[-ROLLOUTS:])
    if not lags:
        return None
    moved = run.series("sampling/probe/moved", rollouts(run)[-ROLLOUTS:])
    far = dict(zip(*moved, strict=True)).get(steps[-1], 0.0)
    evidence = f"at step {steps[-1]} it lacks {lags[-1]:.0%} of the {far:.2g} nats a token that the trainer moved by"
    cause = "the sampler's weights are those of an earlier step, so completions are not the policy's"
    return Flag(
        "sampler's weights",
        level_above(lags[-1], *LAG),
        evidence,
        cause,
        "train.use_vllm: false, which samples with the trainer",
    )


def sampler_difference(run: RunHistory) -> Flag | None:
    """How far the log-probabilities of a rollout's tokens are apart; of the texts of each rollout where TRL has no figure."""
    rows = rollouts(run)[-ROLLOUTS:]
    steps, values = run.series("sampling/sampling_logp_difference/mean", rows)
    if not values:
        steps, values = run.series("sampling/probe/difference", rows)
    if not values:
        return None
    evidence = f"{statistics.fmean(values):.2g} nats a token between them in steps {steps[0]} to {steps[-1]}"
    cause = "the two engines compute different log-probabilities from the same weights"
    level = level_above(statistics.fmean(values), *DIFFERENCE)
    return Flag("sampler and trainer", level, evidence, cause, "model.dtype: float16")


def sampler_correction(run: RunHistory) -> Flag | None:
    """How many of a rollout's tokens or completions count in effect, with the weights of the correction."""
    rows = rollouts(run)[-ROLLOUTS:]
    steps, shares = run.series("sampling/effective_share", rows)
    if not shares:
        return None
    part = statistics.fmean(shares)
    bounded = statistics.fmean(run.series("sampling/corrected_share", rows)[1] or [0.0])
    evidence = (
        f"{part:.0%} of what was sampled in steps {steps[0]} to {steps[-1]} counts, {bounded:.1%} of it is bounded"
    )
    cause = "sampler and trainer are so far apart that few completions decide what is learned"
    knob = "cogumi.sampler_correction: tis, or fewer train.steps_per_generation"
    return Flag("sampler correction", level_above(1 - part, *LOST), evidence, cause, knob)


SAMPLER = (sampler_weights, sampler_difference, sampler_correction)
