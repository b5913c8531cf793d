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
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from benchmarks.faults_disk import fill, mounted
from benchmarks.faults_training import Running
from benchmarks.harness import Row, missing, one_line, quiet, row
from benchmarks.models import Inputs
from cogumi.core.durability import blake3_file
from cogumi.core.errors import UsageError
from cogumi.merge import merge_adapter
from cogumi.merge.merge_manifest import MANIFEST_NAME

# With what transformers and PEFT would otherwise import during the merge.
IMPORTED = ["benchmarks.merge_kills", "transformers.models.llama.modeling_llama", "peft.tuners.lora.model"]
DISK_BYTES = 64 << 20
KILL = partial(Running.signal, number=signal.SIGKILL)


@dataclass
class Ended:
    """How a merge in a child ended. said: "done", or the error that a user would see; None when it was killed."""

    said: str | None
    exitcode: int
    seconds: float


def merge_and_say(pipe: Connection, inputs: Inputs, out: Path) -> None:
    """Runs in the child. An error that no one expects ends it with a traceback and exit status 1."""
    pipe.send(("started",))
    try:
        merge_adapter(inputs.adapter, out, base=str(inputs.base), progress=False)
    except UsageError as error:
        pipe.send((f"refused: {one_line(error)}",))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        pipe.send((f"failed: {one_line(error)}",))
    else:
        pipe.send(("done",))


class Merges:
    """Merges of one pair of inputs that are disturbed, and the counts of what they leave behind.

    expected: BLAKE3 of an undisturbed merge's shards; duration: its seconds; fault: what was wrong with the first bad one.
    """

    def __init__(self, inputs: Inputs, out: Path) -> None:
        quiet()  # each check loads a model
        self.inputs, self.out, self.tally, self.fault = inputs, out, Counter[str](), ""
        self.before = self.input_digests()
        seconds = []
        for _ in range(4):
            shutil.rmtree(out, ignore_errors=True)
            seconds.append(self.run().seconds)
        self.duration = statistics.median(seconds[1:])  # the first one reads from the disk
        self.expected = shards_of(out)
        shutil.rmtree(out)

    def input_digests(self) -> list[dict[str, str]]:
        return [digests(self.inputs.base), digests(self.inputs.adapter)]

    def run(self, disturb: Callable[[Running], object] | None = None, after: float = 0.0) -> Ended:
        """A merge that is disturbed `after` seconds from the moment at which it calls merge_adapter."""
        running, start = Running(IMPORTED, merge_and_say, self.inputs, self.out), time.perf_counter()
        if disturb is not None:
            time.sleep(after)
            disturb(running)
        status = running.finish()
        said = [message[0] for message in running.messages[1:-1]]
        return Ended(said[0] if said else None, status, time.perf_counter() - start)

    def count(self, ended: Ended) -> None:
        self.tally["merges"] += 1
        self.tally["killed"] += ended.said is None and ended.exitcode == -signal.SIGKILL
        self.tally[(ended.said or "").partition(":")[0]] += 1  # done, refused or failed
        self.tally["unexplained"] += ended.exitcode not in (0, -signal.SIGKILL)

    def inspect(self) -> None:
        """What the last merge left, then the same merge again, undisturbed; the output is removed afterwards."""
        tally, out, fault = self.tally, self.out, fault_of(self.out, self.expected)
        tally["faults"] += fault is not None
        tally["complete"] += out.exists() and fault is None
        tally["damaged"] += self.input_digests() != self.before
        tally["partials"] += len(leftovers(out))
        shutil.rmtree(out, ignore_errors=True)
        again = self.run()
        good = again.said == "done" and out.exists() and fault_of(out, self.expected) is None
        tally["repeated"] += good
        self.fault = self.fault or fault or ("" if good else f"the next merge: {again.said}")
        tally["leftovers"] += len(leftovers(out))
        for directory in [out, *leftovers(out)]:
            shutil.rmtree(directory, ignore_errors=True)

    def rows(self, case: str) -> Iterator[Row]:
        """What must hold however a merge was disturbed."""
        every = self.tally["merges"]
        for metric, key, target in (
            ("OUT complete", "complete", ""),
            ("half-merged OUT", "faults", "<= 0"),
            ("damaged base or adapter", "damaged", "<= 0"),
            ("ended otherwise", "unexplained", "<= 0"),
            ("next merge complete", "repeated", f">= {every}"),
            ("partials left by then", "leftovers", "<= 0"),
        ):
            note = self.fault if key in ("faults", "repeated") else ""
            yield row("merge", case, metric, self.tally[key], f"of {every}", target=target, note=note)


