"""Changes to other people's code, each with its own undo, and the only place with private names of theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class PatchStatus:
    """What each patch returns from `apply()`, `undo()` and `status()`: is it in place, and why (not)."""

    name: str
    applied: bool
    reason: str


@contextmanager
def replaced(module: ModuleType, attributes: dict[str, Any]) -> Iterator[None]:
    """A module's own names stand for these for the length of a block. Raises AttributeError for a name that it lacks."""
    originals = {name: getattr(module, name) for name in attributes}
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(originals)
