"""Completions of the same prompts side by side: earlier and later, or of one stage and the next."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import COMPARISON, SAMPLES_FILE, read_json, read_jsonl
from cogumi.evaluation.paired import Comparison
from cogumi.notebook.figures import HtmlFigure
from cogumi.notebook.html_components import add_style, describe_blank, escape_text, folded, level, table, verbatim
from cogumi.telemetry.status import format_value

NOT_ANSWERS = ("step", "prompt", "completion", "ended", "prefix", "suffix", "rejected")  # columns of samples.jsonl
MAX_CHARACTERS = 6000  # of one completion
MAX_PROMPT_CHARACTERS = 600  # shown unfolded

RunDir = str | PathLike[str]
RunDirs = RunDir | Sequence[RunDir] | Mapping[str, RunDir]


def side_by_side(run_dirs: RunDirs) -> HtmlFigure:
    """Show completions of the same held-out prompts in columns.

    One run: before its training and after its last look (`cogumi.samples_every` makes looks on the way). Several runs, such as
    the stages of a chain, or names for them: what was there before the first, and the last look of each. Raises UsageError
    where there are none to show.
    """
    return HtmlFigure(add_style(render_columns(run_dirs)))


def render_columns(run_dirs: RunDirs) -> str:
    if isinstance(run_dirs, str | PathLike):
        run_dirs = {"": run_dirs}
    if not isinstance(run_dirs, Mapping):
        names = {Path(run_dir).name for run_dir in run_dirs}
        is_unique = len(names) == len(run_dirs)
        run_dirs = {Path(run_dir).name if is_unique else str(run_dir): run_dir for run_dir in run_dirs}
    if not run_dirs:
        raise UsageError("side_by_side: name a run, or several")
    columns: dict[str, dict[str, dict[str, Any]]] = {}  # heading -> prompt -> sample
    for name, run_dir in run_dirs.items():
        looks = read_samples(Path(run_dir))
        for step in dict.fromkeys((max(looks),) if columns else (min(looks), max(looks))):
            when = f"after step {step}" if step else "before the training"
            columns[f"{name}, {when}" if name else when] = looks[step]
    prompts = [prompt for prompt in [*columns.values()][-1] if all(prompt in samples for samples in columns.values())]
    if not prompts:
        fix = "runs with other data are shown one by one"
        raise UsageError("no prompt was completed in all of them", place=", ".join(columns), fix=fix)
    html = []
    for prompt in prompts:
        cells = {heading: render_completion(samples[prompt]["completion"]) for heading, samples in columns.items()}
        sample = [*columns.values()][-1][prompt]
        if answer := render_right_answer(sample):
            cells["what would be right"] = answer
        completions = table(list(cells), [list(cells.values())], kind="wide even")
        html.append(f"<h4>Prompt</h4>{render_prompt(prompt)}{completions}")
    return "\n".join(html)


def read_samples(run_dir: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """Return step -> prompt -> sample of samples.jsonl."""
    looks: dict[int, dict[str, dict[str, Any]]] = {}
    for row in read_jsonl(run_dir / SAMPLES_FILE):
        looks.setdefault(int(row["step"]), {})[row["prompt"]] = row
    if not looks:
        times = "before the training, at its end, and every cogumi.samples_every steps"
        fix = f"a run with held-out rows (data.eval_rows) writes them {times}"
        raise UsageError("no completions there yet", place=run_dir, fix=fix)
    return looks


def render_prompt(prompt: str) -> str:
    if len(prompt) <= MAX_PROMPT_CHARACTERS:
        return verbatim(prompt)
    full_prompt = folded(f"the whole prompt, {len(prompt):,} characters", verbatim(prompt))
    return f"{verbatim(prompt, MAX_PROMPT_CHARACTERS)}{full_prompt}"


def render_completion(completion: str) -> str:
    if not completion.strip():
        return describe_blank(completion)
    completion = redact_text(completion)  # before it is cut: a part of a secret would not be recognized
    omitted = len(completion) - MAX_CHARACTERS
    return verbatim(completion[:MAX_CHARACTERS] + (f"\n[{omitted:,} more characters]" if omitted > 0 else ""))


def render_samples(samples: Sequence[Mapping[str, Any]]) -> str:
    """Render sampled completions with their rewards, or with what would be right. samples: as in rollouts or samples.jsonl."""
    has_rewards = "reward" in samples[0]
    rows = []
    for sample in samples:
        result = escape_text(format_value(sample["reward"])) if has_rewards else render_right_answer(sample)
        prompt, completion = render_prompt(sample["prompt"]), render_completion(sample["completion"])
        rows.append([str(sample["step"]), prompt, completion, result])
    return table(["step", "prompt", "completion", "reward" if has_rewards else "what would be right"], rows)


def render_right_answer(sample: Mapping[str, Any]) -> str:
    """Render the expected answer of a held-out row; "" if it has none."""
    answers = [value for key, value in sample.items() if key not in NOT_ANSWERS and isinstance(value, str)]
    return render_completion(answers[0]) if answers else ""


LABELS = {"exact_answer": "exactly right", "answer_similarity": "similarity to the answer"}


def compare(
    models: Mapping[str, str], config: RunDir | Mapping[str, Any], rows: int = 200, shown: int = 5
) -> HtmlFigure:
    """Answers of several models to the first `rows` held-out prompts of a config: their scores, and a few answers.

    models: by name, as `cogumi compare` takes them, such as base, SFT and GSPO. Greedy completions, made now on this
    machine. Scores are means; the last lines are differences to the first model. The `shown` prompts are listed, evenly
    spaced, whatever was answered. Raises UsageError as `cogumi.evaluation.comparison` does.
    """
    from cogumi.config.schema import load_config
    from cogumi.evaluation.comparison import compare_models  # imports torch

    return HtmlFigure(add_style(render_comparison(compare_models(models, load_config(config), rows), shown)))


def render_recorded(run_dir: Path) -> str:
    """Render the comparison that a run made at its end (`cogumi.compare_with`); "" without one."""
    path = run_dir / COMPARISON
    return render_comparison(Comparison.from_dict(read_json(path))) if path.exists() else ""


def render_comparison(comparison: Comparison, shown: int = 5) -> str:
    lines, answers, models = [], comparison.answers, [*comparison.written]
    first, *others = models
    for score in comparison.scores:
        label = LABELS.get(score, score)
        lines.append([escape_text(f"{label}, mean"), *(f"{comparison.mean(score, name):.3f}" for name in models), ""])
        pairs = [comparison.paired(score, first, name) for name in others]
        cells = [
            f"{pair.mean:+.3f} ({pair.low:+.3f} to {pair.high:+.3f}), {pair.verdict}; wins/ties/losses {pair.counts}"
            for pair in pairs
        ]
        lines.append([escape_text(f"{label}, difference to {first} (95 % interval)"), "", *cells, ""])
    marks = {True: level("green", "right"), False: level("red", "wrong")} if answers else {}
    for row in comparison.shown(shown):
        answer, texts = answers[row] if answers else "", [comparison.written[name][row] for name in models]
        cells = [render_completion(text) + marks.get(text.strip() == answer.strip(), "") for text in texts]
        lines.append([verbatim(comparison.prompts[row]), *cells, verbatim(answer)])
    count, notes = len(comparison.shown(shown)), escape_text("; ".join(comparison.notes))
    caption = f"{len(comparison.prompts)} held-out prompts, of which {count} are shown, evenly spaced; {notes}"
    return table(("asked", *models, "right"), lines, caption, kind="wide even")
