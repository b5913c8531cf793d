"""Preview of the training examples (`cogumi preview`).

Nothing is trained and no run directory is made; the prepared data stays in its cache, where the run finds it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from cogumi.config.schema import RunConfig
from cogumi.core.formatting import escape_controls
from cogumi.core.notices import show_seconds
from cogumi.data.literal import LiteralText
from cogumi.data.rows import RECORD_COLUMN, describe_value
from cogumi.methods.examples import Shares, account_for, describe_unused, prepare_examples, render_prompts
from cogumi.methods.gspo import rollout_size, task_of
from cogumi.methods.preparation import load_run_tokenizer, prepare_base
from cogumi.methods.step_split import split_step

log = logging.getLogger(__name__)

# The marks between which a piece of an example is shown: as context, learned, preferred less.
MARKS = {"context": ("", ""), "learned": ("«", "»"), "rejected": ("‹", "›")}
CONTROL = ("⟦", "⟧")  # around a control token; the same spelling without them is text
BARS, BAR_WIDTH = 12, 40


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
    unused_columns: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """In words, bars and marks."""
        lines = [*self.reports, *describe_unused(self.unused_columns), ""]
        lines += [str(shares) for shares in (self.train, self.held_out) if shares is not None]
        most = max((count for *_, count in self.lengths), default=0)
        for first, last, count in self.lengths:
            bar = "█" * round(BAR_WIDTH * count / most)
            lines.append(f"{first:>7,} to {last:>7,} tokens {count:>9,} {bar}")
        for number, pieces in enumerate(self.examples, 1):
            lines.append(f"\n--- example {number} " + "-" * 60)
            lines.append("".join(f"{MARKS[kind][0]}{text}{MARKS[kind][1]}" for kind, text in pieces))
        return "\n".join(map(escape_controls, lines))


@show_seconds("preview: the examples are being prepared")
def preview(run: RunConfig, examples: int = 3) -> Preview:
    """`cogumi.preview`, where torch may be imported (`cogumi.runs`)."""
    run, base = prepare_base(run)
    tokenizer = load_run_tokenizer(run, base)
    prepared = prepare_examples(run, tokenizer, base.config)
    keys = {"data.fraction": run.data.fraction < 1, "data.max_rows": run.data.max_rows is not None}
    why = ", ".join(key for key, is_set in keys.items() if is_set) or "data.mix: weight"
    note = prepared.train.note.removesuffix(" chosen")
    dropped = [line for data in prepared.parts() for line in data.examples_dropped()]
    rows = prepared.train.dataset.select(range(min(examples, len(prepared.train.dataset))))
    is_rl = run.cogumi.method == "gspo"
    tools = task_of(run).schemas if is_rl else []
    rollout = [f"rollout: {rollout_size(split_step(run, run.cogumi.process_count))}"] if is_rl else []
    return Preview(
        train=account_for(prepared.train),
        held_out=None if prepared.held_out is None else account_for(prepared.held_out),
        reports=(*prepared.sources, *([f"{note} kept ({why})"] if note else []), *dropped, *rollout),
        lengths=tuple(prepared.train.lengths.buckets(BARS)),
        examples=tuple(tuple(split_example(row, tokenizer, tools, run.cogumi.thinking)) for row in rows),
        max_length=prepared.max_length,
        unused_columns=prepared.unused,
    )


def split_example(
    row: dict[str, Any], tokenizer: Any, tools: Sequence[dict[str, Any]] = (), thinking: bool | None = None
) -> Iterator[tuple[str, str]]:
    """One example in runs of the same kind, each decoded as a whole: a character may be several tokens."""
    if "input_ids" in row:
        marked = zip(row["completion_mask"], row["input_ids"], strict=True)
        for learned, run in groupby(marked, key=lambda pair: pair[0]):
            yield "learned" if learned else "context", show_controls([token for _, token in run], tokenizer)
    elif "chosen_ids" in row:
        for kind, name in (("context", "prompt_ids"), ("learned", "chosen_ids"), ("rejected", "rejected_ids")):
            yield kind, show_controls(row[name], tokenizer)
    else:
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            _, (ids,) = render_prompts([prompt], tokenizer, thinking, tools=tools)
            prompt = show_controls(ids, tokenizer)
        yield "context", prompt
        for name, value in row.items():
            if name not in ("prompt", RECORD_COLUMN):
                yield "context", f"\n{name}: {describe_value(value)}"


def show_controls(ids: Sequence[int], tokenizer: Any) -> str:
    """Decode ids with marks around control tokens."""
    controls = set(LiteralText(tokenizer).controls.values())
    runs = [(is_control, list(run)) for is_control, run in groupby(ids, key=controls.__contains__)]
    left, right = CONTROL
    pieces = [
        "".join(f"{left}{tokenizer.decode([token])}{right}" for token in run) if is_control else tokenizer.decode(run)
        for is_control, run in runs
    ]
    return "".join(pieces)
