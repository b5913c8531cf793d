"""What can happen to a parameter: the words that an adapter's changes are told in."""

from dataclasses import dataclass, field
from pathlib import Path

from cogumi.core.safetensors_file import Span


@dataclass(frozen=True)
class LowRank:
    """scaling * B @ A on one parameter, from the tensors `key_a` [count * r, in] and `key_b` [out, r * count] of a file.

    count: how many matrices the parameter stacks (experts); A holds their factors one after the other, B interleaved
    (r, count), as PEFT stores target_parameters. transposed: the parameter's matrices are [in, out]. key_a None: B is a
    bias [out], added as it is (lora_bias).
    """

    file: Path
    key_a: str | None
    key_b: str
    rank: int
    scaling: float
    count: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows of a parameter that are replaced by those of a tensor [len(indices), columns] (trainable tokens)."""

    file: Path
    key: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """What happens to one parameter, in this order: replaced whole, updated, rescaled (DoRA), rows replaced.

    magnitude: (file, key) of DoRA's magnitude, one for each output: a row of the parameter, or a column where the low
    rank is transposed.
    """

    whole: Span | None = None
    terms: tuple[LowRank, ...] = ()
    magnitude: tuple[Path, str] | None = None
    rows: Rows | None = None


@dataclass
class Changes:
    """Changes of one adapter: by parameter, and by stored tensor for modules that only the checkpoint still has.

    vocabulary: the number of rows of the embedding where the adapter resized it.
    """

    parameters: dict[str, Change] = field(default_factory=dict)
    tensors: dict[str, Change] = field(default_factory=dict)
    vocabulary: int | None = None
