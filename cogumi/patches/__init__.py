"""Changes to other people's code, each with its own undo, and the only place with private names of theirs."""

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# TRL 1.16 and PEFT 0.21.2 use the old names of transformers 5.24's activation checkpointing in each run and merge.
warnings.filterwarnings("ignore", r".*gradient_checkpointing\w*` is deprecated", FutureWarning)


@dataclass(frozen=True)
class PatchStatus:
    """Result of `apply()`, `undo()` and `status()` of each patch: whether it is in place, and the reason."""

    name: str
    applied: bool
    reason: str


def method_around(original: Any, around: Any) -> Any:
    """Return a method that calls `around(self, original, ...)`. Dynamo traces into functools.partialmethod differently."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, original, *args, **kwargs)

    return method


@contextmanager
def replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of a module or an object for the length of a block. Raises AttributeError for one that it lacks."""
    for name in attributes:
        getattr(owner, name)
    originals = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            delattr(owner, name)
        vars(owner).update(originals)
