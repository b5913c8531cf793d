"""What a flag is, what it is read from, and the rules in their order: rows -> flags, without a trainer and without state.

A row is what the trainer logged at a step, with what the sentinel saw beside it under `seen/...`. Every rule gives a
flag with its evidence and threshold, whatever its level; a flag that is not green says in one sentence its likely cause,
the figures, and the key of the configuration to change.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cogumi.config.subsections import Thresholds
from cogumi.core.formatting import flag_sentence
from cogumi.core.run_directory import SAMPLES_FILE, read_jsonl
from cogumi.rl.runtime_warnings import number

LONGEST_PIECE = 120  # characters of what is repeated
LOOP_CHARACTERS = 20

Level = Literal["green", "yellow", "red"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Flag:
    """One judgement: the figure and the steps it is from, what it was held to, and, unless green, why and what to do."""

    name: str
    level: Level
    evidence: str
    threshold: str
    cause: str = ""
    knob: str = ""

    def __str__(self) -> str:
        if self.level == "green":
            return f"green: {self.name}: {self.evidence} ({self.threshold})"
        return f"{self.level}: {self.name}: {flag_sentence(asdict(self))}"


@dataclass(frozen=True)
class Setting:
    """What the run was told, of what the rules need."""

    method: str
    learning_rate: float
    max_steps: int
    examples_per_step: int
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    beta: float = 0.0
    loss: str = ""
    """train.loss_type; several are joined by a comma."""
    vocabulary: int = 0
    fp16: bool = False
    optimizer: str = ""
    hidden_size: int = 0
    """Width of the base model, 0 where it is not known."""
    lora_rank: int = 0
    """Rank of the trained adapter, 0 where there is none; `lora_scale`: what its product is multiplied by."""
    lora_scale: float = 0.0
    rollout: int = 0
    """gspo: completions that are sampled at a time."""
    other_versions: tuple[str, ...] = ()
    """`package there -> here` of what has changed since the checkpoint that the run resumed from."""


@dataclass(frozen=True)
class Pairs:
    """Loss per learned token of some completions after their own prompt and after another example's (nats), and Student's
    t of the paired difference."""

    examples: int
    own: float
    other: float
    t: float
    step: int = 0
    """After how many steps the model was asked."""


@dataclass(frozen=True)
class Words:
    """Whether completions share words with their own prompts rather than with others'. Student's t of paired differences;
    `t_within` is of pieces of the prompts and the rest of each, which are known to belong together."""

    examples: int
    t: float
    t_within: float
    alike: float
    """Share of the distinct tokens of those pieces that the completions use too."""


@dataclass(frozen=True)
class Answers:
    """Of preference pairs: Student's t of what chosen answers share with their prompts beyond the rejected ones, of what
    both share beyond other prompts' answers, and how far the two rise and fall together (Pearson's correlation)."""

    pairs: int
    t: float
    t_either: float
    together: float


@dataclass(frozen=True)
class Batches:
    """What the collator makes of some examples, looked at before the first step. Counts are of tokens or examples."""

    examples: int
    masked: int
    """Examples without one learned token."""
    learned: int
    """Learned tokens in all."""
    pads_learned: int
    """Padding that is learned: places the attention mask leaves out, with a label."""
    pads_in_text: int
    """Places inside the text that hold the padding token."""
    ends: int
    """Learned tokens that end a text."""
    pad_is_end: bool
    cut: int = 0
    """Examples as long as train.max_length that do not end with an end token."""
    entropy: float = 0.0
    """Entropy of the learned tokens' frequencies, nats."""
    pairs: Pairs | None = None
    """What the base makes of prompts and completions."""
    pairs_now: Pairs | None = None
    """The same of the model as it was when it was asked again."""
    words: Words | None = None
    answers: Answers | None = None


@dataclass(frozen=True)
class Written:
    """Completions of held-out prompts after a step: how many in all, how many are empty, blank, loop, reached the end."""

    step: int
    count: int
    empty: int = 0
    blank: int = 0
    loops: int = 0
    ended: int = 0

    @property
    def unusable(self) -> int:
        return self.empty + self.blank + self.loops


