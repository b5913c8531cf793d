"""Sample a run's data and make examples of it as the run does: their lengths, and how many there will be."""

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
from cogumi.data.packing import count_per_row
from cogumi.data.rows import Lengths, decode_rows, token_lengths
from cogumi.data.selection import held_out_rows
from cogumi.data.source_files import TEXT, kind_of
from cogumi.forecast.preflight_report import Line
from cogumi.methods.examples import longest_example, sources_of
from cogumi.methods.gspo import prompt_ids, task_of

SAMPLED_ROWS = 1000
NOTED_SHARE = 0.05  # of the rows, from which those that are left out or cut are worth a note
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class DataSample:
    """looked_at: rows that were read; examples: those that make one; dropped: the others, by reason.

    lengths: of the examples in tokens, for gspo of the prompts. rows: in the files. trained: examples of a pass over all
    data, extrapolated from the sample. examples_per_row: None where rows are not packed.
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


def assume_longest(run: RunConfig, base: str) -> DataSample | None:
    """Stand in for data that a directory without a tokenizer cannot read: one length, the longest that the config allows."""
    if not Path(base).is_dir() or any((Path(base) / name).exists() for name in TOKENIZER_FILES):
        return None
    length = int(run.train.get("max_length") or longest_example(run))
    return DataSample(0, 0, 0, {}, Lengths([length]), 0, 0, None)


def sample_data(run: RunConfig, tokenizer: Any, base_config: Any = None) -> DataSample:
    """Make examples of the first rows of each source. Raises UsageError as the run would, for what cannot be read."""
    looked_at = examples = truncated = rows = 0
    dropped: Counter[str] = Counter()
    lengths: list[int] = []
    sources = [pair for pair in sources_of(run, tokenizer, base_config) if pair[0].weight]
    for source, _ in sources:
        first = first_rows(source, SAMPLED_ROWS // len(sources))
        chunk = source.tokenize(first, 0)
        looked_at += first.height
        examples += chunk.table.num_rows
        truncated += chunk.truncated
        dropped.update({reason: rows_dropped.count for reason, rows_dropped in chunk.dropped.items()})
        if run.cogumi.method == "gspo":
            prompts = decode_rows(Dataset(chunk.table), chunk.encoded)["prompt"]
            lengths += prompt_lengths(run, list(prompts), tokenizer)
        else:
            lengths += token_lengths(chunk.table)
        rows += sum(map(count_rows, source.files))
    if not examples:
        reasons = ", ".join(f"{count:,} are {reason}" for reason, count in dropped.items())
        problem = f"of the first {looked_at:,} rows none makes an example: {reasons or 'there are none'}"
        raise UsageError(problem, key="data")
    chosen = max(
        0, round((rows - held_out_rows(rows, 0 if run.data.eval_source else run.data.eval_rows)) * run.data.fraction)
    )
    trained = round(min(chosen, run.data.max_rows or chosen) * examples / looked_at)
    packed = examples_per_row(run, Lengths(lengths))
    return DataSample(looked_at, examples, truncated, dropped, Lengths(lengths), rows, trained, packed)


def measure_data(run: RunConfig, data: Data, tokenizer: Any) -> DataSample:
    """Describe all data that a run prepared; for gspo the prompts of SAMPLED_ROWS examples all over it are measured."""
    examples, lengths = len(data.dataset), data.lengths
    if run.cogumi.method == "gspo":
        spread = data.dataset.select(range(0, examples, max(1, examples // SAMPLED_ROWS)))
        lengths = Lengths(prompt_lengths(run, list(spread["prompt"]), tokenizer))
    dropped = {reason: rows_dropped.count for reason, rows_dropped in data.dropped.items()}
    packed = examples_per_row(run, lengths)
    return DataSample(data.total, examples, data.truncated, dropped, lengths, data.total, examples, packed)


def prompt_lengths(run: RunConfig, prompts: list[Any], tokenizer: Any) -> list[int]:
    """Return the lengths of prompts in tokens, with the schemas of the run's tools."""
    tools = task_of(run).schemas
    return [len(prompt_ids(prompt, tokenizer, tools)) for prompt in prompts]


def first_rows(source: Source, count: int) -> pl.DataFrame:
    """Read the first `count` rows of up to eight of the files."""
    chosen = source.files[:: max(1, len(source.files) // 8)][:8]
    batches = (next(source.batches([file]), None) for file in chosen)
    frames = [frame.head(-(-count // len(chosen))) for frame in batches if frame is not None and frame.height]
    if not frames:
        raise UsageError(f"{chosen[0]} has no rows", key="data.source", fix="check what wrote it, or give another file")
    return pl.concat(frames, how="vertical_relaxed")


def count_rows(file: Path) -> int:
    """Count the rows of a file: by a parquet file's footer, by the lines of any other but a text, which is one."""
    if kind_of(file) == TEXT:
        return 1
    if file.suffix == ".parquet":
        return int(pq.ParquetFile(file).metadata.num_rows)
    with file.open("rb") as lines:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: lines.read(2**20), b""))


def examples_per_row(run: RunConfig, lengths: Lengths) -> float | None:
    """Return how many examples packing puts into a row; None where rows are not packed."""
    if not run.train.get("packing") or run.cogumi.method != "sft" or not lengths:
        return None
    return count_per_row(lengths, int(run.train.get("max_length") or longest_example(run)))


def describe_data(sample: DataSample, run: RunConfig) -> Line:
    """Return the line on the data; yellow where a notable share of the rows is left out or cut."""
    kind = "prompts" if run.cogumi.method == "gspo" else "examples"
    if not sample.looked_at:
        text = f"not read: {run.model.name} has no tokenizer. {kind} of {sample.longest:,} tokens are assumed"
        return Line("data", text, "unknown", "put the model's tokenizer files beside its config.json")
    text = f"about {sample.trained:,} {kind} of {sample.rows:,} rows; {sample.examples:,} of the first "
    text += f"{sample.looked_at:,} make one, {sample.mean:,.0f} tokens in the mean, half at most "
    text += f"{sample.lengths.quantile(0.5):,}, the longest {sample.longest:,}"
    if sample.dropped:
        text += "; left out: " + ", ".join(f"{count:,} {reason}" for reason, count in sample.dropped.items())
    if sample.truncated:
        text += f"; {sample.truncated:,} are truncated"
    too_long = sum(count for reason, count in sample.dropped.items() if reason.startswith("longer than"))
    if (sample.truncated + too_long) / sample.looked_at >= NOTED_SHARE:
        fix = "raise train.max_length, if the memory allows, to keep them"
        if run.data.format == "fim":
            fix = "raise data.fim.max_length, if the memory allows, to keep them"
        elif run.cogumi.method == "gspo":
            fix = "lower train.max_completion_length to keep them whole"
        return Line("data", text, "yellow", fix)
    if sum(sample.dropped.values()) / sample.looked_at >= NOTED_SHARE:
        return Line("data", text, "yellow", "`cogumi preview` shows the first of each kind")
    return Line("data", text)
