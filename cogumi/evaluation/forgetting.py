"""The forgetting panel: what a training broke, by sixty instructions that the base and the trained model answer.

It needs no data: forgetting.yaml has the instructions and how their answers are checked. Four scores, paired by row: the
answer is right, it keeps the format, it ends by itself, and the log-likelihood of what the first model samples.
"""

import gc
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import torch
import yaml

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import write_json
from cogumi.data.chat import visible_text
from cogumi.data.templates import ChatTemplate, read_template
from cogumi.evaluation.comparison import LIKELIHOOD_DIGITS, Comparison, find_model, refuse_other_vocabularies
from cogumi.evaluation.saved_models import ADAPTER, BASE, ChatSetup, LoadedModels, read_run
from cogumi.health.verdict import Check, failed_check
from cogumi.models.completion import complete_with_ends, end_ids, generate_ids, mean_log_likelihood
from cogumi.models.loading import load_tokenizer

log = logging.getLogger("cogumi")
INSTRUCTIONS, FORMAT, STOPPING, OWN_SAMPLES = "instructions", "format", "stopping", "own_samples"
MAX_NEW_TOKENS, MAX_THINKING_TOKENS = 40, 256  # of an answer; of one with a thought before it
BETWEEN_WORDS = re.compile(r"[\W_]+")
# Nats a token. Every training lowers the likelihood of the base's own samples: the fall is the KL divergence from the base.
MOVED, DESTROYED = 0.1, 3.0
# From so many right answers no chance leads to so small a part of them.
KNOWN, LEFT = 0.2, 0.1
FIX = "lower train.learning_rate, the steps or lora.r, mix in general data (data.mix), or raise train.beta (gspo, dpo)"


@dataclass(frozen=True)
class Task:
    """One instruction. format: an expression for the whole answer. right: words or phrases, of which one is in it."""

    kind: str
    format: str
    prompt: str
    right: list[str]

    def grade(self, answer: str | None) -> tuple[float, float]:
        """Return whether an answer is right, an echo aside, and keeps the format, 0 or 1; NaN for a thought without end."""
        if answer is None:
            return math.nan, math.nan
        words, *phrases = (
            BETWEEN_WORDS.sub(" ", f" {text} ") for text in (answer.replace(self.prompt, ""), *self.right)
        )
        is_right = any(one in words or (not one.isupper() and one.lower() in words.lower()) for one in phrases)
        return float(is_right), float(re.fullmatch(self.format, answer.strip()) is not None)


def read_tasks() -> list[Task]:
    kinds = yaml.safe_load(files("cogumi.evaluation").joinpath("forgetting.yaml").read_text(encoding="utf-8"))
    rows = [(name, kind["format"], *task) for name, kind in kinds.items() for task in kind["tasks"].items()]
    return [Task(kind, form, prompt, right) for kind, form, prompt, right in rows]


@dataclass(frozen=True)
class PanelComparison(Comparison):
    """Answers to the panel's instructions. kinds: of each row. samples: of the first model, for each row."""

    kinds: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)

    def lines(self, before: str, after: str) -> list[str]:
        """Return what became of a model: a line on what was compared, and one on each score."""
        lines = [f"{before} and {after}, {len(self.prompts)} instructions; {'; '.join(self.notes)}"]
        lines += [
            f"{self.describe(score, before, after)}, {self.paired(score, before, after)}" for score in self.scores
        ]
        if right := self.scores.get(INSTRUCTIONS):
            rows = zip(self.kinds, right[before], right[after], strict=True)
            lost = Counter(kind for kind, old, new in rows if new < old)
            lines[1] += f"; lost: {', '.join(f'{kind} {count}' for kind, count in lost.items())}" if lost else ""
            lines[1] += "; so few are right that little can be lost" if self.mean(INSTRUCTIONS, before) < KNOWN else ""
        return lines

    def describe(self, score: str, before: str, after: str) -> str:
        unit = " nats a token" if score == OWN_SAMPLES else ""
        return f"{score} {self.mean(score, before):.2f} to {self.mean(score, after):.2f}{unit}"

    def __str__(self) -> str:
        first, *others = self.written
        return "\n\n".join("\n".join(self.lines(first, name)) for name in others)

    def judge(self, before: str, after: str) -> Check:
        """Return a warning where a score is told worse, a failed check where little is left of a model."""
        highs = {score: self.paired(score, before, after).high for score in self.scores}
        worse = [score for score, high in highs.items() if high < (-MOVED if score == OWN_SAMPLES else 0)]
        destroyed = highs[OWN_SAMPLES] < -DESTROYED
        if INSTRUCTIONS in highs:
            known, left = (self.mean(INSTRUCTIONS, name) for name in (before, after))
            destroyed |= known >= KNOWN and left < LEFT * known
        means = [self.describe(score, before, after) for score in worse or highs]
        required = f"no score below the base's by its interval; {OWN_SAMPLES} by {MOVED} nats a token"
        return Check("forgetting", ", ".join(means), required, not destroyed, FIX, warning=bool(worse))


