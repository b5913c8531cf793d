"""Compare models on the held-out prompts of a configuration: greedy completions, scored and paired (`cogumi compare`)."""

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.notices import quiet_libraries
from cogumi.core.run_directory import COMPARED, COMPARISON, DECISIONS, read_section, write_json
from cogumi.data.chat import visible_text
from cogumi.data.templates import read_template
from cogumi.evaluation.judge_command import COMMAND, judge_of
from cogumi.evaluation.paired import MIN_DECIDABLE_ROWS, MIN_ROWS, Comparison
from cogumi.evaluation.reward_scores import Scored, call_rewards, read_rewards, read_weights
from cogumi.evaluation.saved_models import BASE, MAX_NEW_TOKENS, MODEL, ChatSetup, LoadedModels, ModelFiles, read_setup
from cogumi.health.verdict import Check
from cogumi.hub.downloads import find_commit
from cogumi.methods.examples import DATA, Examples, prepare_examples, render_prompts
from cogumi.methods.gspo import task_of
from cogumi.methods.preparation import load_run_tokenizer, prepare_base
from cogumi.models.base import RunBase
from cogumi.models.completion import complete_with_ends, mean_log_likelihood
from cogumi.models.loading import load_tokenizer, read_base
from cogumi.patches import unsloth_rl
from cogumi.rewards.distribution import weighted_total
from cogumi.rewards.named_rewards import refuse_missing_columns, rewards_of
from cogumi.telemetry.status import run_above

log = logging.getLogger("cogumi")
REWARDS = "rewards"  # the score that is the weighted total of the configuration's rewards
LOG_LIKELIHOOD = "log_likelihood"  # of the expected answer, in nats a token: minus its loss
MARGIN = "preference_margin"  # log-likelihood of the chosen answer less that of the rejected one, in nats
ANSWER_IDS = {MARGIN: "rejected_ids", LOG_LIKELIHOOD: "answer_ids"}  # what these scores need
LIKELIHOOD_DIGITS = 3  # rounding differs between a merged model and its adapter, and is no difference of the models
ANSWER_SCORES = ("exact_answer", "answer_similarity")
ANSWER_COLUMNS = ("answer", "middle", "chosen")
BATCH_ROWS = 50
EXTRA_TOKENS = 16  # beyond the longest expected answer, so that a completion that goes on differs from it
TRAINED_SCORES = {"sft": LOG_LIKELIHOOD, "dpo": MARGIN, "gspo": REWARDS}  # by method
RESULT = "this run"


@quiet_libraries()
def compare_models(
    models: Mapping[str, str], run: RunConfig, rows: int = 200, scores: Sequence[str] = ()
) -> Comparison:
    """Complete the first `rows` held-out prompts of a configuration with several models, one in memory at a time, and score.

    Args:
        models: By name: `base` (the configuration's), the directory of a run, adapter, model or checkpoint, or a hub id.
        run: The configuration. If its model is not on this machine, prompts are rendered as for the last of `models`.
        rows: At most so many prompts.
        scores: `rewards` (those of the configuration), `log_likelihood` of the expected answer (sft, dpo), names of rewards,
            `file.py:function`, `command:PROGRAM` (a judge), or `preference_margin` (dpo). By default margin, likelihood,
            exact match, edit similarity and rewards, as far as the configuration has them.

    Raises:
        UsageError: No rows are held out, nothing could score them, or a model does not fit the configuration's tokenizer.
    """
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
    answer_ids, rejected_ids = (columns.pop(name, []) for name in ("answer_ids", "rejected_ids"))
    max_new_tokens = run.train.get("max_completion_length") or MAX_NEW_TOKENS
    if run.cogumi.method != "gspo":
        answer_lengths = map(len, tokenizer(columns["answer"])["input_ids"])
        max_new_tokens = min(MAX_NEW_TOKENS, max(answer_lengths) + EXTRA_TOKENS)
    written: dict[str, list[str]] = {}
    scored: dict[str, dict[str, list[float]]] = {score: {} for score in rewards}
    for name, setup in setups.items():
        log.info("%s completes and scores %d held-out prompts", name, len(ids))
        gc.collect()  # models hold reference cycles: of the one before, of a run and its merge
        with LoadedModels(setup.files).model_of(setup.columns[-1]) as model:
            written[name] = complete(model, tokenizer, ids, max_new_tokens, run.cogumi.stop)
            for score in ANSWER_IDS.keys() & rewards:
                values = score_answers(model, ids, answer_ids, rejected_ids if score == MARGIN else [])
                scored[score][name] = [round(value, LIKELIHOOD_DIGITS) for value in values]
        del model
        for score, entry in rewards.items():
            if score not in ANSWER_IDS:
                scored[score][name] = score_written(run, entry, written[name], prompts, columns)
    notes = [f"greedy completions of at most {max_new_tokens} tokens"]
    notes += (
        [f"below {MIN_ROWS} prompts the sign test has to tell them apart as well"] if len(prompts) < MIN_ROWS else []
    )
    notes += [note for name, place in models.items() if (note := describe_other_data(name, Path(place), examples))]
    questions = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    answers = list(map(str, columns["answer"])) if "answer" in columns else None
    return Comparison(questions, answers, written, scored, tuple(notes))