def digests(directory: Path) -> dict[str, str]:
    """BLAKE3 of every file in a directory, by name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): blake3_file(path) for path in files}


def shards_of(directory: Path) -> dict[str, str]:
    return {name: each for name, each in digests(directory).items() if name.endswith(".safetensors")}


def fault_of(out: Path, expected: dict[str, str]) -> str | None:
    """What is wrong with `out`; None when it is absent, or complete. expected: BLAKE3 of each shard by name."""
    if not os.path.lexists(out):
        return None
    if not (out / MANIFEST_NAME).is_file():
        return f"no {MANIFEST_NAME}"
    if shards_of(out) != expected:
        return "shards are not those of an undisturbed merge"
    recorded = json.loads((out / MANIFEST_NAME).read_text())["shards"]
    if {name: each["blake3"] for name, each in recorded.items()} != expected:
        return "the manifest's hashes are not the shards'"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    except (OSError, ValueError) as error:  # transformers' words for missing files and for a broken config
        return one_line(error)
    loading = loaded[1]
    lacking = loading["missing_keys"] or loading["unexpected_keys"] or loading["mismatched_keys"]
    return f"loads with {sorted(lacking)[0]} missing, unexpected or of another shape" if lacking else None


def leftovers(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.partial-*"))


def kill_rows(inputs: Inputs, folder: Path, kills: int) -> Iterator[Row]:
    """Kill merges at uniform moments of an undisturbed one's duration until `kills` of them died of it."""
    merges, moment = Merges(inputs, folder / "out"), random.Random(0)
    tally = merges.tally
    while tally["killed"] < kills and tally["merges"] < 3 * kills:
        merges.count(merges.run(KILL, after=moment.uniform(0, merges.duration)))
        merges.inspect()
    case = f"SIGKILL at random moments of {merges.duration:.2f} s, base of {inputs.base_bytes / 1e6:.0f} MB"
    yield row("merge", case, "merges that died of it", tally["killed"], f"of {tally['merges']}", target=f">= {kills}")
    yield from merges.rows(case)
    yield row("merge", case, "killed with a partial left", tally["partials"], note="before the next merge")


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


def full_disk_rows(inputs: Inputs, folder: Path, shares: tuple[float, ...], moments: int) -> Iterator[Row]:
    """Merges onto a small disk: with `shares` of the base's bytes free, and filled up by another while they run."""
    case = f"a disk of {DISK_BYTES >> 20} MiB, base of {inputs.base_bytes / 1e6:.0f} MB"
    with mounted(folder / "disk", f"size={DISK_BYTES}") as disk:
        if isinstance(disk, str):
            yield missing("merge", case, disk)
            return
        merges, filler, moment = Merges(inputs, disk / "out"), disk / "filler", random.Random(0)
        for share in (*shares, *[None] * moments):
            if share is None:
                after = moment.uniform(0, merges.duration)
                merges.count(merges.run(lambda _: take_all_space(filler), after))
            else:
                fill(filler, int(share * inputs.base_bytes))
                merges.count(merges.run())
            filler.unlink()
            merges.inspect()
    tally, at_least = merges.tally, f">= {sum(share < 1 for share in shares)}"
    yield row("merge", case, "refused", tally["refused"], f"of {tally['merges']}", target=at_least)
    yield row("merge", case, "failed with ENOSPC", tally["failed"], f"of {tally['merges']}")
    yield from merges.rows(case)
