"""Score the completions of a file by the rewards of a config, before anything is trained (`cogumi reward`).

torch and the tokenizer are loaded only if a reward needs them: for the data of the config, token ids or a thought.
"""

import asyncio
import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import escape_controls
from cogumi.core.run_directory import jsonable_numbers
from cogumi.data.chat import text_of, transcript_of
from cogumi.rewards.distribution import Distribution, describe_rewards, share_of_equal_groups, weighted_total
from cogumi.rewards.functions import parameters_of, read_scores, reads_thoughts
from cogumi.rewards.named_rewards import RUN_SETTINGS, as_annotated, messages_of, needed_columns, rewards_of, weights_of

SHOWN_CHARACTERS = 2000
RECORDED_CHARACTERS = 4000  # of a completion in rollouts.jsonl, its beginning; of a prompt, its end
ASSISTANT = "assistant: "  # what a message of a conversation begins with in rollouts.jsonl
LINE_FORM = 'a line is {"prompt": ..., "completion": ...}, or has `completions`, a list'


@dataclass
class Scored:
    """One completion of a file. line: its number. prompt: None if the line has none. recorded: by a run."""

    line: int
    completion: Any
    prompt: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    recorded: bool = False


@dataclass(frozen=True)
class RewardReport:
    """Rewards of the completions of a file.

    groups: (prompts with several completions, those whose totals are all equal). worst, best: line, total and
    completion; None if nothing was scored.
    """

    file: str
    rewards: tuple[Distribution, ...]
    total: Distribution
    groups: tuple[int, int]
    worst: dict[str, Any] | None
    best: dict[str, Any] | None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"groups": {"several": self.groups[0], "equal": self.groups[1]}}
        return jsonable_numbers(values)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        parts = [*self.notes, *map(str, self.rewards)]
        if len(self.rewards) > 1 or self.rewards[0].weight != 1.0:
            parts.append(str(self.total))
        several, equal = self.groups
        if several:
            share = f"{several:,}; {equal:,} ({equal / several:.1%}) have one total for all, which teaches nothing"
            parts.append(f"prompts with several completions: {share}")
        for name, row in (("worst", self.worst), ("best", self.best)):
            if row is not None:
                head = f"--- {name}, line {row['line']}, reward {row['reward']:.4g} ".ljust(70, "-")
                text, more = row["completion"], len(row["completion"]) - SHOWN_CHARACTERS
                shown = text if more <= 0 else f"{text[:SHOWN_CHARACTERS]}\n[{more:,} more characters]"
                parts.append(f"{head}\n{shown}")
        return escape_controls("\n\n".join(parts))


def score_file(run: RunConfig, file: Path) -> RewardReport:
    """Score every completion. Raises UsageError for a line that cannot be scored, by its number."""
    if run.cogumi.method != "gspo":
        raise UsageError(f"cogumi.method is {run.cogumi.method}", key="cogumi.rewards", fix="name a config of gspo")
    if run.cogumi.environment is not None and not run.cogumi.rewards:
        message = f"it is empty: {run.cogumi.environment} scores its own episodes, and no completions of a file"
        raise UsageError(message, key="cogumi.rewards", fix="name a reward")
    rewards = read_rewards(run)
    weights = read_weights(run, rewards)
    rows, notes = drop_cut(list(read_completions(file)))
    if not rows:
        fix = 'write lines such as {"prompt": ..., "completion": ...}'
        raise UsageError("no completions in it", place=file, fix=fix)
    needed = list(dict.fromkeys(name for reward in rewards for name in needed_columns(reward)))
    if rows[0].recorded or any(name not in row.columns for row in rows for name in needed):
        join_data(run, rows, needed, file)
    scores = call_rewards(run, rewards, rows, notes)
    total = weighted_total(scores, weights)
    ranked = sorted((at for at, reward in enumerate(total) if not math.isnan(reward)), key=total.__getitem__)
    extremes: list[dict[str, Any] | None] = [None, None]
    if ranked:
        extremes = [
            {"line": rows[at].line, "reward": total[at], "completion": text_of(rows[at].completion)}
            for at in (ranked[0], ranked[-1])
        ]
    groups = (0, 0)
    if not rows[0].recorded:
        numbers: dict[Any, int] = {}  # equal for equal prompts, or for equal lines without a prompt
        keys = (row.line if row.prompt is None else json.dumps(row.prompt) for row in rows)
        groups = share_of_equal_groups([numbers.setdefault(key, len(numbers)) for key in keys], total)
    names = [reward.__name__ for reward in rewards]
    return RewardReport(
        file=str(file),
        rewards=tuple(describe_rewards(*triple) for triple in zip(names, weights, scores, strict=True)),
        total=describe_rewards("total", None, total),
        groups=groups,
        worst=extremes[0],
        best=extremes[1],
        notes=tuple(notes),
    )


