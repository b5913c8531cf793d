"""Adapters of earlier steps, `checkpoints/adapters/step-N`: hard links of a checkpoint's files, where the disk has links."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cogumi.checkpoints.commit import remove_if_there, write_aside
from cogumi.checkpoints.manifest import step_of
from cogumi.core.durability import sync_path

DIRECTORY, UNFINISHED, MAX_SNAPSHOTS = "adapters", ".unfinished", 20
NAME = re.compile(r"step-(\d+)", re.ASCII)
NOT_OF_THE_ADAPTER = re.compile(r"(optimizer|scheduler|scaler|rng_state|train|cogumi-).*")


def list_snapshots(output_dir: Path) -> dict[int, Path]:
    """Return the snapshots beside a run's checkpoints by step, the first one first."""
    paths = (output_dir / DIRECTORY).glob("step-*")
    return dict(sorted((int(name[1]), path) for path in paths if (name := NAME.fullmatch(path.name))))


def take_snapshot(checkpoint: Path, describe: Callable[[Path], Any]) -> None:
    """Keep a checkpoint's adapter, written aside and renamed. describe: writes its record. Raises DiskFull or OSError."""
    final = checkpoint.parent / DIRECTORY / f"step-{step_of(checkpoint)}"
    with write_aside(unfinished := final.with_name(UNFINISHED)):
        unfinished.mkdir(parents=True)
        for path in checkpoint.iterdir():
            if path.is_file() and not NOT_OF_THE_ADAPTER.fullmatch(path.name):
                try:
                    os.link(path, unfinished / path.name)
                except OSError:
                    shutil.copyfile(path, unfinished / path.name)
                    sync_path(unfinished / path.name)
        describe(unfinished)
    remove_if_there(final)
    unfinished.rename(final)
    thin_out(checkpoint.parent)


def thin_out(output_dir: Path, keep: int = MAX_SNAPSHOTS) -> bool:
    """Remove snapshots until `keep` stay: first, last, and evenly spread ones. Returns whether one was removed."""
    snapshots = list_snapshots(output_dir)
    before = len(snapshots)
    while len(steps := list(snapshots)) > keep:
        gaps = {n: steps[n + 1] - steps[n - 1] for n in range(1, len(steps) - 1)}
        going = snapshots.pop(steps[min(gaps, key=gaps.__getitem__, default=0)])
        remove_if_there(unfinished := going.with_name(UNFINISHED))
        shutil.rmtree(going.rename(unfinished))
    return len(snapshots) < before
