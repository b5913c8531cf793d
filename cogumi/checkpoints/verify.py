"""Verify checkpoints byte by byte, find the newest good one, and remove old ones.

A resume takes the highest number, skips an optimizer that is missing, and torch.load does not compare checksums
(transformers 5.17, torch 2.13). Neither torch nor transformers is imported here. The checkpoints are those of one process,
of several with whole copies of the model, or of FSDP2 with shards. DeepSpeed's have no `optimizer.pt` and are rejected.

Only a checkpoint that cogumi committed is removed, after one that stays was read back. It is renamed, then deleted.
"""

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cogumi.checkpoints.manifest import (
    CHECKPOINT_NAME,
    MANIFEST_NAME,
    CheckpointDamaged,
    Manifest,
    list_manifest_files,
    read_manifest,
)
from cogumi.core.disk_space import space_of
from cogumi.core.durability import sha256_file
from cogumi.core.errors import UsageError

log = logging.getLogger(__name__)

TRASH_PREFIX = ".cogumi-trash-"
# A file of this name in a checkpoint keeps it for good.
PIN_NAME = "KEEP"
# The names are transformers' (trainer.py, utils/__init__.py) and PEFT's (utils/constants.py).
STATE = "trainer_state.json"
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
# What FSDP writes in their place, and in that of the weights: a directory of shards each (accelerate/utils/constants.py).
SHARDED_WEIGHTS, SHARDED_OPTIMIZER = "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"
RNG = re.compile(r"rng_state(_\d+)?\.pth")
WEIGHTS = re.compile(r"(.*/)?(pytorch_|adapter_)?model.*\.(safetensors|bin)")
# A file with one of these endings that the manifest does not list could be loaded in place of one that it does.
LOADED_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".index.json", ".distcp", ".metadata")


@dataclass(frozen=True)
class CheckpointState:
    """Result of inspecting one checkpoint.

    verified: every file has the size and the sha256 of the manifest, and nothing that a resume needs is missing.
    unverified: there is no manifest (plain Trainer wrote it); its parts are there and its safetensors files are not cut off.
    rejected: `reason` says in one line what is wrong; "" for verified. `bytes` is what the directory's files weigh.
    """

    path: Path
    step: int
    state: Literal["verified", "unverified", "rejected"]
    reason: str
    bytes: int


def inspect(directory: Path, check_all: bool = True) -> CheckpointState:
    """Look at a checkpoint; reads all of it (about a second a GB). Raises UsageError unless it is named checkpoint-STEP.

    check_all: without it names and sizes are checked, and no file is read. Then verified means that it was when it was
    saved, for which there is a manifest (`cogumi.checkpoints.commit`); a byte that changed since is not seen.
    What cannot be read is rejected with the system's reason, for a resume would not be able to read it either.
    """
    name = CHECKPOINT_NAME.fullmatch(directory.name)
    if name is None:
        raise UsageError(f"{directory} is not named checkpoint-STEP", fix="name the directory of one checkpoint")
    step, weight = int(name[1]), 0
    try:
        os.listdir(directory)  # rglob finds nothing in a directory that is not there, and says nothing
        files, weight = list_manifest_files(directory), bytes_of(directory)
        manifest = read_manifest(directory)
        if manifest is not None:
            check_listed(manifest, files, step, check_all)
        if check_all:
            check_complete(files)
            if manifest is None:
                check_readable(files, step)
    except CheckpointDamaged as damage:
        return CheckpointState(directory, step, "rejected", str(damage), weight)
    except OSError as error:
        place = os.path.relpath(error.filename or directory, directory.parent)
        reason = f"{place} cannot be read ({error.strerror or error})"
        return CheckpointState(directory, step, "rejected", reason, weight)
    if manifest is None:
        return CheckpointState(directory, step, "unverified", "written without cogumi: not verified", weight)
    return CheckpointState(directory, step, "verified", "", weight)


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def check_listed(manifest: Manifest, files: dict[str, Path], step: int, compare_hashes: bool) -> None:
    """Raise CheckpointDamaged unless names, step and sizes are those saved, and the hashes if `compare_hashes`."""
    check_step(MANIFEST_NAME, manifest.step, step)
    require(manifest.files.keys() - files.keys())
    for name, entry in manifest.files.items():
        size = files[name].stat().st_size
        if size != entry.size:
            raise CheckpointDamaged(f"{name} has {size:,} bytes, and {entry.size:,} were saved")
    for name in files.keys() - manifest.files.keys():
        if name.endswith(LOADED_SUFFIXES):
            raise CheckpointDamaged(f"{name} was added after the checkpoint was saved, and a resume might load it")
    for name, entry in manifest.files.items() if compare_hashes else ():
        if sha256_file(files[name]) != entry.sha256:
            raise CheckpointDamaged(f"{name} has other bytes than were saved (its sha256 differs)")


def check_step(name: str, recorded: object, step: int) -> None:
    if recorded != step:
        raise CheckpointDamaged(
            f"{name} is of step {recorded}, not {step}: the directory was renamed, or parts of two mixed"
        )


