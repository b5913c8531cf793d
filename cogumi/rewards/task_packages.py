"""Rows and scores of `data.source: reasoning_gym:TASK` and `verifiers:ENVIRONMENT`, by the packages' own functions.

Both run in a worker: a scorer may evaluate a completion as Python, and rows must not depend on this process's hash seed.
"""

import ast
import asyncio
import functools
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError
from cogumi.core.formatting import install_command, one_line
from cogumi.data.chat import text_of
from cogumi.data.rows import without_nulls
from cogumi.rewards.functions import Completion
from cogumi.rewards.math_answers import LATE, call_apart

Record = Mapping[str, Any]
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ANSWER_RULE = "an answer is the text in the last <answer>...</answer>, else the whole completion"
SECONDS = {"reasoning_gym": 5.0, "verifiers": 60.0}  # for the completions of a call; 3,600 for all rows


def task_rows(source: str, options: Record) -> list[dict[str, Any]]:
    """Return a task's prompts; each row's record has the task, its options and the package's entry. Raises UsageError."""
    package, _, name = source.partition(":")
    rows = call_apart(package, 3600.0, make_rows, package, name, json.dumps(options))
    if rows == LATE:
        raise UsageError(f"{source}: the package could not make its rows", key="data.source", fix="try a smaller size")
    return rows  # type: ignore[no-any-return]


def reasoning_gym(
    completions: Sequence[Completion], record: Sequence[Record], log_metric: Any = None, **kwargs: Any
) -> list[float | None]:
    """Score the answer by the scorer of its row's task, 0..1; None for rows of another source.

    The answer is the text in the last `<answer>...</answer>` (metric `reasoning_gym/tagged`), else the whole completion,
    without surrounding white space. 0: the scorer raises an error; NaN, not scored: it takes over five seconds.
    """
    texts = list(map(text_of, completions))
    answers = [ANSWER.findall(text) for text in texts]
    if log_metric is not None:
        log_metric("reasoning_gym/tagged", sum(map(bool, answers)) / max(len(answers), 1))
    read = [[(matches or [text])[-1].strip()] for matches, text in zip(answers, texts, strict=True)]
    return _score("reasoning_gym", zip(record, read, strict=True))


def verifiers(completions: Sequence[Completion], record: Sequence[Record], **kwargs: Any) -> list[float | None]:
    """Score by the environment's rubric: the sum of its functions by their weights; None for rows of another source.

    As in verifiers a function that raises an error counts as 0. NaN, not scored: a row's completions take over a minute.
    """
    pairs = zip(record, map(text_of, completions), strict=True)
    groups = ((row, [text for _, text in group]) for row, group in groupby(pairs, itemgetter(0)))
    return _score("verifiers", groups)


def _score(package: str, groups: Iterable[tuple[Record, list[str]]]) -> list[float | None]:
    scores: list[float | None] = []
    for row, texts in groups:
        group_scores: Any = [None] * len(texts)
        if row.get("package") == package:
            task = itemgetter("package", "task", "options", "entry")(row)
            group_scores = call_apart(package, SECONDS[package], score_texts, *task, texts)
        scores += [math.nan] * len(texts) if group_scores == LATE else group_scores
    return scores


# In the worker.


@functools.cache
def load_task(package: str, name: str, options: str) -> Any:
    """Load a data set of reasoning-gym, or an environment of verifiers. options: as JSON. Raises UsageError."""
    fix = f"install it, with verifiers below 0.4 ({install_command('verifiers')}), or check data.options"
    try:
        if package == "reasoning_gym":
            import reasoning_gym
            from reasoning_gym.factory import DATASETS

            near = nearest(name, DATASETS)
            fix = "check data.options" if name in DATASETS else f"did you mean {near}?" if near else "see its gallery"
            random.seed(0)  # a few tasks draw from it
            return reasoning_gym.create_dataset(name, **({"seed": 0} | json.loads(options)))
        import verifiers

        environment = verifiers.load_environment(name, **json.loads(options))
        environment.get_dataset()
    except Exception as error:  # the task's own code may raise anything
        raise UsageError(f"{package}:{name}: {one_line(error)}", key="data.source", fix=fix) from error
    if not isinstance(environment, verifiers.SingleTurnEnv) or environment.tool_defs:
        message = f"{package}:{name} is a {type(environment).__name__}, which takes turns or has tools"
        raise UsageError(message, key="data.source", fix="write it as cogumi.environment, or take a SingleTurnEnv")
    return environment


def make_rows(package: str, name: str, options: str) -> list[dict[str, Any]]:
    loaded, rows = load_task(package, name, options), []
    for entry in map(loaded.__getitem__, range(len(loaded))) if package == "reasoning_gym" else loaded.get_dataset():
        prompt = entry.get("prompt") or [{"role": "user", "content": entry["question"]}]
        row = {"prompt": without_nulls(prompt), "completion": entry.get("answer"), "package": package, "task": name}
        # NumPy's numbers and texts as Python's. JSON would turn tuples into lists.
        with np.printoptions(legacy="1.25"):
            rows.append({**row, "options": options, "entry": repr(entry)})
    return rows


def score_texts(package: str, name: str, options: str, entry: str, texts: list[str]) -> list[float]:
    loaded, original = load_task(package, name, options), ast.literal_eval(entry)
    if package == "verifiers":
        return asyncio.run(_score_rollouts(loaded, original, texts))
    try:
        return [float(loaded.score_answer(text, original)) for text in texts]
    except Exception:  # noqa: BLE001  scorers raise anything for a text that is no answer
        return [0.0] * len(texts)


async def _score_rollouts(environment: Any, entry: Any, texts: list[str]) -> list[float]:
    """Score the completions of one row as verifiers does after its own rollouts."""
    from verifiers.types import AssistantMessage, ClientConfig

    states = []
    for text in texts:
        state = await environment.init_state(entry, ClientConfig(), "policy")
        states.append(await environment.setup_state(state) or state)
        states[-1]["completion"] = [AssistantMessage(content=text)]
    await environment.rubric.score_group(states)
    await asyncio.gather(*map(environment.rubric.cleanup, states))
    return [float(state["reward"]) for state in states]
