"""Driver of `python -m benchmarks gpu`: the checks of a card in one call of ten minutes, most evidence first.

Imports are paid once: this process imports the libraries without starting CUDA, and forks one child for each check, which
has a CUDA context and a time box of its own. Checks that need unsloth, which has to be imported before transformers,
are forked from a process that has imported torch alone. Each figure is appended to a `.jsonl` file as soon as it is
there, and `--resume FILE` skips the checks that an earlier call finished. `--device cpu` runs every check with small shapes.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Row, row
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import read_jsonl

# A card is often lent in slices of ten minutes; this leaves one for unpacking and copying.
BUDGET_SECONDS = 540.0
POLL_SECONDS = 0.05
OUT_OF_TIME = "skipped: out of time"
PRELOADED = (
    "transformers", "peft", "trl", "datasets", "cogumi.training.run", "benchmarks.gpu_checks", "benchmarks.models",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """A check: a function of gpu_checks, its time box on a card, and figures expected before a card has shown them.

    before_transformers: run where transformers is not imported, because the check imports unsloth.
    package: skipped where this is not installed.
    """

    name: str
    seconds: float
    expected: str
    before_transformers: bool = False
    package: str = "torch"


@dataclass(frozen=True)
class Setting:
    """Device of a check, and a directory that the checks of one call share."""

    device: str
    scratch: Path

    @property
    def on_card(self) -> bool:
        return self.device != "cpu"

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Time one call, waiting for the card before and after."""
        wait = torch.cuda.synchronize if self.on_card else time.perf_counter
        wait()
        began = time.perf_counter()
        work()
        wait()
        return 1e3 * (time.perf_counter() - began)

    def reset_peak(self) -> None:
        if self.on_card:
            torch.cuda.reset_peak_memory_stats()


