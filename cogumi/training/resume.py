"""Checks of a run directory that may hold this run, unfinished."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cogumi.checkpoints.commit import write_aside
from cogumi.checkpoints.manifest import differences
from cogumi.checkpoints.mirror import Mirror
from cogumi.config.schema import CogumiSection, DataSection, RunConfig, Section, Thresholds, dump_config
from cogumi.core.durability import lock_directory, write_error
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import DECISIONS, is_empty, read_json, read_section, refuse_occupied, unwritable_error
from cogumi.disk.callback import log_or_print
from cogumi.merge.adapter_files import weights_sample
from cogumi.telemetry.mirrored_run import RUN, fetch_files, fetch_finished, fetch_unfinished, refuse_living_run
from cogumi.telemetry.status import AT_WORK, BROKEN_OFF, BUDGET_SPENT, NON_FINITE, SANITY_CHECKED, STOPPED
from cogumi.telemetry.throughput import HEARTBEAT

RESUME_HINTS = {
    SANITY_CHECKED: "the same command without cogumi.sanity continues from here",
    STOPPED: "change what is red and start again in another cogumi.run_dir; the same command would continue this run",
    NON_FINITE: "lower train.learning_rate, or take bfloat16 or float32 instead of float16, in another cogumi.run_dir; the same "
    "command would resume from the last finite checkpoint, if there is one",
    BUDGET_SPENT: "the same command with a larger budget continues from here",
}
# "running" without the lock means the process was killed.
UNFINISHED = (*AT_WORK, *BROKEN_OFF, *RESUME_HINTS)
# What may differ when a run resumes: where it is, what is kept and shown of it; nothing that shapes what is learned.
MUTABLE_KEYS = frozenset({
    "cogumi.run_dir", "cogumi.resume", "cogumi.merge", "cogumi.merge_dtype", "cogumi.compile", "cogumi.preflight",
    "cogumi.compare_with", "cogumi.gate", "cogumi.from_failed", "cogumi.forgetting",
    "cogumi.mirror", "cogumi.sanity", "cogumi.on_red", "cogumi.on_full", "cogumi.on_hung", "cogumi.restarts",
    "cogumi.price_per_hour", "cogumi.max_hours", "cogumi.max_cost", "cogumi.samples_every", "cogumi.processes",
    "train.save_steps", "train.save_strategy", "train.save_total_limit", "train.report_to", "train.run_name",
    *(f"cogumi.flags.{key}" for key in Thresholds.model_fields),
})  # fmt: skip


def is_resuming(run: RunConfig) -> bool:
    """Tell whether run.run_dir holds this run, unfinished.

    Changes nothing. Raises UsageError for a finished run, one that is under way or of another configuration, and for
    other files.
    """
    if resuming := not is_empty(run.run_dir):
        with lock_run(run.run_dir):
            refuse_unless_unfinished(run)
    parent = next(directory for directory in (run.run_dir, *run.run_dir.absolute().parents) if directory.is_dir())
    if error := write_error(parent):
        raise unwritable_error(run.run_dir, error)
    return resuming


def refuse_unless_unfinished(run: RunConfig) -> None:
    """Raise UsageError where the run directory holds anything but this run, unfinished."""
    status, config = run.run_dir / "status.json", run.run_dir / "config.yaml"
    status_record = read_json(status) if config.exists() and status.exists() and status.stat().st_size else {}
    if run.cogumi.resume == "never" or status_record.get("state") not in UNFINISHED:
        refuse_occupied(run.run_dir)
    if other := describe_differences(run):
        problem = f"{run.run_dir} holds an unfinished run of another configuration ({other})"
        raise UsageError(problem, fix="set cogumi.run_dir to a new directory, or set these back to resume that run")
    checked = read_json(run.run_dir / "flags.json")["step"] if status_record["state"] == SANITY_CHECKED else 0
    if run.cogumi.sanity is not None and run.cogumi.sanity <= checked:
        fix = f"leave cogumi.sanity out and the run resumes there, set it above {checked} to check more steps"
        fix += ", or set cogumi.run_dir to a new directory"
        raise UsageError(f"its first steps were checked, {status_record['reason']}", place=run.run_dir, fix=fix)


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Hold the directory of a run. Raises UsageError where a living process does."""
    with lock_directory(run_dir) as ours:
        if ours is False:
            problem, fix = "this run is under way in another process", "wait for it, or end that one"
            raise UsageError(problem, place=run_dir, fix=fix)
        yield


def refuse_mirror_of_itself(run_dir: Path, mirror: str) -> None:
    """Raise UsageError for a mirror that is the run directory, or one of the two inside the other."""
    here, mirror_path = run_dir.resolve(), Path(mirror).resolve()
    if "://" not in mirror and (here == mirror_path or here in mirror_path.parents or mirror_path in here.parents):
        reason, fix = f"{mirror} and the run directory {run_dir} are lost together", "name a place outside of it"
        raise UsageError(reason, key="cogumi.mirror", fix=fix)


