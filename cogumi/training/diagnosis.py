"""All rules of a method on one run's rows, and the answer to "safe to scale?"."""

from collections.abc import Iterable

from cogumi.training.flags import Flag, Rule, Run, settled
from cogumi.training.flags_common import COMMON
from cogumi.training.flags_dpo import DPO
from cogumi.training.flags_rl import RL
from cogumi.training.flags_sft import SFT

RULES: dict[str, tuple[Rule, ...]] = {"sft": (*COMMON, *SFT), "dpo": (*COMMON, *DPO), "gspo": (*COMMON, *RL)}


def judge(run: Run) -> list[Flag]:
    """The flags of a run so far, red ones first. A rule that has too few rows yet gives none."""
    return settled([flag for rule in RULES[run.setting.method] if (flag := rule(run)) is not None])


def safe_to_scale(was_red: Iterable[Flag]) -> tuple[bool, str]:
    """The answer of a sanity check and its reasons, of the flags that were red at any time in it."""
    reasons = [f"{flag.name}: {flag.cause} ({flag.knob})" for flag in was_red]
    return (False, "no: " + "; ".join(reasons)) if reasons else (True, "yes: no flag was red")
