"""Compare models on the held-out prompts of a configuration: greedy completions, scored and paired (`cogumi compare`)."""

import gc
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import DECISIONS, jsonable_numbers, read_section
from cogumi.data.chat import visible_text
from cogumi.data.templates import read_template
from cogumi.evaluation.paired import PairedDifference, compare_paired
from cogumi.evaluation.reward_scores import Scored, call_rewards, read_rewards, read_weights
from cogumi.evaluation.saved_models import BASE, MAX_NEW_TOKENS, MODEL, ChatSetup, LoadedModels, ModelFiles, read_setup
from cogumi.methods.examples import DATA, Examples, prepare_examples, render_prompts
from cogumi.methods.gspo import task_of
from cogumi.methods.preparation import load_run_tokenizer, prepare_base
from cogumi.models.base import RunBase
from cogumi.models.completion import complete_with_ends, mean_log_likelihood
from cogumi.models.loading import load_tokenizer, read_base
from cogumi.rewards.distribution import weighted_total
from cogumi.rewards.named_rewards import refuse_missing_columns, rewards_of
from cogumi.telemetry.status import is_run

log = logging.getLogger("cogumi")
REWARDS = "rewards"  # the score that is the weighted total of the configuration's rewards
LOG_LIKELIHOOD = "log_likelihood"  # of the expected answer, in nats a token: minus its loss
LIKELIHOOD_DIGITS = 3  # rounding differs between a merged model and its adapter, and is no difference of the models
ANSWER_SCORES = ("exact_answer", "answer_similarity")
ANSWER_COLUMNS = ("answer", "middle", "chosen")
BATCH_ROWS = 50
EXTRA_TOKENS = 16  # beyond the longest expected answer, so that a completion that goes on differs from it
MIN_ROWS = 30  # below, the interval is too narrow