def complete(model: Any, tokenizer: Any, ids: list[list[int]], length: int, stops: Sequence[str]) -> list[str]:
    batches = [ids[at : at + BATCH_ROWS] for at in range(0, len(ids), BATCH_ROWS)]
    bar = tqdm(batches, "completing", disable=None, leave=False)  # on a terminal alone
    return [text for batch in bar for text, _ in complete_with_ends(model, tokenizer, batch, length, stops)]


def score_written(
    run: RunConfig,
    entry: tuple[list[Any], list[float]],
    written: Sequence[str],
    prompts: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> list[float]:
    """Return the weighted total of each completion. entry: reward functions and their weights."""
    cells = [{key: values[at] for key, values in columns.items()} for at in range(len(prompts))]
    completions = [Scored(0, *row) for row in zip(written, prompts, cells, strict=True)]
    functions, weights = entry
    return weighted_total(call_rewards(run, functions, completions, []), weights)


def score_answers(
    model: Any, ids: list[list[int]], answers: list[list[int]], rejected: list[list[int]]
) -> Iterator[float]:
    """Yield the log-likelihood of each answer, in nats a token; with rejected answers, by how many nats it is above theirs."""
    for at, (prompt, answer) in enumerate(zip(ids, answers, strict=True)):
        mean = mean_log_likelihood(model, prompt, answer)
        if rejected:
            mean = mean * len(answer) - mean_log_likelihood(model, prompt, rejected[at]) * len(rejected[at])
        yield mean


def find_model(place: str, run: RunConfig, base: RunBase | None) -> ChatSetup:
    """Return the model of a place; the last of its columns is the one to compare. base: the configuration's, for `base`."""
    if place == BASE and base is not None:
        model = run.model
        files = ModelFiles(model.name, model.revision, dtype=model.dtype, quantization=model.quantization_config)
        return ChatSetup(Path(BASE), replace(files, attention=model.attn_implementation), (BASE,), base.name)
    if Path(place).is_dir():
        return read_setup(Path(place))
    try:
        name = read_base(place, find_commit(place)).name
    except UsageError as error:  # a model that is named here, and not by the configuration
        raise UsageError(error.message, place=error.place, key=place, fix=error.fix) from error
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
    if run.cogumi.environment is not None:
        message = "it scores its own episodes, and no completions of held-out prompts"
        raise UsageError(message, key="cogumi.environment", fix="compare by a configuration without one")
    is_learned_whole = examples.held_out is not None and examples.prompts is None and run.cogumi.method != "gspo"
    if is_learned_whole or run.data.format == "text":
        message = "all of a held-out example is learned, so there is no prompt to complete"
        raise UsageError(message, key="data.format", fix="compare by data with prompts and answers")
    if examples.held_out is None:
        raise UsageError("no rows are held out", key="data.eval_rows", fix="set it to 100 or more")
    if run.cogumi.method == "gspo":
        dataset = examples.held_out.dataset.select(range(min(rows, len(examples.held_out.dataset))))
        prompts = list(dataset["prompt"])
        _, ids = render_prompts(prompts, tokenizer, run.cogumi.thinking, examples.today, task_of(run).schemas)
    else:
        assert examples.prompts is not None
        dataset = examples.prompts
        prompts, ids = list(dataset["prompt"]), list(dataset["prompt_ids"])
    columns = {name: list(dataset[name]) for name in dataset.column_names if name not in ("prompt", "prompt_ids")}
    if run.cogumi.method == "dpo":
        columns["rejected_ids"] = list(examples.held_out.dataset.select(range(len(prompts)))["rejected_ids"])
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
        scores = [score for score, column in ANSWER_IDS.items() if column in columns]
        scores += [*(ANSWER_SCORES if "answer" in columns else ()), *([REWARDS] if has_rewards else [])]
    if REWARDS in scores and not has_rewards:
        message = "the configuration has no cogumi.rewards"
        raise UsageError(message, key="--score rewards", fix="name a function as file.py:function")
    entries: dict[str, tuple[list[Any], list[float]]] = {}
    for score in scores:
        functions: list[Any] = []
        if score in ANSWER_IDS and ANSWER_IDS[score] not in columns:
            column = ANSWER_IDS[score].removesuffix("_ids")
            message = f"prompts of {run.cogumi.method.upper()} have no {column} to learn"
            fix = "compare by a configuration of DPO" + (" or SFT, or by rewards" if score == LOG_LIKELIHOOD else "")
            raise UsageError(message, key=f"--score {score}", fix=fix)
        if score.startswith(COMMAND):
            functions = [judge_of(score)]
        elif score not in ANSWER_IDS:
            try:
                functions = read_rewards(run) if score == REWARDS else rewards_of([score])
            except UsageError as error:
                raise UsageError(error.message, place=error.place, key=f"--score {score}", fix=error.fix) from error
        refuse_missing_columns(functions, columns)
        entries[score] = functions, read_weights(run, functions) if score == REWARDS else [1.0]
    return entries


def describe_other_data(name: str, place: Path, examples: Examples) -> str:
    """Describe a run whose held-out rows are others, so that it may have trained on these; "" if they are the same."""
    run_dir = run_above(place)
    split = None if run_dir is None else read_section(run_dir / DECISIONS, DATA).get("split")
    is_same = split in (None, examples.split)
    return "" if is_same else f"{name} was trained with other data or held-out rows, and may have seen these prompts"


# --------------------------------------------------------------------------------------------------- the result of a run


def refuse_incomparable(run: RunConfig, base: RunBase, examples: Examples, tokenizer: Any) -> None:
    """Raise UsageError where the result could not be compared with `cogumi.compare_with`, before anything is trained."""
    other = run.cogumi.compare_with
    try:
        if other is not None:
            read_held_out(run, examples, tokenizer, 1)
            rows = len(examples.held_out.dataset) if examples.held_out else 0
            if run.cogumi.gate is not None and rows < MIN_DECIDABLE_ROWS:
                message = f"by {rows} held-out rows no model is told better or worse, so cogumi.gate decides nothing"
                fix = f"set it to 100, to {MIN_DECIDABLE_ROWS} at least"
                raise UsageError(message, key="data.eval_rows", fix=fix)
            refuse_other_vocabularies({other: find_model(other, run, base)}, tokenizer)
    except UsageError as error:
        raise UsageError(f"{error}", key="cogumi.compare_with", fix="or drop it") from None


def compare_result(run: RunConfig, base: RunBase) -> Check:
    """Compare the saved model of a run with `cogumi.compare_with` on held-out rows, and record it in comparison.json."""
    unsloth_rl.restore_classes(base.config.model_type)  # where no merge has
    path, other = run.run_dir / COMPARISON, str(run.cogumi.compare_with)
    path.unlink(missing_ok=True)  # of an earlier part of the run
    if (run.run_dir / "merged").is_dir():  # in full precision: a quantized base would be worse without any training
        run = run.model_copy(update={"model": run.model.model_copy(update={"quantization_config": None})})
    comparison = compare_models({other: other, RESULT: str(run.run_dir)}, run)
    write_json(path, comparison.as_dict())
    for line in str(comparison).splitlines():
        log.info("%s", line)
    return judge_result(comparison, other, run)


def judge_result(comparison: Comparison, before: str, run: RunConfig) -> Check:
    """Judge a result by the score that its method trains for, and list the others. Not told apart is a warning."""
    score, gate, mean = TRAINED_SCORES[run.cogumi.method], run.cogumi.gate, comparison.mean
    pair = comparison.paired(score, before, RESULT)
    others = [f"{name} {other.verdict} ({other.mean:+.4f})" for name, *_, other in comparison.pairs() if name != score]
    figure = f"{score} {mean(score, before):.4f} before, {mean(score, RESULT):.4f} after, {pair}, {pair.rows} rows"
    is_better, is_worse = (pair.verdict == verdict for verdict in ("better", "worse"))
    required = f"{'better' if gate == 'better' else 'not worse'}{' (cogumi.gate)' if gate else ''}"
    passed = is_better if gate == "better" else not is_worse and pair.rows > 0
    fix = "hold out more rows (data.eval_rows), which tells smaller differences, or train longer"
    if pair.verdict == "equal":
        fix = "raise train.learning_rate, or train longer: no row has changed"
    if is_worse:
        fix = "see Comparison in report.html, and lower train.learning_rate"
    return Check(COMPARED, "; ".join([figure, *others]), required, passed, fix, warning=passed and not is_better)
