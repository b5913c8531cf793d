"""From the names in a YAML to reward functions, and the shape in which each gets completions.

TRL 1.15 gives strings for prompts that are strings, and for conversations a list of messages each, of which the last is
the model's. A function annotated `completions: list[str]` is given the text of either, and one annotated `completions:
list[list[dict]]` messages of either. Without such an annotation it gets what TRL gives.
"""

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError, ends_by_signal
from cogumi.core.user_code import load_object
from cogumi.data.chat import text_of
from cogumi.rewards.entries import ALWAYS_THERE, bind_parameters, hints_of, is_column, read_entries, with_names
from cogumi.rewards.functions import (
    Reward,
    answer_similarity,
    edit_similarity,
    exact_answer,
    exact_match,
    final_number,
    format_match,
    parameters_of,
    parses,
    with_columns,
)
from cogumi.rewards.lengths import THOUGHT_COLUMNS, overlong, thought_price
from cogumi.rewards.math_answers import math_answer
from cogumi.rewards.unit_tests import unit_tests

# As `str` shows them: list[str], typing.List[str], collections.abc.Sequence[str]; an annotation may be a string itself.
OF_TEXT = re.compile(r"(?:\w+\.)*(?:list|List|Sequence|Iterable)\[str\]")
OF_MESSAGES = re.compile(r"(?:\w+\.)*(?:list|List|Sequence|Iterable)\[(?:\w+\.)*(?:list|List|Sequence)\[.*\]\]")
ROLES = {"prompts": "user", "completions": "assistant"}
# What a wrong shape raises in a function that reads it.
OF_SHAPE = (TypeError, AttributeError, KeyError)
SAMPLE = "The answer is 42."


class RewardError(RuntimeError):
    """A reward of the user's own raised an error; its text names the function, the file and the line."""


def as_annotated(reward: Any) -> Any:
    """A reward function that is given its prompts and completions in the shape that it is annotated with."""
    wanted: dict[str, Callable[[Any], Any]] = {}
    for name, role in ROLES.items():
        annotation = str(getattr(reward, "__annotations__", {}).get(name))
        if OF_TEXT.fullmatch(annotation):
            wanted[name] = text_of
        elif OF_MESSAGES.fullmatch(annotation):
            wanted[name] = functools.partial(messages_of, role=role)
    if not wanted:
        return reward

    def shaped(given: Mapping[str, Any]) -> dict[str, Any]:
        return {**given, **{name: [wanted[name](each) for each in given[name]] for name in wanted if name in given}}

    return with_columns(reward, shaped)


def messages_of(completion: Any, role: str) -> Any:
    """A prompt or completion as messages: text becomes one."""
    return [{"role": role, "content": completion}] if isinstance(completion, str) else completion


def try_reward(reward: Any, row: Mapping[str, Any], group: int, **given: Any) -> tuple[bool, str] | None:
    """(whether it is the shape, one line) about a function that does not score completions of this data; None if it does.

    It is called once, for `group` completions of a made-up text, in the shape that TRL will give it. `row`: the first of
    the data. `given`: what TRL passes besides. An asynchronous one, such as a paid judge, is not called.
    """
    conversational = not isinstance(row["prompt"], str)
    error = error_of_reward(reward, row, group, conversational, given)
    if error is None:
        return None
    name, at = getattr(reward, "__name__", type(reward).__name__), traceback.extract_tb(error.__traceback__)[-1]
    said = f"reward {name} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno}) on a trial completion"
    if not isinstance(error, OF_SHAPE) or error_of_reward(reward, row, group, not conversational, given) is not None:
        return False, f"{said}; a function that cannot score every text ends the training in its first rollout"
    got, takes, shape = ("messages", "strings", "str") if conversational else ("text", "messages", "list[dict]")
    fix = f"annotate it `completions: list[{shape}]` to be given those, or have it read {got}"
    return True, f"{said}: the prompts are {got}, and so are the completions. The function takes {takes}; {fix}"


