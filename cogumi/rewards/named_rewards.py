"""From the names in a YAML to reward functions, and the shape in which each gets completions.

TRL 1.15 gives strings for prompts that are strings, and for conversations a list of messages each, of which the last is
the model's. A function annotated `completions: list[str]` is given the text of either.
"""

import functools
import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError
from cogumi.rewards.functions import (
    Reward,
    answer_similarity,
    edit_similarity,
    exact_answer,
    exact_match,
    final_number,
    parses,
    text_of,
)

# As `str` shows them: list[str], typing.List[str], collections.abc.Sequence[str]; an annotation may be a string itself.
OF_TEXT = re.compile(r"(?:\w+\.)*(?:list|List|Sequence|Iterable)\[str\]")


def as_annotated(reward: Any) -> Any:
    """A reward function that is given the text of its prompts and completions where it is annotated with text."""
    hints = getattr(reward, "__annotations__", {})
    of_text = [name for name in ("prompts", "completions") if OF_TEXT.fullmatch(str(hints.get(name)))]
    if not of_text:
        return reward

    def shaped(given: Mapping[str, Any]) -> dict[str, Any]:
        return {**given, **{name: list(map(text_of, given[name])) for name in of_text if name in given}}

    if inspect.iscoroutinefunction(reward):

        @functools.wraps(reward)
        async def awaited(**columns: Any) -> Any:
            return await reward(**shaped(columns))

        return awaited

    @functools.wraps(reward)
    def scored(**columns: Any) -> Any:
        return reward(**shaped(columns))

    return scored


BUILTIN_REWARDS: dict[str, Reward] = {
    each.__name__: each
    for each in (exact_match, edit_similarity, parses, final_number, exact_answer, answer_similarity)
}
"""What a YAML may name, beside `file.py:function` and `package.module:function`."""
ALWAYS_THERE = ("prompts", "completions", "completion_ids", "trainer_state")  # what TRL passes whatever the data has


def rewards_of(names: Sequence[str]) -> list[Any]:
    """The reward functions of these names, in this order. Raises UsageError for a name that stands for none."""
    if not names:
        raise UsageError("cogumi.rewards is empty", fix="name at least one reward")
    for unknown in (name for name in names if ":" not in name and name not in BUILTIN_REWARDS):
        near = nearest(unknown, BUILTIN_REWARDS)
        hint = f"did you mean {near!r}? " if near else ""
        fix = f"{hint}there are: {', '.join(BUILTIN_REWARDS)}, and your own as file.py:function"
        raise UsageError(f"no reward {unknown!r}", key="cogumi.rewards", fix=fix)
    return [load_reward(name) if ":" in name else BUILTIN_REWARDS[name] for name in names]


def load_reward(name: str) -> Reward:
    """The function of `path/to/file.py:function` or `package.module:function`, whose code is executed to get it."""
    place, _, function = name.rpartition(":")
    try:
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise FileNotFoundError(f"no such file: {place}")
            loader = SourceFileLoader(Path(place).stem, place)
            module = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
            loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise UsageError(f"{name}: {error} (looked from {Path.cwd()})", key="cogumi.rewards") from None
    except Exception as error:  # the user's own code, which may raise anything
        raise UsageError(f"{name}: {place} raises {type(error).__name__}: {error}", key="cogumi.rewards") from error
    found = getattr(module, function, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        fix = f"it has: {', '.join(functions) or 'none'}"
        raise UsageError(f"{place} has no function {function!r}", key="cogumi.rewards", fix=fix)
    return with_location(name, found)


def with_location(name: str, reward: Callable[..., Any]) -> Callable[..., Any]:
    """A reward whose errors name it and the line: the trainer that calls it shows neither."""
    if inspect.iscoroutinefunction(reward):  # trl awaits those
        return reward

    @functools.wraps(reward)
    def scored(*args: Any, **kwargs: Any) -> Any:
        try:
            return reward(*args, **kwargs)
        except Exception as error:  # the user's own code, which may raise anything
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"
            of_shape = isinstance(error, TypeError | AttributeError | KeyError)
            if of_shape and not all(isinstance(each, str) for each in kwargs.get("completions", ())):
                what += "; it was given messages, and text if it is annotated `completions: list[str]`"
            raise RuntimeError(f"cogumi.rewards: {name} raised {what}") from error

    return scored


def refuse_missing_columns(rewards: Sequence[Reward], columns: Collection[str]) -> None:
    """Raise UsageError where a reward asks for what the data has not: TRL would find out after the first rollout."""
    for reward in rewards:
        for parameter in inspect.signature(reward).parameters.values():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            needed = named and parameter.default is parameter.empty and parameter.name not in ALWAYS_THERE
            if needed and parameter.name not in columns:
                what = f"{reward.__name__} takes `{parameter.name}`, and the prompts come with {', '.join(sorted(columns))}"
                fix = f"say which column of the file it is: data.columns: {{{parameter.name}: ...}}"
                raise UsageError(what, key="cogumi.rewards", fix=fix)
