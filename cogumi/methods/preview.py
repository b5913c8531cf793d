"""`cogumi preview`: what a run would train on, before it does: examples as the model sees them, lengths, what is left out.

Nothing is trained and no run directory is made; the prepared data stays in its cache, where the run finds it.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from transformers import AutoConfig

from cogumi.config.schema import load_config
from cogumi.core.formatting import escape_controls
from cogumi.core.notices import show_seconds
from cogumi.data.cache import Data
from cogumi.data.rows import describe_value
from cogumi.methods.building import load_run_tokenizer, pin_revision
from cogumi.methods.examples import account_for, prepare_examples
from cogumi.models.loading import resolve_model

# How a piece of an example is shown: as context, learned, preferred less; and between what marks where there is no colour.
STYLES = {"context": "dim", "learned": "bold green", "rejected": "red"}
MARKS = {"context": ("", ""), "learned": ("«", "»"), "rejected": ("‹", "›")}
BARS, BAR_WIDTH = 12, 40


@dataclass(frozen=True)
class Shares:
    """Of the rows that were chosen: how many made examples, and what became of the others. Tokens: of the examples."""

    name: str
    rows: int
    examples: int
    dropped: dict[str, int]
    truncated: int
    duplicated: int
    tokens: int
    learned: int

    def __str__(self) -> str:
        of_rows = {**self.dropped, "truncated": self.truncated, "equal to an earlier row": self.duplicated}
        left_out = ", ".join(f"{share(count, self.rows)} {reason}" for reason, count in of_rows.items())
        learned = f"; {self.learned / self.tokens:.1%} of {self.tokens:,} tokens are learned" if self.learned else ""
        return f"{self.name}: {self.rows:,} rows, {self.examples:,} examples; {left_out}{learned}"


@dataclass(frozen=True)
class Preview:
    """`examples`: each a list of (kind, text), kind being context, learned or rejected, in the order the model sees them.

    reports: of a mixture how much of each source; for each reason that rows were dropped for, the first of them. lengths:
    (first length, last length, examples) in tokens. max_length: what examples are held to. The last two are empty, and None,
    for prompts, which the trainer tokenizes.
    """

    train: Shares
    held_out: Shares | None
    reports: tuple[str, ...]
    lengths: tuple[tuple[int, int, int], ...]
    examples: tuple[tuple[tuple[str, str], ...], ...]
    max_length: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, colour: bool) -> Iterator[str]:
        """The preview in words and bars; with rich's markup, or marks where colours would not be seen."""
        from rich.markup import escape

        def shown(text: str) -> str:
            return escape(escape_controls(text)) if colour else escape_controls(text)

        yield from map(shown, self.reports)
        yield ""
        for shares in (self.train, self.held_out):
            if shares is not None:
                yield shown(str(shares))
        most = max((count for *_, count in self.lengths), default=0)
        for first, last, count in self.lengths:
            bar = "█" * round(BAR_WIDTH * count / most)
            yield f"{first:>7,} to {last:>7,} tokens {count:>9,} {bar}"
        for number, pieces in enumerate(self.examples, 1):
            yield f"\n--- example {number} " + "-" * 60
            marks = {kind: (f"[{style}]", "[/]") for kind, style in STYLES.items()} if colour else MARKS
            yield "".join(f"{marks[kind][0]}{shown(text)}{marks[kind][1]}" for kind, text in pieces)

    def __str__(self) -> str:
        return "\n".join(self.lines(colour=False))


@show_seconds("preview: the examples are being prepared")
def preview(config: str | os.PathLike[str] | Mapping[str, Any], examples: int = 3, **overrides: Any) -> Preview:
    """`cogumi.preview`, where torch may be imported (`cogumi.runs`)."""
    run = pin_revision(load_config(config, **overrides))
    base = resolve_model(run.model.name, run.model.revision)
    tokenizer = load_run_tokenizer(run, base)
    found = prepare_examples(run, tokenizer, AutoConfig.from_pretrained(base, revision=run.model.revision))
    keys = {"data.fraction": run.data.fraction < 1, "data.max_rows": run.data.max_rows is not None}
    why = ", ".join(key for key, is_set in keys.items() if is_set) or "data.mix: weight"
    note = found.train.note.removesuffix(" chosen")
    parts = [data for data in (found.train, found.held_out) if data is not None]
    dropped = [line for data in parts for line in data.examples_dropped()]
    rows = found.train.dataset.select(range(min(examples, len(found.train.dataset))))
    return Preview(
        train=shares_of(found.train),
        held_out=None if found.held_out is None else shares_of(found.held_out),
        reports=(*found.sources, *([f"{note} kept ({why})"] if note else []), *dropped),
        lengths=tuple(found.train.lengths.buckets(BARS)),
        examples=tuple(tuple(split_example(row, tokenizer)) for row in rows),
        max_length=found.max_length,
    )


def shares_of(data: Data) -> Shares:
    return Shares(**{key: value for key, value in account_for(data).items() if key != "lengths"})


def split_example(row: dict[str, Any], tokenizer: Any) -> Iterator[tuple[str, str]]:
    """One example in runs of the same kind, each decoded as a whole: a character may be several tokens."""
    if "input_ids" in row:
        marked = zip(row["completion_mask"], row["input_ids"], strict=True)
        for learned, run in groupby(marked, key=lambda pair: pair[0]):
            yield "learned" if learned else "context", tokenizer.decode([token for _, token in run])
    elif "chosen_ids" in row:
        for kind, name in (("context", "prompt_ids"), ("learned", "chosen_ids"), ("rejected", "rejected_ids")):
            yield kind, tokenizer.decode(row[name])
    else:
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        yield "context", prompt
        for name, value in row.items():
            if name != "prompt":
                yield "context", f"\n{name}: {describe_value(value)}"


def share(count: int, rows: int) -> str:
    """In percent; what is there is never 0.0%."""
    return "< 0.1%" if 0 < count < rows / 1000 else f"{count / max(1, rows):.1%}"