@dataclass(frozen=True)
class Run:
    """All that the rules read: `first` rows of the run and its `latest` ones once it has settled, both bounded and in order.
    Where few steps are logged the two overlap."""

    setting: Setting
    first: Sequence[Row]
    latest: Sequence[Row]
    batches: Batches | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    written: Sequence[Written] = ()
    """Of held-out prompts, in the order of steps; that of step 0 is of the base."""

    @property
    def rows(self) -> list[Row]:
        known = self.first[-1]["step"] if self.first else 0
        return [*self.first, *(row for row in self.latest if row["step"] > known)]

    @property
    def step(self) -> int:
        rows = self.rows
        return int(rows[-1]["step"]) if rows else 0

    def series(self, key: str, rows: Sequence[Row] | None = None) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric's finite values."""
        steps, values = [], []
        for row in self.rows if rows is None else rows:
            value = number(row, key)
            if value is not None:
                steps.append(int(row["step"]))
                values.append(value)
        return steps, values


Rule = Callable[[Run], Flag | None]

# A red flag explains others: those are told as its consequences, so that one cause is named for one fault. In this order.
FOLLOWS: dict[str, tuple[str, ...]] = {
    "finite numbers": ("*",),
    "learned tokens": (
        "adapter moves",
        "gradient norm",
        "loss trend",
        "loss noise",
        "token frequencies",
        "end tokens",
        "held-out completions",
        "samples end",
    ),
    "padding": (
        "end tokens",
        "prompt and completion",
        "gradient norm",
        "loss trend",
        "loss noise",
        "token frequencies",
        "held-out completions",
        "samples end",
    ),
    "learning-rate schedule": ("adapter moves", "gradient norm", "loss trend", "preferences", "reward trend"),
    "adapter moves": ("gradient norm", "loss trend", "loss noise", "token frequencies", "preferences", "reward trend"),
    "loss trend": ("gradient norm", "loss noise", "token frequencies", "prompt and completion", "preferences"),
    "held-out completions": ("samples end",),
    "samples end": ("end tokens",),
    "prompt and completion": ("gradient norm", "loss noise", "token frequencies"),
    "token frequencies": ("loss noise",),
    "preferences": ("gradient norm",),
    "KL to the sampler": (
        "gradient norm",
        "clip fraction",
        "entropy",
        "completions end",
        "reward trend",
        "reward varies",
    ),
    "entropy": ("gradient norm", "clip fraction", "completions end", "reward trend", "reward varies"),
    "reward varies": ("gradient norm", "adapter moves", "clip fraction", "reward trend"),
    "completions end": ("gradient norm", "adapter moves", "clip fraction", "reward trend"),
    "waiting for data": ("tokens per second",),
}


def settled(flags: Sequence[Flag]) -> list[Flag]:
    """The flags with those that follow from another red one turned yellow and saying so; red ones first, then yellow."""
    found: dict[str, Flag] = {flag.name: flag for flag in flags}
    for name, consequences in FOLLOWS.items():
        if name not in found or found[name].level != "red":
            continue
        for other in found if consequences == ("*",) else consequences:
            if other != name and other in found and found[other].level != "green":
                root = found[name]
                found[other] = replace(found[other], level="yellow", cause=f"follows from {name}", knob=root.knob)
    order = {"red": 0, "yellow": 1, "green": 2}
    return sorted(found.values(), key=lambda flag: order[flag.level])


def reds(flags: Sequence[Flag]) -> list[Flag]:
    return [flag for flag in flags if flag.level == "red"]


def share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def written_in(run_dir: Path) -> list[Written]:
    """What samples.jsonl holds, by step."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in read_jsonl(run_dir / SAMPLES_FILE):
        steps.setdefault(int(row["step"]), []).append(row)
    return [
        Written(
            step,
            len(rows),
            empty=sum(not row["completion"] for row in rows),
            blank=sum(row["completion"].isspace() for row in rows),
            loops=sum(repeats_itself(row["completion"]) for row in rows),
            ended=sum(row.get("ended", True) for row in rows),
        )
        for step, rows in sorted(steps.items())
    ]


def repeats_itself(completion: str) -> bool:
    """Whether the end of a text is one piece over and over: three times at least, and half of the text."""
    text = completion.strip()
    for period in range(1, min(LONGEST_PIECE, len(text) // 3) + 1):
        same = next((i for i in range(len(text) - period) if text[-1 - i] != text[-1 - i - period]), len(text) - period)
        if same + period >= max(3 * period, LOOP_CHARACTERS, len(text) / 2):
            return True
    return False
