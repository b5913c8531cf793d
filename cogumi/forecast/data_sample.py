"""A sample of a run's data, made into examples as the run makes them: how long they are, how many there will be."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
from datasets import Dataset

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.data.cache import Data, Source
from cogumi.data.packing import with_labels
from cogumi.data.records import decode_rows
from cogumi.data.rows import Lengths, token_lengths
from cogumi.data.selection import held_out_rows
from cogumi.forecast.preflight_report import Line
from cogumi.methods.examples import longest_example, sources_of
from cogumi.methods.gspo import prompt_ids
from cogumi.methods.tasks import task_of

ROWS = 1000  # that are read, in all
MANY = 0.05  # of the rows: then it is worth a note
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class DataSample:
    """looked_at: rows that were read; examples: those that make one; dropped: the others, by reason.

    lengths: of the examples in tokens, of gspo the prompts'. rows: in the files; trained: examples of the whole, by the
    sample's share, that a pass over the data has. examples_per_row: None where rows are not packed.
    """

    looked_at: int
    examples: int
    truncated: int
    dropped: Mapping[str, int]
    lengths: Lengths
    rows: int
    trained: int
    examples_per_row: float | None

    @property
    def longest(self) -> int:
        return self.lengths.quantile(1.0)

    @property
    def mean(self) -> float:
        return self.lengths.mean

    def as_dict(self) -> dict[str, Any]:
        names = ("rows", "looked_at", "examples", "trained", "truncated", "longest")
        return {name: getattr(self, name) for name in names} | {"dropped": dict(self.dropped), "mean_tokens": self.mean}


def has_no_tokenizer(base: str) -> bool:
    """Whether a base is a directory with a config.json and nothing to make tokens with."""
    return Path(base).is_dir() and not any((Path(base) / name).exists() for name in TOKENIZERS)


def assume_longest(run: RunConfig) -> DataSample:
    """Of data that cannot be read: one length, the longest that the config lets through."""
    length = int(run.train.get("max_length") or longest_example(run))
    return DataSample(0, 0, 0, {}, Lengths([length]), 0, 0, None)


def sample_data(run: RunConfig, tokenizer: Any, of_base: Any = None) -> DataSample:
    """Make examples of the first rows of each source. Raises UsageError as the run would, for what cannot be read."""
    looked_at = examples = truncated = rows = 0
    dropped: Counter[str] = Counter()
    lengths: list[int] = []
    tables = []
    sources = sources_of(run, tokenizer, of_base)
    for source, _ in sources:
        first = first_rows(source, ROWS // len(sources))
        chunk = source.tokenize(first, 0)
        looked_at += first.height
        examples += chunk.table.num_rows
        truncated += chunk.truncated
        dropped.update({reason: each.count for reason, each in chunk.dropped.items()})
        if run.cogumi.method == "gspo":
            prompts = decode_rows(Dataset(chunk.table), chunk.encoded)["prompt"]
            lengths += prompt_lengths(run, list(prompts), tokenizer)
        else:
            lengths += token_lengths(chunk.table)
        tables.append(chunk.table)
        rows += sum(map(count_rows, source.files))
    if not examples:
        reasons = ", ".join(f"{count:,} are {reason}" for reason, count in dropped.items())
        what = f"of the first {looked_at:,} rows none makes an example: {reasons or 'there are none'}"
        raise UsageError(what, key="data")
    chosen = max(0, round((rows - held_out_rows(rows, run.data.eval_rows)) * run.data.fraction))
    trained = round(min(chosen, run.data.max_rows or chosen) * examples / looked_at)
    packed = examples_per_row(run, Dataset(tables[0]))
    return DataSample(looked_at, examples, truncated, dropped, Lengths(lengths), rows, trained, packed)


def measure_data(run: RunConfig, data: Data, tokenizer: Any) -> DataSample:
    """What a run prepared, all of it; of gspo the prompts of ROWS examples from all over it are measured."""
    examples, lengths = len(data.dataset), data.lengths
    if run.cogumi.method == "gspo":
        some = data.dataset.select(range(0, examples, max(1, examples // ROWS)))
        lengths = Lengths(prompt_lengths(run, list(some["prompt"]), tokenizer))
    dropped = {reason: each.count for reason, each in data.dropped.items()}
    packed = examples_per_row(run, data.dataset.select(range(min(ROWS, examples))))
    return DataSample(data.total, examples, data.truncated, dropped, lengths, data.total, examples, packed)


def prompt_lengths(run: RunConfig, prompts: list[Any], tokenizer: Any) -> list[int]:
    """In tokens, with the schemas of the run's tools."""
    tools = task_of(run).schemas
    return [len(prompt_ids(prompt, tokenizer, tools)) for prompt in prompts]


def first_rows(source: Source, count: int) -> pl.DataFrame:
    """The first rows of up to eight of the files, by field."""
    chosen = source.files[:: max(1, len(source.files) // 8)][:8]
    each = -(-count // len(chosen))
    found = (next(source.batches([file]), None) for file in chosen)
    frames = [frame.head(each) for frame in found if frame is not None and frame.height]
    if not frames:
        raise UsageError(f"{chosen[0]} has no rows", key="data.source", fix="check what wrote it, or give another file")
    return pl.concat(frames, how="vertical_relaxed")


def count_rows(file: Path) -> int:
    """Rows of a file; a parquet file says how many, of any other the lines are read."""
    if file.suffix == ".parquet":
        return int(pq.ParquetFile(file).metadata.num_rows)
    with file.open("rb") as lines:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: lines.read(2**20), b""))


def examples_per_row(run: RunConfig, examples: Dataset) -> float | None:
    """Examples that packing puts into a row, by a sample; None where rows are not packed."""
    from trl import pack_dataset

    if not run.train.get("packing") or run.cogumi.method != "sft":
        return None
    length = int(run.train.get("max_length") or longest_example(run))
    return len(examples) / len(pack_dataset(with_labels(examples), length, run.train.get("packing_strategy") or "bfd"))


def describe_data(found: DataSample, run: RunConfig) -> Line:
    what = "prompts" if run.cogumi.method == "gspo" else "examples"
    if not found.looked_at:
        said = f"not read: {run.model.name} has no tokenizer. {what} of {found.longest:,} tokens are assumed"
        return Line("data", said, "unknown", "put the model's tokenizer files beside its config.json")
    said = (
        f"about {found.trained:,} {what} of {found.rows:,} rows; {found.examples:,} of the first {found.looked_at:,} make one, "
        f"{found.mean:,.0f} tokens in the mean, half at most {found.lengths.quantile(0.5):,}, the longest {found.longest:,}"
    )
    if found.dropped:
        said += "; left out: " + ", ".join(f"{n:,} {reason}" for reason, n in found.dropped.items())
    if found.truncated:
        said += f"; {found.truncated:,} are truncated"
    long = found.truncated + sum(n for reason, n in found.dropped.items() if reason.startswith("longer than"))
    if long / found.looked_at >= MANY:
        if run.cogumi.method == "gspo" and run.data.format != "fim":
            return Line("data", said, "yellow", "lower train.max_completion_length to keep them whole")
        key = "data.fim.max_length" if run.data.format == "fim" else "train.max_length"
        return Line("data", said, "yellow", f"raise {key}, if the memory allows, to keep them")
    if sum(found.dropped.values()) / found.looked_at >= MANY:
        return Line("data", said, "yellow", "`cogumi preview` shows the first of each kind")
    return Line("data", said)
