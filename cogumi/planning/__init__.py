"""Does a run fit the card, the disk and the budget? Said before anything is downloaded."""

from cogumi.planning.flight import preflight
from cogumi.planning.lines import Line, PreflightReport

__all__ = ["Line", "PreflightReport", "preflight"]
