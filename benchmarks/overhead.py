"""Share of a training step that cogumi's callbacks take: telemetry, guards, flags, TensorBoard, exchange between processes.

With a mirror also that of its other threads: watch, heartbeat, uploads of the run, and of a checkpoint in twelve seconds. By
itself a run saves once a minute or less often.

`cogumi.train` on the small base, alone and as two processes over gloo, with each step logged. A GPU's step is longer, and what
is counted here does not grow with the model. `torchrun -m benchmarks.overhead DIRECTORY SHARDING STEPS` is one of the processes.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import OwnTime, Row, quiet, run_process, values_row

WARM_UP = 5  # steps
MIRRORED = "mirrored"
# Processes, and sharding or a mirror.
CASES = {
    "sft, 8 x 512 tokens": (1, "none"),
    "sft, 8 x 512 tokens, mirrored": (1, MIRRORED),
    "sft, 8 x 512 tokens, 2 processes": (2, "none"),
    "sft, 8 x 512 tokens, 2 processes, fsdp2": (2, "fsdp2"),
}


def configure(directory: str, sharding: str, steps: int) -> dict[str, Any]:
    """Return a run of the small base on rows of one length, without samples and evaluation, with checkpoints if mirrored."""
    mirror = {"mirror": f"{directory}/mirror", "max_hours": 1} if sharding == MIRRORED else {"sharding": sharding}
    saves = {"save_strategy": "steps", "save_steps": 40} if sharding == MIRRORED else {"save_strategy": "no"}
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_length": 512, "packing": True}
    train = {"max_steps": steps, "learning_rate": 1e-4, "gradient_checkpointing": False, "logging_steps": 1}
    return {
        "model": {"name": "cogumi:small-base", "dtype": "float32"},
        "lora": {"r": 16},
        "data": {"source": "cogumi:stdlib-chat", "format": "chat"},
        "train": rows | train | saves | {"eval_strategy": "no"},
        "cogumi": {
            "method": "sft", "processes": int(os.environ.get("WORLD_SIZE", "1")), "samples_every": 0, **mirror,
            "run_dir": f"{directory}/run", "merge": False, "preflight": "off", "compile": "off",
        },
    }  # fmt: skip


class StepTimes:
    """Seconds in callbacks and in exchanges, from the end of the fifth step to the end of the last."""

    def __init__(self) -> None:
        from transformers import TrainerCallback
        from transformers.integrations import TensorBoardCallback
        from transformers.trainer_callback import CallbackHandler

        import cogumi.training.run  # noqa: F401  defines the callbacks
        from cogumi.stack.ranks import Ranks

        self.callbacks, self.exchange = OwnTime(), OwnTime()
        self.steps, self.marks = 0, list[list[float]]()
        for kind in TrainerCallback.__subclasses__():
            if kind.__module__.startswith("cogumi.") or kind is TensorBoardCallback:
                self.callbacks.wrap(kind, *(name for name in vars(kind) if name.startswith("on_")))
        for timer in (self.exchange, self.callbacks):
            timer.wrap(Ranks, "tell", "agree", "largest", "gather", "total")
        call_all = CallbackHandler.on_step_end

        def on_step_end(*args: Any, **kwargs: Any) -> Any:
            control = call_all(*args, **kwargs)
            self.steps += 1
            if self.steps >= WARM_UP:
                callbacks = self.callbacks.cpu, self.callbacks.wall
                self.marks.append(
                    [time.thread_time(), time.perf_counter(), *callbacks, self.exchange.wall, time.process_time()]
                )
            return control

        CallbackHandler.on_step_end = on_step_end  # type: ignore[method-assign]


def figures(marks: list[list[list[float]]]) -> dict[str, float]:
    """Return the figures of one run from the marks of its processes, one mark for each step.

    By the clock, a step counts the process that waited least: the other one waited for it.
    """
    took = [[[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(rank)] for rank in marks]
    steps = len(took[0])
    cpu, wall, callbacks_cpu, _, _, process = (sum(step[field] for step in took[0]) for field in range(6))
    callbacks, exchange = (sum(min(rank[at][field] for rank in took) for at in range(steps)) for field in (3, 4))
    return {
        "step|ms": 1e3 * wall / steps,
        "callbacks|CPU ms/step": 1e3 * callbacks_cpu / steps,
        "exchange between the processes|ms/step": 1e3 * exchange / steps,
        "share of a step|%": 100 * callbacks_cpu / cpu,
        "share of a step by the clock|%": 100 * callbacks / wall,
        "CPU of other threads, share of a step|%": 100 * (process - cpu) / cpu,
    }


def train_rank(directory: str, sharding: str, steps: int) -> None:
    import cogumi

    quiet()
    times = StepTimes()
    cogumi.train(configure(directory, sharding, steps))
    Path(directory, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(times.marks))


def measure(processes: int, sharding: str, steps: int) -> dict[str, float]:
    """Train once in processes of their own, and return the figures."""
    with tempfile.TemporaryDirectory() as scratch:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
        command = [sys.executable, *launcher, "-m", "benchmarks.overhead", scratch, sharding, str(steps)]
        run_process(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return figures([json.loads(Path(scratch, f"{rank}.json").read_text()) for rank in range(processes)])


def run(quick: bool = False) -> Iterator[Row]:
    steps, repeats = (12, 1) if quick else (45, 3)
    for case, (processes, sharding) in CASES.items():
        values: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            for name, value in measure(processes, sharding, steps).items():
                values[name].append(value)
        for name, series in values.items():
            metric, unit = name.split("|")
            yield values_row("overhead", case, metric, series, unit, target="<= 2" if unit == "%" else "")


if __name__ == "__main__":
    train_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
