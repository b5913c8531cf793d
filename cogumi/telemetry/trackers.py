"""Trackers beside the run's own files: `train.report_to`, TensorBoard by default.

Packages, keys and network for what a run reports and uploads to are checked before anything is paid for.
"""

import importlib.util
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.integrations import TensorBoardCallback, WandbCallback

from cogumi.core.durability import NO_SPACE
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.core.formatting import one_line, pip_command
from cogumi.core.redact import redact_text
from cogumi.telemetry.status import relative_path

log = logging.getLogger("cogumi")
TENSORBOARD, WANDB = "tensorboard", "wandb"
PACKAGES = (TENSORBOARD, WANDB, "trackio")  # transformers would look for them only when the model is loaded
WITHOUT_WANDB = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"


def refuse_unreachable(train: Mapping[str, Any]) -> None:
    """Raise UsageError if a tracker or an upload of `train:` would fail."""
    report_to = train.get("report_to") or []
    for name in [report_to] if isinstance(report_to, str) else report_to:
        if name in PACKAGES and not is_installed(name):
            fix = f"run: {pip_command('install ' + name)}"
            raise UsageError(f"{name} is not installed", key="train.report_to", fix=fix)
        if name == WANDB:
            refuse_wandb_without_key()
    if train.get("push_to_hub"):
        refuse_no_upload(train.get("hub_model_id"), train.get("hub_token"))


def is_installed(reporter: str) -> bool:
    """Return whether a reporter's package is installed; W&B's own `wandb/` directory, which Python finds too, is none."""
    spec = importlib.util.find_spec(reporter)
    return spec is not None and spec.origin is not None


def refuse_wandb_without_key() -> None:
    """Raise UsageError unless W&B has a key that its server takes, or writes to the disk alone (WANDB_MODE=offline)."""
    import wandb

    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    # Older releases have no such switch, and ask for a key where there is a terminal.
    quietly = {"prompt": False} if "prompt" in inspect.signature(wandb.login).parameters else {}
    try:
        if wandb.login(verify=True, **quietly):
            return
        reason = "there is no API key"
    except wandb.errors.Error as error:
        reason = quote_error(error)
    raise UsageError(f"wandb: {reason}", key="train.report_to", fix=WITHOUT_WANDB)


def refuse_no_upload(repository: str | None, token: str | None) -> None:
    """Raise UsageError without a name or a token for the upload; the trainer asks the hub itself."""
    from huggingface_hub import constants, get_token

    problem, fix = "", ""
    if repository is None:
        problem, fix = "train.hub_model_id is missing, and TRL would call the repository `checkpoints`", "set it"
    elif constants.is_offline_mode():
        problem, fix = "HF_HUB_OFFLINE is set, so nothing can be uploaded", "unset it, or drop train.push_to_hub"
    elif (token or get_token()) is None:
        problem, fix = "there is no token to write to the hub with", "run `hf auth login`, or set HF_TOKEN"
    if problem:
        raise UsageError(problem, key="train.push_to_hub", fix=fix)


def quote_error(error: Exception) -> str:
    return redact_text(one_line(error).rstrip("."))[:300]


def default_reporter() -> str:
    return TENSORBOARD if is_installed(TENSORBOARD) else "none"


def set_tensorboard_directory(run_dir: Path, trainer: Any) -> None:
    """Have TensorBoard's files written into the run directory, unless TENSORBOARD_LOGGING_DIR names another.

    transformers would write them below checkpoints/, in a directory for each start, and into ./runs.
    """
    for board in callbacks_of(trainer, TensorBoardCallback):
        if board.logging_dir is None:
            board.logging_dir = str(run_dir / TENSORBOARD)
        survive_full_disk(board)
        log.info("tensorboard --logdir %s shows the metrics", relative_path(str(board.logging_dir)))


def survive_full_disk(board: TensorBoardCallback) -> None:
    """Let a training continue if TensorBoard's file does not fit on the disk; metrics.jsonl has the same rows."""
    warned = False

    @contextmanager
    def unless_full() -> Iterator[None]:
        nonlocal warned
        try:
            yield
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            board.tb_writer = None  # it would fail at each call; the next row gets a new one
            if not warned:
                log.warning("TensorBoard's file does not fit on the disk; training continues without it")
            warned = True

    for event in ("on_train_begin", "on_log", "on_train_end"):
        setattr(board, event, unless_full()(getattr(board, event)))


def begin_wandb(trainer: Any) -> None:
    """Have W&B make its run now. Raises RefusedAtSetup with W&B's own words.

    transformers would do it when the training begins, and its failure would end the training with a traceback.
    """
    for callback in callbacks_of(trainer, WandbCallback):
        import wandb

        try:
            callback.setup(trainer.args, trainer.state, trainer.model)
        except wandb.errors.Error as error:
            raise RefusedAtSetup(f"wandb: {quote_error(error)}", key="train.report_to", fix=WITHOUT_WANDB) from error


def close_tensorboard(trainer: Any) -> None:
    for callback in callbacks_of(trainer, TensorBoardCallback):
        callback.on_train_end(trainer.args, trainer.state, trainer.control)


def callbacks_of(trainer: Any, kind: type) -> list[Any]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]
