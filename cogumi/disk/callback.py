"""The disk monitor as a callback of any transformers or TRL trainer."""

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from cogumi.core.disk_space import nearest_existing
from cogumi.disk.monitor import DiskMonitor, Sample, check_settings

log = logging.getLogger(__name__)


class DiskMonitorCallback(TrainerCallback):
    """Watches the disk that a trainer saves to: `Trainer(..., callbacks=[cogumi.DiskMonitorCallback()])`.

    path: by default args.output_dir. Measures at most once every `interval` seconds, after a step. Logs a line when the
    level changes, and puts disk/free_gb (10^9 bytes) and disk/used_percent into what the trainer logs with a loss, for
    every reporter. Of another directory than args.output_dir these are disk/DIRECTORY/free_gb and
    disk/DIRECTORY/used_percent. warn, alarm, on_change and log_path are those of `DiskMonitor`. It never deletes and
    never stops a training, even where the disk does not answer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        warn: float = 0.60,
        alarm: float = 0.80,
        interval: float = 10.0,
        on_change: Callable[[Sample], object] | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> None:
        check_settings(warn, alarm, interval)
        self.path = path
        self.interval = interval
        self.settings: dict[str, Any] = {"warn": warn, "alarm": alarm, "on_change": on_change, "log_path": log_path}
        self.monitor: DiskMonitor | None = None
        self.prefix = "disk"
        self.next_look = math.inf

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_local_process_zero:
            return
        path = self.path or Path(args.output_dir or ".")
        if self.path is None:
            with suppress(OSError):  # a mount that is gone: its watch says so
                path = nearest_existing(Path(path))  # the trainer makes the directory at its first save
        self.monitor = DiskMonitor(path, interval=self.interval, **self.settings)
        if self.path is not None and self.monitor.path != Path(args.output_dir or ".").absolute():
            self.prefix = f"disk/{self.monitor.path.as_posix().strip('/')}"
        # Reporters that report_to brought in come after it. Trainer hands no callback the list, so it is the caller's.
        handler = sys._getframe(1).f_locals.get("self")
        if isinstance(handler, CallbackHandler) and self in handler.callbacks:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)
        else:
            log.info("disk: reporters that are called before this callback do not see its figures")
        log_or_print(f"disk: watching {self.monitor}, at most every {self.interval:g} s, between steps")
        self.next_look = 0.0
        self.on_step_end(args, state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if time.monotonic() >= self.next_look and self.monitor is not None:
            self.monitor.sample()
            self.next_look = time.monotonic() + self.interval

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        sample = None if self.monitor is None else self.monitor.latest
        # What evaluate() and train() return is logged too, and is not to be added to.
        if logs is None or "loss" not in logs or sample is None or sample.free is None or sample.used_share is None:
            return
        logs[f"{self.prefix}/free_gb"] = round(sample.free / 1e9, 3)
        logs[f"{self.prefix}/used_percent"] = round(sample.used_share * 100, 2)


def log_or_print(line: str) -> None:
    """Say what is watched also in a script that has not set up logging, where only warnings are shown."""
    if log.hasHandlers():
        log.info(line)
    else:
        print(line, file=sys.stderr)
