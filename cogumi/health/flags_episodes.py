"""Rules of episodes with an environment or tools, and of completions that no reward could score.

The limits have no source. At the red ones most of a rollout is lost.
"""

import statistics

from cogumi.health.flags import Flag, Level, RunHistory, level_above
from cogumi.health.flags_by_method import FIRST_ROLLOUTS, ROLLOUTS, rollouts

FAILED_CALLS = 0.2, 0.5  # yellow and red share of calls that raise, or name no tool
NO_END = 0.3, 0.8  # of episodes that a budget cut, as of completions that are cut
MASKED = 0.9  # yellow share of a rollout's tokens that the environment wrote
NOT_SCORED = 0.02, 0.2
BUDGETS = {
    "turns": "train.max_tool_calling_iterations, higher",
    "tokens": "train.max_completion_length, higher",
    "seconds": "cogumi.episode_seconds, higher",
}


def tool_calls(run: RunHistory) -> Flag | None:
    """Whether tools are called, and calls succeed."""
    rows = rollouts(run)[-ROLLOUTS:]
    calls = run.series("tools/call_frequency", rows)[1]
    if len(calls) < FIRST_ROLLOUTS:
        return None
    failed = statistics.fmean(run.series("tools/failure_frequency", rows)[1] or [0.0])
    evidence = f"{statistics.fmean(calls):.2f} calls a completion, {failed:.0%} of them fail"
    if not any(calls):
        cause = "no tool is ever called, so the policy cannot learn to"
        return Flag("tool calls", "red", evidence, cause, "a model that was trained to call tools")
    cause = "calls name no tool, have wrong arguments, or the tool raises"
    return Flag("tool calls", level_above(failed, *FAILED_CALLS), evidence, cause, "the docstrings of cogumi.tools")


def episodes_end(run: RunHistory) -> Flag | None:
    """Episodes that a budget cut: of turns, of tokens or of seconds."""
    rows = rollouts(run)[-ROLLOUTS:]
    cut = run.series("episodes/without_end", rows)[1]
    if len(cut) < FIRST_ROLLOUTS:
        return None
    by = {name: statistics.fmean(run.series(f"episodes/cut_by_{name}", rows)[1] or [0.0]) for name in BUDGETS}
    most = max(by, key=by.__getitem__)
    part = statistics.fmean(cut)
    named = ", ".join(f"{share:.0%} by their {name}" for name, share in by.items() if share) or "none by a budget"
    evidence = f"{part:.0%} of the episodes are cut: {named}"
    cause = f"the budget of {most} is too small for these episodes, or the policy does not end them"
    return Flag("episodes end", level_above(part, *NO_END), evidence, cause, BUDGETS[most])


def masked_tokens(run: RunHistory) -> Flag | None:
    """The share of tokens that the environment wrote, which the loss leaves out."""
    masked = run.series("episodes/masked_share", rollouts(run)[-ROLLOUTS:])[1]
    if len(masked) < FIRST_ROLLOUTS:
        return None
    part = statistics.fmean(masked)
    level: Level = "yellow" if part > MASKED else "green"
    why = "the environment writes nearly everything, so a rollout is dear for what is learned", "shorter answers"
    return Flag("masked tokens", level, f"{part:.0%} of the tokens are the environment's, outside of the loss", *why)


def scored(run: RunHistory) -> Flag | None:
    """Completions without any reward, because what should have scored them crashed or ran out of time."""
    rows = rollouts(run)[-ROLLOUTS:]
    missing = run.series("rewards/not_scored", rows)[1]
    if not missing:
        return None
    part = sum(missing) / len(rows)
    evidence = f"{part:.1%} of the completions of steps {rows[0]['step']} to {rows[-1]['step']} were not scored"
    cause = "a reward returned NaN for them (a program crashed or ran out of time), and they have no advantage"
    why = cause, "the reward, or the limits of what it runs"
    return Flag("scored", level_above(part, *NOT_SCORED), evidence, *why)


EPISODES = (tool_calls, episodes_end, masked_tokens, scored)
