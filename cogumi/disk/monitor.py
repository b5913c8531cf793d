"""A monitor of the disk that a directory is on: it measures, says when a threshold is passed, and never deletes."""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from cogumi.core.disk_space import Space, filesystem_of, space_of
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes
from cogumi.core.run_directory import append_jsonl

log = logging.getLogger(__name__)

Level = Literal["green", "yellow", "red", "unknown"]

TOLD = ("total", "used", "free", "used_share", "inodes_free", "inodes_share")  # of a Space, in a Sample


@dataclass(frozen=True)
class Sample:
    """One look at a filesystem. Bytes; None where it did not answer (level "unknown", and `reason` says why).

    time: seconds since 1970. used_share: of what root's reserve leaves, 0 to 1; inodes_share: None where inodes are
    without a limit.
    """

    time: float
    path: str
    level: Level
    reason: str
    total: int | None = None
    used: int | None = None
    free: int | None = None
    used_share: float | None = None
    inodes_free: int | None = None
    inodes_share: float | None = None


class DiskMonitor:
    """Watches the filesystem of `path`: `with DiskMonitor("/workspace"):`, or start() and stop(), or sample() alone.

    warn, alarm: shares of the bytes, or of the inodes, from which the level is "yellow" and "red". interval: seconds
    between two looks of the thread. on_change: called with the Sample when the level changes, in the thread that
    looked. The level is green at first. log_path: a file that each Sample is added to as a line of JSON. Levels are
    logged when they change. Nothing is ever deleted.

    Raises UsageError for thresholds that are none, or a `path` that is not there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = ".",
        *,
        warn: float = 0.60,
        alarm: float = 0.80,
        interval: float = 30.0,
        on_change: Callable[[Sample], object] | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> None:
        check_settings(warn, alarm, interval)
        self.path = Path(path).absolute()
        with suppress(OSError):  # a mount that does not answer is there
            if not self.path.exists():
                fix = "give a directory on the disk to be watched"
                raise UsageError(f"cannot watch {path}: it does not exist", fix=fix)
        self.warn, self.alarm, self.interval = warn, alarm, interval
        self.on_change = on_change
        self.log_path = None if log_path is None else Path(log_path)
        self.latest: Sample | None = None
        self.level: Level = "green"
        self._device: int | None = None
        self._said: set[str] = set()
        self._looking = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __str__(self) -> str:
        return f"{described(self.path)}; yellow from {percent(self.warn)}, red from {percent(self.alarm)}"

    def sample(self) -> Sample:
        """Look now, with or without the thread running. A filesystem that does not answer is a Sample, not an error."""
        with self._looking:
            sample = self._measure()
            changed = sample.level != self.level
            self.level, self.latest = sample.level, sample
        if changed:
            severity = logging.INFO if sample.level == "green" else logging.WARNING
            log.log(severity, "disk %s is %s: %s", sample.path, sample.level, sample.reason)
        self._tell(sample, changed)
        return sample

    def _measure(self) -> Sample:
        try:
            device, space = os.stat(self.path).st_dev, space_of(self.path)
        except OSError as error:
            return Sample(time.time(), str(self.path), "unknown", f"does not answer: {error.strerror}")
        if self._device not in (None, device):
            # An unmounted volume leaves an empty directory, whose numbers are those of the disk below.
            log.warning("disk %s: is on another filesystem now than when the watch began", self.path)
        self._device = device
        level, reason = self._judge(space)
        told = {name: getattr(space, name) for name in TOLD}
        return Sample(time.time(), str(self.path), level, reason, **told)

    def _judge(self, space: Space) -> tuple[Level, str]:
        if space.used_share is None:
            return "unknown", "this filesystem tells no size"
        reason = f"{percent(space.used_share)} of {format_bytes(space.used + space.free)} used, {format_bytes(space.free)} free"
        if space.read_only:  # as the kernel makes a filesystem when its disk fails
            return "red", f"it is read-only: nothing can be written; {reason}"
        share = space.used_share
        if space.inodes_share is not None and space.inodes_share > share:
            share = space.inodes_share
            if share >= self.warn:
                reason = f"{percent(share)} of {space.inodes:,} inodes used, {space.inodes_free:,} free; {reason}"
        return ("red" if share >= self.alarm else "yellow" if share >= self.warn else "green"), reason

    def _tell(self, sample: Sample, changed: bool) -> None:
        """Call on_change, and add to log_path. What fails there is said once, and must not end the watch."""
        try:
            if changed and self.on_change is not None:
                self.on_change(sample)
        except Exception:  # noqa: BLE001  the caller's
            self._say_once("on_change failed", sys.exc_info())
        try:
            if self.log_path is not None:
                append_jsonl(self.log_path, asdict(sample))
        except OSError as error:  # the disk that is watched may be the one it is on
            self._say_once(f"cannot write {self.log_path}: {error.strerror}")

    def _say_once(self, message: str, failure: Any = None) -> None:
        if message not in self._said:
            log.log(logging.ERROR if failure else logging.WARNING, "disk %s: %s; the watch continues, and this is said once",
                    self.path, message, exc_info=failure)  # fmt: skip
        self._said.add(message)

    def start(self) -> Self:
        """Look now, and then every `interval` seconds in a thread of its own. Raises RuntimeError if that runs already."""
        if self._thread is not None:
            raise RuntimeError(f"{self.path} is being watched by this monitor already")
        log.info("disk: watching %s, every %g s", self, self.interval)
        self.sample()
        self._stopping = threading.Event()  # of its own: an earlier thread may hang in a filesystem still
        self._thread = threading.Thread(
            target=self._watch, args=[self._stopping], name="cogumi-disk-monitor", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread and wait for it, a minute at most where the filesystem hangs. Does nothing where none runs."""
        if self._thread is None:
            return
        self._stopping.set()
        if self._thread is not threading.current_thread():  # on_change may be what stops it
            self._thread.join(60)
        self._thread = None

    def _watch(self, stopping: threading.Event) -> None:
        while not stopping.wait(self.interval):
            self.sample()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def check_settings(warn: float, alarm: float, interval: float) -> None:
    """Raises UsageError for thresholds that are no shares in order, and for an interval that is none."""
    if not 0 < warn <= alarm <= 1:
        raise UsageError(
            f"warn={warn}, alarm={alarm}: shares of the disk with 0 < warn <= alarm <= 1", fix="0.6 and 0.8 are usual"
        )
    if not (math.isfinite(interval) and interval > 0):
        raise UsageError(f"interval={interval}: give a number of seconds above 0")


def described(path: Path) -> str:
    """A directory and its filesystem in words: what a watch says when it begins."""
    try:
        filesystem = filesystem_of(path)
    except OSError as error:
        return f"{path} (its filesystem does not answer: {error.strerror})"
    where = f"{filesystem.kind or 'a filesystem'} at {filesystem.mount}"
    if filesystem.network:
        where += ", a network filesystem whose numbers may be the whole cluster's"
    share = filesystem.space.used_share
    used = "of unknown size" if share is None else f"{percent(share)} used, {format_bytes(filesystem.space.free)} free"
    return f"{path} ({where}: {used})"


def percent(share: float) -> str:
    """Rounded down, so that what is below a threshold does not read as if it had reached it."""
    return f"{math.floor(share * 100 + 1e-9)} %"
