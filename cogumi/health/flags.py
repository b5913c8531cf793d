"""Flags, what they are judged from, and the statistics they are judged by; no trainer and no state.

A row is what the trainer logged at a step, with what the sentinel measured under `seen/...`.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cogumi.config.schema import Thresholds
from cogumi.core.formatting import flag_sentence
from cogumi.core.run_directory import SAMPLES_FILE, read_jsonl

MAX_LOOP_PERIOD = 120  # characters of a repeated piece
MIN_LOOP_CHARACTERS = 20
SIGNIFICANT_FALL_Z = 4.0  # standard deviations from which a fall is more than noise
USUAL_FALL_SHARE = 0.1  # of a loss in the first 100 steps, of its start: axolotl's training-stability page
MIN_ORDER_Z = 2.5  # z of a trend below which the order of the values is chance

Level = Literal["green", "yellow", "red"]
Row = Mapping[str, Any]


HELD_OUT_COMPLETIONS = "held-out completions"
# A red flag explains others, which are then reported as its consequences, so that one fault has one cause. In this order.
TEXT_FLAGS = ("gradient norm", "loss trend", "loss noise", "token frequencies", HELD_OUT_COMPLETIONS)
UPDATE_FLAGS = ("gradient norm", "adapter moves")
CONSEQUENCES: dict[str, tuple[str, ...]] = {
    "finite numbers": (),  # every other flag
    "learned tokens": ("adapter moves", *TEXT_FLAGS),
    "padding": ("prompt and completion", *TEXT_FLAGS),
    "learning-rate schedule": (*UPDATE_FLAGS, "update size", "loss trend", "preferences"),
    "adapter moves": ("gradient norm", "update size", "loss trend", "loss noise", "token frequencies", "preferences"),
    "loss trend": (*TEXT_FLAGS, "prompt and completion", "preferences"),
    "prompt and completion": ("gradient norm", "loss noise", "token frequencies"),
    "token frequencies": ("loss noise",),
    "preferences": ("gradient norm",),
    "sampler's weights": ("sampler and trainer", "KL to the sampler"),
    "scored": (*UPDATE_FLAGS, "reward varies"),
    "tool calls": (*UPDATE_FLAGS, "reward varies"),
    "episodes end": ("completions end",),
    "KL to the sampler": ("gradient norm", "entropy", "completions end", "reward varies"),
    "entropy": ("gradient norm", "completions end", "reward varies"),
    "reward varies": UPDATE_FLAGS,
    "completions end": UPDATE_FLAGS,
}


@dataclass(frozen=True)
class Flag:
    """One judgement. evidence: the figure and its steps. cause, knob: why, and what to change; only if it is not green."""

    name: str
    level: Level
    evidence: str
    cause: str = ""
    knob: str = ""

    def __str__(self) -> str:
        if self.level == "green":
            return f"green: {self.name}: {self.evidence}"
        return f"{self.level}: {self.name}: {flag_sentence(asdict(self))}"


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that the rules need. loss: train.loss_type, several joined by a comma.

    rollout: completions that gspo samples at a time. spacings_per_rate: by how many spacings of bfloat16 a weight of the
    model moves where a trained one moves by 1; 0 where that is not known.
    """

    method: str
    learning_rate: float
    max_steps: int
    examples_per_step: int
    warmup_steps: int = 0
    loss: str = ""
    vocabulary: int = 0
    fp16: bool = False
    rollout: int = 0
    spacings_per_rate: float = 0.0

    @property
    def update_size(self) -> float:
        """The whole run's update in spacings of bfloat16 weights, as Adam moves a weight; 0 where it is not known."""
        return self.learning_rate * self.max_steps * self.spacings_per_rate


@dataclass(frozen=True)
class PairLosses:
    """Loss per learned token (nats) of completions after their own prompt and after another example's.

    t: Student's t of the paired difference. step: the optimizer step after which it was measured.
    """

    own: float
    other: float
    t: float
    step: int = 0


@dataclass(frozen=True)
class WordOverlap:
    """Words that completions share with their own prompt beyond those shared with other prompts, as Student's t.

    t_within: the same of a piece of each prompt and the rest of it. alike: share of the distinct tokens of those pieces
    that completions use too.
    """

    t: float
    t_within: float
    alike: float


