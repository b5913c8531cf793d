"""Merges that are killed, and merges onto a disk that is full or fills up: what is left behind, each time.

A merge starts in a forked process that has everything imported, so that the moments fall on the merge and not on
`import torch`. OUT must be absent or complete: loadable, with every shard's bytes those of an undisturbed merge.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.faults_disk import fill, mounted
from benchmarks.harness import Row, missing, one_line, prepared_forks, row
from benchmarks.models import Inputs
from cogumi.core.durability import sha256_file

# With what transformers and PEFT would otherwise import during the merge.
IMPORTED = ["cogumi.merge", "transformers.models.llama.modeling_llama", "peft.tuners.lora.model"]
DISK_BYTES = 64 << 20


@dataclass
class Ended:
    """How a merge in a child ended. said: "done", or the error that a user would see; None when it was killed."""

    said: str | None
    exitcode: int | None
    seconds: float


def merge_and_say(inputs: Inputs, out: Path, pipe: Connection) -> None:
    """Runs in the child. An error that no one expects ends it with a traceback and exit status 1."""
    from cogumi.core.errors import UsageError
    from cogumi.merge import merge_adapter

    pipe.send("started")
    try:
        merge_adapter(inputs.adapter, out, base=str(inputs.base), progress=False)
    except UsageError as error:
        pipe.send(f"refused: {one_line(error)}")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        pipe.send(f"failed: {one_line(error)}")
    else:
        pipe.send("done")


class Merges:
    """Starts merges of one pair of inputs in forks of one prepared process."""

    def __init__(self, inputs: Inputs) -> None:
        from transformers.utils.logging import disable_progress_bar

        self.inputs, self.context = inputs, prepared_forks(IMPORTED)
        disable_progress_bar()  # each check loads a model

    def run(self, out: Path, disturb: Callable[[BaseProcess], object] | None = None, after: float = 0.0) -> Ended:
        """A merge that is disturbed `after` seconds from the moment at which it calls merge_adapter."""
        ours, theirs = self.context.Pipe()
        child = self.context.Process(target=merge_and_say, args=(self.inputs, out, theirs))
        child.start()
        theirs.close()
        if ours.recv() != "started":
            raise RuntimeError("the merging process said something before it started")
        start = time.perf_counter()
        if disturb is not None:
            time.sleep(after)
            disturb(child)
        try:
            said = ours.recv()
        except EOFError:  # killed
            said = None
        child.join()
        return Ended(said, child.exitcode, time.perf_counter() - start)


def digests(directory: Path) -> dict[str, str]:
    """sha256 of every file in a directory, by name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): sha256_file(path) for path in files}


def shards_of(directory: Path) -> dict[str, str]:
    return {name: each for name, each in digests(directory).items() if name.endswith(".safetensors")}


def fault_of(out: Path, expected: dict[str, str]) -> str | None:
    """What is wrong with `out`; None when it is absent, or complete. expected: sha256 of each shard by name."""
    from transformers import AutoModelForCausalLM

    from cogumi.merge.merge_manifest import MANIFEST_NAME

    if not os.path.lexists(out):
        return None
    if not (out / MANIFEST_NAME).is_file():
        return f"no {MANIFEST_NAME}"
    if shards_of(out) != expected:
        return "shards are not those of an undisturbed merge"
    recorded = json.loads((out / MANIFEST_NAME).read_text())["shards"]
    if {name: each["sha256"] for name, each in recorded.items()} != expected:
        return "the manifest's hashes are not the shards'"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    except (OSError, ValueError) as error:  # transformers' words for missing files and for a broken config
        return one_line(error)
    loading = loaded[1]
    lacking = loading["missing_keys"] or loading["unexpected_keys"] or loading["mismatched_keys"]
    return f"loads with {sorted(lacking)[0]} missing, unexpected or of another shape" if lacking else None


class Tally(Counter[str]):
    """What a series of disturbed merges left behind; first_fault: what was wrong with the first bad one."""

    first_fault = ""

    def count(self, ended: Ended) -> None:
        self["merges"] += 1
        self["killed"] += ended.said is None and ended.exitcode == -9
        self[(ended.said or "").partition(":")[0]] += 1  # done, refused or failed
        self["unexplained"] += ended.exitcode not in (0, -9)


