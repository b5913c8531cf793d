"""What every patch in this folder returns from `apply()`, `undo()` and `status()`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PatchStatus:
    """One patch: is it in place, and why (not)."""

    name: str
    applied: bool
    reason: str
