"""All rules of a method on one run's rows, and the answer to "safe to scale?"."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from cogumi.training.flags import Flag, Rule, Run, reds, settled
from cogumi.training.flags_common import COMMON
from cogumi.training.flags_dpo import DPO
from cogumi.training.flags_rl import RL, rollouts
from cogumi.training.flags_sft import ENOUGH_ROWS, SFT, TREND_STEPS
from cogumi.training.trend import BEYOND_NOISE, USUAL_FALL, fall, trend

RULES: dict[str, tuple[Rule, ...]] = {"sft": (*COMMON, *SFT), "dpo": (*COMMON, *DPO), "gspo": (*COMMON, *RL)}
# Flags of the machine: yellow ones cost time, and say nothing of what is learned.
OF_THE_MACHINE = {"waiting for data", "tokens per second", "memory"}


class Scale(StrEnum):
    """Safe to scale? Only YES is true."""

    YES = "yes"
    NO = "no"
    NOT_SHOWN = "not shown"

    def __bool__(self) -> bool:
        return self is Scale.YES


def judge(run: Run) -> list[Flag]:
    """The flags of a run so far, red ones first. A rule that has too few rows yet gives none."""
    return settled([flag for rule in RULES[run.setting.method] if (flag := rule(run)) is not None])


def safe_to_scale(run: Run, flags: Sequence[Flag], was_red: Iterable[Flag] = ()) -> tuple[Scale, str]:
    """The answer and its reason in one sentence. was_red: the flags that were red at any time.

    No: a flag was red, or the loss rose, or stayed where it was over enough steps. Yes: the loss fell beyond its noise and
    by USUAL_FALL of its start (gspo: the reward rose beyond its noise), and no flag speaks of what is learned.
    """
    now = {flag.name: flag for flag in flags}
    # Equal rewards of one rollout may be chance, which the next ones show; any other red flag has told of a fault.
    red = [flag for flag in was_red if flag.name != "reward varies" or now.get(flag.name, flag).level != "green"]
    if red := list({flag.name: flag for flag in [*red, *reds(flags)]}.values()):
        return Scale.NO, "; ".join(f"{flag.name}: {flag.cause} ({flag.knob})" for flag in red)
    answer, why = reward_rose(run) if run.setting.method == "gspo" else loss_fell(run)
    yellow = [flag for flag in flags if flag.level == "yellow" and flag.name not in OF_THE_MACHINE]
    if answer and yellow:
        return Scale.NOT_SHOWN, f"{why}, and {yellow[0].name} is yellow: {yellow[0].cause} ({yellow[0].knob})"
    return answer, why


def loss_fell(run: Run) -> tuple[Scale, str]:
    steps, losses = run.series("loss")
    if not losses:
        return Scale.NOT_SHOWN, "no loss was logged"
    found = fall(losses)
    figures = f"from {found.start:.3f} to {found.end:.3f} in {len(losses)} logged losses to step {steps[-1]}"
    beyond = f"{found.z:.1f} times what its noise explains"
    if len(losses) < ENOUGH_ROWS:
        few = f"{len(losses)} logged losses, from {losses[0]:.3f} to {losses[-1]:.3f}"
        return Scale.NOT_SHOWN, f"{few}, are too few to tell, and {ENOUGH_ROWS} are needed"
    half = len(losses) // 2
    lately, latest = trend(steps[half:], losses[half:]), fall(losses[half:])
    if found.z < -BEYOND_NOISE:
        return Scale.NO, f"the loss rose {figures}, {-found.z:.1f} times what its noise explains"
    if lately.z > run.thresholds.trend_z and latest.z < -BEYOND_NOISE:
        return Scale.NO, f"the loss rose from {latest.start:.3f} to {latest.end:.3f} since step {steps[half]}"
    if found.is_by(USUAL_FALL):
        return Scale.YES, f"the loss fell by {found.share:.0%}, {figures}, {beyond}"
    if found.z > BEYOND_NOISE:
        return Scale.NOT_SHOWN, f"the loss fell by {found.share:.0%}, {figures}, and {USUAL_FALL:.0%} is usual"
    most = found.start - found.end + 2 * found.error  # that it may have fallen by
    if steps[-1] >= run.setting.warmup_steps + TREND_STEPS and most < USUAL_FALL * abs(found.start):
        return Scale.NO, f"the loss stayed where it was, {figures}"
    return Scale.NOT_SHOWN, f"the loss went {figures}, which its noise of {found.error:.3f} may explain"


def reward_rose(run: Run) -> tuple[Scale, str]:
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
