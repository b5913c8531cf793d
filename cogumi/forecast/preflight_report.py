"""What a preflight says: a line for each thing that was checked, with the change that would make a red one green."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["green", "yellow", "red", "unknown"]
MARKS = {"green": "ok", "yellow": "note", "red": "RED", "unknown": "?"}


@dataclass(frozen=True)
class Line:
    """figure: what was found, in words with numbers. fix: what to do, "" where nothing is to be done."""

    stage: str
    figure: str
    state: State = "green"
    fix: str = ""


@dataclass(frozen=True)
class PreflightReport:
    """Every line, in the order in which a run would meet it. `figures`: the numbers behind the words, by stage."""

    target: str
    lines: tuple[Line, ...]
    figures: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        return all(line.state != "red" for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        lines = [asdict(line) for line in self.lines]
        return {"fits": self.fits, "target": self.target, "lines": lines, "figures": dict(self.figures)}

    def __str__(self) -> str:
        width = max(len(line.stage) for line in self.lines)
        lines = [f"preflight for {self.target}"]
        for line in self.lines:
            lines.append(f"{MARKS[line.state]:>4}  {line.stage:{width}}  {line.figure}")
            if line.fix:
                lines.append(f"{'':>4}  {'':{width}}  -> {line.fix}")
        red = sum(line.state == "red" for line in self.lines)
        unknown = ", ".join(dict.fromkeys(line.stage for line in self.lines if line.state == "unknown"))
        verdict = f"{red} of {len(self.lines)} lines are red" if red else "nothing is red: it fits"
        lines.append(f"{verdict}, as far as is known; not known: {unknown}" if unknown and not red else verdict)
        return "\n".join(lines)
