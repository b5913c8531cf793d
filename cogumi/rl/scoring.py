"""Completions that could not be scored are left out of the baseline, whatever their other rewards are.

A reward function returns None where it does not apply to a row, as in TRL 1.15, which adds up the others. It returns NaN
where a score was wanted and could not be had: the program crashed, or ran out of time. A sum would take that for 0. So the
whole completion has no reward then, its advantage is 0, and `rewards/not_scored` logs the share of a rollout with any.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from cogumi.patches.trl_internals import CALCULATE_REWARDS, logged_metrics, rollout_mode, wrap_method

NOT_SCORED = "rewards/not_scored"


def leave_out_unscored(trainer: Any) -> None:
    """Have a GRPO trainer take NaN from a reward function for a completion without any reward. Call it once."""
    unscored: set[int] = set()  # of this process's completions, in one rollout
    trainer.reward_funcs = [
        reward if isinstance(reward, nn.Module) else note_unscored(reward, unscored) for reward in trainer.reward_funcs
    ]

    def calculate(original: Callable[..., Tensor], inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Tensor:
        unscored.clear()
        scores = original(inputs, *args, **kwargs)  # (completions of all processes, reward functions)
        here = torch.tensor([number in unscored for number in range(len(inputs))], device=scores.device)
        everywhere = trainer.accelerator.gather(here)
        scores[everywhere] = math.nan
        if everywhere.any():
            logged_metrics(trainer, rollout_mode(trainer))[NOT_SCORED].append(float(everywhere.float().mean()))
        return scores

    wrap_method(trainer, CALCULATE_REWARDS, calculate)


def note_unscored(reward: Callable[..., Any], unscored: set[int]) -> Callable[..., Any]:
    """The same reward function; the places of NaN in what it returns are added to `unscored`."""

    name = getattr(reward, "__name__", type(reward).__name__)

    def note(scores: Any) -> list[float | None]:
        found: list[float | None] = []
        for score in scores:
            if not isinstance(score, Real | None) and not hasattr(score, "item"):
                raise RuntimeError(
                    f"reward {name} returned {type(score).__name__} {score!r:.40}, and a score is a number"
                )
            found.append(None if score is None else float(score) if math.isfinite(score) else math.nan)
        unscored.update(n for n, score in enumerate(found) if score is not None and math.isnan(score))
        return found

    if inspect.iscoroutinefunction(reward):

        @functools.wraps(reward)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return note(await reward(*args, **kwargs))

        return awaited

    @functools.wraps(reward)
    def scored(*args: Any, **kwargs: Any) -> Any:
        return note(reward(*args, **kwargs))

    return scored
