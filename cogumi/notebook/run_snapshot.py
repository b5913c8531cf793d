"""Everything worth seeing of a run, from its directory: what the panel and `cogumi status --watch` are made of.

Each look reads what was written since the last one; nothing is held but curves, and what is the same is not read again.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cogumi.checkpoints.manifest import step_of
from cogumi.checkpoints.retention import list_checkpoints
from cogumi.checkpoints.verify import CheckpointState, inspect
from cogumi.core.disk_space import format_bytes
from cogumi.core.formatting import escape_controls, format_duration
from cogumi.core.run_directory import FORECAST, ROLLOUTS, read_section
from cogumi.notebook.curves import LAST, Curve, Curves, Plot, format_number
from cogumi.telemetry.status import (
    Status,
    format_facts,
    format_headline,
    format_value,
    read_json_or_empty,
    status_of,
    tail_lines,
)

ROLLOUT_BYTES = 1 << 20  # at the end of a file: more than one rollout writes
LOOK_BYTES = 48 << 20  # of metrics that are read at a look: some tenths of a second
CHECKPOINTS = 4  # that are inspected, the newest
SOON_HOURS = 24.0  # a disk that fills in more is no news
REFRESH_SECONDS = 2.0
BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 48
MOST_CHARACTERS = 160
MARKS = {"red": "bold red", "yellow": "yellow"}


@dataclass(frozen=True)
class RunSnapshot:
    """One look at a run. `flags` and `was_red` are those of flags.json.
    `samples`: each has prompt, completion, and reward or the expected answer. `changed`: a curve has grown since the
    last look. `behind`: a long run has more metrics, to be read at once."""

    status: Status
    plots: list[tuple[Plot, dict[str, Curve]]]
    flags: list[dict[str, Any]]
    was_red: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    sampled_at: int | None
    checkpoints: list[CheckpointState]
    disk: list[str]
    changed: bool
    behind: bool

    @property
    def broke(self) -> str:
        return describe_broken_checkpoints(self.was_red, [each.path for each in self.checkpoints])


class SnapshotReader:
    """Reads one run again and again. Raises UsageError where there is none any more."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.curves = run_dir, Curves(run_dir / "metrics.jsonl")

    def look(self) -> RunSnapshot:
        status = status_of(self.run_dir)
        changed = self.curves.read(LOOK_BYTES)
        judged = read_json_or_empty(self.run_dir / "flags.json")
        sampled_at, samples = read_newest_samples(self.run_dir)
        # Names and sizes against what was verified when it was saved; one may just have made room.
        newest = list_checkpoints(self.run_dir / "checkpoints")[:CHECKPOINTS]
        inspected = [inspect(path, whole=False) for path in newest]
        return RunSnapshot(
            status=status,
            plots=self.curves.plots(),
            flags=judged.get("flags", []),
            was_red=judged.get("was_red", []),
            samples=samples,
            sampled_at=sampled_at,
            checkpoints=[each for each in inspected if each.path.exists()],
            disk=disk_lines(self.run_dir, status),
            changed=changed,
            behind=self.curves.behind,
        )


def describe_broken_checkpoints(was_red: list[dict[str, Any]], newest: list[Path]) -> str:
    """What to say of checkpoints, whole as they are, that were saved when numbers had stopped being finite; "" of none."""
    at = next((int(each["step"]) for each in was_red if each["name"] == "finite numbers"), None)
    late = [path.name for path in newest if at is not None and step_of(path) >= at]
    return f"saved after numbers stopped being finite (step {at}): {', '.join(late)}" if late else ""


