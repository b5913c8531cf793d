"""The verdict of a run: the checks it has to pass, its flags, and whether it is safe to scale."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median
from typing import Any

from cogumi.checkpoints.snapshots import list_snapshots
from cogumi.core.durability import NO_SPACE
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import read_json
from cogumi.health.flags import (
    HELD_OUT_COMPLETIONS,
    SIGNIFICANT_FALL_Z,
    USUAL_FALL_SHARE,
    Flag,
    RunHistory,
    fall,
    noise,
    number,
    red_flags,
    resolve_consequences,
    trend,
)
from cogumi.health.rules import DIVERGED_SHARE, FEW_LOSS_ROWS, RULES, TREND_Z, UNSETTLED_STEPS, rollouts
from cogumi.rl.watch import RECORD

log = logging.getLogger("cogumi")
RAISED = "it raised "  # how the evidence of a flag begins that is a failed check
REWARD_Z = 2.0  # beyond which a reward moved: of 3,000 series of noise with 12 to 200 values 0.9 % did, as the order counts too
COSTS_TIME = {"GPU", "mirror", "waiting for data", "clip fraction", "gradient clipping"}  # not what is learned


class Scale(StrEnum):
    """Safe to scale? Only YES is true."""

    YES = "yes"
    NO = "no"
    NOT_SHOWN = "not shown"

    def __bool__(self) -> bool:
        return self is Scale.YES


def judge(run: RunHistory, saved: Sequence[Flag] = ()) -> list[Flag]:
    """Return the flags of a run so far, red ones first. A rule that has too few rows yet gives none. saved: they replace."""
    flags = []
    for rule in RULES[run.setting.method]:
        try:
            flags.append(rule(run))
        except Exception as error:  # noqa: BLE001  a training does not end because a rule does
            check = failed_check(rule.__name__, error)
            flags.append(Flag(check.name, "yellow", check.figure, "the rule is wrong", "report it"))
    return resolve_consequences([*(flag for flag in flags if flag is not None), *saved])


def safe_to_scale(run: RunHistory, flags: Sequence[Flag], was_red: Iterable[Flag] = ()) -> tuple[Scale, str]:
    """Return the answer and its reason in one sentence: by the flags, then by the loss, or for gspo by the reward.

    was_red: the flags that were red at any time.
    """
    now = {flag.name: flag for flag in flags}
    # Equal rewards of one rollout may be chance, which the next ones show; any other red flag has found a fault.
    red = [flag for flag in was_red if flag.name != "reward varies" or now.get(flag.name, flag).level != "green"]
    if red := list({flag.name: flag for flag in [*red, *red_flags(flags)]}.values()):
        return Scale.NO, "; ".join(f"{flag.name}: {flag.cause} ({flag.knob})" for flag in red)
    answer, why = judge_reward(run) if run.setting.method == "gspo" else judge_loss(run)
    small = now.get("update size")
    if not answer and small is not None and small.level == "yellow":
        return answer, f"{why}; {small.cause} ({small.knob})"
    yellow = [flag for flag in flags if flag.level == "yellow" and flag.name not in COSTS_TIME]
    if answer and yellow:
        return Scale.NOT_SHOWN, f"{why}, and {yellow[0].name} is yellow: {yellow[0].cause} ({yellow[0].knob})"
    return answer, why


def judge_loss(run: RunHistory) -> tuple[Scale, str]:
    steps, losses = run.series("loss")
    if not losses:
        return Scale.NOT_SHOWN, "no loss was logged"
    change = fall(losses)
    figures = f"from {change.start:.3f} to {change.end:.3f} in {len(losses)} logged losses to step {steps[-1]}"
    if len(losses) < FEW_LOSS_ROWS:
        few = f"{len(losses)} logged losses, from {losses[0]:.3f} to {losses[-1]:.3f}, are too few to tell"
        return Scale.NOT_SHOWN, f"{few}, and {FEW_LOSS_ROWS} are needed"
    half = len(losses) // 2
    recent_trend, recent = trend(steps[half:], losses[half:]), fall(losses[half:])
    if change.z < -SIGNIFICANT_FALL_Z:
        return Scale.NO, f"the loss rose {figures}, {-change.z:.1f} times what its noise explains"
    if recent_trend.z > TREND_Z and recent.z < -SIGNIFICANT_FALL_Z:
        return Scale.NO, f"the loss rose from {recent.start:.3f} to {recent.end:.3f} since step {steps[half]}"
    fell = f"the loss fell by {change.share:.0%}, {figures}"
    if change.is_by(USUAL_FALL_SHARE):
        return Scale.YES, f"{fell}, {change.z:.1f} times what its noise explains"
    if change.z > SIGNIFICANT_FALL_Z:
        return Scale.NOT_SHOWN, f"{fell}, and {USUAL_FALL_SHARE:.0%} is usual"
    largest_fall = change.start - change.end + 2 * change.error
    is_settled = steps[-1] >= run.setting.warmup_steps + UNSETTLED_STEPS
    if is_settled and largest_fall < USUAL_FALL_SHARE * abs(change.start):
        return Scale.NO, f"the loss stayed where it was, {figures}"
    return Scale.NOT_SHOWN, f"the loss went {figures}, which its noise of {change.error:.3f} may explain"


def judge_reward(run: RunHistory) -> tuple[Scale, str]:
    steps, rewards = run.series("reward", rollouts(run))
    if len(rewards) < FEW_LOSS_ROWS:
        return Scale.NOT_SHOWN, f"{len(rewards)} rollouts were scored, and {FEW_LOSS_ROWS} are needed"
    change = fall(rewards)
    figures = f"from {change.start:.3f} to {change.end:.3f} in {len(rewards)} rollouts to step {steps[-1]}"
    if change.z < -REWARD_Z:
        return Scale.YES, f"the reward rose {figures}, {-change.z:.1f} times what its noise explains"
    if change.z > REWARD_Z:
        return Scale.NO, f"the reward fell {figures}, {change.z:.1f} times what its noise explains"
    return Scale.NOT_SHOWN, f"the reward went {figures}, which its noise of {change.error:.3f} may explain"


# -------------------------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True)
class Check:
    """One requirement and its figure. fix: what to do if it was missed, else "". warning: passed, but the fix is useful."""

    name: str
    figure: str
    requirement: str
    passed: bool
    fix: str = ""
    warning: bool = False

    def __post_init__(self) -> None:
        if self.passed and not self.warning:  # callers may pass a fix in any case
            object.__setattr__(self, "fix", "")

    def __str__(self) -> str:
        mark = "FAIL" if not self.passed else "warn" if self.warning else "pass"
        line = f"{mark}  {self.name}: {self.figure} (required: {self.requirement})"
        return f"{line}; {self.fix}" if self.fix else line


@dataclass(frozen=True)
class Verdict:
    """The result of a run. checks: they decide whether it passed. flags: its last ones, red first.

    was_red: flags that were red at any time, with the step. safe_to_scale: the answer of a sanity check.
    """

    checks: tuple[Check, ...]
    flags: tuple[Flag, ...] = ()
    was_red: tuple[tuple[int, Flag], ...] = ()
    safe_to_scale: Scale | None = None

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            **({} if self.safe_to_scale is None else {"safe_to_scale": self.safe_to_scale}),
            "checks": [asdict(check) for check in self.checks],
            "flags": [asdict(flag) for flag in self.flags],
            "was_red": [{"step": step, **asdict(flag)} for step, flag in self.was_red],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Verdict":
        checks, flags = (Check(**check) for check in values["checks"]), (Flag(**flag) for flag in values["flags"])
        was_red = ((red["step"], Flag(**{key: red[key] for key in red if key != "step"})) for red in values["was_red"])
        safe = values.get("safe_to_scale")
        return cls(tuple(checks), tuple(flags), tuple(was_red), None if safe is None else Scale(safe))

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def failed_check(name: str, error: Exception) -> Check:
    """Return the failed check of an exception, whose traceback goes into run.log."""
    check = Check(name, f"{RAISED}{type(error).__name__}: {one_line(error)}", "judged", False, "read run.log")
    log.error("%s: %s", name, check.figure, exc_info=error)
    return check


def attempt(name: str, function: Callable[..., Any], *arguments: Any) -> list[Check]:
    """Return the checks that a function returns, if any; one that raises, but for a full disk, is a failed check."""
    try:
        result = function(*arguments)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:  # the run goes on from here when there is space
            raise
        return [failed_check(name, error)]
    return result if isinstance(result, list) else [result] if isinstance(result, Check) else []


def judge_training(metrics: list[dict[str, Any]], steps: int, max_steps: int, early: bool = False) -> list[Check]:
    """Check what every run must pass: it trained to the end, on finite numbers. early: it was to end before, and did."""
    done = Check("steps", f"{steps}", f"{max_steps}", steps == max_steps, "read in run.log what ended it")
    if early:
        done = Check("steps", f"{steps} of {max_steps}", "as far as it was to go", True)
    logged = [row[key] for row in metrics for key in ("loss", "eval_loss", "grad_norm") if key in row]
    has_loss, finite = any("loss" in row for row in metrics), count_finite(logged)
    figure, required = f"{finite} of {len(logged)} logged values finite", "all, and a training loss among them"
    fix = "lower train.learning_rate" if has_loss else "set train.logging_steps to train.max_steps or less"
    return [done, Check("loss and gradient norm", figure, required, finite == len(logged) > 0 and has_loss, fix)]


def judge_divergence(metrics: list[dict[str, Any]]) -> list[Check]:
    """Return a failed check for each of the losses that ended far above its start. Two are enough; eight are held closer."""
    checks = []
    for key, name in (("loss", "loss diverged"), ("eval_loss", "held-out loss diverged")):
        losses = [value for row in metrics if (value := number(row, key)) is not None]
        if len(losses) < 2:
            continue
        start, end = min(losses[0], median(losses[:3])), median(losses[-max(1, len(losses) // 4) :])
        limit = max(2 * start, start + 1)
        if len(losses) >= FEW_LOSS_ROWS:
            limit = min(limit, start + max(5 * noise(losses), DIVERGED_SHARE * start))
        if end > limit:
            required, fix = f"at most {limit:.3g}", "lower train.learning_rate, to a tenth"
            checks.append(Check(name, f"from {start:.3g} to {end:.3g}", required, False, fix))
    return checks


def count_finite(values: Sequence[Any]) -> int:
    return sum(isinstance(value, (int, float)) and math.isfinite(value) for value in values)


def judge_gspo(metrics: list[dict[str, Any]], run_dir: Path) -> list[Check]:
    """Check what GSPO adds: completions were scored, the requested loss ran, and every ratio is a number."""
    # TRL 1.15 logs None for a rollout in which every reward function returned None for every completion.
    rewards = [number(row, "reward") for row in metrics if "reward" in row]
    scored, best = sum(reward is not None for reward in rewards), describe_best_reward(metrics, run_dir)
    fix = "change cogumi.rewards, so that one scores these completions: every advantage was 0, and nothing was learned"
    ratios = [row[key] for row in metrics for key in ("policy/min_ratio", "policy/max_ratio") if key in row]
    clipped = [row["policy/clipped_ratio_fraction"] for row in metrics if "policy/clipped_ratio_fraction" in row]
    finite, total = count_finite(ratios + clipped), len(ratios + clipped)
    span, lower = f"{finite} of {total} values finite", "lower train.learning_rate"
    if not ratios:
        span, lower = "no completion counted in a loss", "set train.mask_truncated_completions: false"
    elif finite == total:
        span = f"ratio {min(ratios):.5f} to {max(ratios):.5f}, {sum(clipped) / len(clipped):.1%} outside the clip"
    return [
        Check("rewards", f"{scored} of {len(rewards)} batches scored{best}", "at least one", scored > 0, fix),
        judge_loss_record(run_dir),
        Check("ratio and clip fraction", span, "all finite", bool(ratios) and finite == total, lower),
    ]


def describe_best_reward(metrics: list[dict[str, Any]], run_dir: Path) -> str:
    """Name the step around which five rollouts earned most, and the snapshot nearest to it; "" for few rollouts."""
    rewards = [(row.get("step", 0), reward) for row in metrics if (reward := number(row, "reward")) is not None]
    snapshots = list_snapshots(run_dir / "checkpoints")
    if len(rewards) < FEW_LOSS_ROWS or not snapshots:
        return ""
    means = {rewards[n][0]: fmean(reward for _, reward in rewards[n - 2 : n + 3]) for n in range(2, len(rewards) - 2)}
    best, end = max(means, key=means.__getitem__), means[max(means)]
    nearest = snapshots[min(snapshots, key=lambda step: abs(step - best))]
    return f"; best around step {best}: {means[best]:.3g}, {end:.3g} at the end; nearest adapter {nearest}"


def check_completions(run: RunHistory, flags: Sequence[Flag]) -> list[Check]:
    """Return a failed check where the flag is red, and most completions are blank or none is text: whatever the loss says."""
    red = next((flag for flag in red_flags(flags) if flag.name == HELD_OUT_COMPLETIONS), None)
    if red is None or not run.written:
        return []
    now = run.written[-1]
    is_mute = 2 * (now.empty + now.blank) > now.count or now.unusable == now.count
    return [Check(red.name, red.evidence, "text", False, f"{red.cause}: change {red.knob}")] if is_mute else []


def check_reward(run: RunHistory) -> list[Check]:
    """Check that the reward did not fall beyond its noise; one that did not rise is a warning. None for few rollouts."""
    if len(run.series("reward", rollouts(run))[1]) < FEW_LOSS_ROWS:
        return []
    answer, figure = judge_reward(run)
    fell, unclear = answer is Scale.NO, answer is Scale.NOT_SHOWN
    fix = "a task that is answered at times, more steps or examples a step, or another train.learning_rate"
    if unclear:  # each rollout has other prompts, whose difficulty is most of the noise
        fix = f"`cogumi compare base RUN` tells it by the same held-out prompts; for more of a rise {fix}"
    return [Check("reward", figure, "no fall beyond noise", not fell, fix, warning=unclear)]


def judge_loss_record(run_dir: Path) -> Check:
    name, path, required = "loss that ran", run_dir / RECORD, "the formula's value and gradient"
    if not path.exists():
        return Check(name, "no step was made", required, False, "raise train.max_steps")
    record = read_json(path)
    loss = f"{record['loss']} by {'.'.join(record['function'].split('.')[-2:])} ({record['backend']})"
    if record["unproven"]:
        return Check(name, f"{loss}; not compared: {', '.join(record['unproven'])}", "its settings", True)
    apart = record["relative_difference"]
    figure = f"{loss}, {max(apart['loss'], apart['gradient']):.1e} apart over {apart['steps']} steps"
    if not record["asserted"]:
        fix = "change cogumi.rewards, so that the rewards of a group differ"
        return Check(name, f"{figure}, none with a gradient to compare", required, False, fix)
    seen = record["clip_seen_at_step"]
    return Check(name, f"{figure}, " + (f"clip seen at step {seen}" if seen else "no clip seen"), required, True)