def compare_panel(models: Mapping[str, str]) -> PanelComparison:
    """Compare models by the panel. `base` is that of the last run or adapter named. Raises UsageError without one."""
    others = [place for place in models.values() if place != BASE]
    setups = {place: find_model(place, None, None) for place in others}  # type: ignore[arg-type]  # they are for BASE
    adapted = [setup for setup in setups.values() if setup.files.base]
    if not adapted and len(others) < len(models):
        fix = "name its directory or hub id"
        raise UsageError("no run or adapter is named whose base it could be", key=BASE, fix=fix)
    if adapted:
        setups[BASE] = replace(adapted[-1], columns=(BASE,))
    return run_panel({name: setups[place] for name, place in models.items()})


def check_forgetting(run: RunConfig) -> Check:
    """Compare a run's base with its adapter or model, and write forgetting.json. An error is a warning: the model is there."""
    try:
        setup = read_run(run.run_dir)
        after = setup.columns[1]
        result = run_panel({name: replace(setup, columns=(name,)) for name in (BASE, after)})
        lines = result.lines(BASE, after)
        write_json(run.run_dir / "forgetting.json", {"lines": lines, **result.as_dict()})
    except Exception as error:  # noqa: BLE001
        return replace(failed_check("forgetting", error), passed=True, warning=True)
    for line in lines:
        log.info("%s", line)
    return result.judge(BASE, after)


def run_panel(setups: Mapping[str, ChatSetup]) -> PanelComparison:
    """Let the last column of each setup answer; prompts are made as for the last run or adapter, without thoughts if it can."""
    setup = ([*setups.values()] + [setup for setup in setups.values() if setup.files.base])[-1]
    tokenizer, tasks = load_tokenizer(setup.tokenizer), read_tasks()
    refuse_other_vocabularies(setups, tokenizer)
    template = read_panel_template(tokenizer, setup) if tokenizer.chat_template else None
    texts = [template.prompt([{"role": "user", "content": task.prompt}]) if template else task.prompt for task in tasks]
    prompts = [list(tokenizer(text, add_special_tokens=template is None)["input_ids"]) for text in texts]
    thinks = template is not None and (template.prompt_opens_thought or bool(template.thinking.flag))
    length, style = MAX_THINKING_TOKENS if thinks else MAX_NEW_TOKENS, template.thinking.style if template else "none"
    notes = [f"greedy, at most {length} tokens"]
    scores: dict[str, dict[str, list[float]]] = {INSTRUCTIONS: {}, FORMAT: {}, STOPPING: {}, OWN_SAMPLES: {}}
    written, samples, models = dict[str, list[str]](), list[list[int]](), LoadedModels(setup.files)
    for name, one in setups.items():
        log.info("%s answers %d instructions", name, len(tasks))
        if one.columns[-1] != ADAPTER or one.files != models.files:  # an adapter shares the base that is in memory
            models = LoadedModels(one.files)
            gc.collect()  # models hold reference cycles
        with models.model_of(one.columns[-1]) as model:
            answers = complete_with_ends(model, tokenizer, prompts, length, setup.stops, style != "harmony")
            samples = samples or sample_from(model, tokenizer, prompts)
            likelihoods = [mean_log_likelihood(model, *row) for row in zip(prompts, samples, strict=True)]
        del model  # before the next one is loaded
        written[name], scores[STOPPING][name] = [text for text, _ in answers], [float(ended) for _, ended in answers]
        scores[OWN_SAMPLES][name] = [round(value, LIKELIHOOD_DIGITS) for value in likelihoods]
        opens = template is not None and template.prompt_opens_thought
        grades = [task.grade(visible_text(text, style, opens)) for task, text in zip(tasks, written[name], strict=True)]
        scores[INSTRUCTIONS][name], scores[FORMAT][name] = ([*column] for column in zip(*grades, strict=True))
    silent = [name for name, values in scores[FORMAT].items() if all(map(math.isnan, values))]
    missing = [f"no end of a thought of {name}" for name in silent] if template else ["no chat template"]
    if missing:
        del scores[INSTRUCTIONS], scores[FORMAT]
        notes.append(f"{INSTRUCTIONS} and {FORMAT} are not measured: {missing[0]}")
    rows = [task.prompt for task in tasks], None, written, scores, tuple(notes), [task.kind for task in tasks]
    return PanelComparison(*rows, tokenizer.batch_decode(samples))


def read_panel_template(tokenizer: Any, setup: ChatSetup) -> ChatTemplate:
    try:
        template = read_template(tokenizer, bool(setup.thinking), setup.today)
    except UsageError:  # there is no switch for thoughts
        template = read_template(tokenizer, setup.thinking, setup.today)
    return replace(template, variables=template.variables | setup.template_kwargs)


def sample_from(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Sample a completion of each prompt at temperature 1, by a fixed seed, with the token that ends it."""
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        rows = generate_ids(model, tokenizer, prompts, max_new_tokens=MAX_NEW_TOKENS, **sampling).tolist()
    ends = end_ids(model, tokenizer)
    return [row[: next((at for at, token in enumerate(row, 1) if token in ends), len(row))] for row in rows]
