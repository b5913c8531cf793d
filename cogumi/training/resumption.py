"""Resuming a run that ended before its end: is there one in the directory, and is it this one?"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cogumi.checkpoints.manifest import differences
from cogumi.config.schema import RunConfig, Thresholds, dump_config
from cogumi.core.durability import lock_directory, write_error
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import is_empty, read_json, read_jsonl, refuse_occupied, unwritable_error
from cogumi.telemetry.status import AT_WORK, BUDGET_SPENT, SANITY_CHECKED, STOPPED

RESUME_HINTS = {
    SANITY_CHECKED: "the same command without cogumi.sanity continues from here",
    STOPPED: "change what is red and start again in another cogumi.run_dir; the same command would continue this run",
    BUDGET_SPENT: "the same command with a larger budget continues from here",
}
# "running" is one that was killed: a living one holds the directory's lock.
UNFINISHED = (*AT_WORK, "interrupted", "failed", "stopped", STOPPED, SANITY_CHECKED, BUDGET_SPENT)
# What may differ when a run resumes: where it is, what is kept and shown of it; nothing that shapes what is learned.
COGUMI = "run_dir resume merge compile preflight mirror sanity on_red on_full on_hung price_per_hour max_hours max_cost"
TRAIN = "save_steps save_strategy save_total_limit report_to run_name"
MUTABLE_KEYS = {
    *(f"cogumi.{key}" for key in (*COGUMI.split(), "samples_every")),
    *(f"cogumi.flags.{key}" for key in Thresholds.model_fields),
    *(f"train.{key}" for key in TRAIN.split()),
}


def is_resuming(run: RunConfig) -> bool:
    """Whether run.run_dir holds this run, unfinished; False where there is nothing. Changes nothing.

    Raises UsageError for anything else: a finished run, one that is under way, one of another configuration, other files.
    """
    if is_empty(run.run_dir):
        above = next(each for each in (run.run_dir, *run.run_dir.absolute().parents) if each.is_dir())
        if error := write_error(above):
            raise unwritable_error(run.run_dir, error)
        return False
    with lock_run(run.run_dir):
        refuse_unless_unfinished(run)
        if error := write_error(run.run_dir):  # and not because its disk is full
            raise unwritable_error(run.run_dir, error)
    return True


def refuse_unless_unfinished(run: RunConfig) -> None:
    """Raise UsageError where the run directory holds anything but this run, unfinished."""
    status, config = run.run_dir / "status.json", run.run_dir / "config.yaml"
    there = read_json(status) if config.exists() and status.exists() and status.stat().st_size else {}
    if run.cogumi.resume == "never" or there.get("state") not in UNFINISHED:
        refuse_occupied(run.run_dir)
    if other := describe_differences(run):
        problem = f"{run.run_dir} holds an unfinished run of another configuration ({other})"
        raise UsageError(problem, fix="set cogumi.run_dir to a new directory, or set these back to resume that run")
    sanity = run.cogumi.sanity
    if sanity is None or there.get("state") != SANITY_CHECKED:
        return
    checked = read_json(run.run_dir / "flags.json")["step"]
    if sanity <= checked:
        fix = f"leave cogumi.sanity out and the run resumes there, set it above {checked} to check more steps"
        fix += ", or set cogumi.run_dir to a new directory"
        raise UsageError(f"its first steps were checked, {there['reason']}", place=run.run_dir, fix=fix)


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Hold the directory of a run. Raises UsageError where a living process does."""
    with lock_directory(run_dir) as ours:
        if ours is False:
            problem, fix = "this run is under way in another process", "wait for it, or end that one"
            raise UsageError(problem, place=run_dir, fix=fix)
        yield


def describe_differences(run: RunConfig) -> str:
    """What of the run in the directory is not as it was asked for, in words; "" where only MUTABLE_KEYS is."""
    before = (run.run_dir / "config.yaml").read_text(encoding="utf-8")
    there, here = (flatten(yaml.safe_load(text)) for text in (before, dump_config(run)))
    return differences(*({key: side[key] for key in side.keys() - MUTABLE_KEYS} for side in (there, here)))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def was_evaluated(run_dir: Path, step: int) -> bool:
    return any("eval_loss" in row and row["step"] == step for row in read_jsonl(run_dir / "metrics.jsonl"))
