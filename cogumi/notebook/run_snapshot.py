"""Everything worth seeing of a run, from its directory: what panel and report are made of.

Each look reads what was written since the last one; nothing is held but curves, and what is the same is not read again.
"""

import json
from pathlib import Path
from typing import Any, Self

from cogumi.checkpoints.manifest import step_of
from cogumi.checkpoints.retention import list_checkpoints
from cogumi.checkpoints.verify import inspect
from cogumi.core.run_directory import FORECAST, ROLLOUTS, SAMPLES_FILE, read_section
from cogumi.notebook.curves import Curves
from cogumi.telemetry.status import Status, read_json_or_empty, status_of, tail_lines

ROLLOUT_BYTES = 1 << 20  # at the end of a file: more than one rollout writes
CHECKPOINTS = 4  # that are inspected, the newest


class RunSnapshot:
    """A run as it stood at the last `look()`, which raises UsageError where there is none (any more).

    `judged` is flags.json. `samples`: each has prompt, completion, and reward or the expected answer, of step `sampled_at`.
    `changed`: a curve has grown since the look before.
    """

    def __init__(self, run_dir: Path, checkpoints: int | None = CHECKPOINTS) -> None:
        self.run_dir, self.newest = run_dir, checkpoints
        self.curves = Curves(run_dir / "metrics.jsonl")

    def look(self) -> Self:
        self.status = status_of(self.run_dir)
        self.changed = self.curves.read()
        self.judged = read_json_or_empty(self.run_dir / "flags.json")
        self.flags: list[dict[str, Any]] = self.judged.get("flags", [])
        self.was_red: list[dict[str, Any]] = self.judged.get("was_red", [])
        self.sampled_at, self.samples = read_newest_samples(self.run_dir)
        # Names and sizes against what was verified when it was saved; one may just have made room.
        newest = list_checkpoints(self.run_dir / "checkpoints")[: self.newest]
        self.checkpoints = [each for each in (inspect(path, whole=False) for path in newest) if each.path.exists()]
        self.disk = disk_lines(self.run_dir, self.status)
        return self

    @property
    def broke(self) -> str:
        """What to say of checkpoints, whole as they are, that were saved when numbers had stopped being finite; "" of none."""
        at = next((int(each["step"]) for each in self.was_red if each["name"] == "finite numbers"), None)
        late = [each.path.name for each in self.checkpoints if at is not None and step_of(each.path) >= at]
        return f"saved after numbers stopped being finite (step {at}): {', '.join(late)}" if late else ""


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
    """What is free, and what the run was forecast to want before its first step."""
    lines = tail_lines(run_dir / "disk.jsonl", 4096)
    sample = json.loads(lines[-1]) if lines else {}
    forecast: list[str] = read_section(run_dir / FORECAST, "disks").get("lines", [])
    free = (status.heartbeat.get("disk") or {}).get("free") or sample.get("free")
    if free is None:
        return forecast
    level = f" ({sample['level']})" if sample.get("level") else ""
    return [f"{free / 1e9:.1f} GB free{level}", *forecast]