def read_newest_samples(run_dir: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """Step and rows of the last rollout that was written (worst to best), else of the last samples; none of either: []."""
    lines = tail_lines(run_dir / ROLLOUTS, ROLLOUT_BYTES)
    if lines:
        row = json.loads(lines[-1])
        return row["step"], row["shown"]
    rows = [json.loads(line) for line in tail_lines(run_dir / "samples.jsonl", ROLLOUT_BYTES)]
    last = rows[-1]["step"] if rows else None
    return last, [row for row in rows if row["step"] == last]


def disk_lines(run_dir: Path, status: Status) -> list[str]:
    """What is free, how fast it is used up, and what the run was forecast to want before its first step."""
    lines = tail_lines(run_dir / "disk.jsonl", 4096)
    sample = json.loads(lines[-1]) if lines else {}
    forecast: list[str] = read_section(run_dir / FORECAST, "disks").get("lines", [])
    free = (status.heartbeat.get("disk") or {}).get("free") or sample.get("free")
    if free is None:
        return forecast
    said, hours = f"{free / 1e9:.1f} GB free", sample.get("hours_until_full") or math.inf
    if hours < SOON_HOURS:
        said += f", full in {format_duration(hours * 3600)} at the rate of the last hour"
    return [said + (f" ({sample['level']})" if sample.get("level") else ""), *forecast]


# --------------------------------------------------------------------------------------------------------- in a terminal


def watch(run_dir: Path, console: Console | None = None) -> None:
    """Follow a run until it ends. Ctrl-C ends the watching, not the run. Without a terminal each look is printed once."""
    looker = SnapshotReader(run_dir)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            look = looker.look()
            live.update(render_screen(look), refresh=True)
            if look.behind:
                continue
            if look.status.ended:
                return
            time.sleep(REFRESH_SECONDS)


def render_screen(look: RunSnapshot) -> RenderableType:
    """One look as a screen: state, flags, curves, checkpoints, disk, samples: what a low terminal does not show comes last."""
    status = look.status
    parts: list[RenderableType] = []
    if status.step is not None and status.steps:
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=status.steps, completed=min(status.step, status.steps), width=COLUMNS * 2))
        parts.append(bar)
    parts += [plain_text(line, MARKS.get(line.partition(":")[0], "")) for line in format_facts(status)]
    if look.flags:
        green = sum(flag["level"] == "green" for flag in look.flags)
        parts.append(plain_text(f"{green} of {len(look.flags)} flags are green", "green"))
    parts.append(render_curves(look))
    parts += [plain_text(f"{each.path.name}: {each.state}, {format_bytes(each.bytes)}") for each in look.checkpoints]
    parts += [plain_text(each) for each in (look.broke, *(f"disk: {each}" for each in look.disk)) if each]
    if look.samples:
        parts.append(render_samples(look))
    return Panel(Group(*parts), title=plain_text(format_headline(status)), title_align="left")


def render_curves(look: RunSnapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    finite = [curve for _, drawn in look.plots for curve in drawn.values() if len(curve.low)]
    reached = max((curve.bins[LAST][-1] for curve in finite), default=0)
    for plot, drawn in look.plots:
        for key, curve in drawn.items():
            name = plot.title if len(drawn) == 1 else key
            if len(curve.low):
                between = f"{format_number(float(curve.low.min()))} to {format_number(float(curve.high.max()))}"
                value, step = format_number(float(curve.mean[-1])), int(curve.bins[LAST][-1])
                at_last = f"now {value}" if step == reached else f"{value} (step {step})"
                table.add_row(plain_text(name), sparkline(curve), at_last, between)
            if curve.broken:
                table.add_row(plain_text(name), f"NOT FINITE at step {curve.broken[0]}", f"{len(curve.broken)} times")
    return table


def plain_text(text: str, style: str = "") -> Text:
    """Text that others wrote, as it is: neither rich's markup in it nor a terminal's control characters are obeyed."""
    return Text(escape_controls(text), style)


def sparkline(curve: Curve) -> str:
    """The means in one line of blocks, as many as there is room for."""
    means = np.array([part.mean() for part in np.array_split(curve.mean, min(COLUMNS, len(curve.mean)))])
    low, high = means.min(), means.max()
    levels = (means - low) / (high - low) if high > low else np.full_like(means, 0.5)
    return "".join(BLOCKS[round(level * (len(BLOCKS) - 1))] for level in levels)


def render_samples(look: RunSnapshot) -> Table:
    rewarded = "reward" in look.samples[0]
    table = Table(title=f"newest samples, step {look.sampled_at}", title_justify="left", show_lines=True)
    for name in ("prompt (its end)", "completion", *(["reward"] if rewarded else [])):
        table.add_column(name)
    for each in look.samples:
        row = [str(each["prompt"])[-MOST_CHARACTERS:], str(each["completion"])[:MOST_CHARACTERS]]
        reward = [format_value(each["reward"])] if rewarded else []
        table.add_row(*map(plain_text, row + reward))
    return table
