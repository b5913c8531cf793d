"""Names of a module that stand for something else for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(module: ModuleType, attributes: dict[str, Any]) -> Iterator[None]:
    """Put these in the place of the module's own, and those back. Raises AttributeError for a name that it lacks."""
    originals = {name: getattr(module, name) for name in attributes}
    for name, value in attributes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)
