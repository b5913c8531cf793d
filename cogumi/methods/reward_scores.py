"""`cogumi reward`: the rewards of a config on completions of a file, before anything is trained.

torch and the tokenizer are loaded only where a reward needs them: for the data of the config, token ids or a thought.
"""

import asyncio
import inspect
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import escape_controls
from cogumi.core.run_directory import jsonable_numbers
from cogumi.data.chat import text_of, transcript_of
from cogumi.rewards.distribution import Distribution, describe_rewards, share_of_equal_groups, weighted_total
from cogumi.rewards.entries import RUN_SETTINGS, weights_of
from cogumi.rewards.functions import parameters_of
from cogumi.rewards.lengths import reads_thoughts
from cogumi.rewards.named_rewards import as_annotated, messages_of, needed_columns, rewards_of

SHOWN_CHARACTERS = 2000
RECORDED_CHARACTERS = 4000  # of a completion in rollouts.jsonl, its beginning; of a prompt, its end
ASSISTANT = "assistant: "  # what a message of a conversation begins with in rollouts.jsonl


@dataclass
class Scored:
    """One completion of a file. line: its number there. prompt: None where the line has none. recorded: by a run."""

    line: int
    completion: Any
    prompt: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    recorded: bool = False


@dataclass(frozen=True)
class RewardReport:
    """What the rewards of a config give to the completions of a file.

    groups: (prompts with several completions, those of which all totals are equal). worst, best: a line, its total and its
    completion; None where nothing was scored.
    """

    file: str
    rewards: tuple[Distribution, ...]
    total: Distribution
    groups: tuple[int, int]
    worst: dict[str, Any] | None
    best: dict[str, Any] | None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self) | {"groups": {"several": self.groups[0], "equal": self.groups[1]}}
        return jsonable_numbers(found)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        parts = [*self.notes, *map(str, self.rewards)]
        if len(self.rewards) > 1 or self.rewards[0].weight != 1.0:
            parts.append(str(self.total))
        several, equal = self.groups
        if several:
            share = f"prompts with several completions: {several:,}; {equal:,} ({equal / several:.1%}) have one total for all"
            parts.append(f"{share}, which teaches nothing")
        for name, shown in (("worst", self.worst), ("best", self.best)):
            if shown is not None:
                head = f"--- {name}, line {shown['line']}, reward {shown['reward']:.4g} ".ljust(70, "-")
                parts.append(f"{head}\n{cut(shown['completion'])}")
        return escape_controls("\n\n".join(parts))


def cut(text: str) -> str:
    more = len(text) - SHOWN_CHARACTERS
    return text if more <= 0 else f"{text[:SHOWN_CHARACTERS]}\n[{more:,} more characters]"


def score_file(run: RunConfig, file: Path) -> RewardReport:
    """Score every completion. Raises UsageError for a line that cannot be scored, by its number."""
    if run.cogumi.method != "gspo":
        raise UsageError(f"cogumi.method is {run.cogumi.method}", key="cogumi.rewards", fix="name a config of gspo")
    if run.cogumi.environment is not None and not run.cogumi.rewards:
        what = f"it is empty: {run.cogumi.environment} scores its own episodes, and no completions of a file"
        raise UsageError(what, key="cogumi.rewards", fix="name a reward")
    rewards = read_rewards(run)
    weights = weights_of(run.cogumi.rewards, run.train.get("reward_weights")) or [1.0] * len(rewards)
    if len(weights) != len(rewards):
        what = f"{len(weights)} weights for {len(rewards)} rewards"
        raise UsageError(what, key="train.reward_weights", fix="give one for each reward")
    rows = list(read_completions(file))
    rows, notes = drop_cut(rows)
    if not rows:
        raise UsageError(
            "no completions in it", place=file, fix='write lines such as {"prompt": ..., "completion": ...}'
        )
    needed = list(dict.fromkeys(name for reward in rewards for name in needed_columns(reward)))
    if rows[0].recorded or any(name not in row.columns for row in rows for name in needed):
        join_data(run, rows, needed, file)
    names = [reward.__name__ for reward in rewards]
    scores = call_rewards(run, rewards, rows)
    total = weighted_total(scores, weights)
    triples = zip(names, weights, scores, strict=True)
    ranked = sorted((at for at, reward in enumerate(total) if not math.isnan(reward)), key=total.__getitem__)
    shown = [describe_row(rows[at], total[at]) for at in (ranked[0], ranked[-1])] if ranked else [None, None]
    groups = (0, 0) if rows[0].recorded else share_of_equal_groups(number_groups(rows), total)
    return RewardReport(
        file=str(file),
        rewards=tuple(describe_rewards(*each) for each in triples),
        total=describe_rewards("total", None, total),
        groups=groups,
        worst=shown[0],
        best=shown[1],
        notes=tuple(notes),
    )