@dataclass(frozen=True)
class AnswerOverlap:
    """The same of the answers of preference pairs.

    t: of the chosen answers' share less the rejected ones'. t_either: of the sum of both. correlation: of both.
    """

    pairs: int
    t: float
    t_either: float
    correlation: float


@dataclass(frozen=True)
class BatchStatistics:
    """Counts of some examples as the collator makes them, before the first step.

    masked: examples without a learned token. pads_learned: labelled places outside the attention mask. ends: learned end
    tokens. entropy: of the learned tokens' frequencies, nats. pairs_now: measured again, with the model as it is now.
    """

    examples: int
    masked: int
    learned: int
    pads_learned: int
    ends: int
    pad_is_end: bool
    entropy: float = 0.0
    pairs: PairLosses | None = None
    pairs_now: PairLosses | None = None
    words: WordOverlap | None = None
    answers: AnswerOverlap | None = None


@dataclass(frozen=True)
class SampleCounts:
    """Completions of held-out prompts after a step: how many, and how many are empty, blank, a loop."""

    step: int
    count: int
    empty: int = 0
    blank: int = 0
    loops: int = 0

    @property
    def unusable(self) -> int:
        return self.empty + self.blank + self.loops


@dataclass(frozen=True)
class RunHistory:
    """All that the rules read. first, latest: rows, both bounded; in a short run they overlap.

    written: completions of held-out prompts by step; step 0 is the base. held_out: the first and the last held-out loss.
    """

    setting: RunSettings
    first: Sequence[Row]
    latest: Sequence[Row]
    batches: BatchStatistics | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    written: Sequence[SampleCounts] = ()
    held_out: Sequence[float] = ()

    @property
    def rows(self) -> list[Row]:
        known = self.first[-1]["step"] if self.first else 0
        return [*self.first, *(row for row in self.latest if row["step"] > known)]

    @property
    def step(self) -> int:
        rows = self.rows
        return int(rows[-1]["step"]) if rows else 0

    def series(self, key: str, rows: Sequence[Row] | None = None) -> tuple[list[int], list[float]]:
        """Return steps and values of the rows with a finite number for a key."""
        pairs = [(int(row["step"]), number(row, key)) for row in (self.rows if rows is None else rows)]
        return [step for step, value in pairs if value is not None], [value for _, value in pairs if value is not None]


Rule = Callable[[RunHistory], Flag | None]


def resolve_consequences(flags: Sequence[Flag]) -> list[Flag]:
    """Turn flags that follow from another red one yellow, with that cause; return red ones first, then yellow."""
    resolved: dict[str, Flag] = {flag.name: flag for flag in flags}
    for name, consequences in CONSEQUENCES.items():
        if name not in resolved or resolved[name].level != "red":
            continue
        for other in consequences or resolved:
            if other != name and other in resolved and resolved[other].level != "green":
                knob = resolved[name].knob
                resolved[other] = replace(resolved[other], level="yellow", cause=f"follows from {name}", knob=knob)
    order = {"red": 0, "yellow": 1, "green": 2}
    return sorted(resolved.values(), key=lambda flag: order[flag.level])


def red_flags(flags: Sequence[Flag]) -> list[Flag]:
    return [flag for flag in flags if flag.level == "red"]


def level_above(value: float, yellow: float, red: float) -> Level:
    return "red" if value > red else "yellow" if value > yellow else "green"


def share(part: float, total: float) -> float:
    return part / total if total else math.nan


def number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def read_samples(run_dir: Path) -> list[SampleCounts]:
    steps: dict[int, list[str]] = {}
    for row in read_jsonl(run_dir / SAMPLES_FILE):
        steps.setdefault(int(row["step"]), []).append(row["completion"])
    return [
        SampleCounts(step, len(texts), texts.count(""), sum(map(str.isspace, texts)), sum(map(is_loop, texts)))
        for step, texts in sorted(steps.items())
    ]


