"""Where a run's metrics are shown besides its own files: `train.report_to`, with TensorBoard where nothing is said.

Whether there is a package, a key, a network for what a run reports and uploads to is asked before anything is paid.
"""

import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.integrations import TensorBoardCallback, WandbCallback

from cogumi.core.durability import NO_SPACE
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.core.formatting import pip_command
from cogumi.core.redact import redact_text

log = logging.getLogger("cogumi")
TENSORBOARD, WANDB = "tensorboard", "wandb"
PACKAGES = (TENSORBOARD, WANDB, "trackio")  # transformers would look for them only when the model is loaded
WITHOUT_WANDB = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"


def refuse_unreachable(train: Mapping[str, Any]) -> None:
    """Raise UsageError where what `train:` reports or uploads to would fail in the middle of the run, or when it begins."""
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
    """Whether a reporter's package is there. W&B writes a directory of its own name, which Python finds as well."""
    spec = importlib.util.find_spec(reporter)
    return spec is not None and spec.origin is not None


def refuse_wandb_without_key() -> None:
    """Raise UsageError unless W&B has a key that its server takes, or writes to the disk alone (WANDB_MODE=offline)."""
    import wandb

    settings = wandb.setup().settings
    if settings.mode in ("offline", "dryrun", "disabled"):
        return
    # Older releases have no such switch, and ask for a key where there is a terminal.
    quietly = {"prompt": False} if "prompt" in inspect.signature(wandb.login).parameters else {}
    try:
        if wandb.login(verify=True, **quietly):
            return
        reason = "there is no API key"
    except wandb.errors.Error as error:
        reason = one_line(error)
    raise UsageError(f"wandb: {reason}", key="train.report_to", fix=WITHOUT_WANDB)


def refuse_no_upload(repository: str | None, token: str | None) -> None:
    """Raise UsageError unless the hub answers, and takes the token for one that may write."""
    import httpx
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    def refuse(problem: str, fix: str) -> UsageError:
        return UsageError(problem, key="train.push_to_hub", fix=fix)

    hub, token = constants.ENDPOINT, token or get_token()
    another = f"make one that may write at {hub}/settings/tokens"
    if repository is None:
        raise refuse("train.hub_model_id is missing, and TRL would call the repository `checkpoints`", "set it")
    if constants.is_offline_mode():
        raise refuse("HF_HUB_OFFLINE is set, so nothing can be uploaded", "unset it, or drop train.push_to_hub")
    if token is None:
        raise refuse(f"there is no token to write to {hub} with", "run `hf auth login`, or set HF_TOKEN")
    try:
        role = HfApi(token=token).whoami().get("auth", {}).get("accessToken", {}).get("role")
    except HfHubHTTPError as error:
        if error.response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise refuse(f"{hub} refuses the token", another) from error
        return  # busy; the upload is some minutes or hours away
    except httpx.TransportError as error:
        raise refuse(f"{hub} cannot be reached ({one_line(error)})", "connect, or drop train.push_to_hub") from error
    if role == "read":
        raise refuse("the token may only read", another)


def one_line(error: Exception) -> str:
    return redact_text(" ".join(f"{error}".split()).rstrip(".") or type(error).__name__)[:300]


def default_reporter() -> str:
    return TENSORBOARD if is_installed(TENSORBOARD) else "none"


def set_tensorboard_directory(run_dir: Path, trainer: Any) -> None:
    """Have TensorBoard's files written into the run directory, unless TENSORBOARD_LOGGING_DIR says where.

    transformers would write them below checkpoints/, in a directory for each start, and into ./runs.
    """
    for board in callbacks_of(trainer, TensorBoardCallback):
        if board.logging_dir is None:
            board.logging_dir = str(run_dir / TENSORBOARD)
        survive_full_disk(board)
        log.info("tensorboard --logdir %s shows the metrics", os.path.relpath(board.logging_dir))
    if not is_installed(TENSORBOARD) and not trainer.args.report_to:
        install = pip_command("install tensorboard")
        log.info("metrics are in metrics.jsonl alone: TensorBoard is not installed (%s)", install)


def survive_full_disk(board: TensorBoardCallback) -> None:
    """Have a training continue where TensorBoard's file does not fit on the disk; metrics.jsonl has the same rows.

    A writer that failed fails at each call, so the next row is given a new one, whose file begins there.
    """
    told = False

    def guard(act: Callable[..., None]) -> Callable[..., None]:
        def guarded(*given: Any, **more: Any) -> None:
            nonlocal told
            try:
                act(*given, **more)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                board.tb_writer = None
                if not told:
                    log.warning("TensorBoard's file does not fit on the disk; training continues without it")
                told = True

        return guarded

    for event in ("on_train_begin", "on_log", "on_train_end"):
        setattr(board, event, guard(getattr(board, event)))


def begin_wandb(trainer: Any) -> None:
    """Have W&B make its run now, or raise RefusedAtSetup with W&B's own words.
    transformers would do it when the training begins, and its failure would end the training with a traceback."""
    for each in callbacks_of(trainer, WandbCallback):
        import wandb

        try:
            each.setup(trainer.args, trainer.state, trainer.model)
        except wandb.errors.Error as error:
            raise RefusedAtSetup(f"wandb: {one_line(error)}", key="train.report_to", fix=WITHOUT_WANDB) from error


def close_tensorboard(trainer: Any) -> None:
    """Close TensorBoard's file, which what is logged after the training has opened again."""
    for each in callbacks_of(trainer, TensorBoardCallback):
        each.on_train_end(trainer.args, trainer.state, trainer.control)


def callbacks_of(trainer: Any, kind: type) -> list[Any]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, kind)]
