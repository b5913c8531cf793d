"""The examples of one part (trained on, or held out) into one arrow file, and the accounts of the rows they are made of."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from cogumi.core.disk_space import space_of, spoken
from cogumi.core.durability import sync_path
from cogumi.core.errors import UsageError
from cogumi.data.cache_files import LONGEST, Lengths, lengths_of
from cogumi.data.example_kinds import Chunk, Dropped, Tokenize

Indices = npt.NDArray[np.int64]


class Part:
    """Takes the rows of one part and writes what they become to `path`, an arrow stream that `datasets` can map."""

    def __init__(self, path: Path, expected_rows: int) -> None:
        self.path = path
        self.expected_rows = expected_rows
        """Set to 0 when the disk was asked whether it has the room for what they become."""
        self.waiting: list[pl.DataFrame] = []
        self.waiting_at: list[Indices] = []
        self.waiting_for: Tokenize | None = None
        self.waiting_share = 0.0
        self.position = 0
        self.total = self.truncated = self.learned = 0
        self.dropped: dict[str, Dropped] = {}
        self.counts = np.zeros(LONGEST + 1, np.int64)
        self.file: Any = None
        self.schema: pa.Schema | None = None

    def drop(self, reason: str, at: Indices, first: str) -> None:
        """Count rows that are not to become examples. at: their places in the source; first: what the first holds."""
        if len(at):
            self.total += len(at)
            self.count(reason, Dropped(len(at), int(at[0]), first[:80]))

    def count(self, reason: str, dropped: Dropped) -> None:
        self.dropped[reason] = self.dropped[reason] + dropped if reason in self.dropped else dropped

    def add(self, tokenize: Tokenize, rows: pl.DataFrame, at: Indices, share: float) -> None:
        """Rows to make examples of. at: their places in the source; share: of a batch that they were chosen from.

        They wait until there is a whole batch of them: tokenizers are fast on many texts at once.
        """
        if self.waiting and (self.waiting_for is not tokenize or self.waiting[0].schema != rows.schema):
            self.flush()
        self.waiting_for = tokenize
        self.waiting.append(rows)
        self.waiting_at.append(at)
        self.waiting_share += share
        if self.waiting_share >= 1:
            self.flush()

    def flush(self) -> None:
        if self.waiting_for is None:
            return
        rows, at = pl.concat(self.waiting), np.concatenate(self.waiting_at)
        chunk = self.waiting_for(rows, self.position)
        self.take(chunk, at)
        if self.expected_rows:
            self.check_disk(chunk.table.nbytes / rows.height)
        self.position += rows.height
        self.waiting, self.waiting_at, self.waiting_for, self.waiting_share = [], [], None, 0.0

    def take(self, chunk: Chunk, at: Indices) -> None:
        """Write the examples made of the rows at these places, and count what became of the others."""
        lost = sum(dropped.count for dropped in chunk.dropped.values())
        if len(chunk.table) + lost != len(at):
            raise RuntimeError(f"{len(at)} rows became {len(chunk.table)} examples and {lost} dropped")
        self.total += len(at)
        self.truncated += chunk.truncated
        for reason, dropped in chunk.dropped.items():
            # `tokenize` numbers the chosen rows; whoever looks for one needs its place in the source.
            self.count(reason, Dropped(dropped.count, int(at[dropped.row - self.position]), dropped.excerpt))
        if not len(chunk.table):
            return
        self.counts += np.bincount(np.minimum(lengths_of(chunk.table), LONGEST), minlength=LONGEST + 1)
        if "completion_mask" in chunk.table.column_names:
            self.learned += sum(int(np.count_nonzero(part.flatten())) for part in chunk.table["completion_mask"].chunks)
        self.write(chunk.table.replace_schema_metadata(None))

    def write(self, table: pa.Table) -> None:
        if self.schema is None:
            self.schema = table.schema
            self.file = pa.ipc.new_stream(str(self.path), self.schema)
        elif table.schema != self.schema:
            schema = one_schema(self.schema, table.schema)
            if schema != self.schema:
                self.rewrite(schema)
            table = table.select(schema.names).cast(schema)
        self.file.write_table(table.combine_chunks())

    def rewrite(self, schema: pa.Schema) -> None:
        """What is written so far, in the types that later rows need: a column may have begun with nulls alone."""
        self.file.close()
        before = self.path.with_suffix(".before")
        self.path.rename(before)
        self.file, self.schema = pa.ipc.new_stream(str(self.path), schema), schema
        with pa.memory_map(str(before)) as mapped:
            for batch in pa.ipc.open_stream(mapped):
                self.file.write_table(pa.Table.from_batches([batch]).cast(schema))
        before.unlink()

    def check_disk(self, bytes_a_row: float) -> None:
        """Refuse, by the first chunk, what will not fit on the disk."""
        needed = int(bytes_a_row * self.expected_rows)
        self.expected_rows = 0
        free = space_of(self.path.parent).free
        if needed > free:
            raise UsageError(
                f"prepared data will take about {spoken(needed)} and {spoken(free)} are free",
                place=self.path.parents[1],
                fix=("free some, set XDG_CACHE_HOME to another disk, or use fewer rows (data.max_rows)"),
            )

    def close(self, name: str, duplicates: int, note: str) -> dict[str, Any]:
        """The record of this part. Raises UsageError where no row was usable."""
        self.flush()
        if self.file is None:
            longer = any(reason.startswith("longer than") for reason in self.dropped)
            allow = ", or allow longer examples (of gspo: lower train.max_completion_length)" if longer else ""
            raise UsageError(told(name, self.total, 0, self.dropped), fix=f"give other rows{allow}")
        self.file.close()
        sync_path(self.path)
        return {
            "name": name,
            "total": self.total,
            "dropped": {reason: [each.count, each.row, each.excerpt] for reason, each in self.dropped.items()},
            "truncated": self.truncated,
            "duplicates": duplicates,
            "lengths": Lengths(self.counts).pairs(),
            "learned": self.learned,
            "note": note,
        }


def one_schema(before: pa.Schema, now: pa.Schema) -> pa.Schema:
    """The types that hold both chunks' values; UsageError names a column for which there are none."""
    fields = []
    for name in before.names:
        pair = [pa.schema([schema.field(name)]) for schema in (before, now)]
        try:
            fields.append(pa.unify_schemas(pair, promote_options="permissive").field(name))
        except pa.ArrowException as error:
            kinds = " and ".join(str(schema.field(name).type) for schema in pair)
            raise UsageError(f"column {name!r} holds {kinds} in different rows", fix="write them alike") from error
    return pa.schema(fields)


def told(name: str, total: int, used: int, dropped: Mapping[str, Dropped]) -> str:
    """ "sample.parquet: 9,421 rows, 9,100 used; dropped 300 longer than 512 tokens, 21 null"."""
    reasons = ", ".join(f"{each.count:,} {reason}" for reason, each in dropped.items())
    return f"{name}: {total:,} rows, {used:,} used" + (f"; dropped {reasons}" if reasons else "")