def is_loop(completion: str) -> bool:
    """Return whether a text ends in one piece repeated at least three times, over at least half of the text."""
    text = completion.strip()
    for period in range(1, min(MAX_LOOP_PERIOD, len(text) // 3) + 1):
        same = next((i for i in range(len(text) - period) if text[-1 - i] != text[-1 - i - period]), len(text) - period)
        if same + period >= max(3 * period, MIN_LOOP_CHARACTERS, len(text) / 2):
            return True
    return False


# ----------------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Trend:
    """slope: per unit of x. z: standard deviations by which the order of the values differs from chance."""

    slope: float
    z: float

    def change(self, x: Sequence[float]) -> float:
        return self.slope * (x[-1] - x[0])


def trend(x: Sequence[float], y: Sequence[float]) -> Trend:
    """Return Sen's slope (1968, doi:10.1080/01621459.1968.10480934) and the z of Mann and Kendall's test of the order.

    Its S is the number of rising minus falling pairs, of variance n(n-1)(2n+5)/18 less what ties take away. O(n^2). x has
    to increase; fewer than three values have no trend.
    """
    n = len(y)
    if n < 3:
        return Trend(0.0, 0.0)
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    later, earlier = np.triu_indices(n, 1)[::-1]
    rises = ys[later] - ys[earlier]
    slope = float(np.median(rises / (xs[later] - xs[earlier])))
    s = float(np.sign(rises).sum())
    ties = np.unique(ys, return_counts=True)[1].astype(np.float64)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if variance <= 0:  # all values the same
        return Trend(slope, 0.0)
    return Trend(slope, (s - math.copysign(min(1.0, abs(s)), s)) / math.sqrt(variance))


def noise(y: Sequence[float]) -> float:
    """Return the standard deviation of one value about a smooth curve; jumps and trends hardly count.

    The median absolute difference of neighbours of normal noise is 0.6745 * sqrt(2) * sigma.
    """
    if len(y) < 3:
        return 0.0
    return float(np.median(np.abs(np.diff(np.asarray(y, dtype=np.float64))))) / (0.6744897501960817 * math.sqrt(2))


@dataclass(frozen=True)
class Fall:
    """A fall from the first values to the last. z: in standard deviations of what noise alone would do.

    error: one standard deviation of `start - end`. share: the fall as a share of the start.
    """

    start: float
    end: float
    z: float
    error: float
    share: float

    def is_by(self, least: float) -> bool:
        """Return whether the fall is beyond noise, and at least this share of the start."""
        return self.z > SIGNIFICANT_FALL_Z and self.share >= least


def fall(y: Sequence[float]) -> Fall:
    """Compare the median of the first three values with that of the last fifth, in units of the scatter of neighbours.

    z is of these, or of the first and last tenth or quarter where they show more: a slow fall is in all values. The
    median of n normal values has the standard deviation `1.2533 sigma / sqrt(n)`; neighbours differ on average by
    `2 sigma / sqrt(pi)`. A fall that the order of the values does not show (`trend`) has z = 0. y: at least one value.
    """
    sigma = float(np.abs(np.diff(y)).mean()) * math.sqrt(math.pi) / 2 if len(y) > 1 else 0.0
    compared = [
        (statistics.median(y[:first]) - statistics.median(y[-last:]), sigma * 1.2533 * math.sqrt(1 / first + 1 / last))
        for first, last in ((3, max(3, len(y) // 5)), (len(y) // 10, len(y) // 10), (len(y) // 4, len(y) // 4))
        if first >= 3
    ]
    order = trend(range(len(y)), y).z
    z_scores = [away / error for away, error in compared if error and away * order < 0 and abs(order) > MIN_ORDER_Z]
    start, end = statistics.median(y[:3]), statistics.median(y[-max(3, len(y) // 5) :])
    share_of_start = (start - end) / abs(start) if start else 0.0
    return Fall(start, end, max(z_scores, key=abs, default=0.0), compared[0][1], share_of_start)


def students_t(values: Sequence[float]) -> float:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) / error if error > 0 else 0.0


def smooth(y: Sequence[float]) -> list[float]:
    """Return the median of each value and its two neighbours, which removes a spike and keeps a step."""
    return [statistics.median(y[i : i + 3]) for i in range(max(1, len(y) - 2))] if len(y) else []
