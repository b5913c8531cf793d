"""From flags to their causes, and from checks to the verdict."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from cogumi.core.run_directory import read_json
from cogumi.health.flags import (
    BEYOND_NOISE,
    USUAL_FALL,
    Flag,
    Rule,
    RunHistory,
    fall,
    number,
    red_flags,
    resolve_consequences,
    trend,
)
from cogumi.health.flags_by_method import DPO, ENOUGH_ROWS, RL, SFT, TREND_STEPS, TREND_Z, rollouts
from cogumi.health.flags_common import COMMON
from cogumi.health.flags_episodes import EPISODES
from cogumi.health.flags_sampler import SAMPLER
from cogumi.rl.watch import RECORD

RULES: dict[str, tuple[Rule, ...]] = {
    "sft": (*COMMON, *SFT),
    "dpo": (*COMMON, *DPO),
    "gspo": (*COMMON, *RL, *EPISODES, *SAMPLER),
}
# Flags that cost time when they are yellow, and say nothing of what is learned.
COSTS_TIME = {"waiting for data", "clip fraction"}


class Scale(StrEnum):
    """Safe to scale? Only YES is true."""

    YES = "yes"
    NO = "no"
    NOT_SHOWN = "not shown"

    def __bool__(self) -> bool:
        return self is Scale.YES


def judge(run: RunHistory) -> list[Flag]:
    """The flags of a run so far, red ones first. A rule that has too few rows yet gives none."""
    return resolve_consequences([flag for rule in RULES[run.setting.method] if (flag := rule(run)) is not None])


def safe_to_scale(run: RunHistory, flags: Sequence[Flag], was_red: Iterable[Flag] = ()) -> tuple[Scale, str]:
    """The answer and its reason in one sentence. was_red: the flags that were red at any time.
    The flags decide first, and then the loss; for gspo the reward in place of the loss."""
    now = {flag.name: flag for flag in flags}
    # Equal rewards of one rollout may be chance, which the next ones show; any other red flag has told of a fault.
    red = [flag for flag in was_red if flag.name != "reward varies" or now.get(flag.name, flag).level != "green"]
    if red := list({flag.name: flag for flag in [*red, *red_flags(flags)]}.values()):
        return Scale.NO, "; ".join(f"{flag.name}: {flag.cause} ({flag.knob})" for flag in red)
    answer, why = judge_reward(run) if run.setting.method == "gspo" else judge_loss(run)
    yellow = [flag for flag in flags if flag.level == "yellow" and flag.name not in COSTS_TIME]
    if answer and yellow:
        return Scale.NOT_SHOWN, f"{why}, and {yellow[0].name} is yellow: {yellow[0].cause} ({yellow[0].knob})"
    return answer, why


def judge_loss(run: RunHistory) -> tuple[Scale, str]:
    steps, losses = run.series("loss")
    if not losses:
        return Scale.NOT_SHOWN, "no loss was logged"
    found = fall(losses)
    figures = f"from {found.start:.3f} to {found.end:.3f} in {len(losses)} logged losses to step {steps[-1]}"
    if len(losses) < ENOUGH_ROWS:
        few = f"{len(losses)} logged losses, from {losses[0]:.3f} to {losses[-1]:.3f}, are too few to tell"
        return Scale.NOT_SHOWN, f"{few}, and {ENOUGH_ROWS} are needed"
    half = len(losses) // 2
    lately, latest = trend(steps[half:], losses[half:]), fall(losses[half:])
    if found.z < -BEYOND_NOISE:
        return Scale.NO, f"the loss rose {figures}, {-found.z:.1f} times what its noise explains"
    if lately.z > TREND_Z and latest.z < -BEYOND_NOISE:
        return Scale.NO, f"the loss rose from {latest.start:.3f} to {latest.end:.3f} since step {steps[half]}"
    if found.is_by(USUAL_FALL):
        return Scale.YES, f"the loss fell by {found.share:.0%}, {figures}, {found.z:.1f} times what its noise explains"
    if found.z > BEYOND_NOISE:
        return Scale.NOT_SHOWN, f"the loss fell by {found.share:.0%}, {figures}, and {USUAL_FALL:.0%} is usual"
    most = found.start - found.end + 2 * found.error  # that it may have fallen by
    if steps[-1] >= run.setting.warmup_steps + TREND_STEPS and most < USUAL_FALL * abs(found.start):
        return Scale.NO, f"the loss stayed where it was, {figures}"
    return Scale.NOT_SHOWN, f"the loss went {figures}, which its noise of {found.error:.3f} may explain"


def judge_reward(run: RunHistory) -> tuple[Scale, str]:
    steps, rewards = run.series("reward", rollouts(run))
    if len(rewards) < ENOUGH_ROWS:
        return Scale.NOT_SHOWN, f"{len(rewards)} rollouts were scored, and {ENOUGH_ROWS} are needed"
    found = fall(rewards)
    figures = f"from {found.start:.3f} to {found.end:.3f} in {len(rewards)} rollouts to step {steps[-1]}"
    if found.z < -BEYOND_NOISE:
        return Scale.YES, f"the reward rose {figures}, {-found.z:.1f} times what its noise explains"
    if found.z > BEYOND_NOISE:
        return Scale.NO, f"the reward fell {figures}, {found.z:.1f} times what its noise explains"
    return Scale.NOT_SHOWN, f"the reward went {figures}, which its noise of {found.error:.3f} may explain"


# -------------------------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True)
class Check:
    """One requirement and the figure that met or missed it. `fix`: what to do where it was missed, "" where it was met."""

    name: str
    figure: str
    requirement: str
    passed: bool
    fix: str = ""

    def __post_init__(self) -> None:
        if self.passed:  # so that callers may give it whatever the figure is
            object.__setattr__(self, "fix", "")

    def __str__(self) -> str:
        said = f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.figure} (required: {self.requirement})"
        return f"{said}; {self.fix}" if self.fix else said


@dataclass(frozen=True)
class Verdict:
    """The checks decide whether a run passed. `flags`: its last ones, red first. `was_red`: those that were red at any
    time, with the step. `safe_to_scale`: the answer of a sanity check, true for yes alone."""

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

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def judge_training(metrics: list[dict[str, Any]], steps: int, max_steps: int, early: bool = False) -> list[Check]:
    """Checks every run must pass: it trained to the end, on finite numbers. early: it was to end before, and does."""
    done = Check("steps", f"{steps}", f"{max_steps}", steps == max_steps, "read in run.log what ended it")
    if early:
        done = Check("steps", f"{steps} of {max_steps}", "as far as it was to go", True)
    logged = [row[key] for row in metrics for key in ("loss", "eval_loss", "grad_norm") if key in row]
    trained, finite = any("loss" in row for row in metrics), count_finite(logged)
    figure, required = f"{finite} of {len(logged)} logged values finite", "all, and a training loss among them"
    fix = "lower train.learning_rate" if trained else "set train.logging_steps to train.max_steps or less"
    return [done, Check("loss and gradient norm", figure, required, finite == len(logged) > 0 and trained, fix)]


def count_finite(values: Sequence[Any]) -> int:
    return sum(isinstance(each, (int, float)) and math.isfinite(each) for each in values)


def judge_gspo(metrics: list[dict[str, Any]], run_dir: Path) -> list[Check]:
    """What GSPO adds: completions were scored, the loss that was asked for ran, and every ratio is a number."""
    # TRL 1.15 logs None for a rollout in which every reward function returned None for every completion.
    rewards = [number(row, "reward") for row in metrics if "reward" in row]
    scored = sum(reward is not None for reward in rewards)
    fix = "change cogumi.rewards, so that one scores these completions: every advantage was 0, and nothing was learned"
    ratios = [row[key] for row in metrics for key in ("policy/min_ratio", "policy/max_ratio") if key in row]
    clipped = [row["policy/clipped_ratio_fraction"] for row in metrics if "policy/clipped_ratio_fraction" in row]
    finite, all_of_them = count_finite(ratios + clipped), len(ratios + clipped)
    span = f"{finite} of {all_of_them} values finite"
    if finite == all_of_them > 0:
        span = f"ratio {min(ratios):.5f} to {max(ratios):.5f}, {sum(clipped) / len(clipped):.1%} outside the clip"
    return [
        Check("rewards", f"{scored} of {len(rewards)} batches scored", "at least one", scored > 0, fix),
        judge_loss_record(run_dir),
        Check("ratio and clip fraction", span, "all finite", finite == all_of_them > 0, "lower train.learning_rate"),
    ]


def judge_loss_record(run_dir: Path) -> Check:
    name, path, required = "loss that ran", run_dir / RECORD, "the formula's value and gradient"
    if not path.exists():
        return Check(name, "no step was made", required, False, "raise train.max_steps")
    record = read_json(path)
    what = f"{record['loss']} by {'.'.join(record['function'].split('.')[-2:])} ({record['backend']})"
    if record["unproven"]:
        return Check(name, f"{what}; not compared: {', '.join(record['unproven'])}", "its settings", True)
    apart = record["relative_difference"]
    figure = f"{what}, {max(apart['loss'], apart['gradient']):.1e} apart over {apart['steps']} steps"
    if not record["asserted"]:
        fix = "change cogumi.rewards, so that the rewards of a group differ"
        return Check(name, f"{figure}, none with a gradient to compare", required, False, fix)
    seen = record["clip_seen_at_step"]
    return Check(name, f"{figure}, " + (f"clip seen at step {seen}" if seen else "no clip seen"), required, True)
