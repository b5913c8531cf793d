"""What guarding and observing a run of two processes takes of a step: `cogumi train` over gloo, on tiny models.

Counted are all of cogumi's callbacks, and what the processes exchange: what the first decides, and sums. Each step is logged.
A GPU's step is longer, and what is counted here does not grow with the model.
As a module of its own it is one of the processes: `torchrun -m benchmarks.processes DIRECTORY SHARDING STEPS`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, OwnTime, Row, quiet, values_row
from cogumi.core.formatting import last_line

COUNT = 2
WARM_UP = 5  # steps
CASES = {"sft, 8 x 512 tokens": "none", "sft, 8 x 512 tokens, fsdp2": "fsdp2"}


def configure(directory: str, sharding: str, steps: int) -> dict[str, Any]:
    """A run of the small base on rows of one length, each step logged, without what is done now and then."""
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_length": 512, "packing": True}
    once = {"save_strategy": "no", "logging_steps": 1, "report_to": "none", "eval_strategy": "no"}
    return {
        "model": {"name": "cogumi:small-base", "dtype": "float32"},
        "lora": {"r": 16},
        "data": {"source": "cogumi:stdlib-chat", "format": "chat"},
        "train": rows | once | {"max_steps": steps, "learning_rate": 1e-4, "gradient_checkpointing": False},
        "cogumi": {
            "method": "sft", "processes": "all", "sharding": sharding, "run_dir": f"{directory}/run", "merge": False,
            "samples_every": 0, "preflight": "off",
        },
    }  # fmt: skip


class Timed:
    """The seconds in cogumi's callbacks and in exchanges, from the end of the fifth step to the end of the last."""

    def __init__(self) -> None:
        from transformers import TrainerCallback

        import cogumi.training.run  # noqa: F401  defines the callbacks
        from cogumi.stack.ranks import Ranks
        from cogumi.training.loop import Agreement

        self.guards, self.exchange = OwnTime(), OwnTime()
        self.steps, self.marks = 0, list[list[float]]()
        for kind in TrainerCallback.__subclasses__():
            if kind.__module__.startswith("cogumi."):
                self.guards.wrap(kind, *(name for name in vars(kind) if name.startswith("on_")))
        for owner in (self.exchange, self.guards):
            owner.wrap(Ranks, "tell", "agree", "largest", "gather", "total")
        before = Agreement.on_step_end  # of the last callback

        def on_step_end(*args: Any, **kwargs: Any) -> None:
            before(*args, **kwargs)
            self.steps += 1
            if self.steps >= WARM_UP:
                of_guards = self.guards.cpu, self.guards.wall
                self.marks.append([time.thread_time(), time.perf_counter(), *of_guards, self.exchange.wall])

        Agreement.on_step_end = on_step_end  # type: ignore[method-assign]


def figures(marks: list[list[list[float]]]) -> dict[str, float]:
    """Of the marks of each process, one for each step. By the clock it is the one that waited least in a step: the other has
    waited for it, as it would have waited for the slower one's gradients."""
    took = [[[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(each)] for each in marks]
    steps = len(took[0])
    cpu, wall, guards_cpu, _, _ = (sum(step[field] for step in took[0]) for field in range(5))
    guards, exchange = (sum(min(each[at][field] for each in took) for at in range(steps)) for field in (3, 4))
    return {
        "step|ms": 1e3 * wall / steps,
        "guards and telemetry|CPU ms/step": 1e3 * guards_cpu / steps,
        "exchange between the processes|ms/step": 1e3 * exchange / steps,
        "share of a step|%": 100 * guards_cpu / cpu,
        "share of a step by the clock|%": 100 * guards / wall,
    }


def train_rank(directory: str, sharding: str, steps: int) -> None:
    import cogumi

    quiet()
    timed = Timed()
    cogumi.train(configure(directory, sharding, steps))
    Path(directory, f"{os.environ['RANK']}.json").write_text(json.dumps(timed.marks))


def run(quick: bool = False) -> Iterator[Row]:
    steps, repeats = (12, 1) if quick else (45, 3)
    for case, sharding in CASES.items():
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as scratch:
                words = ["--nproc-per-node", str(COUNT), "-m", "benchmarks.processes", scratch, sharding, str(steps)]
                done = subprocess.run(
                    [sys.executable, "-m", "torch.distributed.run", *words], cwd=ROOT, capture_output=True, text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
                )  # fmt: skip
                if done.returncode:
                    raise RuntimeError(f"{case}: {last_line(done.stderr)}")
                marks = [json.loads(Path(scratch, f"{rank}.json").read_text()) for rank in range(COUNT)]
            for name, value in figures(marks).items():
                found[name].append(value)
        for name, values in found.items():
            metric, unit = name.split("|")
            target = "<= 2" if unit == "%" else ""
            yield values_row("processes", f"{case}, {COUNT} processes", metric, values, unit, target=target)


if __name__ == "__main__":
    train_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
