"""What a guard found: its name, its words, and whether the user has accepted it.

Guards name settings as a run's YAML does (`train.epsilon`). A script of one's own reads them as its Python has them
(`GRPOConfig.epsilon`), and may accept a finding by its name.
"""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cogumi.core.errors import UsageError

OWN_OBJECTIVE = "own-objective"
NAMES = {
    "dropout": "old and new log-probabilities see different masks",
    "pad-is-eos": "unsloth masks the end of a completion",
    "token-aggregation": "a ratio per sequence in a loss summed over tokens, or the reverse",
    "two-temperatures": "completions are sampled at another temperature than they are scored at",
    "epsilon": "a clip that is no positive number",
    "beta": "a negative KL term",
    "delta": "a cap of the ratio at or below 1",
    "wide-clip": "a token loss's epsilon on sequence ratios",
    "narrow-clip": "a sequence loss's epsilon on token ratios",
    "kl-correction": "TRL multiplies the KL term by the sequence's ratio",
    "ratio-always-one": "each rollout is used for one optimizer step",
    "checkpoint-inside-rollout": "a resumed run trains on other rollouts",
    "last-checkpoint-inside-rollout": "a run continued from its last checkpoint trains on other rollouts",
    "less-than-a-rollout": "fewer prompts than one rollout takes",
    "reward": "a reward function that raises an error on a trial completion",
    "long-prompts": "prompts that leave no room for a completion",
    OWN_OBJECTIVE: "the trainer's loss is the user's own, and is compared with no formula",
}
"""What a script may accept, and what it then trains with."""
_accepted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GuardFinding:
    """One rule that spoke. `name`: of NAMES. `message` is one line: the setting, its value, why, and what to set instead."""

    name: str
    refused: bool
    message: str


def accept_findings(names: Iterable[str]) -> None:
    """Have the guards of this process let these findings pass, and no others. Raises UsageError for an unknown name."""
    global _accepted
    _accepted = validate_names(names)


def accepted_findings() -> frozenset[str]:
    """What `accept_findings` was told last."""
    return _accepted


def validate_names(names: Iterable[str]) -> frozenset[str]:
    given = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in given if name not in NAMES]:
        raise UsageError(f"accept={given!r}: {unknown[0]!r} is no finding", fix=f"there are: {', '.join(NAMES)}")
    return frozenset(given)


def format_accept_call(name: str, beside: frozenset[str]) -> str:
    """The call that accepts `name`, and still what was accepted before."""
    return f"cogumi.patch(accept={sorted({name, *beside})})"


def is_run_trainer(trainer: Any) -> bool:
    """Whether `cogumi train` or `cogumi.train` built a trainer, from a YAML."""
    return getattr(trainer, "cogumi_run", False)


def reword_for(trainer: Any, message: str) -> str:
    """A message that names settings as a YAML does, in Python for a script and in YAML for a run."""
    return message if is_run_trainer(trainer) else to_python_names(message)


def reword_errors(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """A function of a trainer whose refusals name settings as its user does."""

    @functools.wraps(function)
    def speaking(trainer: Any) -> None:
        try:
            function(trainer)
        except UsageError as error:
            raise UsageError(reword_for(trainer, str(error))) from error.__cause__

    return speaking


def to_python_names(message: str) -> str:
    """`set train.epsilon: 3e-4` as `set GRPOConfig.epsilon=3e-4`."""

    def assigned(setting: re.Match[str]) -> str:
        key, value = setting.groups()
        if value in ("true", "false"):
            value = value.capitalize()
        elif not (value[0].isdigit() or value[0] == "-"):
            value = repr(value)
        return f"{config}.{key}={value}"

    message = message.replace("cogumi.behaviour_logps: rollout", "use_rollout_logps(trainer)")
    message = re.sub(r"cogumi\.fp32_lm_head(: true)?", "fp32_lm_head(trainer)", message)
    for section, config in (("train", "GRPOConfig"), ("lora", "LoraConfig")):
        key = rf"(?<![\w/.\\]){section}\.(?!py\b)(\w+)"  # not in the path of a user's train.py
        message = re.sub(rf"{key}: ([\w.+-]*\w)", assigned, message)
        message = re.sub(rf"{key}\.(\w+)", rf'{config}.\1["\2"]', message)
        message = re.sub(key, rf"{config}.\1", message)
    return message