def error_of_reward(reward: Any, row: Mapping[str, Any], group: int, messages: bool, given: Mapping[str, Any]) -> Any:
    """What a reward function raises on made-up completions of one prompt; None where it scores them."""
    if inspect.iscoroutinefunction(reward):
        return None
    shape = messages_of if messages else lambda text, role: text_of(text)
    columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
    columns |= {
        "prompts": shape(row["prompt"], "user"),
        "completions": shape(SAMPLE, "assistant"),
        "completion_ids": [0],
    }
    logs = dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)
    try:
        list(as_annotated(reward)(**{name: [value] * group for name, value in columns.items()}, **logs, **given))
    except UsageError:  # of a parameter that it cannot work with
        raise
    except Exception as error:  # noqa: BLE001  the user's own code may raise anything; it is reported
        # What is in a file is wrapped by `with_location`, which says where.
        return error.__cause__ if isinstance(error, RewardError) and error.__cause__ is not None else error
    return None


BUILTIN_REWARDS: dict[str, Reward] = {
    each.__name__: each
    for each in (
        *(exact_match, edit_similarity, parses, final_number, exact_answer, answer_similarity),
        *(math_answer, format_match, overlong, thought_price, unit_tests),
    )
}
"""What a YAML may name, beside `file.py:function` and `package.module:function`."""


def rewards_of(rewards: Sequence[str | Mapping[str, Any]], settings: Mapping[str, Any] | None = None) -> list[Any]:
    """The reward functions of these entries, in this order, with their arguments.

    settings: values of `entries.RUN_SETTINGS`, of a run. Raises UsageError for a name that stands for none.
    """
    entries = read_entries(rewards)
    for unknown in (each.name for each in entries if ":" not in each.name and each.name not in BUILTIN_REWARDS):
        near = nearest(unknown, BUILTIN_REWARDS)
        hint = f"did you mean {near!r}? " if near else ""
        fix = f"{hint}there are: {', '.join(BUILTIN_REWARDS)}, and your own as file.py:function"
        raise UsageError(f"no reward {unknown!r}", key="cogumi.rewards", fix=fix)
    functions = [load_reward(each.name) if ":" in each.name else BUILTIN_REWARDS[each.name] for each in entries]
    pairs = zip(functions, entries, strict=True)
    return with_names([bind_parameters(function, entry, settings or {}) for function, entry in pairs])


def load_reward(name: str) -> Reward:
    """The function of `path/to/file.py:function` or `package.module:function`, whose code is executed to get it."""
    return with_location(name, load_object(name, "cogumi.rewards", callable, "function"))


def with_location(name: str, reward: Callable[..., Any]) -> Callable[..., Any]:
    """A reward whose errors name it and the line: the trainer that calls it shows neither."""
    if inspect.iscoroutinefunction(reward):  # trl awaits those
        return reward

    @functools.wraps(reward)
    def scored(*args: Any, **kwargs: Any) -> Any:
        try:
            return reward(*args, **kwargs)
        except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
            if ends_by_signal(error):
                raise
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}"
            raise RewardError(f"cogumi.rewards: {name} raised {what} ({at.filename}:{at.lineno})") from error

    return scored


def refuse_missing_columns(rewards: Sequence[Reward], columns: Collection[str]) -> None:
    """Raise UsageError where a reward asks for what the data has not: TRL would find out after the first rollout."""
    for reward in rewards:
        hints = hints_of(reward)
        for name in needed_columns(reward):
            if name not in columns:
                what = f"{reward.__name__} takes `{name}`, and the prompts come with {', '.join(sorted(columns))}"
                fix = f"say which column of the file it is: data.columns: {{{name}: ...}}"
                if not is_column(parameters_of(reward)[name], hints):
                    fix += f", or give its value in the entry: {{name: {reward.__name__}, {name}: ...}}"
                raise UsageError(what, key="cogumi.rewards", fix=fix)


def needed_columns(reward: Reward) -> list[str]:
    """The columns of the data without which a reward cannot score."""
    given = (*ALWAYS_THERE, *THOUGHT_COLUMNS)
    parameters = parameters_of(reward).values()
    return [each.name for each in parameters if each.default is each.empty and each.name not in given]
