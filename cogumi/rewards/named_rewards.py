"""Reward functions of the entries of `cogumi.rewards`, their arguments, and the shape in which they get completions.

    rewards:
      - exact_match
      - {name: overlong, weight: 0.5, buffer: 64}

An argument is bound to the function's own signature and checked against its annotation.

TRL 1.15 gives strings for prompts that are strings, and for conversations a list of messages each, of which the last is
the model's. A function annotated `completions: list[str]` gets the text of either, one annotated `completions:
list[list[dict]]` messages of either, and one without such an annotation what TRL gives.
"""

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_origin, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError, UserCodeError, ends_by_signal
from cogumi.core.user_code import describe_error, load_object
from cogumi.data.chat import text_of
from cogumi.rewards.functions import (
    THOUGHT_COLUMNS,
    Reward,
    answer_similarity,
    edit_similarity,
    exact_answer,
    exact_match,
    final_number,
    format_match,
    overlong,
    parameters_of,
    parses,
    read_scores,
    thought_price,
    with_columns,
)
from cogumi.rewards.math_answers import math_answer
from cogumi.rewards.task_packages import reasoning_gym, verifiers
from cogumi.rewards.unit_tests import unit_tests

KEY = "cogumi.rewards"
# Arguments that TRL passes whatever the data has.
ALWAYS_THERE = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
SHARED = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that all rewards share; of the others each gets its own copy."""
RUN_SETTINGS = ("max_completion_length",)
"""Keys of `train:` that a reward gets if it names them, unless its entry says otherwise."""
BUILTIN_REWARDS: dict[str, Reward] = {
    reward.__name__: reward
    for reward in (
        *(exact_match, edit_similarity, parses, final_number, exact_answer, answer_similarity),
        *(math_answer, format_match, overlong, thought_price, unit_tests, reasoning_gym, verifiers),
    )
}
"""Names for a YAML, besides `file.py:function` and `package.module:function`."""

# As `str` shows them: list[str], typing.List[str], collections.abc.Sequence[str]; an annotation may be a string itself.
TEXT_ANNOTATION = re.compile(r"(?:\w+\.)*(?:list|List|Sequence|Iterable)\[str\]")
MESSAGES_ANNOTATION = re.compile(r"(?:\w+\.)*(?:list|List|Sequence|Iterable)\[(?:\w+\.)*(?:list|List|Sequence)\[.*\]\]")
ROLES = {"prompts": "user", "completions": "assistant"}
SHAPE_ERRORS = (TypeError, AttributeError, KeyError)
"""Raised by a function that reads completions of the wrong shape."""
SAMPLE = "The answer is 42."


class RewardError(UserCodeError):
    """A reward of the user's own raised an error; the message names the function, the file and the line."""


# ------------------------------------------------------------------------------------------------------------- entries


@dataclass(frozen=True)
class Entry:
    """One entry of `cogumi.rewards`. A weight of None stands for 1.0."""

    name: str
    weight: float | None = None
    parameters: dict[str, Any] = field(default_factory=dict)


def read_entries(rewards: Sequence[str | Mapping[str, Any]]) -> list[Entry]:
    """Parse the entries and check what is known without their functions. Raises UsageError."""
    if not rewards:
        raise UsageError("cogumi.rewards is empty", fix="name at least one reward")
    entries: list[Entry] = []
    for item in rewards:
        entry = _read_entry({"name": item} if isinstance(item, str) else item)
        if any((entry.name, entry.parameters) == (other.name, other.parameters) for other in entries):
            message = f"{entry.name} stands there twice with the same parameters"
            raise UsageError(message, key=KEY, fix="name it once, with a weight: {name: ..., weight: 2.0}")
        entries.append(entry)
    return entries


def _read_entry(entry: Mapping[str, Any]) -> Entry:
    name, weight = entry.get("name"), entry.get("weight")
    if not isinstance(name, str):
        message = f"an entry is a name, or a mapping with `name`, and this is {dict(entry)!r}"
        raise UsageError(message, key=KEY, fix="write {name: exact_match, weight: 0.5}")
    if weight is not None:
        weight = _check_type("weight", weight, float, name)
        if not math.isfinite(weight):
            raise UsageError(f"{name}: weight = {weight}: must be a finite number", key=KEY)
    return Entry(name, weight, {key: value for key, value in entry.items() if key not in ("name", "weight")})


def weights_of(rewards: Sequence[str | Mapping[str, Any]], requested: Sequence[float] | None) -> list[float] | None:
    """Return TRL's `reward_weights` from the entries or from `train:` (`requested`); None if neither has any.

    Raises UsageError if both have.
    """
    entries = read_entries(rewards)
    if all(entry.weight is None for entry in entries):
        return None if requested is None else list(requested)
    if requested is not None:
        message = "train.reward_weights and a `weight` in cogumi.rewards say the same"
        raise UsageError(message, key="train.reward_weights", fix="drop one")
    return [1.0 if entry.weight is None else entry.weight for entry in entries]


