"""What the user can fix, and what a merge found wrong."""

from pathlib import Path


class UsageError(Exception):
    """Bad input from the user.

    Its text is one line that names the thing, the place and the fix. The command line prints that line without a
    traceback and exits with status 2; a notebook shows it alone as well.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython prints in place of a traceback."""
        return [f"cogumi: {self}"]


class RefusedAtSetup(UsageError):
    """A setting that a library refuses while the run is set up, before the first step; the run leaves no directory."""


class DiskFull(UsageError):
    """Something does not fit on a disk. needed: bytes that it takes there, 0 where that is not known; place: a directory."""

    def __init__(self, text: str, place: Path, needed: int = 0) -> None:
        super().__init__(text)
        self.place, self.needed = place, needed


class RunFailed(Exception):
    """A run that was to be started in another process ended there before it had begun to train."""


class MergeError(Exception):
    """A merge produced something that is not W + delta, or a merged directory is not what was written."""


# What KeyboardInterrupt says when a training was ended in good order. (A subclass would not give exit status 130.)
FINISHED_AND_SAVED = "the step was finished, and saved if the disk took it"
