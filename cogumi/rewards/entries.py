"""Entries of `cogumi.rewards`: a name, or a mapping of `name`, `weight` and keyword arguments of the function.

    rewards:
      - exact_match
      - {name: overlong, weight: 0.5, buffer: 64}

An argument is bound to the function's own signature and checked against its annotation.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError
from cogumi.rewards.functions import Reward, parameters_of, with_columns
from cogumi.rewards.lengths import THOUGHT_COLUMNS

KEY = "cogumi.rewards"
OWN_KEYS = ("name", "weight")
# What TRL passes whatever the data has.
ALWAYS_THERE = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
RUN_SETTINGS = ("max_completion_length",)
"""Keys of `train:` that a reward is given which names them, unless its entry says otherwise."""


@dataclass(frozen=True)
class Entry:
    """One entry. weight: None where it is not given, which stands for 1.0."""

    name: str
    weight: float | None = None
    parameters: dict[str, Any] = field(default_factory=dict)


def read_entries(rewards: Sequence[str | Mapping[str, Any]]) -> list[Entry]:
    """The entries, checked as far as they are known without their functions. Raises UsageError."""
    if not rewards:
        raise UsageError("cogumi.rewards is empty", fix="name at least one reward")
    entries = [Entry(each) if isinstance(each, str) else read_entry(each) for each in rewards]
    for number, entry in enumerate(entries):
        if any((entry.name, entry.parameters) == (other.name, other.parameters) for other in entries[:number]):
            what = f"{entry.name} stands there twice with the same parameters"
            raise UsageError(what, key=KEY, fix="name it once, with a weight: {name: ..., weight: 2.0}")
    return entries


def read_entry(entry: Mapping[str, Any]) -> Entry:
    name, weight = entry.get("name"), entry.get("weight")
    if not isinstance(name, str):
        fix = "write {name: exact_match, weight: 0.5}"
        raise UsageError(f"an entry is a name, or a mapping with `name`, and this is {dict(entry)!r}", key=KEY, fix=fix)
    if weight is not None:
        weight = check_type("weight", weight, float, name)
        if not math.isfinite(weight):
            raise UsageError(f"{name}: weight = {weight}: must be a finite number", key=KEY)
    return Entry(name, weight, {key: value for key, value in entry.items() if key not in OWN_KEYS})


def weights_of(rewards: Sequence[str | Mapping[str, Any]], given: Sequence[float] | None) -> list[float] | None:
    """TRL's `reward_weights`: what the entries say, or what `train:` does; None where neither says anything.

    Raises UsageError where both do.
    """
    entries = read_entries(rewards)
    if all(entry.weight is None for entry in entries):
        return None if given is None else list(given)
    if given is not None:
        what = "train.reward_weights and a `weight` in cogumi.rewards say the same"
        raise UsageError(what, key="train.reward_weights", fix="drop one")
    return [1.0 if entry.weight is None else entry.weight for entry in entries]


def bind_parameters(reward: Reward, entry: Entry, settings: Mapping[str, Any]) -> Reward:
    """The reward function with the entry's arguments, under its name. settings: values of RUN_SETTINGS.

    Raises UsageError for an argument that it does not take, and for one of a wrong type.
    """
    taken, hints = parameters_of(reward), hints_of(reward)
    columns = {name for name, each in taken.items() if name not in ALWAYS_THERE and is_column(each, hints)}
    known = [name for name in taken if name not in (*ALWAYS_THERE, "environments", *THOUGHT_COLUMNS, *columns)]
    bound = {name: settings[name] for name in RUN_SETTINGS if name in taken and name in settings}
    for name, value in entry.parameters.items():
        if name not in known:
            near = nearest(name, known)
            fix = f"did you mean {near}?" if near else f"it takes {', '.join(known) or 'none'}"
            fix = (
                f"it is a column of the data, by the name in data.columns: {{{name}: ...}}" if name in columns else fix
            )
            raise UsageError(f"{entry.name} takes no parameter `{name}`", key=KEY, fix=fix)
        bound[name] = check_type(name, value, hints.get(name, Any), entry.name)
    return with_arguments(reward, bound) if bound else reward


def check_type(key: str, value: Any, hint: Any, name: str) -> Any:
    """The value in the type of an annotation. Raises UsageError where it is of another one."""
    adapter = adapter_of(hint)
    if adapter is None:
        return value
    said = "not a number" if isinstance(value, bool) and not accepts_bool(adapter) else ""
    try:
        checked = adapter.validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
    if said:
        raise UsageError(f"{name}: {key} = {value!r}: {said}", key=KEY)
    return checked


def adapter_of(hint: Any) -> TypeAdapter[Any] | None:
    """None for an annotation that is no type of values, such as a class of the user's own."""
    try:
        return TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        return None


def accepts_bool(adapter: TypeAdapter[Any]) -> bool:
    """Whether true and false are values of this type: pydantic would read them as the numbers 1 and 0."""
    try:
        return adapter.validate_python(True, strict=True) is True
    except ValidationError:
        return False


def hints_of(reward: Reward) -> dict[str, Any]:
    """The annotations of a function, with their limits; none of them where a name in one is not to be found."""
    try:
        return get_type_hints(inspect.unwrap(reward), include_extras=True)
    except (NameError, TypeError):
        return {}


def is_column(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    """Whether a parameter is annotated as one value for each completion, and so is a column of the data."""
    return parameter.default is parameter.empty and get_origin(hints.get(parameter.name)) in (list, Sequence)


def with_arguments(reward: Reward, arguments: Mapping[str, Any]) -> Reward:
    """A reward function that is given these arguments, whatever column of the data has the same name."""
    bound: Any = with_columns(reward, lambda columns: {**columns, **arguments})
    signature = inspect.signature(reward)
    rest = [each for name, each in signature.parameters.items() if name not in arguments]
    bound.__signature__ = signature.replace(parameters=rest)
    return bound  # type: ignore[no-any-return]


def with_names(rewards: Sequence[Reward]) -> list[Reward]:
    """The functions, of which none has the name of another: TRL's metrics, as `rewards/overlong/mean`, are by name.

    The second of a name is `overlong_2`, in the order of the config.
    """
    names = [getattr(reward, "__name__", type(reward).__name__) for reward in rewards]
    named = []
    for number, (name, reward) in enumerate(zip(names, rewards, strict=True)):
        if name in names[:number]:
            reward = with_arguments(reward, {})
            reward.__name__ = f"{name}_{names[: number + 1].count(name)}"
        named.append(reward)
    return named
