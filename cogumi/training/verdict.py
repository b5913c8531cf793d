"""What was checked about a run, with the figure and the requirement it was held to."""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One requirement and the figure that met or missed it."""

    name: str
    figure: str
    requirement: str
    passed: bool

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.figure} (required: {self.requirement})"


@dataclass(frozen=True)
class Verdict:
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "checks": [asdict(check) for check in self.checks]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def judge_training(metrics: list[dict[str, Any]], steps: int, max_steps: int, largest_change: float) -> list[Check]:
    """Checks every run must pass: it trained to the end, on finite numbers, and the adapter is no longer zero."""
    losses = [row[key] for row in metrics for key in ("loss", "eval_loss") if key in row]
    norms = [row["grad_norm"] for row in metrics if "grad_norm" in row]
    finite = [x for x in losses + norms if isinstance(x, (int, float)) and math.isfinite(x)]
    return [
        Check("steps", f"{steps}", f"{max_steps}", steps == max_steps),
        Check(
            "loss and gradient norm",
            f"{len(finite)} of {len(losses + norms)} logged values finite",
            "all, and at least one",
            len(finite) == len(losses + norms) > 0,
        ),
        Check("adapter", f"max |B| {largest_change:.2e}", "> 0", largest_change > 0),
    ]


def judge_gspo(metrics: list[dict[str, Any]]) -> list[Check]:
    """What GSPO adds: completions were scored, and every ratio it computed is a number."""
    rewards = [row["reward"] for row in metrics if row.get("reward") is not None]
    ratios = [row[key] for row in metrics for key in ("ratio_new_old/min", "ratio_new_old/max") if key in row]
    clipped = [row["clip_ratio/region_mean"] for row in metrics if "clip_ratio/region_mean" in row]
    numbers = [x for x in ratios + clipped if isinstance(x, (int, float)) and math.isfinite(x)]
    span = (
        f"ratio {min(ratios):.5f} to {max(ratios):.5f}, clipped {sum(clipped) / len(clipped):.1%}"
        if numbers
        else "none"
    )
    return [
        Check("rewards", f"{len(rewards)} batches scored", "at least one", bool(rewards)),
        Check("ratio and clip fraction", span, "all finite", len(numbers) == len(ratios + clipped) > 0),
    ]
