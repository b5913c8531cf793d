"""What a GRPO run's own log shows to be wrong while it runs: told once each, with what to do."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

ROLLOUTS = 8  # that the share of groups without variance is averaged over
TEACHES_NOTHING = 0.9
FIRST_ROWS = 3  # in which the gradient norm is held against max_grad_norm
ORDERS_OF_MAGNITUDE = 100.0
HISTORY = 100  # gradient norms that the running median is taken over
ENOUGH = 8  # norms before a median means something
ZEROS = 3  # gradients of exactly 0 in a row


class DuringTheRun:
    """Reads what a run logs, row by row, and says once what each row shows to be wrong."""

    def __init__(self, max_grad_norm: float = 1.0) -> None:
        """`max_grad_norm`: the run's, GRPOConfig's default; 0 where gradients are not clipped."""
        self.max_grad_norm = max_grad_norm
        self.zero_variance: deque[float] = deque(maxlen=ROLLOUTS)
        self.norms: deque[float] = deque(maxlen=HISTORY)
        self.rows = 0
        self.varied = False  # did rewards differ within the latest rollout's groups?
        self.zeros_in_a_row = 0
        self.waiting: list[str] = []
        self.said: set[str] = set()

    def first_step(self, found: Mapping[str, Any]) -> None:
        """The ratios of the first optimizer step, as `cogumi.rl.loss_check.first_ratios` has them; `warnings` says the rest."""
        outside, deviation = found["ratio_outside_clip"], found["ratio_max_deviation"]
        if outside > 0:
            self._say(
                "ratio",
                f"the first step's ratios are up to {deviation:.2g} away from 1 and {outside:.0%} of them outside the clip, "
                "before anything was learned: the sampler's and the trainer's numerics differ, and the clip acts on that "
                "(an fp32 head on both sides takes its share away, what the body rounds stays; else a wider clip)",
            )

    def warnings(self, row: Mapping[str, Any]) -> list[str]:
        """New warnings after one logged row; metrics it lacks, or has as None, are passed over."""
        share, norm = number(row, "frac_reward_zero_std"), number(row, "grad_norm")
        if "reward" in row and number(row, "reward") is None:  # TRL 1.15 logs a share of 0 then
            self.varied = False
            self._say(
                "unscored", "no completion of this rollout was scored: every reward function returned None or NaN"
            )
        elif share is not None:  # rows of a step without a rollout lack it
            self.varied = share < 1
            self.zero_variance.append(share)
            self._look_at_variance()
        if norm is not None:
            self.rows += bool(self.rows or norm)  # counted from the first gradient there is
            self._look_at_gradient(norm)
        new, self.waiting = self.waiting, []
        return new

    def _look_at_variance(self) -> None:
        mean = statistics.fmean(self.zero_variance)
        if len(self.zero_variance) == ROLLOUTS and mean > TEACHES_NOTHING:
            self._say(
                "variance",
                f"in {mean:.0%} of the last {ROLLOUTS} rollouts' groups all rewards are the same: their advantages are 0 and "
                "the completions teach nothing; take prompts the model sometimes solves, a finer reward, a higher "
                "train.temperature or more train.num_generations",
            )

    def _look_at_gradient(self, norm: float) -> None:
        limit = self.max_grad_norm
        if self.rows <= FIRST_ROWS and limit > 0 and norm / limit > ORDERS_OF_MAGNITUDE:
            self._say(
                "first norm",
                f"the gradient norm starts at {norm:.3g}, and train.max_grad_norm is {limit:g}: clipping divides it by "
                f"{norm / limit:.0f}. A loss with the wrong divisor looks like this",
            )
        if len(self.norms) >= ENOUGH:
            median = statistics.median(self.norms)
            if norm > ORDERS_OF_MAGNITUDE * median > 0:
                self._say("norm", f"the gradient norm is {norm:.3g}, {norm / median:.0f} times its running median")
        self.norms.append(norm)
        self.zeros_in_a_row = self.zeros_in_a_row + 1 if norm == 0 and self.varied else 0
        if self.zeros_in_a_row == ZEROS:
            self._say(
                "zero",
                f"the gradient was exactly 0 in {ZEROS} logged steps in a row, though rewards differ within groups: "
                "everything is clipped, or masked (train.mask_truncated_completions), or the loss does not reach a trainable "
                "weight",
            )

    def _say(self, what: str, line: str) -> None:
        if what not in self.said:
            self.said.add(what)
            self.waiting.append(line)


def no_reward_was_scored(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Why a run with these logged rows is a failure: not one completion was scored. None where one was.

    TRL 1.15 logs `reward: None` for a rollout in which every reward function returned None for every completion.
    """
    rewards = [row["reward"] for row in rows if "reward" in row]
    if any(number({"reward": reward}, "reward") is not None for reward in rewards):
        return None
    return (
        f"no completion was ever scored: {len(rewards)} logged rollouts without a reward (every reward function returned "
        "None or NaN for all of them), so every advantage was 0 and nothing was learned"
    )


def number(row: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a logged row; None where it is missing, None, NaN or infinite."""
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
