"""Trackers beside the run's own files: `train.report_to`, TensorBoard by default.

Packages, keys and network for what a run reports and uploads to are checked before anything is paid for.
"""

import importlib.util
import inspect
import logging
import os
import secrets
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import constants, get_token
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from cogumi.core.durability import NO_SPACE
from cogumi.core.errors import RefusedAtSetup, UsageError, best_effort
from cogumi.core.formatting import one_line, pip_command
from cogumi.core.redact import redact_text
from cogumi.core.run_directory import DECISIONS, read_section, write_section
from cogumi.telemetry.status import relative_path

log = logging.getLogger("cogumi")
TENSORBOARD, WANDB = "tensorboard", "wandb"
PACKAGES = (TENSORBOARD, WANDB, "trackio")  # transformers would look for them only when the model is loaded
SECTION, FINISH_SECONDS = "trackers", 25.0  # of decisions.json; for a tracker's server at the end of a run
UNFINISHED: list[tuple[str, Callable[..., Any]]] = []  # what ends the trackers' runs that this process began
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
    if not train.get("push_to_hub"):
        return
    problem, fix = "", ""  # of the upload; the trainer asks the hub itself
    if train.get("hub_model_id") is None:
        problem, fix = "train.hub_model_id is missing, and TRL would call the repository `checkpoints`", "set it"
    elif constants.is_offline_mode():
        problem, fix = "HF_HUB_OFFLINE is set, so nothing can be uploaded", "unset it, or drop train.push_to_hub"
    elif (train.get("hub_token") or get_token()) is None:
        problem, fix = "there is no token to write to the hub with", "run `hf auth login`, or set HF_TOKEN"
    if problem:
        raise UsageError(problem, key="train.push_to_hub", fix=fix)


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


def quote_error(error: Exception) -> str:
    return redact_text(one_line(error).rstrip("."))[:300]


def set_tensorboard_directory(run_dir: Path, trainer: Any) -> None:
    """Have TensorBoard's files written into the run directory, unless TENSORBOARD_LOGGING_DIR names another.

    transformers would write them below checkpoints/, in a directory for each start, and into ./runs.
    """
    for board in callbacks_of(trainer, TensorBoardCallback):
        if board.logging_dir is None:
            board.logging_dir = str(run_dir / TENSORBOARD)
        survive_errors(board)
        log.info("tensorboard --logdir %s shows the metrics", shlex.quote(relative_path(str(board.logging_dir))))


def survive_errors(callback: Any) -> None:
    """Let a training continue without a tracker that raises; metrics.jsonl has the same rows.

    TensorBoard's file that does not fit on the disk is tried again with each row.
    """
    name, warned, broken = type(callback).__name__.removesuffix("Callback"), False, False

    def guard(act: Callable[..., Any]) -> Callable[..., None]:
        def call(*arguments: Any, **more: Any) -> None:
            nonlocal warned, broken
            try:
                if not broken:
                    act(*arguments, **more)
            except Exception as error:  # noqa: BLE001  whatever a tracker's package raises
                is_full = isinstance(error, OSError) and error.errno in NO_SPACE and hasattr(callback, "tb_writer")
                if is_full:
                    callback.tb_writer = None  # it would fail at each call; the next row gets a new one
                broken = not is_full
                if not warned:
                    problem = "'s file does not fit on the disk" if is_full else f": {quote_error(error)}"
                    log.warning("%s%s; training continues without it", name, problem)
                warned = True

        return call

    for event in (event for event in dir(callback) if event.startswith("on_")):
        setattr(callback, event, guard(getattr(callback, event)))


def begin_trackers(run_dir: Path, trainer: Any) -> None:
    """Have W&B and trackio make the run now, or take up the one that an unfinished run began with.

    Raises RefusedAtSetup with W&B's own words: transformers would begin it with the training, and end with a traceback.
    """
    args, begun = trainer.args, (trainer.args, trainer.state, trainer.control)
    known, urls = read_section(run_dir / DECISIONS, SECTION), {}
    wandbs, trackios = callbacks_of(trainer, WandbCallback), callbacks_of(trainer, TrackioCallback)
    if wandbs or trackios:
        unique = f"{run_dir.absolute().name}-{secrets.token_hex(3)}"  # trackio takes a run of the same name up
        args.run_name = known.get("name") or args.run_name or os.environ.get("WANDB_NAME") or unique
        args.project = known.get("project", args.project)
    for callback in wandbs:
        import wandb

        project = known.get("wandb_project") or os.environ.get("WANDB_PROJECT", "huggingface")  # transformers' default
        try:
            if wandb.run is None:
                made = wandb.init(project=project, name=args.run_name, id=known.get("wandb_id"), resume="allow")
                UNFINISHED.append(("W&B", made.finish))
            callback.setup(args, trainer.state, trainer.model)
        except wandb.errors.Error as error:
            raise RefusedAtSetup(f"wandb: {quote_error(error)}", key="train.report_to", fix=WITHOUT_WANDB) from error
        known |= {"wandb_project": wandb.run.project, "wandb_id": wandb.run.id}
        urls["wandb"] = wandb.run.url
    for callback in callbacks_of(trainer, TrainerCallback):
        if type(callback).__module__ == WandbCallback.__module__ and not isinstance(callback, TensorBoardCallback):
            survive_errors(callback)
    for callback in trackios:
        # Its model gets a tag; the real one would stay in memory until after the merge.
        UNFINISHED.append(("trackio", partial(callback.on_train_end, *begun, model=SimpleNamespace())))
        callback.on_train_end = lambda *_, **__: None  # the held-out loss comes after it
        callback.on_train_begin(*begun, model=trainer.model)
        space = args.trackio_space_id or os.environ.get("TRACKIO_SPACE_ID")
        urls["trackio"] = space and callback.SPACE_URL.format(space_id=space)
    if wandbs or trackios:
        record = {"name": args.run_name, "project": args.project, "urls": {at: url for at, url in urls.items() if url}}
        write_section(run_dir / DECISIONS, SECTION, known | record)


@contextmanager
def finish_trackers(run_dir: Path) -> Iterator[None]:
    """End the trackers' runs with the block, as failed unless every check passed, each within FINISH_SECONDS."""
    code = 1
    try:
        yield
        code = int(not (run_dir / "DONE").exists())
    finally:
        while UNFINISHED:
            name, finish = UNFINISHED.pop()
            thread = threading.Thread(target=copy_context().run, args=(end_quietly, name, finish, code), daemon=True)
            thread.start()
            thread.join(FINISH_SECONDS)
            if thread.is_alive():
                log.warning("%s has not taken everything within %.0f s: the rest may be missing", name, FINISH_SECONDS)


def end_quietly(name: str, finish: Callable[..., Any], code: int) -> None:
    with best_effort(f"end the run of {name}"):
        finish(exit_code=code)


def close_tensorboard(trainer: Any) -> None:
    for callback in callbacks_of(trainer, TensorBoardCallback):
        callback.on_train_end(trainer.args, trainer.state, trainer.control)


def callbacks_of(trainer: Any, kind: type) -> list[Any]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]
