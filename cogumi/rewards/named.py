"""From the names in a YAML to reward functions: those that are here, and the user's own in a file or a module."""

import difflib
import functools
import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cogumi.errors import UsageError
from cogumi.rewards.answers import answer_similarity, final_number
from cogumi.rewards.fim import edit_similarity, exact_match, parses

Reward = Callable[..., list[float]]
REWARDS: dict[str, Reward] = {
    "exact_match": exact_match,
    "edit_similarity": edit_similarity,
    "parses": parses,
    "final_number": final_number,
    "answer_similarity": answer_similarity,
}
"""What a YAML may name, beside `file.py:function` and `package.module:function`."""
ALWAYS_THERE = ("prompts", "completions", "completion_ids", "trainer_state")  # what TRL passes whatever the data has


def rewards_of(names: Sequence[str]) -> list[Any]:
    """The reward functions of these names, in this order. Raises UsageError for a name that stands for none.

    Typed as Any, because trl's `reward_funcs` is an invariant list of a union that no list of functions matches.
    """
    if not names:
        raise UsageError("cogumi.rewards is empty", fix="name at least one reward")
    return [own_reward(name) if ":" in name else reward_here(name) for name in names]


def reward_here(name: str) -> Reward:
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(
            f"no reward {name!r}",
            key="cogumi.rewards",
            fix=f"{hint}there are: {', '.join(REWARDS)}, and your own as file.py:function",
        )
    return REWARDS[name]


def own_reward(name: str) -> Reward:
    """The function of `path/to/file.py:function` or `package.module:function`, whose code is executed to get it."""
    place, _, function = name.rpartition(":")
    try:
        module = module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise UsageError(f"{name}: {error} (looked from {Path.cwd()})", key="cogumi.rewards") from None
    except Exception as error:  # the user's own code, which may raise anything
        raise UsageError(f"{name}: {place} raises {type(error).__name__}: {error}", key="cogumi.rewards") from error
    found = getattr(module, function, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            f"{place} has no function {function!r}",
            key="cogumi.rewards",
            fix=f"it has: {', '.join(functions) or 'none'}",
        )
    return saying_where(name, found)


def saying_where(name: str, reward: Callable[..., Any]) -> Callable[..., Any]:
    """A reward whose errors name it and the line: the trainer that calls it shows neither."""
    if inspect.iscoroutinefunction(reward):  # trl awaits those
        return reward

    @functools.wraps(reward)
    def scored(*args: Any, **kwargs: Any) -> Any:
        try:
            return reward(*args, **kwargs)
        except Exception as error:  # the user's own code, which may raise anything
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"cogumi.rewards: {name} raised {what} ({at.filename}:{at.lineno})") from error

    return scored


def module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refuse_missing_columns(rewards: Sequence[Reward], columns: Collection[str]) -> None:
    """Raise UsageError where a reward asks for what the data has not: TRL would find out after the first rollout."""
    for reward in rewards:
        for parameter in inspect.signature(reward).parameters.values():
            positional = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if not positional or parameter.default is not parameter.empty or parameter.name in ALWAYS_THERE:
                continue
            if parameter.name not in columns:
                raise UsageError(
                    f"{reward.__name__} takes `{parameter.name}`, and the prompts come with "
                    f"{', '.join(sorted(columns))}",
                    key="cogumi.rewards",
                    fix=f"say which column of the file it is: data.columns: {{{parameter.name}: ...}}",
                )