def read_rewards(run: RunConfig) -> list[Any]:
    """Return the reward functions. A setting that the config leaves to TRL is asked of TRL where a reward takes it."""
    rewards = rewards_of(run.cogumi.rewards, {key: run.train[key] for key in RUN_SETTINGS if key in run.train})
    if all(name not in RUN_SETTINGS for reward in rewards for name in needed_columns(reward)):
        return rewards
    from cogumi.methods import gspo

    return gspo.read_rewards(run)


def read_weights(run: RunConfig, rewards: list[Any]) -> list[float]:
    weights = weights_of(run.cogumi.rewards, run.train.get("reward_weights")) or [1.0] * len(rewards)
    if len(weights) != len(rewards):
        message = f"{len(weights)} weights for {len(rewards)} rewards"
        raise UsageError(message, key="train.reward_weights", fix="give one for each reward")
    return weights


# ------------------------------------------------------------------------------------------------------------- the file


def read_completions(file: Path) -> Iterator[Scored]:
    """Read the completions of a file of JSON lines. Raises UsageError, with the number of the line."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"cannot be read as UTF-8 text: {error}"
        raise UsageError(reason, place=file, fix="name a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield from read_line(line, number, f"{file}:{number}")


def read_line(line: str, number: int, place: str) -> Iterator[Scored]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"not valid JSON: {error.msg} at column {error.colno}", place=place, fix=LINE_FORM) from None
    except RecursionError:
        raise UsageError("it is nested too deep", place=place, fix=LINE_FORM) from None
    if not isinstance(row, dict):
        raise UsageError("not a JSON object", place=place, fix=LINE_FORM)
    if isinstance(row.get("shown"), list):  # rollouts.jsonl of a run
        for rollout in row["shown"]:
            yield Scored(number, rollout["completion"], rollout["prompt"], recorded=True)
        return
    columns = {key: value for key, value in row.items() if key not in ("prompt", "completion", "completions")}
    completions = row.get("completions", [row["completion"]] if "completion" in row else None)
    if not isinstance(completions, list):
        raise UsageError("it has no `completion`", place=place, fix=LINE_FORM)
    for completion in completions:
        messages = completion if isinstance(completion, list) else [{"content": completion}]
        is_text = completion is not None and all(
            isinstance(message, dict) and isinstance(message.get("content"), str | None) for message in messages
        )
        if not is_text:
            reason = f"a completion is text or a list of messages, and this is {json.dumps(completion)[:80]}"
            raise UsageError(reason, place=place, fix=LINE_FORM)
        yield Scored(number, completion, row.get("prompt"), columns)


def drop_cut(rows: list[Scored]) -> tuple[list[Scored], list[str]]:
    """Drop rows of which a run recorded the beginning alone. Returns the others, and notes for the report."""
    complete = [row for row in rows if not row.recorded or len(row.completion) < RECORDED_CHARACTERS]
    notes = []
    if any(row.recorded for row in rows):
        notes.append("a run records four completions of each rollout, from the worst to the best: the shares below are "
                     "not those of its rollouts")  # fmt: skip
    if len(complete) < len(rows):
        notes.append(f"{len(rows) - len(complete):,} completions are left out: the run recorded their first "
                     f"{RECORDED_CHARACTERS:,} characters alone")  # fmt: skip
    return complete, notes


# ------------------------------------------------------------------------------------------------- the data of the config


def join_data(run: RunConfig, rows: list[Scored], needed: list[str], file: Path) -> None:
    """Add missing columns to the rows, from the config's data by their prompts, and give completions the prompts' form."""

    def refuse_missing(row: Scored, columns: Mapping[str, Any], reason: str) -> None:
        name = next((name for name in needed if name not in row.columns and name not in columns), None)
        if name is not None:
            message = f"no `{name}`, which a reward takes, and {reason}"
            raise UsageError(message, place=f"{file}:{row.line}", fix=f"give `{name}` in the line")

    for row in (row for row in rows if row.prompt is None):
        refuse_missing(row, {}, "no `prompt` to find it by")

    from cogumi.methods.examples import prepare_examples

    def key_of(prompt: Any) -> str:
        return transcript_of(prompt)[-RECORDED_CHARACTERS:]  # as rollouts.jsonl has it

    base, tokenizer = load_base_tokenizer(run)
    data: dict[str, dict[str, Any]] = {}
    for part in prepare_examples(run, tokenizer, base.config).parts():  # held-out prompts as well
        for example in part.dataset:
            data.setdefault(key_of(example["prompt"]), example)
    for row in rows:
        example = data.get(key_of(row.prompt)) if row.prompt is not None else None
        reason = "its prompt is none of the config's data" if example is None else "the config's data has none, either"
        refuse_missing(row, example or {}, reason)
        if example is not None:
            row.columns = {name: value for name, value in example.items() if name != "prompt"} | row.columns
            row.prompt = example["prompt"]
            if row.recorded and not isinstance(row.prompt, str):
                row.completion = messages_of(last_message(row.completion), "assistant")


def last_message(recorded: str) -> str:
    """Return the text of the last message of a conversation in rollouts.jsonl."""
    if "\ntool: " in recorded:
        return recorded.rpartition(f"\n{ASSISTANT}")[2]
    return recorded.removeprefix(ASSISTANT)


def load_base_tokenizer(run: RunConfig) -> tuple[Any, Any]:
    from cogumi.methods.preparation import load_run_tokenizer
    from cogumi.models.loading import read_base

    base = read_base(run.model.name, run.model.revision)
    return base, load_run_tokenizer(run, base)


# ---------------------------------------------------------------------------------------------------------- the rewards


def call_rewards(run: RunConfig, rewards: list[Any], rows: list[Scored], notes: list[str]) -> list[list[float | None]]:
    """Call the functions as TRL does, note what they log, and return scores by reward, NaN where one was not scored."""
    parameters = {name for reward in rewards for name in parameters_of(reward)}
    names = dict.fromkeys(name for row in rows for name in row.columns)
    arguments: dict[str, Any] = {name: [row.columns.get(name) for row in rows] for name in names}
    arguments["prompts"] = [row.prompt if row.prompt is not None else "" for row in rows]
    arguments["completions"] = [
        row.completion if isinstance(row.prompt, str | None) else messages_of(row.completion, "assistant")
        for row in rows
    ]
    arguments |= {"log_extra": lambda *_: None, "log_metric": lambda name, value: notes.append(f"{name} {value:.4g}")}
    needs_ids = "completion_ids" in parameters and "completion_ids" not in arguments
    if needs_ids or run.cogumi.thinking is not None or any(map(reads_thoughts, rewards)):
        from cogumi.methods.gspo import graded_as_seen

        _, tokenizer = load_base_tokenizer(run)
        if needs_ids:
            texts = map(text_of, arguments["completions"])
            arguments["completion_ids"] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        rewards = graded_as_seen(run, rewards, tokenizer)
    elif run.cogumi.stop:
        from cogumi.rl.sampling import strip_stops

        rewards = [strip_stops(reward, run.cogumi.stop) for reward in rewards]
    if "trainer_state" in parameters:
        from transformers import TrainerState

        arguments["trainer_state"] = TrainerState()
    return [call_reward(as_annotated(reward), arguments, len(rows)) for reward in rewards]


def call_reward(reward: Any, arguments: Mapping[str, Any], count: int) -> list[float | None]:
    answer = asyncio.run(reward(**arguments)) if inspect.iscoroutinefunction(reward) else reward(**arguments)
    return read_scores(reward, answer, count)
