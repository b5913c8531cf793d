"""What may be asked of a training under way, by a file in its run directory: CHECKPOINT and PAUSE.

A pause waits between two steps, with a checkpoint, until the file PAUSED is removed; a red flag may ask for one as well.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.core.run_directory import CHECKPOINT, PAUSE, PAUSED
from cogumi.telemetry.recorder import set_status

log = logging.getLogger("cogumi")
LOOK_SECONDS = 1.0  # between two looks at the directory, which may be on a slow disk
PAUSE_SECONDS = 0.5


class Waiting(TrainerCallback):
    """Does what is asked for. paused: in whose block time is no part of a step. excused: in whose block the training may be
    silent. asked_to_end: whether a signal has come. Goes before callbacks that take the time of a step."""

    def __init__(
        self,
        trainer: Any,
        directory: Path,
        paused: Callable[[], AbstractContextManager[None]],
        excused: Callable[[], AbstractContextManager[None]],
        asked_to_end: Callable[[], bool],
    ) -> None:
        self.trainer, self.directory = trainer, directory
        self.paused, self.excused, self.asked_to_end = paused, excused, asked_to_end
        self.reason: str | None = None
        self.looked = 0.0

    def pause(self, reason: str) -> None:
        """Have the training wait before its next step."""
        self.reason = reason

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        forget_requests(self.directory)  # what came too late

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS or state.global_step >= state.max_steps:
            return
        self.looked = now
        if self.taken(PAUSE):
            control.should_save = True
            self.pause("asked to wait")
        if self.taken(CHECKPOINT):
            log.info("step %d: a checkpoint, as asked", state.global_step)
            control.should_save = True

    def taken(self, name: str) -> bool:
        """Whether the file is there. It is removed: what it asks for is about to be done."""
        try:
            (self.directory / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Where the checkpoint is written. (An `on_save` of its own would have every save wait for the disk.)"""
        if self.reason is not None:
            reason, self.reason = self.reason, None
            self.wait(reason, state.global_step)

    def wait(self, reason: str, step: int) -> None:
        """Wait until somebody removes the file, or a signal asks the training to end."""
        protection = getattr(self.trainer, "cogumi_protection", None)
        if protection is not None:
            protection.saver.settle()  # the checkpoint of this step is there when the file is
        path = self.directory / PAUSED
        text = f"step {step}: {reason}\n"
        path.write_text(
            f"{text}`cogumi unpause`, or removing this file, ends the pause; end the process and it can go on later.\n"
        )
        set_status(self.directory, "paused", reason=text.strip())
        log.warning("training waits after step %d; `cogumi unpause %s` ends the pause", step, self.directory)
        with self.excused(), self.paused():
            while path.exists() and not self.asked_to_end():
                time.sleep(PAUSE_SECONDS)
        if path.exists():
            path.unlink()
        else:
            log.warning("the pause is over, training continues")
        set_status(self.directory, "running", stage="train")


def forget_requests(directory: Path) -> None:
    for name in (CHECKPOINT, PAUSE, PAUSED):
        (directory / name).unlink(missing_ok=True)
