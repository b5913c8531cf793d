"""`cogumi disk`: what the disks hold, who uses them, what a run will want; which checkpoints are good; and what may go."""

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from cogumi.checkpoints.manifest import CHECKPOINT_NAME, MANIFEST_NAME
from cogumi.checkpoints.verify import CheckpointState, inspect, inspect_all, list_checkpoints, plan_pruning, remove
from cogumi.cli.run_commands import AsJson
from cogumi.config.source import parse_overrides
from cogumi.core.disk_space import Filesystem, filesystems, format_bytes
from cogumi.core.durability import lock_directory
from cogumi.core.errors import UsageError
from cogumi.core.formatting import escape_controls
from cogumi.core.output import failures_in_one_line, print_json, print_table, print_text, show_waiting
from cogumi.disk import usage

disk_app = typer.Typer(no_args_is_help=True)

DryRun = Annotated[bool, Option("--dry-run", help="Say what would go, and remove nothing.")]
Directory = Annotated[Path, Argument(metavar="DIR", help="A directory of checkpoints, or a run's directory.")]


@disk_app.callback()
def disk() -> None:
    """Disks and checkpoints: what is full, what is good, what may go."""


@disk_app.command()
def status(
    path: Annotated[Path, Argument(help="The directory of a run, or of many.")] = Path("."),
    as_json: AsJson = False,
) -> None:
    """What the filesystems of a run hold, and who uses the space. Changes nothing."""
    check_directory(path)
    with failures_in_one_line():
        disks, using, left = filesystems(path), usage.list_uses(path), usage.list_leftovers(path)
    if as_json:
        sections: dict[str, list[Any]] = {"filesystems": disks, "uses": using, "leftovers": left}
        print_json({name: [asdict(row) for row in rows] for name, rows in sections.items()})
        return
    show_filesystems(disks)
    here = str(path.resolve())
    table = [(use.what, "here" if use.path == here else use.path, format_bytes(use.bytes)) for use in using]
    print_table(f"who uses the space (here: {path})", ["what", "where", ">on disk"], table)
    leftovers = [
        (row.what, os.path.relpath(row.path, path), format_bytes(row.bytes), row.in_use or "no sign of use")
        for row in left
    ]
    if leftovers:
        print_table(f"left by cogumi below {path}", ["what", "where", ">on disk", ""], leftovers)


def show_filesystems(disks: list[Filesystem]) -> None:
    from cogumi.disk.monitor import percent

    rows = []
    for disk in disks:
        space = disk.space
        kind = f"{disk.kind}, network" if disk.network else disk.kind
        share = "?" if space.used_share is None else percent(space.used_share)
        inodes = "" if space.inodes_share is None else percent(space.inodes_share)
        free = "read-only" if space.read_only else format_bytes(space.free)
        rows.append((", ".join(disk.used_for), disk.mount, kind, format_bytes(space.total), share, free, inodes))
    print_table("filesystems", ["for", "mounted at", "type", ">size", ">used", ">free", ">inodes used"], rows)
    if any(disk.network for disk in disks):
        note = "The numbers of a network filesystem may be the whole cluster's: a quota shows only when it is used up."
        print_text(note)


@disk_app.command()
def predict(
    target: Annotated[Path, Argument(metavar="CONFIG|DIR", help="A run's YAML, or its directory.")],
    overrides: Annotated[list[str] | None, Argument(help="key=value, such as train.save_steps=50")] = None,
    as_json: AsJson = False,
) -> None:
    """What a run will want of its disks. Exit status 1 where it does not fit. Loads and downloads no weights."""
    from rich.console import Console

    from cogumi.config.schema import load_config

    if target.is_dir():  # of a run that has begun: what it has yet to write
        if not (target / "config.yaml").is_file():
            wrong = f"{target} is not a run's directory: it holds no config.yaml"
            raise UsageError(wrong, fix="`cogumi disk status` says what it takes")
        if overrides:
            raise UsageError("a run's directory has its config", place=overrides[0], fix="overrides go with a YAML")
        overrides, target = [f"cogumi.run_dir={json.dumps(str(target))}"], target / "config.yaml"
    with failures_in_one_line(), show_waiting("forecasting the disks"):
        run = load_config(target, **parse_overrides(overrides))
        from cogumi.forecast.disk_forecast import forecast_disks

        forecast = forecast_disks(run)
    if as_json:
        computed = ("wanted", "short", "refusal")
        disks = [{name: getattr(disk, name) for name in computed} | asdict(disk) for disk in forecast.disks]
        print_json({"fits": forecast.fits, **asdict(forecast), "disks": disks, "lines": forecast.lines})
    else:
        console = Console(markup=False, highlight=False, emoji=False)  # which breaks lines
        console.print("\n".join(map(escape_controls, forecast.lines)))
    raise typer.Exit(0 if forecast.fits else 1)


