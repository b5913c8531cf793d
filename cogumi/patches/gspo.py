"""`loss_type="gspo"` in TRL's own words, before TRL or unsloth sees it.

TRL 1.15 takes the string, pays for the first rollout and fails at the first loss. GSPO (Zheng et al. 2025,
arXiv:2507.18071) is its `grpo` loss with a sequence-level ratio: the per-sequence mean of the clipped objective, averaged
over sequences, R = exp(mean_t(new - old)). beta and both epsilons are always passed, so that nobody's other defaults
(TRL's epsilon 0.2 is ~600x the paper's) can change the objective.
"""

import dataclasses
import functools
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from cogumi.errors import UsageError
from cogumi.patches.status import PatchStatus

NAME = "gspo"
WRITTEN_FOR = "trl 1.15"
DECIDED = ("importance_sampling_level", "epsilon", "epsilon_high")
EPSILON, EPSILON_HIGH = 3e-4, 4e-4  # arXiv:2507.18071, section 5.1


def gspo_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """GRPOConfig keyword arguments with `loss_type="gspo"` spelled out; other loss types pass through unchanged.

    Raises UsageError when another key contradicts it.
    """
    if arguments.get("loss_type") != "gspo":
        return dict(arguments)
    if (level := arguments.get("importance_sampling_level", "sequence")) != "sequence":
        raise UsageError(
            f"importance_sampling_level={level!r} contradicts loss_type='gspo', whose ratio is per sequence; drop one"
        )
    epsilon = arguments.get("epsilon", EPSILON)
    # As in TRL, a lone epsilon bounds both sides.
    epsilon_high = arguments.get("epsilon_high") or (epsilon if "epsilon" in arguments else EPSILON_HIGH)
    return {
        "beta": 0.0,
        **arguments,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": epsilon,
        "epsilon_high": epsilon_high,
    }


def without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Without the GSPO keys that carry TRL's own default: argument parsers and generated subclasses pass them all."""
    defaults = {f.name: f.default for f in dataclasses.fields(grpo_config()) if f.name in DECIDED}
    return {k: v for k, v in arguments.items() if k not in defaults or v != defaults[k]}


def apply() -> PatchStatus:
    """Make `trl.GRPOConfig(loss_type="gspo")` mean GSPO in this process. Applying twice is applying once."""
    config = grpo_config()
    original = config.__init__
    if not hasattr(original, "cogumi_original"):

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **gspo_arguments(without_defaults(kwargs)))

        __init__.cogumi_original = original  # type: ignore[attr-defined]
        config.__init__ = __init__
    return status()


def undo() -> PatchStatus:
    """Put TRL's own `GRPOConfig.__init__` back."""
    config = grpo_config()
    config.__init__ = getattr(config.__init__, "cogumi_original", config.__init__)
    return status()


def status() -> PatchStatus:
    applied = hasattr(grpo_config().__init__, "cogumi_original")
    became = f"grpo + sequence-level ratio, beta 0, epsilon {EPSILON:g}/{EPSILON_HIGH:g}"
    reason = (
        f"loss_type='gspo' becomes {became}"
        if applied
        else "loss_type='gspo' is left to TRL, which fails at the first loss"
    )
    return PatchStatus(NAME, applied, f"{reason} (trl {version('trl')}, written for {WRITTEN_FOR})")


def grpo_config() -> Any:
    import trl

    return trl.GRPOConfig
