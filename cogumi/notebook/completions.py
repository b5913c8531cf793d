"""What a model writes for the same prompts, earlier and later, or after one stage and the next, side by side."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import SAMPLES_FILE, read_jsonl
from cogumi.notebook.curves import HtmlFigure
from cogumi.notebook.html_components import describe_blank, escape_text, folded, inline_styles, level, table, verbatim

# Of a sample's columns those that are no answer.
NO_ANSWERS = ("step", "prompt", "completion", "ended", "prefix", "suffix", "rejected")
MOST_CHARACTERS = 6000  # of one completion; what is longer is cut, and says so
SHORT = 600  # characters of a prompt that are shown unfolded

Row = dict[str, Any]
RunDir = str | PathLike[str]


def side_by_side(run_dirs: RunDir | Sequence[RunDir] | Mapping[str, RunDir]) -> HtmlFigure:
    """Completions of the same held-out prompts in columns.

    One run: before its training and after its last look (`cogumi.samples_every` makes looks on the way). Several runs, such as
    the stages of a chain, or names for them: what was there before the first, and the last look of each. Raises UsageError
    where there are none to show.
    """
    return HtmlFigure(inline_styles(render_columns(run_dirs)))


def render_columns(run_dirs: RunDir | Sequence[RunDir] | Mapping[str, RunDir]) -> str:
    columns = build_columns(run_dirs)
    prompts = [prompt for prompt in columns[-1][1] if all(prompt in of for _, of in columns)]
    if not prompts:
        named = ", ".join(name for name, _ in columns)
        fix = "runs with other data are shown one by one"
        raise UsageError("no prompt was completed in all of them", place=named, fix=fix)
    return "\n".join(render_example(prompt, {name: of[prompt] for name, of in columns}) for prompt in prompts)


def build_columns(run_dirs: RunDir | Sequence[RunDir] | Mapping[str, RunDir]) -> list[tuple[str, dict[str, Row]]]:
    """(heading, prompt -> sample) of each column."""
    if isinstance(run_dirs, str | PathLike):
        run_dirs = {"": run_dirs}
    if not isinstance(run_dirs, Mapping):
        names = {Path(each).name for each in run_dirs}
        run_dirs = {Path(each).name if len(names) == len(run_dirs) else str(each): each for each in run_dirs}
    if not run_dirs:
        raise UsageError("side_by_side: name a run, or several")
    found: list[tuple[str, dict[str, Row]]] = []
    for name, each in run_dirs.items():
        steps = read_samples(Path(each))
        for step in dict.fromkeys((max(steps),) if found else (min(steps), max(steps))):
            when = f"after step {step}" if step else "before the training"
            found.append((f"{name}, {when}" if name else when, steps[step]))
    return found


def read_samples(run_dir: Path) -> dict[int, dict[str, Row]]:
    """step -> prompt -> sample. Raises UsageError where there is none yet."""
    found: dict[int, dict[str, Row]] = {}
    for row in read_jsonl(run_dir / SAMPLES_FILE):
        found.setdefault(int(row["step"]), {})[row["prompt"]] = row
    if not found:
        times = "before its training, at its end, and every cogumi.samples_every steps"
        fix = f"a run with held-out rows (data.eval_rows) writes them {times}"
        raise UsageError("no completions there yet", place=run_dir, fix=fix)
    return found


def render_example(prompt: str, samples: Mapping[str, Row]) -> str:
    """One prompt, what would be the answer, and the completions in columns."""
    cells = {name: render_completion(row["completion"]) for name, row in samples.items()}
    last = [*samples.values()][-1]
    answers = [key for key, value in last.items() if key not in NO_ANSWERS and isinstance(value, str)]
    for key in answers[:1]:
        cells[f"what would be right ({key})"] = render_completion(last[key])
    return f"<h4>Prompt</h4>{render_prompt(prompt)}{table(list(cells), [list(cells.values())], kind='wide even')}"


def render_prompt(prompt: str) -> str:
    if len(prompt) <= SHORT:
        return verbatim(prompt)
    return f"{verbatim(prompt, SHORT)}{folded(f'the whole prompt, {len(prompt):,} characters', verbatim(prompt))}"


def render_completion(completion: str) -> str:
    if not completion.strip():
        return describe_blank(completion)
    completion = redact_text(completion)  # before it is cut: a part of a secret would not be known for one
    more = len(completion) - MOST_CHARACTERS
    return verbatim(completion[:MOST_CHARACTERS] + (f"\n[{more:,} more characters]" if more > 0 else ""))


def render_rollouts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sampled completions of some steps with their rewards: rows of rollouts.jsonl that have some `shown`."""
    cells = []
    for row in rows:
        for each in row["shown"]:
            reward = each.get("reward")
            said = f"{reward:.3g}" if isinstance(reward, int | float) else escape_text(reward)
            cells.append([str(row["step"]), render_prompt(each["prompt"]), render_completion(each["completion"]), said])
    return table(["step", "prompt", "completion", "reward"], cells, numbers=(3,), kind="wide rollouts")


def compare(
    models: Mapping[str, str], config: str | PathLike[str] | Mapping[str, Any], rows: int = 200, shown: int = 5
) -> HtmlFigure:
    """Answers of several models to the first `rows` held-out prompts of a GSPO config: how many are right, and a few.

    models: directories or hub ids by name, such as base, SFT and GSPO. Greedy completions, made now on this machine. The
    `shown` prompts are listed, evenly spaced, whatever was answered. Raises UsageError as `cogumi.methods.preview` does.
    """
    from cogumi.methods.preview import compare_models  # imports torch

    found = compare_models(models, config, rows)
    right = ["exactly right", *(f"{found.exact(name):.1%}" for name in models), ""]
    close = ["mean edit similarity", *(f"{found.similarity(name):.2f}" for name in models), ""]
    listed = []
    for row in found.shown(shown):
        answer = found.answers[row]
        texts = (render_answer(found.written[name][row], answer) for name in models)
        listed.append([verbatim(found.prompts[row]), *texts, verbatim(answer)])
    rows_of_table = [*([escape_text(each) for each in row] for row in (right, close)), *listed]
    caption = f"{len(found.prompts)} held-out prompts, of which {len(listed)} are shown, evenly spaced"
    return HtmlFigure(inline_styles(table(("asked", *models, "right"), rows_of_table, caption, kind="wide even")))


def render_answer(text: str, answer: str) -> str:
    mark = level("green", "right") if text.strip() == answer.strip() else level("red", "wrong")
    return render_completion(text) + mark
