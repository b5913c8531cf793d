"""Where a run's metrics are shown besides its own files: `train.report_to`, with TensorBoard where nothing is said."""

import logging
import os
from pathlib import Path
from typing import Any

from transformers.integrations import TensorBoardCallback, WandbCallback

from cogumi.core.errors import RefusedAtSetup
from cogumi.core.formatting import pip
from cogumi.telemetry import accounts
from cogumi.telemetry.accounts import TENSORBOARD, WITHOUT_WANDB, one_line

log = logging.getLogger("cogumi")


def default_reporter() -> str:
    return TENSORBOARD if accounts.is_installed(TENSORBOARD) else "none"


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
    if not accounts.is_installed(TENSORBOARD) and not trainer.args.report_to:
        install = pip("install tensorboard")
        log.info("metrics are in metrics.jsonl alone: TensorBoard is not installed (%s)", install)


def begin_wandb(trainer: Any) -> None:
    """Have W&B make its run now: transformers would at the first log, and its failure would end the training with a traceback.

    Raises RefusedAtSetup, in W&B's words.
    """
    for each in trainer.callback_handler.callbacks:
        if isinstance(each, WandbCallback):
            import wandb

            try:
                each.setup(trainer.args, trainer.state, trainer.model)
            except wandb.errors.Error as error:
                raise RefusedAtSetup(f"wandb: {one_line(error)}", key="train.report_to", fix=WITHOUT_WANDB) from error


def close(trainer: Any) -> None:
    """Close TensorBoard's file, which what is logged after the training has opened again."""
    for each in trainer.callback_handler.callbacks:
        if isinstance(each, TensorBoardCallback) and each.tb_writer is not None:
            each.tb_writer.close()
            each.tb_writer = None
