"""Everything worth seeing of a run, from its directory: what panel and report are made of.

Each look reads what was written since the last one; nothing is held but curves, and what is the same is not read again.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.checkpoints.manifest import step_of
from cogumi.checkpoints.retention import list_checkpoints
from cogumi.checkpoints.verify import CheckpointState, inspect
from cogumi.core.formatting import format_duration
from cogumi.core.run_directory import FORECAST, ROLLOUTS, SAMPLES_FILE, read_section
from cogumi.notebook.curves import Curve, Curves, Plot
from cogumi.telemetry.status import Status, read_json_or_empty, status_of, tail_lines

ROLLOUT_BYTES = 1 << 20  # at the end of a file: more than one rollout writes
CHECKPOINTS = 4  # that are inspected, the newest
SOON_HOURS = 24.0  # a disk that fills in more is no news


@dataclass(frozen=True)
class RunSnapshot:
    """One look at a run. `judged` is flags.json. `samples`: each has prompt, completion, and reward or the expected answer.
    `changed`: a curve has grown since the last look."""

    status: Status
    plots: list[tuple[Plot, dict[str, Curve]]]
    judged: dict[str, Any]
    samples: list[dict[str, Any]]
    sampled_at: int | None
    checkpoints: list[CheckpointState]
    disk: list[str]
    changed: bool

    @property
    def flags(self) -> list[dict[str, Any]]:
        return list(self.judged.get("flags", []))

    @property
    def was_red(self) -> list[dict[str, Any]]:
        return list(self.judged.get("was_red", []))

    @property
    def broke(self) -> str:
        """What to say of checkpoints, whole as they are, that were saved when numbers had stopped being finite; "" of none."""
        at = next((int(each["step"]) for each in self.was_red if each["name"] == "finite numbers"), None)
        late = [each.path.name for each in self.checkpoints if at is not None and step_of(each.path) >= at]
        return f"saved after numbers stopped being finite (step {at}): {', '.join(late)}" if late else ""


class SnapshotReader:
    """Reads one run again and again. Raises UsageError where there is none any more."""

    def __init__(self, run_dir: Path, checkpoints: int | None = CHECKPOINTS) -> None:
        self.run_dir, self.newest = run_dir, checkpoints
        self.curves = Curves(run_dir / "metrics.jsonl")

    def look(self) -> RunSnapshot:
        status = status_of(self.run_dir)
        changed = self.curves.read()
        sampled_at, samples = read_newest_samples(self.run_dir)
        # Names and sizes against what was verified when it was saved; one may just have made room.
        newest = list_checkpoints(self.run_dir / "checkpoints")[: self.newest]
        inspected = [inspect(path, whole=False) for path in newest]
        return RunSnapshot(
            status=status,
            plots=self.curves.plots(),
            judged=read_json_or_empty(self.run_dir / "flags.json"),
            samples=samples,
            sampled_at=sampled_at,
            checkpoints=[each for each in inspected if each.path.exists()],
            disk=disk_lines(self.run_dir, status),
            changed=changed,
        )


def read_newest_samples(run_dir: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """Step and rows of the last rollout that was written (worst to best), else of the last samples; none of either: []."""
    lines = tail_lines(run_dir / ROLLOUTS, ROLLOUT_BYTES)
    if lines:
        row = json.loads(lines[-1])
        return row["step"], row["shown"]
    rows = [json.loads(line) for line in tail_lines(run_dir / SAMPLES_FILE, ROLLOUT_BYTES)]
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