CHECKS = (
    Check("environment", 20, "expandable segments in use; cuDNN's attention off on Hopper"),
    Check(
        "numerics", 40,
        "RoPE's angles: error 0 in ieee, 0.3 rad at 2,048 in TF32; cuDNN's masked backward: NaN, none with it off; "
        "a new length: 50 to 1,000 ms with cuDNN, 5 without",
    ),
    Check(
        "ratios", 60,
        "TRL: first step of a rollout 0 away from 1; second step in bf16 28 to 84 % outside 3e-4, by rounding",
    ),
    Check(
        "ratios-unsloth", 90,
        "first step 0 away from 1 (0.018 on an H200 before the micro-batches were scored again); no slower",
        before_transformers=True, package="unsloth",
    ),
    Check(
        "sft-speed", 130,
        "8 x 4,096 recomputed: 20 to 28 % MFU; 1 x 4,096 without recomputation: 30 to 40 % more; at least 40 % in all",
    ),
    Check("sft-speed-unsloth", 60, "1.5 to 2 times TRL", True, "unsloth"),
    Check(
        "rollout", 60,
        "16 layers of an 8B: 11 to 25 ms a token with an adapter (1,400 kernels at 8 us); a third less without",
    ),
    Check("merge-check", 60, "at most 2 bytes a parameter and 1 GiB (8 bytes before)"),
    Check(
        "experts-4bit", 60,
        "two layers 2.7 to 4.3 ms a token, a twelfth of gpt-oss-20b's: every expert is dequantized for each token",
        package="bitsandbytes",
    ),
    Check("interruption", 80, "saved in < 2 s; the resumed adapter equal to the bit"),
    Check("smoke", 200, "ends within 180 s, all checks passed"),
    Check("probes", 90, "every installed package works", before_transformers=True),
    Check("forecasts", 200, "within 5 % of the peak"),
    Check("gspo-step", 75, "at most 1.02 of stock TRL's step"),
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Exit status: 0 every check that ran met its targets, 1 one failed or missed a target, 2 used wrongly."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description="Check a card, most evidence first.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: each check with small shapes")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, metavar="SECONDS", help="for all checks")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="run these alone")
    parser.add_argument("--resume", type=Path, metavar="FILE", help=".jsonl of an earlier call, whose checks are kept")
    parser.add_argument("--json", type=Path, help="where to save, instead of a dated file under benchmarks/results")
    parser.add_argument("--list", action="store_true", help="print the checks with what is expected, and exit")
    options = parser.parse_args(argv)
    if options.list:
        for check in CHECKS:
            print(f"{check.name:18} {check.seconds:4.0f} s  expected: {check.expected}")
        return 0
    if problem := find_problem(options):
        print(problem, file=sys.stderr)
        return 2
    about, began = harness.machine(), time.monotonic()
    name = "gpu" if options.device == "cuda" else "gpu-cpu"
    earlier = read_jsonl(options.resume) if options.resume else []  # before writing: it may be the same file
    path = options.json or unused_path(harness.result_path(name, about, options.device == "cuda"))
    record = Record(path, name, about, began)
    finished = record.keep_finished(earlier)
    checks = [check for check in CHECKS if check.name in (options.only or [check.name]) and check.name not in finished]
    with tempfile.TemporaryDirectory(prefix="cogumi-gpu-") as scratch:
        try:
            run_checks(checks, Setting(options.device, Path(scratch)), record, began + options.budget)
        except KeyboardInterrupt:
            print(f"interrupted; continue with --resume {record.lines}", file=sys.stderr)
            return 130
    bad = harness.report(record.rows, name, about, began, path)
    if late := [each["benchmark"] for each in record.rows if each["note"] == OUT_OF_TIME]:
        print(f"not started, for lack of time: {', '.join(late)}; run them with --resume {record.lines}")
    return 1 if bad else 0


def find_problem(options: argparse.Namespace) -> str:
    """Return what is wrong with the arguments or missing on this machine; "" where nothing is."""
    unknown = sorted({*(options.only or ())} - {check.name for check in CHECKS})
    if unknown:
        return f"--only: no check {unknown[0]!r}; --list prints them"
    if options.budget < 0:
        return f"--budget {options.budget:g} is negative; give the seconds for all checks"
    if options.json is not None and options.json.suffix != ".json":
        return f"--json {options.json}: name a .json; the lines go to a .jsonl beside it"
    if options.resume is not None and not options.resume.is_file():
        return f"--resume: {options.resume} is not a file"
    if options.resume is not None and options.resume.suffix != ".jsonl":
        return f"--resume: {options.resume} is not a .jsonl; pass the one beside it"
    # CUDA must not start in the process that forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if options.device == "cuda" and not torch.cuda.is_available():
        reason = f"torch {torch.__version__} sees no usable device"
        return f"no CUDA device: {reason}; --device cpu runs the checks with small shapes"
    return ""


def unused_path(path: Path) -> Path:
    """The path, with a number where an earlier call of the day has left its lines there."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not each.with_suffix(".jsonl").exists())


class Record:
    """The rows of all checks: each appended to `<path>.jsonl` at once, and all saved as one JSON after each check."""

    def __init__(self, path: Path, name: str, about: dict[str, Any], began: float) -> None:
        self.path, self.name, self.about, self.began = path, name, about, began
        self.lines = path.with_suffix(".jsonl")
        self.rows: list[Row] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines.unlink(missing_ok=True)

    def keep_finished(self, entries: list[dict[str, Any]]) -> set[str]:
        """Keep the lines of the checks that an earlier call finished, and return their names."""
        finished = {entry["check"] for entry in entries if entry.get("finished")}
        for entry in entries:
            if entry["check"] in finished:
                self.append(entry)
        self.collect()
        return finished

    def append(self, entry: dict[str, Any]) -> None:
        """Write one line and wait for the disk: a call that is killed keeps it. Also called in children."""
        with self.lines.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def collect(self) -> None:
        """Read what the children appended, and save the JSON."""
        self.rows = [entry["row"] for entry in read_jsonl(self.lines) if "row" in entry]
        harness.save(self.name, self.rows, time.monotonic() - self.began, self.about, self.path)


def run_checks(checks: list[Check], setting: Setting, record: Record, deadline: float) -> None:
    """Fork one child for each check that fits before the deadline (of time.monotonic)."""
    with torch_only_process(setting, record) as run_early:
        if any(not check.before_transformers for check in checks):
            for module in PRELOADED:
                importlib.import_module(module)
        for check in checks:
            left = deadline - time.monotonic()
            if left < check.seconds:
                late = row(check.name, "-", "-", None, target=check.expected, note=OUT_OF_TIME)
                record.append({"check": check.name, "row": late})
            elif check.before_transformers:
                run_early(check.name)
            else:
                run_check(check, setting, record)
            record.collect()


@contextmanager
def torch_only_process(setting: Setting, record: Record) -> Iterator[Callable[[str], None]]:
    """Fork a process that has imported torch and not transformers; yield a function that runs a check from there."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        by_name = {check.name: check for check in CHECKS}
        while name := theirs.recv():
            run_check(by_name[name], setting, record)
            theirs.send(True)
        os._exit(0)
    theirs.close()

    def run(name: str) -> None:
        ours.send(name)
        ours.recv()

    try:
        yield run
    finally:
        ours.send("")
        os.waitpid(pid, 0)


def run_check(check: Check, setting: Setting, record: Record) -> None:
    """Run one check in a fork with its time box, and append what it measured and how it ended."""
    print(f"{check.name} ... (at most {check.seconds:.0f} s; expected: {check.expected})", file=sys.stderr, flush=True)
    began = time.monotonic()

    def work() -> None:
        measure = getattr(importlib.import_module("benchmarks.gpu_checks"), check.name.replace("-", "_"))
        is_installed = importlib.util.find_spec(check.package) is not None
        for found in measure(setting) if is_installed else [harness.missing(check.name, "-", check.package)]:
            if not setting.on_card and found["value"] is not None:
                found = {**found, "ok": None}  # the targets are a card's
            harness.print_row(found)
            record.append({"check": check.name, "t": round(time.time(), 1), "row": found})

    ended = in_fork(work, check.seconds)
    if ended is not None:
        record.append({"check": check.name, "row": row(check.name, "-", "-", None, ok=False, note=f"failed: {ended}")})
    seconds = round(time.monotonic() - began, 1)
    record.append({"check": check.name, "seconds": seconds, "finished": ended is None})


def in_fork(work: Callable[[], None], seconds: float) -> str | None:
    """Call `work` in a forked child and kill its process group after `seconds`. Return why it failed, or None."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+") as failure:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                work()
                status = 0
            except BaseException as error:  # noqa: BLE001 - reported by the parent
                traceback.print_exc()
                failure.write(f"{type(error).__name__}: {one_line(error)}"[:300])
                failure.flush()
            finally:
                sys.stdout.flush()
                os._exit(status)
        deadline = time.monotonic() + seconds
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return f"killed after {seconds:.0f} s, its time box"
            time.sleep(POLL_SECONDS)
        code = os.waitstatus_to_exitcode(ended[1])
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        failure.seek(0)
        return failure.read() or None if code else None


def write_model(path: Path, shape: Any, device: str = "cpu") -> Path:
    """Save a random model of a shape in bfloat16, with the small base's tokenizer; nothing where it exists already."""
    from transformers import AutoTokenizer

    from benchmarks.models import random_model
    from cogumi.models.small_base import small_base_path

    if path.exists():
        return path
    partial = path.with_name(f".{path.name}")
    shutil.rmtree(partial, ignore_errors=True)  # of a check that was killed
    tokenizer = AutoTokenizer.from_pretrained(small_base_path())
    tokenizer.save_pretrained(partial)
    # A card draws billions of normal numbers in a moment.
    model = random_model(shape, device, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(partial)
    partial.rename(path)
    return path
