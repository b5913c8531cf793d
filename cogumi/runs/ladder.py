"""`cogumi ladder`: the first steps of one configuration with 1, 2, 8 processes, and what each number of cards gains and costs.

A step has the same examples with any number of processes. So losses are compared step by step, and the speed of one number
is to be had beside the same training of another.
"""

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json, read_jsonl, write_json
from cogumi.methods.step_split import refuse_unshared
from cogumi.runs import refuse_mistakes
from cogumi.runs.rank_launcher import run_processes
from cogumi.stack.gpus import refuse_missing_gpus

STEPS = 20  # of each number of processes
WARM_UP = 3  # of them, whose speed is left out
PAYS = 0.7  # of the speed that as many times more cards would ideally give: below, a run costs 1.4 times as much
# A verdict on the first steps needs every loss; nothing of these runs is kept but their figures.
OVERRIDES: dict[str, Any] = {
    "train.logging_steps": 1, "train.save_strategy": "no", "cogumi.merge": False, "cogumi.samples_every": 0,
    "train.report_to": "none", "cogumi.resume": "never",
}  # fmt: skip


@dataclass(frozen=True)
class Rung:
    """What one number of processes came to. tokens_per_second: of all processes, the median over steps. seconds: of a step.

    hours, cost: of the whole run at this speed; cost in dollars, None without a price. loss: of the last step. apart: the
    largest difference of a step's loss from the first rung's. safe: yes, no or not shown; verdict: why. efficiency: speed-up
    over the rung before, by the ratio of processes; None of the first.
    """

    processes: int
    tokens_per_second: float
    seconds: float
    hours: float
    cost: float | None
    loss: float
    apart: float
    safe: str
    verdict: str
    efficiency: float | None = None


@dataclass(frozen=True)
class Ladder:
    """The rungs that were tried, and why the next ones were not."""

    rungs: tuple[Rung, ...]
    stopped: str

    def as_dict(self) -> dict[str, Any]:
        return {"stopped": self.stopped, "rungs": [asdict(rung) for rung in self.rungs]}

    def rows(self) -> list[tuple[str, ...]]:
        """Of a table, with the columns of COLUMNS."""
        first = self.rungs[0]
        return [
            (
                str(rung.processes),
                f"{rung.tokens_per_second:,.0f}",
                f"{rung.tokens_per_second / first.tokens_per_second:.2f}",
                "" if rung.efficiency is None else f"{rung.efficiency:.0%}",
                f"{rung.seconds:.3g}",
                f"{rung.hours:.2g}",
                "-" if rung.cost is None else f"{rung.cost:.2g}",
                f"{rung.apart:.0e}",
                rung.safe,
            )
            for rung in self.rungs
        ]


# n: processes. hours, $: of the whole run. apart: of the losses, from those of the first row.
COLUMNS = (">n", ">tokens/s", ">speed-up", ">efficiency", ">s/step", ">hours", ">$", ">apart", "safe")


def climb(
    config: str | Path | Mapping[str, Any],
    processes: Sequence[int],
    directory: Path,
    overrides: Mapping[str, Any],
    steps: int = STEPS,
    price: float | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> Ladder:
    """Train the first `steps` with each number of processes, in that order, until one is unsafe or does not pay.

    price: dollars for an hour of one card. tell: is given a line before each rung. Raises UsageError for what `cogumi.train`
    refuses, and RunFailed where a process died.
    """
    if steps <= WARM_UP:
        raise UsageError(f"{steps} steps: the first {WARM_UP} warm up", key="--steps", fix=f"take {STEPS}")
    if not processes or list(processes) != sorted(set(processes)) or min(processes) < 1:
        said = ",".join(map(str, processes))
        raise UsageError(f"{said} is no ladder", key="--processes", fix="name rising numbers, as in 1,2,8")
    asked = refuse_mistakes(config, {**overrides, "cogumi.processes": processes[-1]})
    refuse_missing_gpus(processes[-1], os.environ)
    for count in processes:
        if count > 1:
            refuse_unshared(asked, count)
    if directory.exists():
        raise UsageError(f"{directory} is there already", key="--out", fix="name a new directory")
    directory.mkdir(parents=True)
    rungs: list[Rung] = []
    losses: dict[int, float] = {}
    stopped = ""
    for count in processes:
        run_dir = directory / f"processes-{count}"
        own = dict(overrides) | OVERRIDES
        own |= {"cogumi.processes": count, "cogumi.run_dir": str(run_dir), "cogumi.sanity": steps}
        own |= {"cogumi.sharding": asked.cogumi.sharding if count > 1 else "none"}
        tell(f"{count} process{'es' if count > 1 else ''}: {steps} steps, in {run_dir}")
        run_processes(config, own, run_dir, count, quiet=True)
        rung, own_losses = read_rung(run_dir, count, price)
        losses = losses or own_losses
        apart = max(
            (abs(own_losses[step] - losses[step]) for step in own_losses.keys() & losses.keys()), default=math.nan
        )
        rung = replace(rung, apart=apart)
        if rungs:
            before = rungs[-1]
            speed_up = rung.tokens_per_second / before.tokens_per_second
            rung = replace(rung, efficiency=speed_up * before.processes / count)
        rungs.append(rung)
        stopped = reason_to_stop(rung, rungs)
        write_json(directory / "ladder.json", Ladder(tuple(rungs), stopped).as_dict())
        if stopped:
            break
    return Ladder(tuple(rungs), stopped)


def reason_to_stop(rung: Rung, rungs: Sequence[Rung]) -> str:
    if rung.safe == "no":
        return f"{rung.processes}: not safe to scale: {rung.verdict}"
    if rung.efficiency is not None and rung.efficiency < PAYS:
        before = rungs[-2]
        faster = rung.tokens_per_second / before.tokens_per_second
        said = f"{rung.processes} processes are {faster:.2f} times as fast as {before.processes}"
        return f"{said}, and a run costs {1 / rung.efficiency:.1f} times as much: more cards do not pay"
    return ""


def read_rung(run_dir: Path, count: int, price: float | None) -> tuple[Rung, dict[int, float]]:
    """The figures of a run, and its loss at each step."""
    rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if "loss" in row]
    summary, verdict = read_json(run_dir / "metrics.json"), read_json(run_dir / "verdict.json")
    warm = [row["perf/tokens_per_second"] for row in rows[WARM_UP:] if row.get("perf/tokens_per_second")]
    speed = statistics.median(warm) if warm else summary["tokens_per_second"]
    tokens_a_step = summary["tokens"] / max(1, summary["steps"])
    seconds = tokens_a_step / speed
    hours = seconds * summary["max_steps"] / 3600
    safe = next((check for check in verdict["checks"] if check["name"] == "safe to scale"), None)
    figure = safe["figure"] if safe else "the run has no more steps than these"
    word = figure.partition(":")[0] if safe else "-"
    cost = None if price is None else hours * count * price
    found = Rung(count, speed, seconds, hours, cost, rows[-1]["loss"], 0.0, word, figure)
    return found, {row["step"]: row["loss"] for row in rows}


def parse_processes(text: str) -> list[int]:
    """ "1,2,8" as numbers. Raises UsageError for anything else."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is no list of numbers", key="--processes", fix="as in 1,2,8") from None