@dataclass(frozen=True)
class Comparison:
    """Completions of the same prompts and their scores.

    prompts: the last message or the text; answers: expected answers, None where there are none; written: completions by
    model; scores: by score and model, NaN where a completion is not scored.
    """

    prompts: list[str]
    answers: list[str] | None
    written: dict[str, list[str]]
    scores: dict[str, dict[str, list[float]]]
    notes: tuple[str, ...] = ()

    def mean(self, score: str, name: str) -> float:
        """Return the mean score of a model over the rows that are scored."""
        return fmean([value for value in self.scores[score][name] if not math.isnan(value)] or [math.nan])

    def paired(self, score: str, before: str, after: str) -> PairedDifference:
        return compare_paired(self.scores[score][before], self.scores[score][after])

    def pairs(self) -> list[tuple[str, str, str, PairedDifference]]:
        names = list(combinations(self.written, 2))
        return [(score, *pair, self.paired(score, *pair)) for score in self.scores for pair in names]

    def shown(self, count: int) -> range:
        """Return the rows to show, whatever was answered: evenly spaced, as neighbours are often of one source file."""
        return range(0, len(self.prompts), max(1, len(self.prompts) // count))[:count]

    def as_dict(self) -> dict[str, Any]:
        pairs = [
            {"score": score, "before": before, "after": after, **asdict(pair), "verdict": pair.verdict}
            for score, before, after, pair in self.pairs()
        ]
        means = {score: {name: self.mean(score, name) for name in self.written} for score in self.scores}
        return jsonable_numbers({"means": means, "pairs": pairs, **asdict(self)})  # type: ignore[no-any-return]

    def __str__(self) -> str:
        lines = [f"{len(self.prompts):,} held-out prompts; {'; '.join(self.notes)}"]
        for score in self.scores:
            lines += ["", f"{score}: " + ", ".join(f"{name} {self.mean(score, name):.4f}" for name in self.written)]
            lines += [f"  {after} - {before}: {pair}" for name, before, after, pair in self.pairs() if name == score]
        return "\n".join(lines)


def compare_models(
    models: Mapping[str, str], run: RunConfig, rows: int = 200, scores: Sequence[str] = ()
) -> Comparison:
    """Complete the first `rows` held-out prompts of a configuration with several models, one in memory at a time, and score.

    Args:
        models: By name: `base` (the configuration's), the directory of a run, adapter, model or checkpoint, or a hub id.
        run: The configuration. If its model is not on this machine, prompts are rendered as for the last of `models`.
        rows: At most so many prompts.
        scores: `rewards` (those of the configuration), `log_likelihood` of the expected answer (sft, dpo), names of rewards,
            or `file.py:function`. By default the likelihood, exact match, edit similarity, and the rewards, if there are any.

    Raises:
        UsageError: No rows are held out, nothing could score them, or a model does not fit the configuration's tokenizer.
    """
    if run.cogumi.environment is not None:
        message = "it scores its own episodes, and no completions of held-out prompts"
        raise UsageError(message, key="cogumi.environment", fix="compare by a configuration without one")
    base: RunBase | None = None
    try:
        run, base = prepare_base(run)
    except UsageError:
        if BASE in models.values():
            raise
    setups = {name: find_model(place, run, base) for name, place in models.items()}
    tokenizer = load_run_tokenizer(run, base) if base else load_tokenizer([*setups.values()][-1].tokenizer)
    refuse_other_vocabularies(setups, tokenizer)
    examples = prepare_examples(run, tokenizer, base.config if base else None, rows)
    prompts, ids, columns = read_held_out(run, examples, tokenizer, rows)
    rewards = read_scores(run, columns, scores)
    answers = list(zip(ids, columns.pop("answer_ids", []), strict=False)) if LOG_LIKELIHOOD in rewards else []
    max_new_tokens = run.train.get("max_completion_length") or MAX_NEW_TOKENS
    if run.cogumi.method != "gspo":
        answer_lengths = map(len, tokenizer(columns["answer"])["input_ids"])
        max_new_tokens = min(MAX_NEW_TOKENS, max(answer_lengths) + EXTRA_TOKENS)
    written: dict[str, list[str]] = {}
    scored: dict[str, dict[str, list[float]]] = {score: {} for score in rewards}
    for name, setup in setups.items():
        log.info("%s completes %d held-out prompts", name, len(ids))
        with LoadedModels(setup.files).model_of(setup.columns[-1]) as model:
            written[name] = complete(model, tokenizer, ids, max_new_tokens, run.cogumi.stop)
            likelihoods = [round(mean_log_likelihood(model, *answer), LIKELIHOOD_DIGITS) for answer in answers]
        del model
        gc.collect()  # models hold reference cycles
        cells = [{key: values[at] for key, values in columns.items()} for at in range(len(prompts))]
        completions = [Scored(0, *row) for row in zip(written[name], prompts, cells, strict=True)]
        for score, (functions, weights) in rewards.items():
            scored[score][name] = likelihoods
            if score != LOG_LIKELIHOOD:
                scored[score][name] = weighted_total(call_rewards(run, functions, completions, []), weights)
    notes = [f"greedy completions of at most {max_new_tokens} tokens"]
    notes += [f"below {MIN_ROWS} prompts the interval is too narrow"] if len(prompts) < MIN_ROWS else []
    notes += [note for name, place in models.items() if (note := describe_other_data(name, Path(place), examples))]
    asked = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    return Comparison(asked, columns.get("answer"), written, scored, tuple(notes))


def complete(model: Any, tokenizer: Any, ids: list[list[int]], length: int, stops: Sequence[str]) -> list[str]:
    batches = [ids[at : at + BATCH_ROWS] for at in range(0, len(ids), BATCH_ROWS)]
    completed = [complete_with_ends(model, tokenizer, batch, length, stops) for batch in batches]
    return [text for batch in completed for text, _ in batch]


def find_model(place: str, run: RunConfig, base: RunBase | None) -> ChatSetup:
    """Return the model of a place; the last of its columns is the one to compare. base: the configuration's, for `base`."""
    if place == BASE and base is not None:
        model = run.model
        files = ModelFiles(model.name, model.revision, dtype=model.dtype, quantization=model.quantization_config)
        return ChatSetup(Path(BASE), replace(files, attention=model.attn_implementation), (BASE,), base.name)
    if Path(place).is_dir():
        return read_setup(Path(place))
    name = read_base(place).name  # raises UsageError if there is no such model
    return ChatSetup(Path(name), ModelFiles(merged=Path(name)), (MODEL,), name)


def refuse_other_vocabularies(setups: Mapping[str, ChatSetup], tokenizer: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    for name, setup in setups.items():
        if any(vocabulary.get(token, at) != at for token, at in load_tokenizer(setup.tokenizer).get_vocab().items()):
            message = f"{name} has another vocabulary than the model whose tokenizer renders the prompts"
            raise UsageError(message, key="model.name", fix="compare models of one tokenizer")


def read_held_out(
    run: RunConfig, examples: Examples, tokenizer: Any, rows: int
) -> tuple[list[Any], list[list[int]], dict[str, list[Any]]]:
    """Return the first `rows` held-out prompts, their ids, and what rewards take by name. Raises UsageError without any."""
    if examples.held_out is None:
        raise UsageError("no rows are held out", key="data.eval_rows", fix="set it to 100 or more")
    if run.cogumi.method == "gspo":
        dataset = examples.held_out.dataset.select(range(min(rows, len(examples.held_out.dataset))))
        prompts = list(dataset["prompt"])
        _, ids = render_prompts(prompts, tokenizer, run.cogumi.thinking, examples.today, task_of(run).schemas)
    elif examples.prompts is None:
        message = "all of a held-out example is learned, so there is no prompt to complete"
        raise UsageError(message, key="data.format", fix="compare by data with prompts and answers")
    else:
        dataset = examples.prompts
        prompts, ids = list(dataset["prompt"]), list(dataset["prompt_ids"])
    columns = {name: list(dataset[name]) for name in dataset.column_names if name not in ("prompt", "prompt_ids")}
    if column := next((name for name in ANSWER_COLUMNS if name in columns), ""):
        columns["answer"] = columns[column]
    if run.cogumi.method != "gspo" and run.cogumi.thinking is not None:  # completions are scored without their thoughts
        template = read_template(tokenizer, run.cogumi.thinking)
        style, opened = template.thinking.style, template.prompt_opens_thought
        columns["answer"] = [visible_text(text, style, opened) or text for text in columns["answer"]]
    return prompts, ids, columns


def read_scores(
    run: RunConfig, columns: Mapping[str, Any], scores: Sequence[str]
) -> dict[str, tuple[list[Any], list[float]]]:
    """Return the functions and weights of each score. Raises UsageError for one that cannot score these rows."""
    has_rewards = run.cogumi.method == "gspo" and bool(run.cogumi.rewards)
    if not scores:
        scores = [LOG_LIKELIHOOD] if "answer_ids" in columns else []
        scores += [*(ANSWER_SCORES if "answer" in columns else ()), *([REWARDS] if has_rewards else [])]
    if REWARDS in scores and not has_rewards:
        message = "the configuration has no cogumi.rewards"
        raise UsageError(message, key="--score rewards", fix="name a function as file.py:function")
    entries: dict[str, tuple[list[Any], list[float]]] = {}
    for score in scores:
        if score == LOG_LIKELIHOOD:
            if "answer_ids" not in columns:
                message = "prompts of GSPO have no answer that is learned"
                raise UsageError(
                    message, key=f"--score {score}", fix="compare by a configuration of SFT or DPO, or by rewards"
                )
            entries[score] = [], []
            continue
        functions = read_rewards(run) if score == REWARDS else rewards_of([score])
        refuse_missing_columns(functions, columns)
        entries[score] = functions, read_weights(run, functions) if score == REWARDS else [1.0]
    return entries


def describe_other_data(name: str, place: Path, examples: Examples) -> str:
    """Describe a run whose held-out rows are others, so that it may have trained on these; "" if they are the same."""
    run_dir = next((path for path in (place, *place.resolve().parents[:2]) if is_run(path)), None)
    split = None if run_dir is None else read_section(run_dir / DECISIONS, DATA).get("split")
    is_same = split in (None, examples.split)
    return "" if is_same else f"{name} was trained with other data or held-out rows, and may have seen these prompts"
