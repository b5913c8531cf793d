"""How long examples are, in memory that does not grow with their number."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

LONGEST = 2**17
"""In tokens; what is longer counts as this."""


@dataclass(frozen=True)
class Lengths:
    """counts[n]: examples of n tokens. Of a preference pair: the prompt with the longer answer."""

    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> "Lengths":
        """From (length, examples) pairs, as `pairs` gives them."""
        counts = np.zeros(LONGEST + 1, np.int64)
        for length, number in pairs:
            counts[length] += number
        return cls(counts)

    def pairs(self) -> list[tuple[int, int]]:
        """(length, examples) of the lengths that occur, ascending."""
        return [(int(length), int(self.counts[length])) for length in np.flatnonzero(self.counts)]

    @property
    def examples(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.counts @ np.arange(len(self.counts)))

    @property
    def mean(self) -> float:
        return self.tokens / max(1, self.examples)

    def quantile(self, share: float) -> int:
        """The shortest length that at least this share of the examples does not exceed; 0 where there are none."""
        up_to = np.cumsum(self.counts)
        return int(np.searchsorted(up_to, max(1, np.ceil(share * up_to[-1])))) if up_to[-1] else 0

    def buckets(self, width: int) -> list[tuple[int, int, int]]:
        """(first length, last length, examples) of buckets of this width, up to the longest example."""
        last = self.quantile(1.0)
        return [
            (start, start + width - 1, int(self.counts[start : start + width].sum()))
            for start in range(0, last + 1, width)
        ]


def lengths_of(table: pa.Table) -> npt.NDArray[np.int64]:
    """Tokens of each example of a chunk; none where the chunk holds text, which a trainer tokenizes."""
    if "input_ids" in table.column_names:
        return _list_lengths(table, "input_ids")
    if "chosen_ids" in table.column_names:
        answers = np.maximum(_list_lengths(table, "chosen_ids"), _list_lengths(table, "rejected_ids"))
        return _list_lengths(table, "prompt_ids") + answers
    return np.empty(0, np.int64)


def _list_lengths(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = pc.list_value_length(table[column]).to_numpy().astype(np.int64)
    return lengths
