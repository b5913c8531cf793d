"""Going on with a run that ended before its end: is there one in the directory, and is it this one?"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cogumi.checkpoints.identity import differences
from cogumi.config import RunConfig, dump_config
from cogumi.durable import locked
from cogumi.errors import UsageError
from cogumi.rundir import line_of, read_json, read_jsonl, refuse_occupied, write_atomic

# Where a run stopped that can go on. "running" is one that was killed: a living one holds the directory's lock.
UNFINISHED = ("starting", "running", "interrupted", "failed", "preempted")
# What may differ when a run goes on: where it is, what is kept of it and shown of it; nothing that shapes what is learned.
MAY_CHANGE = {
    "cogumi.run_dir",
    "cogumi.resume",
    "cogumi.merge",
    "cogumi.compile",
    "cogumi.on_full",
    "cogumi.on_hung",
    "cogumi.fallback",
    "cogumi.mirror",
    *(f"train.{key}" for key in ("save_steps", "save_strategy", "save_total_limit", "report_to", "run_name")),
}


def goes_on(run: RunConfig) -> bool:
    """Whether run.run_dir holds this run, unfinished; False where there is nothing. Changes nothing.

    Raises UsageError for anything else: a finished run, one that is under way, one of another configuration, other files.
    """
    directory = run.run_dir
    if not directory.is_dir() or not any(directory.iterdir()):
        return False
    with alone_in(directory):
        if run.cogumi.resume == "never" or not is_unfinished(directory):
            refuse_occupied(directory)
        refuse_another(run)
    return True


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Hold the directory of a run. Raises UsageError where a living process does."""
    with locked(run_dir) as ours:
        if ours is False:
            raise UsageError(f"{run_dir}: this run is under way in another process; wait for it, or end that one")
        yield


def is_unfinished(run_dir: Path) -> bool:
    status, config = run_dir / "status.json", run_dir / "config.yaml"
    if not config.exists() or not status.exists() or not status.stat().st_size:
        return False
    return read_json(status).get("state") in UNFINISHED


def refuse_another(run: RunConfig) -> None:
    """Raise UsageError, with what differs, when the run in the directory is not the one that was asked for."""
    there = flat(yaml.safe_load((run.run_dir / "config.yaml").read_text(encoding="utf-8")))
    here = flat(yaml.safe_load(dump_config(run)))
    other = differences(*({key: side[key] for key in side.keys() - MAY_CHANGE} for side in (there, here)))
    if other:
        raise UsageError(
            f"{run.run_dir} holds an unfinished run of another configuration ({other}); "
            "set cogumi.run_dir to a new directory, or set these back to go on with that run"
        )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def take_up_metrics(run_dir: Path, state: Any) -> None:
    """Let the metrics end at the step that the training goes on from: what was logged later is logged again.

    On a machine that fetched its checkpoint there are none: then they are what that checkpoint remembers.
    """
    path = run_dir / "metrics.jsonl"
    rows = read_jsonl(path)
    if not any("loss" in row for row in rows):
        rows += state.log_history
    # A summary at the end of a training that a signal ended is of a part of it.
    kept = [row for row in rows if row["step"] <= state.global_step and "train_runtime" not in row]
    text = "".join(map(line_of, kept))
    if text and not (path.exists() and text == path.read_text(encoding="utf-8")):
        write_atomic(path, text)


def was_evaluated(run_dir: Path, step: int) -> bool:
    """Whether the held-out loss after a step is in the metrics already."""
    return any("eval_loss" in row and row["step"] == step for row in read_jsonl(run_dir / "metrics.jsonl"))
