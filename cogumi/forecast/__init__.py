"""Does a run fit the card, the disk and the budget? Said before anything is downloaded."""

from typing import TYPE_CHECKING, Any

from cogumi.forecast.preflight_report import Line, PreflightReport

if TYPE_CHECKING:
    from cogumi.forecast.preflight_worker import preflight

__all__ = ["Line", "PreflightReport", "preflight"]


def __getattr__(name: str) -> Any:
    # A report that comes from another process is read without torch.
    if name != "preflight":
        raise AttributeError(f"module 'cogumi.forecast' has no attribute {name!r}")
    from cogumi.forecast.preflight_worker import preflight

    return preflight
