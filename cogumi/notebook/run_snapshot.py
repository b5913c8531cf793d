"""Everything worth seeing of a run, from its directory: what the panel, `cogumi status --watch` and the text are made of.

Each look reads what was written since the last one; nothing is held but curves, and what is the same is not read again.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cogumi.checkpoints.commit import step_of
from cogumi.checkpoints.retention import checkpoints_in
from cogumi.checkpoints.verify import Finding, inspect
from cogumi.core.formatting import duration
from cogumi.core.run_directory import FORECAST, ROLLOUTS, read_section
from cogumi.notebook.curves import Curve, Curves, Plot
from cogumi.telemetry.status import Status, read_if_there, status_of, tail_lines

ROLLOUT_BYTES = 1 << 20  # at the end of a file: more than one rollout writes
LOOK_BYTES = 48 << 20  # of metrics that are read at a look: some tenths of a second
CHECKPOINTS = 4  # that are looked at, the newest
SOON_HOURS = 24.0  # a disk that fills in more is no news


@dataclass(frozen=True)
class Look:
    """One look. `flags` and `was_red` as in flags.json; `samples`: prompt, completion, and reward or the expected answer."""

    status: Status
    plots: list[tuple[Plot, dict[str, Curve]]]
    flags: list[dict[str, Any]]
    was_red: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    sampled_at: int | None
    checkpoints: list[Finding]
    disk: list[str]
    changed: bool
    """Whether a curve has grown since the last look."""
    behind: bool
    """Whether there is more to be read at once: a long run is shown from its beginning on while it is read."""

    @property
    def troubles(self) -> list[dict[str, Any]]:
        """The flags that are not green, red ones first."""
        return [flag for flag in self.flags if flag["level"] != "green"]


@dataclass
class Looker:
    """Looks at one run again and again. Raises UsageError where there is none any more."""

    run_dir: Path
    curves: Curves = field(init=False)

    def __post_init__(self) -> None:
        self.curves = Curves(self.run_dir / "metrics.jsonl")

    def look(self) -> Look:
        status = status_of(self.run_dir)
        changed = self.curves.read(LOOK_BYTES)
        judged = read_if_there(self.run_dir / "flags.json")
        sampled_at, samples = newest_samples(self.run_dir)
        return Look(
            status=status,
            plots=self.curves.plots(),
            flags=judged.get("flags", []),
            was_red=judged.get("was_red", []),
            samples=samples,
            sampled_at=sampled_at,
            checkpoints=self.checkpoints(),
            disk=disk_lines(self.run_dir, status),
            changed=changed,
            behind=self.curves.behind,
        )

    def checkpoints(self) -> list[Finding]:
        """The newest ones: names and sizes against what was verified when it was saved."""
        newest = checkpoints_in(self.run_dir / "checkpoints")[:CHECKPOINTS]
        found = [inspect(path, whole=False) for path in newest]
        return [each for each in found if each.path.exists()]  # one may just have made room


def broke(was_red: list[dict[str, Any]], newest: list[Path]) -> str:
    """What to say of checkpoints, whole as they are, that were saved when numbers had stopped being finite; "" of none."""
    at = next((int(each["step"]) for each in was_red if each["name"] == "finite numbers"), None)
    late = [path.name for path in newest if at is not None and step_of(path) >= at]
    return f"saved after numbers stopped being finite (step {at}): {', '.join(late)}" if late else ""


def newest_samples(run_dir: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """Step and rows of the last rollout that was written (worst to best), else of the last samples; none of either: []."""
    lines = tail_lines(run_dir / ROLLOUTS, ROLLOUT_BYTES)
    if lines:
        row = json.loads(lines[-1])
        return row["step"], row["shown"]
    rows = [json.loads(line) for line in tail_lines(run_dir / "samples.jsonl", ROLLOUT_BYTES)]
    last = rows[-1]["step"] if rows else None
    return last, [row for row in rows if row["step"] == last]


def disk_lines(run_dir: Path, status: Status) -> list[str]:
    """What is free, how fast it goes, and what the run was forecast to want before its first step."""
    said = []
    lines = tail_lines(run_dir / "disk.jsonl", 4096)
    sample = json.loads(lines[-1]) if lines else {}
    free = (status.heartbeat.get("disk") or {}).get("free") or sample.get("free")
    if free is not None:
        hours = sample.get("hours_until_full") or math.inf
        rate = f", full in {duration(hours * 3600)} at the rate of the last hour" if hours < SOON_HOURS else ""
        said.append(f"{free / 1e9:.1f} GB free{rate}" + (f" ({sample['level']})" if sample.get("level") else ""))
    forecast: list[str] = read_section(run_dir / FORECAST, "disks").get("lines", [])
    return said + forecast