@disk_app.command()
def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Read every checkpoint, or the one named, and say which are good. Exit status 1 if one is rejected."""
    place = checkpoints_dir(directory)
    with failures_in_one_line(), show_waiting(f"reading the checkpoints of {place}"):
        is_one = CHECKPOINT_NAME.fullmatch(place.resolve().name)
        findings = [unless_recent(finding) for finding in ([inspect(place)] if is_one else inspect_all(place))]
    if not findings:
        raise no_checkpoints(place)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [(row.path.name, row.state, format_bytes(row.bytes), row.reason) for row in findings]
        print_table(str(place), ["checkpoint", "", ">size", "why"], rows)
    raise typer.Exit(1 if any(finding.state == "rejected" for finding in findings) else 0)


def unless_recent(finding: CheckpointState) -> CheckpointState:
    """A checkpoint that a trainer without `protect` writes in place is not called damaged while it changes."""
    age = time.time() - usage.last_change(finding.path)
    if finding.state != "rejected" or (finding.path / MANIFEST_NAME).exists() or age > usage.SETTLED_SECONDS:
        return finding
    reason = f"it changed {max(0.0, age):.0f} s ago and may still be written: {finding.reason}"
    return replace(finding, state="unverified", reason=reason)


@disk_app.command("resume-point")
def resume_point(directory: Directory, as_json: AsJson = False) -> None:
    """Print the newest checkpoint that a run can resume from; exit status 1 where there is none."""
    place, good = checkpoints_dir(directory), None
    inspected: list[CheckpointState] = []
    with failures_in_one_line(), show_waiting(f"looking for a good checkpoint in {place}"):
        for finding in inspect_all(place):
            inspected.append(finding)
            if finding.state != "rejected":
                good = finding.path
                break
    for finding in inspected:
        if finding.reason:
            print_text(f"{finding.path.name} is {finding.state}: {finding.reason}", to_error=True)
    if good is None:
        why = f"none of {len(inspected)} checkpoints is good" if inspected else "there are no checkpoints"
        print_text(f"cogumi: {place}: nothing to resume from: {why}", to_error=True)
        print_text("A run reads its mirror too when it resumes; this command does not.", to_error=True)
    if as_json:
        print_json({"resume_point": good, "looked_at": [asdict(finding) for finding in inspected]})
    elif good is not None:
        print_text(good)
    raise typer.Exit(0 if good is not None else 1)


@disk_app.command()
def prune(
    directory: Directory,
    keep: Annotated[int, Option(help="How many of the newest stay, at least 2.")],
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints that cogumi wrote. The newest that verify, the best and pinned ones stay."""
    if keep < 2:
        wrong = "at least 2, since the newest checkpoint is the one that a fault damages"
        raise UsageError(wrong, key=f"--keep {keep}")
    place = checkpoints_dir(directory)
    checkpoints = list_checkpoints(place)
    if not checkpoints:
        raise no_checkpoints(place)
    with failures_in_one_line(), lock_directory(place) as free:
        if free is False:
            wrong = "a training is writing there, and removes old checkpoints itself"
            raise UsageError(wrong, place=place, fix="wait for it")
        with show_waiting(f"verifying what stays in {place}"):
            going, staying = plan_pruning(place, keep, best_of(checkpoints))
        back = [(path, None if dry_run else remove(path)) for path in going]
    if as_json:
        removed = [{"path": path, "bytes_back": count} for path, count in back]
        print_json({"dry_run": dry_run, "removed": removed, "kept": staying})
        return
    for line in staying:
        print_text(f"stays     {line}")
    for path, count in back:
        gone = "would go" if count is None else "gone    "
        print_text(f"{gone}  {path.name}" + ("" if count is None else f": {format_bytes(max(0, count))} came back"))
    if not back:
        print_text("nothing to remove")
    elif not dry_run:
        print_text(f"{format_bytes(sum(count or 0 for _, count in back))} came back")


def best_of(checkpoints: list[Path]) -> Path | None:
    """The checkpoint that the newest trainer state calls the best."""
    for path in checkpoints:
        with suppress(FileNotFoundError, ValueError, AttributeError):  # damaged, and an older one knows as well
            best = json.loads((path / "trainer_state.json").read_text(encoding="utf-8")).get("best_model_checkpoint")
            return Path(best) if isinstance(best, str) else None
    return None


@disk_app.command()
def clean(directory: Directory, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Remove what interrupted trainings left (.cogumi-saving, .cogumi-trash-*), and nothing else."""
    check_directory(directory)
    removed: list[usage.Leftover] = []
    kept_with_reason: list[tuple[usage.Leftover, str]] = []
    with failures_in_one_line():
        for row in usage.list_leftovers(directory):
            if row.what not in (usage.STAGING, usage.TRASH):
                continue
            if reason := row.in_use or (find_verified(Path(row.path)) if row.what == usage.STAGING else ""):
                kept_with_reason.append((row, reason))
                continue
            removed.append(row)
            if not dry_run:
                shutil.rmtree(row.path)
    if as_json:
        left = [asdict(row) | {"reason": reason} for row, reason in kept_with_reason]
        print_json({"dry_run": dry_run, "removed": [asdict(row) for row in removed], "kept": left})
        return
    for row in removed:
        print_text(f"{'would go' if dry_run else 'removed'}: {row.path} ({row.what}, {format_bytes(row.bytes)})")
    for row, reason in kept_with_reason:
        print_text(f"kept: {row.path} ({row.what}, {format_bytes(row.bytes)}): {reason}")
    if not removed and not kept_with_reason:
        print_text(f"{directory}: nothing to clean")


def find_verified(staging: Path) -> str:
    """Why a save that was not finished is worth keeping: killed just before its rename, it is a good checkpoint."""
    for path in sorted(staging.iterdir()):
        new = CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir() and not os.path.lexists(staging.parent / path.name)
        if new and inspect(path).state == "verified":
            return f"{path.name} in it is whole and verified; move it to {staging.parent} to resume from it"
    return ""


def check_directory(path: Path) -> None:
    """Raises UsageError unless `path` is a directory."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}", fix="give a directory of checkpoints or of a run")


def checkpoints_dir(path: Path) -> Path:
    """Where the checkpoints are: `path`, or the checkpoints/ in it where it has none itself, as in a run's directory."""
    check_directory(path)
    with failures_in_one_line():
        return path / "checkpoints" if not list_checkpoints(path) and (path / "checkpoints").is_dir() else path


def no_checkpoints(path: Path) -> UsageError:
    return UsageError(f"{path} holds no checkpoints (directories named checkpoint-STEP)", fix="name the one that does")