def read_rewards(run: RunConfig) -> list[Any]:
    """The reward functions. A setting that the config leaves to TRL is asked of TRL where a reward takes it."""
    rewards = rewards_of(run.cogumi.rewards, {key: run.train[key] for key in RUN_SETTINGS if key in run.train})
    if all(name not in RUN_SETTINGS for reward in rewards for name in needed_columns(reward)):
        return rewards
    from cogumi.methods import gspo

    return gspo.read_rewards(run)


# ------------------------------------------------------------------------------------------------------------- the file


def read_completions(file: Path) -> Iterator[Scored]:
    """The completions of a file of JSON lines. Raises UsageError, with the number of the line."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or f"cannot be read as UTF-8 text: {error}"
        raise UsageError(said, place=file, fix="name a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield from read_line(line, number, f"{file}:{number}")


def read_line(line: str, number: int, place: str) -> Iterator[Scored]:
    form = 'a line is {"prompt": ..., "completion": ...}, or has `completions`, a list'
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"not valid JSON: {error.msg} at column {error.colno}", place=place, fix=form) from None
    except RecursionError:
        raise UsageError("it is nested too deep", place=place, fix=form) from None
    if not isinstance(row, dict):
        raise UsageError("not a JSON object", place=place, fix=form)
    if isinstance(row.get("shown"), list):  # rollouts.jsonl of a run
        for each in row["shown"]:
            yield Scored(number, each["completion"], each["prompt"], recorded=True)
        return
    columns = {key: value for key, value in row.items() if key not in ("prompt", "completion", "completions")}
    said = row.get("completions", [row["completion"]] if "completion" in row else None)
    if not isinstance(said, list):
        raise UsageError("it has no `completion`", place=place, fix=form)
    for each in said:
        if not is_completion(each):
            what = f"a completion is text or a list of messages, and this is {json.dumps(each)[:80]}"
            raise UsageError(what, place=place, fix=form)
        yield Scored(number, each, row.get("prompt"), columns)


def is_completion(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, dict) and isinstance(each.get("content"), str | None) for each in value)
    return isinstance(value, str)


def drop_cut(rows: list[Scored]) -> tuple[list[Scored], list[str]]:
    """The rows less those of which a run recorded the beginning alone; and what to say of it."""
    whole = [row for row in rows if not row.recorded or len(row.completion) < RECORDED_CHARACTERS]
    notes = []
    if any(row.recorded for row in rows):
        kept = "a run records four completions of each rollout, from the worst to the best"
        notes.append(f"{kept}: the shares below are not those of its rollouts")
    if len(whole) < len(rows):
        left_out = f"{len(rows) - len(whole):,} completions are left out"
        notes.append(f"{left_out}: the run recorded their first {RECORDED_CHARACTERS:,} characters alone")
    return whole, notes


def number_groups(rows: Iterable[Scored]) -> list[int]:
    """A number for each row, equal where the prompts are, or the lines where there is no prompt."""
    numbers: dict[Any, int] = {}
    keys = (row.line if row.prompt is None else json.dumps(row.prompt) for row in rows)
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def describe_row(row: Scored, reward: float) -> dict[str, Any]:
    return {"line": row.line, "reward": reward, "completion": text_of(row.completion)}


# ------------------------------------------------------------------------------------------------- the data of the config


def join_data(run: RunConfig, rows: list[Scored], needed: list[str], file: Path) -> None:
    """Give the rows what they lack, from the config's data by their prompts, and the completions the prompts' form."""
    alone = (row for row in rows if row.prompt is None and any(name not in row.columns for name in needed))
    if (row := next(alone, None)) is not None:
        raise missing_error(row, needed, {}, "no `prompt` to find it by", file)
    data: dict[str, dict[str, Any]] = {}
    for each in prompts_of(run):
        data.setdefault(prompt_key(each["prompt"]), each)
    for row in rows:
        found = data.get(prompt_key(row.prompt)) if row.prompt is not None else None
        if any(name not in row.columns and name not in (found or {}) for name in needed):
            why = "its prompt is none of the config's data" if found is None else "the config's data has none, either"
            raise missing_error(row, needed, found or {}, why, file)
        if found is not None:
            row.columns = {name: value for name, value in found.items() if name != "prompt"} | row.columns
            row.prompt = found["prompt"]
            if row.recorded and not isinstance(row.prompt, str):
                row.completion = messages_of(last_message(row.completion), "assistant")


def missing_error(row: Scored, needed: list[str], found: Mapping[str, Any], why: str, file: Path) -> UsageError:
    name = next(name for name in needed if name not in row.columns and name not in found)
    what = f"no `{name}`, which a reward takes, and {why}"
    return UsageError(what, place=f"{file}:{row.line}", fix=f"give `{name}` in the line")


def last_message(recorded: str) -> str:
    """The text of the last message of a conversation in rollouts.jsonl."""
    if "\ntool: " in recorded:
        return recorded.rpartition(f"\n{ASSISTANT}")[2]
    return recorded.removeprefix(ASSISTANT)


def prompt_key(prompt: Any) -> str:
    """A prompt as rollouts.jsonl has it."""
    return transcript_of(prompt)[-RECORDED_CHARACTERS:]


def prompts_of(run: RunConfig) -> Iterator[dict[str, Any]]:
    """The prepared prompts of a run with their columns, those that are held out as well."""
    from transformers import AutoConfig

    from cogumi.methods.examples import prepare_examples
    from cogumi.models.loading import resolve_model

    base = resolve_model(run.model.name, run.model.revision)
    of_base = AutoConfig.from_pretrained(base, revision=run.model.revision)
    for part in prepare_examples(run, load_tokenizer(run), of_base).parts():
        yield from part.dataset


def load_tokenizer(run: RunConfig) -> Any:
    from cogumi.methods.building import load_run_tokenizer
    from cogumi.models.loading import resolve_model

    return load_run_tokenizer(run, resolve_model(run.model.name, run.model.revision))


# ---------------------------------------------------------------------------------------------------------- the rewards


def call_rewards(run: RunConfig, rewards: list[Any], rows: list[Scored]) -> list[list[float | None]]:
    """The scores by reward, NaN where a completion was not scored, from functions called as TRL calls them."""
    taken = {name for reward in rewards for name in parameters_of(reward)}
    given = columns_of(rows)
    needs_ids = "completion_ids" in taken and "completion_ids" not in given
    if needs_ids or run.cogumi.thinking is not None or any(map(reads_thoughts, rewards)):
        from cogumi.methods.gspo import graded_as_seen

        tokenizer = load_tokenizer(run)
        if needs_ids:
            texts = [text_of(each) for each in given["completions"]]
            given["completion_ids"] = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in texts]
        rewards = graded_as_seen(run, rewards, tokenizer)
    elif run.cogumi.stop:
        from cogumi.rl.sampling import strip_stops

        rewards = [strip_stops(reward, run.cogumi.stop) for reward in rewards]
    if "trainer_state" in taken:
        from transformers import TrainerState

        given["trainer_state"] = TrainerState()
    return [call_reward(as_annotated(reward), given, len(rows)) for reward in rewards]


def columns_of(rows: list[Scored]) -> dict[str, Any]:
    """What TRL passes: prompts, completions, and each column that a row has, None where another row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    given: dict[str, Any] = {name: [row.columns.get(name) for row in rows] for name in names}
    given["prompts"] = [row.prompt if row.prompt is not None else "" for row in rows]
    given["completions"] = [
        row.completion if isinstance(row.prompt, str | None) else messages_of(row.completion, "assistant")
        for row in rows
    ]
    return given | dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)


def call_reward(reward: Any, given: Mapping[str, Any], count: int) -> list[float | None]:
    found = asyncio.run(reward(**given)) if inspect.iscoroutinefunction(reward) else reward(**given)
    if not isinstance(found, Iterable):
        what = f"{reward.__name__} returned {type(found).__name__}, and a reward returns a list"
        raise UsageError(what, key="cogumi.rewards", fix="return one number for each completion")
    scores = [None if score is None else float(score) for score in found]
    scores = [score if score is None or math.isfinite(score) else math.nan for score in scores]
    if len(scores) != count:
        what = f"{reward.__name__} returned {len(scores)} rewards for {count} completions"
        raise UsageError(what, key="cogumi.rewards", fix="return one for each")
    return scores
