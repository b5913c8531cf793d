"""Where a run's metrics are shown besides its own files: `train.report_to`, with TensorBoard where nothing is said."""

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from cogumi.errors import UsageError

log = logging.getLogger("cogumi")
TENSORBOARD = "tensorboard"
# What has to be importable for a reporter, and what brings it, where transformers would say so only when the model is loaded.
PACKAGES = {TENSORBOARD: "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def default_reporter() -> str:
    return TENSORBOARD if is_installed(TENSORBOARD) else "none"


def is_installed(reporter: str) -> bool:
    return importlib.util.find_spec(PACKAGES[reporter]) is not None


def refuse_missing(report_to: str | list[str] | None) -> None:
    """Raise UsageError for a reporter that transformers does not know, or whose package is not installed."""
    if report_to in (None, "none", "all", ["none"], ["all"]):
        return
    try:
        get_reporting_integration_callbacks(report_to)
    except ValueError as error:
        raise UsageError(f"train.report_to: {error}") from None
    for name in [report_to] if isinstance(report_to, str) else report_to or []:
        if name in PACKAGES and not is_installed(name):
            raise UsageError(f"train.report_to: {name} is not installed; run: pip install {PACKAGES[name]}")


def write_into(run_dir: Path, trainer: Any) -> None:
    """Have TensorBoard's files written into the run directory, unless TENSORBOARD_LOGGING_DIR says where.

    transformers would write them below checkpoints/, in a directory for each start; and into the current directory what an
    evaluation before the training logs (5.17, `TensorBoardCallback.on_log`).
    """
    boards = [each for each in trainer.callback_handler.callbacks if isinstance(each, TensorBoardCallback)]
    for board in boards:
        if board.logging_dir is None:
            board.logging_dir = str(run_dir / TENSORBOARD)
        log.info("tensorboard --logdir %s shows the metrics", os.path.relpath(board.logging_dir))
    if not is_installed(TENSORBOARD) and not trainer.args.report_to:
        log.info("metrics are in metrics.jsonl alone: TensorBoard is not installed (pip install tensorboard)")


def close(trainer: Any) -> None:
    """Close TensorBoard's file, which what is logged after the training has opened again."""
    for each in trainer.callback_handler.callbacks:
        if isinstance(each, TensorBoardCallback) and each.tb_writer is not None:
            each.tb_writer.close()
            each.tb_writer = None
