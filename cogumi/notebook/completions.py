"""What a model writes for the same prompts, earlier and later, or after one stage and the next, side by side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import read_jsonl
from cogumi.notebook.html_components import (
    describe_blank,
    escape_text,
    folded,
    inline_styles,
    table,
    verbatim,
    wrap_table,
)

SAMPLES = "samples.jsonl"
# Of a sample's columns those that are no answer.
NO_ANSWERS = ("step", "prompt", "completion", "ended", "prefix", "suffix", "rejected")
MOST_CHARACTERS = 6000  # of one completion; what is longer is cut, and says so
MOST_WORDS = 1500  # longer completions are not compared: finding the differences takes the square of it
SHORT = 600  # characters of a prompt that are shown unfolded
WORD = re.compile(r"\s+|\w+|[^\w\s]")
LEGEND = (
    '<p class="legend"><span><ins>underlined, solid</ins>: not in the column before</span>'
    "<span><del>underlined, dashed</del>: no longer in the next column</span></p>"
)

Row = dict[str, Any]
RunDir = str | PathLike[str]


@dataclass(frozen=True)
class SideBySide:
    """What a notebook shows; `str()` of it is the piece of HTML."""

    content: str = field(repr=False)

    def __str__(self) -> str:
        return self.content

    def _repr_html_(self) -> str:
        return inline_styles(self.content)


def side_by_side(run_dirs: RunDir | Sequence[RunDir] | Mapping[str, RunDir]) -> SideBySide:
    """Completions of the same held-out prompts in columns, the differences from one column to the next marked.

    One run: before its training and after its last look (`cogumi.samples_every` makes looks on the way). Several runs, such as
    the stages of a chain, or names for them: what was there before the first, and the last look of each. Raises UsageError
    where there are none to show.
    """
    columns = build_columns(run_dirs)
    prompts = [prompt for prompt in columns[-1][1] if all(prompt in of for _, of in columns)]
    if not prompts:
        named = ", ".join(name for name, _ in columns)
        fix = "runs with other data are shown one by one"
        raise UsageError("no prompt was completed in all of them", place=named, fix=fix)
    rendered = [render_example(prompt, [(name, of[prompt]) for name, of in columns]) for prompt in prompts]
    legend = LEGEND if len(columns) > 1 else ""
    return SideBySide(legend + "\n".join(rendered))


def build_columns(run_dirs: RunDir | Sequence[RunDir] | Mapping[str, RunDir]) -> list[tuple[str, dict[str, Row]]]:
    """(heading, prompt -> sample) of each column."""
    if isinstance(run_dirs, str | PathLike):
        steps = read_samples(Path(run_dirs))
        first, last = min(steps), max(steps)
        return [(describe_step(step), steps[step]) for step in dict.fromkeys((first, last))]
    named = run_dirs if isinstance(run_dirs, Mapping) else {Path(each).name: each for each in run_dirs}
    if not isinstance(run_dirs, Mapping) and len(named) < len(run_dirs):
        named = {str(each): each for each in run_dirs}
    if not named:
        raise UsageError("side_by_side: name a run, or several")
    found: list[tuple[str, dict[str, Row]]] = []
    for name, each in named.items():
        steps = read_samples(Path(each))
        if not found and 0 in steps:
            found.append((f"before {name}", steps[0]))
        found.append((f"{name}, {describe_step(max(steps))}", steps[max(steps)]))
    return found


def describe_step(step: int) -> str:
    return f"after step {step}" if step else "before the training"


def read_samples(run_dir: Path) -> dict[int, dict[str, Row]]:
    """step -> prompt -> sample. Raises UsageError where there is none yet."""
    found: dict[int, dict[str, Row]] = {}
    for row in read_jsonl(run_dir / SAMPLES):
        found.setdefault(int(row["step"]), {})[row["prompt"]] = row
    if not found:
        times = "before its training, at its end, and every cogumi.samples_every steps"
        fix = f"a run with held-out rows (data.eval_rows) writes them {times}"
        raise UsageError("no completions there yet", place=run_dir, fix=fix)
    return found


def render_example(prompt: str, samples: Sequence[tuple[str, Row]]) -> str:
    """One prompt, what would be the answer, and the completions in columns."""
    cut = [truncate(row["completion"]) for _, row in samples]
    cells = [
        f"<pre>{mark_differences(before, said, after)}</pre>" if said.strip() else describe_blank(said)
        for before, said, after in zip([cut[0], *cut], cut, [*cut[1:], cut[-1]], strict=False)
    ]
    heads = [name for name, _ in samples]
    for key, answer in samples[-1][1].items():
        if key not in NO_ANSWERS and isinstance(answer, str):
            heads.append(f"what would be right ({key})")
            cells.append(render_completion(answer))
            break
    columns = "".join(f'<th scope="col">{escape_text(each)}</th>' for each in heads)
    body = "".join(f"<td>{each}</td>" for each in cells)
    content = f"<thead><tr>{columns}</tr></thead><tbody><tr>{body}</tr></tbody>"
    return f"<h4>Prompt</h4>{render_prompt(prompt)}{wrap_table(content, kind='wide even')}"


def render_prompt(prompt: str) -> str:
    if len(prompt) <= SHORT:
        return verbatim(prompt)
    return f"{verbatim(prompt, SHORT)}{folded(f'the whole prompt, {len(prompt):,} characters', verbatim(prompt))}"


def truncate(completion: str) -> str:
    """Without secrets, which would no longer be known once it is cut, or marked word by word."""
    completion = redact_text(completion)
    if len(completion) <= MOST_CHARACTERS:
        return completion
    return f"{completion[:MOST_CHARACTERS]}\n[{len(completion) - MOST_CHARACTERS:,} more characters]"


def render_completion(completion: str) -> str:
    return verbatim(truncate(completion)) if completion.strip() else describe_blank(completion)


def mark_differences(before: str, now: str, after: str) -> str:
    """`now` as HTML: what is not in `before` as <ins>, what is not in `after` as <del>; both where it is in neither."""
    words = WORD.findall(now)
    new, gone = find_differences(WORD.findall(before), words), find_differences(WORD.findall(after), words)
    said = ""
    for (is_new, is_gone), group in groupby(zip(new, gone, words, strict=True), key=lambda each: each[:2]):
        part = escape_text("".join(word for *_, word in group))
        part = f"<del>{part}</del>" if is_gone else part
        said += f"<ins>{part}</ins>" if is_new else part
    return said


def find_differences(other: Sequence[str], words: Sequence[str]) -> list[bool]:
    """Of each word whether it is not in the other text at its place. Of very long texts nothing is said."""
    found = [False] * len(words)
    if other == words or max(len(other), len(words)) > MOST_WORDS:
        return found
    for what, _, _, begin, end in SequenceMatcher(None, other, words, autojunk=False).get_opcodes():
        if what in ("insert", "replace"):
            found[begin:end] = [True] * (end - begin)
    return found


def render_rollouts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sampled completions of some steps with their rewards: rows of rollouts.jsonl that have some `render_completion`."""
    cells = []
    for row in rows:
        for each in row["shown"]:
            reward = each.get("reward")
            said = f"{reward:.3g}" if isinstance(reward, int | float) else escape_text(reward)
            cells.append([str(row["step"]), render_prompt(each["prompt"]), render_completion(each["completion"]), said])
    return table(["step", "prompt", "completion", "reward"], cells, numbers=(3,), kind="wide rollouts") if cells else ""