def check_complete(files: dict[str, Path]) -> None:
    """Raise CheckpointDamaged unless there is everything that a resumed run needs to continue as if it had not stopped."""
    optimizer = SHARDED_OPTIMIZER if SHARDED_OPTIMIZER in files else OPTIMIZER
    missing = {name for name in (STATE, optimizer, SCHEDULER) if name not in files}
    if not any(RNG.fullmatch(name) for name in files):
        missing.add("rng_state.pth")
    if missing == {OPTIMIZER, SCHEDULER, "rng_state.pth"}:
        raise CheckpointDamaged(
            "it has no optimizer, scheduler and RNG state (save_only_model=True?): a run cannot resume"
        )
    require(missing, " (Trainer writes that last: the save did not finish)" if STATE in missing else "")
    if SHARDED_WEIGHTS not in files and not any(WEIGHTS.fullmatch(name) for name in files):
        raise CheckpointDamaged("it has no weights: neither a model's nor an adapter's")


def require(missing: Collection[str], why: str = "") -> None:
    if missing:
        raise CheckpointDamaged(f"{', '.join(sorted(missing))} {'is' if len(missing) == 1 else 'are'} missing{why}")


def check_readable(files: dict[str, Path], step: int) -> None:
    """Raise CheckpointDamaged where a checkpoint without a manifest is of another step, or its weights are cut off.

    What else does not load, the resume itself refuses (`cogumi.checkpoints.protection.loading`).
    """
    from safetensors import SafetensorError, safe_open

    try:
        reached = json.loads(files[STATE].read_bytes())["global_step"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointDamaged(f"{STATE} is damaged: it has no global_step") from error
    check_step(STATE, reached, step)
    for name, path in files.items():
        if name.endswith(".safetensors"):
            try:
                safe_open(path, framework="numpy")  # which checks that the header accounts for every byte
            except SafetensorError as error:
                raise CheckpointDamaged(f"{name} is damaged or cut off ({error})") from error


def last_good_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint of `output_dir` that a run can resume from; None without one, or without a directory.

    Newer ones that are rejected are logged, each with its reason. A checkpoint without a manifest is logged as unverified.
    Raises UsageError when `output_dir` cannot be listed.
    """
    rejected = 0
    for finding in inspect_all(output_dir):
        if finding.state == "rejected":
            log.warning("%s is not resumed from: %s", finding.path, finding.reason)
            rejected += 1
            continue
        if finding.state == "unverified":
            log.warning("%s is accepted unverified: %s", finding.path, finding.reason)
        return finding.path
    if rejected:
        log.warning("%s: none of %d checkpoints can be resumed from", output_dir, rejected)
    return None


def inspect_all(output_dir: str | os.PathLike[str]) -> Iterator[CheckpointState]:
    """Verify each checkpoint of `output_dir`, newest first, when it is asked for: that reads the whole checkpoint."""
    for directory in list_checkpoints(Path(output_dir)):
        finding = inspect(directory)
        if finding.state != "rejected" or directory.exists():  # others may remove it meanwhile
            yield finding


def list_checkpoints(output_dir: Path) -> list[Path]:
    """List the directories named checkpoint-STEP, the highest step first."""
    try:
        paths = list(output_dir.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        fix = "name the directory of the checkpoints"
        raise UsageError(f"{output_dir} cannot be listed ({error.strerror})", fix=fix) from error
    steps = {
        path: int(name[1])
        for path in paths
        if (name := CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    }
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


def plan_pruning(
    output_dir: Path,
    keep: int,
    best: Path | None = None,
    pinned: frozenset[Path] = frozenset(),
    inspect_one: Callable[[Path], CheckpointState] = inspect,
) -> tuple[list[Path], list[str]]:
    """Return (to_delete, kept_with_reason), oldest first. The newest `keep` that verify stay, and all newer ones.

    A damaged checkpoint does not count. If fewer than `keep` verify, nothing is deleted. inspect_one is called for the
    newest until `keep` are good. Raises ValueError for keep below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove every checkpoint")
    kept_with_reason, damaged, foreign, going, good = [], [], [], [], 0
    for path in list_checkpoints(output_dir):  # the newest first
        if not (path / MANIFEST_NAME).is_file():
            foreign.append(f"{path.name}: not written by cogumi")
            continue
        counts = good < keep
        finding = inspect_one(path) if counts else None
        good += finding is not None and finding.state == "verified"
        if finding is not None and finding.state != "verified":
            damaged.append(f"{path.name}: is {finding.state} and does not count: {finding.reason}")
        elif best is not None and path.name == best.name:
            kept_with_reason.append(f"{path.name}: the best")
        elif path in pinned or (path / PIN_NAME).exists():
            kept_with_reason.append(f"{path.name}: pinned")
        elif counts:
            kept_with_reason.append(f"{path.name}: one of the newest")
        else:
            going.append(path)
    return going[::-1], [*damaged, *kept_with_reason[::-1], *foreign[::-1]]


def remove(path: Path) -> int:
    """Remove a checkpoint and return the bytes freed. It is renamed first, so half of one is never taken for a checkpoint."""
    free = space_of(path.parent).free
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(2)}")
    path.rename(trash)
    shutil.rmtree(trash)
    return space_of(path.parent).free - free


def remove_trash(output_dir: Path) -> list[Path]:
    paths = [path for path in output_dir.glob(f"{TRASH_PREFIX}*") if path.is_dir() and not path.is_symlink()]
    for path in paths:
        shutil.rmtree(path)
    return paths
