"""What is done to the newest checkpoint in benchmarks/faults.py: files deleted, cut, flipped, swapped with another step's."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Takes the newest checkpoint and the one before it.
Damage = Callable[[Path, Path], None]


def damages(newest: Path, decisive: tuple[str, ...]) -> list[tuple[str, Damage]]:
    """Every (label, damage) for a checkpoint; all kinds for the files that decide how training goes on, else three."""
    older = newest.with_name("checkpoint-" + str(int(newest.name.partition("-")[2]) - 2))
    found: list[tuple[str, Damage]] = []
    for path in sorted(newest.iterdir()):
        name = path.name
        found += [(f"{name} deleted", partial(delete, (name,)))]
        found += [(f"{name} cut to a half", partial(cut, name, 0.5, 0))]
        found += [(f"{name} with a byte flipped in the middle", partial(flip, name, 0.5))]
        if name not in decisive and "manifest" not in name:
            continue
        found += [(f"{name} emptied", partial(cut, name, 0.0, 0))]
        found += [(f"{name} cut by a byte", partial(cut, name, 1.0, 1))]
        found += [(f"{name} with its first byte flipped", partial(flip, name, 0.0))]
        found += [(f"{name} with its last byte flipped", partial(flip, name, 1.0))]
        if not filecmp.cmp(path, older / name, shallow=False):
            found += [(f"{name} of the step before", partial(swap, name))]
    found += [("optimizer.pt and scheduler.pt deleted", partial(delete, ("optimizer.pt", "scheduler.pt")))]
    found += [("all but the weights deleted", partial(delete, ("optimizer.pt", "scheduler.pt", "rng_state.pth")))]
    return found


def delete(names: tuple[str, ...], newest: Path, older: Path) -> None:
    for name in names:
        (newest / name).unlink()


def cut(name: str, share: float, less: int, newest: Path, older: Path) -> None:
    path = newest / name
    os.truncate(path, int(path.stat().st_size * share) - less)


def flip(name: str, share: float, newest: Path, older: Path) -> None:
    """Change some bits of the byte at that share of the file."""
    with (newest / name).open("r+b") as file:
        at = int((os.fstat(file.fileno()).st_size - 1) * share)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x55]))


def swap(name: str, newest: Path, older: Path) -> None:
    shutil.copyfile(older / name, newest / name)