def rewards_of(rewards: Sequence[str | Mapping[str, Any]], settings: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the reward functions of these entries in order, with their arguments and with unique names.

    TRL's metrics, such as `rewards/overlong/mean`, go by name: the second `overlong` is `overlong_2`. `settings` are values
    of RUN_SETTINGS. Raises UsageError for an unknown name, or an argument that the function does not take.
    """
    entries = read_entries(rewards)
    for entry in entries:
        if ":" not in entry.name and entry.name not in BUILTIN_REWARDS:
            near = nearest(entry.name, BUILTIN_REWARDS)
            hint = f"did you mean {near!r}? " if near else ""
            fix = f"{hint}there are: {', '.join(BUILTIN_REWARDS)}, and your own as file.py:function"
            raise UsageError(f"no reward {entry.name!r}", key=KEY, fix=fix)
    functions: list[Any] = []
    names: list[str] = []
    for entry in entries:
        reward = load_reward(entry.name) if ":" in entry.name else BUILTIN_REWARDS[entry.name]
        reward = _bind_parameters(reward, entry, settings or {})
        name = getattr(reward, "__name__", type(reward).__name__)
        if name in names:
            reward = _with_arguments(reward, {})
            reward.__name__ = f"{name}_{names.count(name) + 1}"
        names.append(name)
        functions.append(reward)
    return functions


def load_reward(name: str) -> Reward:
    """Execute the code of `path/to/file.py:name` or `package.module:name` and return the callable as a function `name`.

    Its errors name it and the line: the trainer that calls it shows neither. Raises UsageError for a class.
    """
    reward = load_object(name, KEY, callable, "function")
    behind = reward
    while isinstance(behind, functools.partial):
        behind = behind.func
    if isinstance(behind, type):
        raise UsageError(f"{name} is a class", key=KEY, fix="name a function, or an instance that has __call__")
    if not inspect.isroutine(behind) and not hasattr(behind, "__wrapped__"):
        behind = behind.__call__

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with _errors_named(name):
            return await reward(*args, **kwargs)

    scored = _errors_named(name)(lambda *args, **kwargs: reward(*args, **kwargs))
    function: Any = functools.wraps(behind)(awaited if inspect.iscoroutinefunction(behind) else scored)
    function.__name__, function.__signature__ = name.rpartition(":")[2], inspect.signature(reward)
    return function  # type: ignore[no-any-return]


@contextmanager
def _errors_named(name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
        if ends_by_signal(error):
            raise
        raise RewardError(f"cogumi.rewards: {describe_error(error, name)}") from error


def _bind_parameters(reward: Reward, entry: Entry, settings: Mapping[str, Any]) -> Reward:
    """Bind the entry's arguments and RUN_SETTINGS to a reward. Raises UsageError for an unknown one or a wrong type."""
    parameters, hints = parameters_of(reward), _hints_of(reward)
    columns = {name for name in parameters if name not in ALWAYS_THERE and _is_column(parameters[name], hints)}
    known = [name for name in parameters if name not in (*ALWAYS_THERE, "environments", *THOUGHT_COLUMNS, *columns)]
    bound = {name: settings[name] for name in RUN_SETTINGS if name in parameters and name in settings}
    for name, value in entry.parameters.items():
        if name not in known:
            near = nearest(name, known)
            fix = f"did you mean {near}?" if near else f"it takes {', '.join(known) or 'none'}"
            if name in columns:
                fix = f"it is a column of the data, by the name in data.columns: {{{name}: ...}}"
            raise UsageError(f"{entry.name} takes no parameter `{name}`", key=KEY, fix=fix)
        bound[name] = _check_type(name, value, hints.get(name, Any), entry.name)
    return _with_arguments(reward, bound) if bound else reward


def _with_arguments(reward: Reward, arguments: Mapping[str, Any]) -> Reward:
    """Bind arguments to a reward; they take precedence over columns of the same name."""
    bound: Any = with_columns(reward, lambda columns: {**columns, **arguments})
    signature = inspect.signature(reward)
    rest = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
    bound.__signature__ = signature.replace(parameters=rest)
    return bound  # type: ignore[no-any-return]


def _check_type(key: str, value: Any, hint: Any, name: str) -> Any:
    """Coerce a value to an annotation. Raises UsageError if it is of another type."""
    try:
        adapter = TypeAdapter(hint)
    except PydanticSchemaGenerationError:  # no type of values, such as a class of the user's own
        return value
    try:
        checked = adapter.validate_python(value)
    except ValidationError as error:
        raise UsageError(f"{name}: {key} = {value!r}: {error.errors()[0]['msg']}", key=KEY) from None
    if isinstance(value, bool) and not isinstance(checked, bool):  # pydantic reads true as the number 1
        raise UsageError(f"{name}: {key} = {value!r}: not a number", key=KEY)
    return checked


def _hints_of(reward: Reward) -> dict[str, Any]:
    """Return the annotations of a function with their limits; nothing if a name in one cannot be resolved."""
    try:
        return get_type_hints(inspect.unwrap(reward), include_extras=True)
    except (NameError, TypeError):
        return {}


def _is_column(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    """Tell whether a parameter is annotated as one value per completion, and so is a column of the data."""
    return parameter.default is parameter.empty and get_origin(hints.get(parameter.name)) in (list, Sequence)


def needed_columns(reward: Reward) -> list[str]:
    """Return the columns of the data that a reward cannot score without."""
    provided = (*ALWAYS_THERE, *THOUGHT_COLUMNS)
    parameters = parameters_of(reward).values()
    return [item.name for item in parameters if item.default is item.empty and item.name not in provided]


def refuse_missing_columns(rewards: Sequence[Reward], columns: Collection[str]) -> None:
    """Raise UsageError if a reward needs a column that the data lacks: TRL would find out after the first rollout."""
    for reward in rewards:
        hints = _hints_of(reward)
        if all(item.kind is not item.VAR_KEYWORD for item in inspect.signature(reward).parameters.values()):
            message = f"{reward.__name__} is given every column, completion_ids and more, and takes no **kwargs"
            raise UsageError(message, key=KEY, fix="add **kwargs to its parameters")
        if by_place := [item.name for item in parameters_of(reward).values() if item.kind is item.POSITIONAL_ONLY]:
            message = f"{reward.__name__} takes `{by_place[0]}` by its place, and is given arguments by their names"
            raise UsageError(message, key=KEY, fix="leave out the / of its parameters")
        for name in needed_columns(reward):
            if name not in columns:
                message = f"{reward.__name__} takes `{name}`, and the prompts come with {', '.join(sorted(columns))}"
                fix = f"say which column of the file it is: data.columns: {{{name}: ...}}"
                if not _is_column(parameters_of(reward)[name], hints):
                    fix += f", or give its value in the entry: {{name: {reward.__name__}, {name}: ...}}"
                raise UsageError(message, key=KEY, fix=fix)


# -------------------------------------------------------------------------------------------------------------- shapes


def messages_of(completion: Any, role: str) -> Any:
    """Return a prompt or completion as messages: text becomes one."""
    return [{"role": role, "content": completion}] if isinstance(completion, str) else completion


def as_annotated(reward: Any) -> Any:
    """Wrap a reward so that it gets prompts and completions as it is annotated, in lists that it may change."""
    converters: dict[str, Callable[[Any], Any]] = {}
    hints = {**getattr(reward, "__annotations__", {}), **_hints_of(reward)}
    for name, role in ROLES.items():
        annotation = re.sub(r"^(?:\w+\.)?Optional\[(.*)\]$| \| None$", r"\1", str(hints.get(name)))
        if TEXT_ANNOTATION.fullmatch(annotation):
            converters[name] = text_of
        elif MESSAGES_ANNOTATION.fullmatch(annotation):
            converters[name] = functools.partial(messages_of, role=role)

    def convert(columns: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {name: value if name in SHARED else copy.deepcopy(value) for name, value in columns.items()}
        inputs = {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}
        return inputs | {name: list(map(converters[name], inputs[name])) for name in converters if name in inputs}

    return with_columns(reward, convert)


def try_reward(reward: Any, row: Mapping[str, Any], group: int, **arguments: Any) -> tuple[bool, str] | None:
    """Call a reward once, for `group` completions of a made-up text in the shape that TRL will give it.

    `row` is the first of the data, `arguments` what TRL passes besides. An asynchronous reward, such as a paid judge, is not
    called. Returns None if it scores them, else (whether the shape is wrong, one line about the error).
    """
    conversational = not isinstance(row["prompt"], str)
    error = _error_of_reward(reward, row, group, conversational, arguments)
    if error is None:
        return None
    name = getattr(reward, "__name__", type(reward).__name__)
    problem = f"reward {describe_error(error, name)} on a trial completion"
    is_shape = isinstance(error, SHAPE_ERRORS)
    if not is_shape or _error_of_reward(reward, row, group, not conversational, arguments) is not None:
        return False, f"{problem}; a function that cannot score every text ends the training in its first rollout"
    got, takes, shape = ("messages", "strings", "str") if conversational else ("text", "messages", "list[dict]")
    fix = f"annotate it `completions: list[{shape}]` to be given those, or have it read {got}"
    return True, f"{problem}: the prompts are {got}, and so are the completions. The function takes {takes}; {fix}"


def _error_of_reward(
    reward: Any, row: Mapping[str, Any], group: int, conversational: bool, arguments: Mapping[str, Any]
) -> Any:
    """Return the exception of a reward on made-up completions of one prompt, or None."""
    if inspect.iscoroutinefunction(reward):
        return None
    shape = messages_of if conversational else lambda text, role: text_of(text)
    columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
    columns |= {"prompts": shape(row["prompt"], "user"), "completions": shape(SAMPLE, "assistant")}
    columns["completion_ids"] = [0]
    logs = dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)
    try:
        answer = as_annotated(reward)(**{name: [value] * group for name, value in columns.items()}, **logs, **arguments)
        read_scores(reward, answer, group)
    except UsageError:  # of a parameter that it cannot work with, or of what it returned
        raise
    except Exception as error:  # noqa: BLE001  the user's own code may raise anything; it is reported
        # `load_reward` wraps an error of a user's file.
        return error.__cause__ if isinstance(error, RewardError) and error.__cause__ is not None else error
    return None