def bring_back(run: RunConfig, mirror: Mirror) -> bool:
    """Fetch this run from its mirror where this machine has none. Returns whether it is finished, and nothing is to be done.

    Raises UsageError if the mirror holds a run of another configuration, one that is under way, or none that can be
    continued; then nothing is written here.
    """
    run_dir, unfinished = run.run_dir, run.run_dir.parent / f".{run.run_dir.name}-fetched"
    with mirror.place.reaching("cannot be listed"):
        if not mirror.place.tree() | mirror.place.tree(re.compile(RUN)):
            return False
    try:
        with write_aside(unfinished):
            unfinished.mkdir(parents=True)
            with mirror.place.reaching("cannot be read"):
                fetch_files(mirror.place, unfinished, ("config.yaml",))
                is_new = is_empty(run_dir)
                refuse_other_run(run, mirror, unfinished, is_new)
                refuse_living_run(mirror.place)
                finished = is_new and fetch_finished(mirror, unfinished)
                is_there = finished or (is_new and fetch_unfinished(mirror, unfinished))
            if is_there:
                refuse_other_run(run, mirror, unfinished, is_new)
    except OSError as error:
        raise unwritable_error(run_dir, error) from None
    if not is_there:
        shutil.rmtree(unfinished)
        return False
    if run_dir.exists():
        for path in run_dir.iterdir():  # of a detached start
            path.rename(unfinished / path.name)
        run_dir.rmdir()
    unfinished.rename(run_dir)
    state = "; it is finished already, and there is nothing to start" if finished else ""
    log_or_print(f"{run_dir} is fetched from {mirror}{state}")
    return finished


def refuse_other_run(run: RunConfig, mirror: Mirror, fetched: Path, is_new: bool) -> None:
    """Raise UsageError where the configuration that was fetched is not this one's, or the run must be a new one.

    is_new: this machine has no part of the run.
    """
    if not (fetched / "config.yaml").exists():
        return
    other, fix = describe_differences(run, fetched), "give this one its own mirror"
    if other:
        fix += ", or set these back to continue that one"
        raise UsageError(f"mirror {mirror} holds a run of another configuration ({other})", fix=fix)
    if is_new and run.cogumi.resume == "never":
        raise UsageError(f"mirror {mirror} holds this run already, and cogumi.resume is never", fix=fix)


def describe_differences(run: RunConfig, run_dir: Path | None = None) -> str:
    """Describe how the run in the directory differs from this configuration, beyond MUTABLE_KEYS; "" if it does not."""
    before = ((run_dir or run.run_dir) / "config.yaml").read_text(encoding="utf-8")
    stored, here = (flatten(yaml.safe_load(text)) for text in (before, dump_config(run)))
    sections: dict[str, type[Section]] = {"cogumi": CogumiSection, "data": DataSection}
    defaults = {f"{name}.{key}": at.default for name, part in sections.items() for key, at in part.model_fields.items()}
    stored = {key: defaults[key] for key in here if key in defaults} | stored  # a run that is older than a key
    other = differences(*({key: side[key] for key in side.keys() - MUTABLE_KEYS} for side in (stored, here)))
    began_with = read_section((run_dir or run.run_dir) / DECISIONS, "base").get("weights")
    if not other and began_with is not None and weights_sample(run.model.name) not in (None, began_with):
        return f"other weights in {run.model.name}"
    return other


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def budget_reached(options: CogumiSection, seconds: float) -> str | None:
    """Return which limit is reached after so many seconds of a run, in words; None if none is."""
    hours = seconds / 3600
    if options.max_hours is not None and hours >= options.max_hours:
        return f"{hours:.{2 if hours >= 1 else 4}f} h of cogumi.max_hours {options.max_hours:g}"
    cost = hours * (options.price_per_hour or 0)
    if options.max_cost is not None and options.price_per_hour is not None and cost >= options.max_cost:
        return f"${cost:.{2 if cost >= 1 else 4}f} of cogumi.max_cost {options.max_cost:g}"
    return None


def refuse_spent(run_dir: Path, options: CogumiSection) -> None:
    """Raise UsageError for a run that its budget has ended, started again with no more of it: it would end at once."""
    if read_json(run_dir / "status.json").get("state") == BUDGET_SPENT and (run_dir / HEARTBEAT).exists():
        spent = budget_reached(options, read_json(run_dir / HEARTBEAT).get("elapsed_seconds", 0.0))
        if spent is not None:
            raise UsageError(f"the budget of this run is spent ({spent})", place=run_dir, fix="raise it to resume")
