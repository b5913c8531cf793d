"""Does a run fit the card, the disk and the budget? Said before anything is downloaded."""

from typing import TYPE_CHECKING, Any

from cogumi.planning.lines import Line, PreflightReport

if TYPE_CHECKING:
    from cogumi.planning.flight import preflight

__all__ = ["Line", "PreflightReport", "preflight"]


def __getattr__(name: str) -> Any:
    # A report that comes from another process is read without torch.
    if name != "preflight":
        raise AttributeError(f"module 'cogumi.planning' has no attribute {name!r}")
    from cogumi.planning.flight import preflight

    return preflight