def inspect(tally: Tally, merges: Merges, out: Path, expected: dict[str, str], before: list[dict[str, str]]) -> None:
    """What the last merge left, then the same merge again, undisturbed; the output is removed afterwards."""
    fault = fault_of(out, expected)
    tally["faults"] += fault is not None
    tally["complete"] += out.exists() and fault is None
    tally["damaged"] += [digests(merges.inputs.base), digests(merges.inputs.adapter)] != before
    tally["partials"] += len(leftovers(out))
    shutil.rmtree(out, ignore_errors=True)
    again = merges.run(out)
    good = again.said == "done" and out.exists() and fault_of(out, expected) is None
    tally["repeated"] += good
    tally.first_fault = tally.first_fault or fault or ("" if good else f"the next merge: {again.said}")
    tally["leftovers"] += len(leftovers(out))
    for directory in [out, *leftovers(out)]:
        shutil.rmtree(directory, ignore_errors=True)


def leftovers(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.partial-*"))


def kill_rows(inputs: Inputs, folder: Path, kills: int, seed: int = 0) -> Iterator[Row]:
    """Kill merges at uniform moments of an undisturbed one's duration until `kills` of them died of it."""
    merges, out, tally = Merges(inputs), folder / "out", Tally()
    before = [digests(inputs.base), digests(inputs.adapter)]
    merges.run(out)  # the first one reads from the disk
    expected = shards_of(out)
    durations = []
    for _ in range(3):
        shutil.rmtree(out)
        durations.append(merges.run(out).seconds)
    shutil.rmtree(out)
    duration, moment = statistics.median(durations), random.Random(seed)
    while tally["killed"] < kills and tally["merges"] < 3 * kills:
        tally.count(merges.run(out, BaseProcess.kill, after=moment.uniform(0, duration)))
        inspect(tally, merges, out, expected, before)
    case = f"SIGKILL at random moments of {duration:.2f} s, base of {inputs.base_bytes / 1e6:.0f} MB"
    yield row("merge", case, "merges that died of it", tally["killed"], f"of {tally['merges']}", target=f">= {kills}")
    yield from shared_rows(case, tally)
    yield row("merge", case, "killed with a partial left", tally["partials"], note="before the next merge")


def shared_rows(case: str, tally: Tally) -> Iterator[Row]:
    """What must hold however a merge was disturbed."""
    every = tally["merges"]
    for metric, key, target in (
        ("OUT complete", "complete", ""),
        ("half-merged OUT", "faults", "<= 0"),
        ("damaged base or adapter", "damaged", "<= 0"),
        ("ended otherwise", "unexplained", "<= 0"),
        ("next merge complete", "repeated", f">= {every}"),
        ("partials left by then", "leftovers", "<= 0"),
    ):
        note = tally.first_fault if key in ("faults", "repeated") else ""
        yield row("merge", case, metric, tally[key], f"of {every}", target=target, note=note)


def take_all_space(filler: Path) -> None:
    """Take every free block, in steps that halve: the merge takes blocks meanwhile."""
    size, position = DISK_BYTES, 0
    with filler.open("xb") as file:
        while size >= 4096:
            try:
                os.posix_fallocate(file.fileno(), position, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
            else:
                position += size


def full_disk_rows(
    inputs: Inputs, folder: Path, shares: tuple[float, ...], moments: int, seed: int = 0
) -> Iterator[Row]:
    """Merges onto a small disk: with `shares` of the base's bytes free, and filled up by another while they run."""
    case = f"a disk of {DISK_BYTES >> 20} MiB, base of {inputs.base_bytes / 1e6:.0f} MB"
    with mounted(folder / "disk", f"size={DISK_BYTES}") as disk:
        if isinstance(disk, str):
            yield missing("merge", case, disk)
            return
        merges, out, filler, tally = Merges(inputs), disk / "out", disk / "filler", Tally()
        before = [digests(inputs.base), digests(inputs.adapter)]
        duration = merges.run(out).seconds
        expected = shards_of(out)
        shutil.rmtree(out)
        for share in shares:
            fill(filler, int(share * inputs.base_bytes))
            tally.count(merges.run(out))
            filler.unlink()
            inspect(tally, merges, out, expected, before)
        moment = random.Random(seed)
        for _ in range(moments):
            tally.count(merges.run(out, lambda _: take_all_space(filler), after=moment.uniform(0, duration)))
            filler.unlink()
            inspect(tally, merges, out, expected, before)
    at_least = f">= {sum(share < 1 for share in shares)}"
    yield row("merge", case, "refused", tally["refused"], f"of {tally['merges']}", target=at_least)
    yield row("merge", case, "failed with ENOSPC", tally["failed"], f"of {tally['merges']}")
    yield from shared_rows(case, tally)
