"""What a traceback or a log says went wrong, if it is one of the failures of signatures.toml: the cause and the fix."""

import functools
import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cogumi.core.redact import redact_text

# Terminal colours, also as a notebook file spells them, and the links that some terminals write.
COLOURS = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033)\[[0-9;:?]{0,40}[A-Za-z]|\x1b\][^\x07\x1b\n]{0,2000}(?:\x07|\x1b\\)")
# What may stand between two words of a message: a wrapped line with its indentation, the border of a box, and what a
# launcher or a log collector puts before every line: the rank, the process, the time.
TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?"
GAP = rf"(?:[\s│|>]|\[rank\d{{1,4}}\]:|\(\w{{1,40}} pid=\d{{1,9}}\)|{TIME}){{1,200}}"
# The start of a line of source code as IPython and rich print it around a frame. A message in such a line was not said:
# `309 raise AssertionError("Torch not compiled with CUDA enabled")` stands there for whatever fails a line further down.
SOURCE_LINE = re.compile(r"[ \t│|]{0,40}(?:-{1,5}>|❱)?[ \t]{0,20}\d{1,6}[ \t]{1,20}(?:│|[^\d])")
SHOWN = 240  # characters of a line
NEXT_STEP = (
    "  next: `cogumi doctor` checks this environment; a CUDA error: once more with CUDA_LAUNCH_BLOCKING=1, "
    "which shows where it is"
)


@dataclass(frozen=True)
class FailureSignature:
    """A failure that is known by its message. The fields are explained at the head of signatures.toml."""

    name: str
    patterns: tuple[re.Pattern[str], ...]
    cause: str
    fix: str
    source: str
    fatal: bool = True
    follows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """A known failure that a text speaks of, with the first line that says so and that line's number, from 1."""

    name: str
    cause: str
    fix: str
    line: str
    line_number: int

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}\n  line {self.line_number}: {self.line}\n  fix: {self.fix}"


@dataclass(frozen=True)
class Explanation:
    """What is known of a text, the root first, and its last line for where nothing is known."""

    diagnoses: tuple[Diagnosis, ...]
    last_line: str

    def __str__(self) -> str:
        if self.diagnoses:
            return "\n".join(map(str, self.diagnoses))
        if not self.last_line:
            return "unknown: there is no text to explain"
        unknown = f"unknown: none of the {len(signatures())} known failures"
        return f"{unknown}; the last line is: {self.last_line}\n{NEXT_STEP}"

    def as_dict(self) -> dict[str, Any]:
        return {"known": bool(self.diagnoses), "signatures": len(signatures()), **asdict(self)}


@functools.cache
def signatures() -> tuple[FailureSignature, ...]:
    """Every failure that is known, as written in signatures.toml beside this module."""
    written = tomllib.loads(Path(__file__).with_name("signatures.toml").read_text(encoding="utf-8"))
    found = []
    for name, entry in written.items():
        patterns = tuple(re.compile(pattern.replace(" ", GAP)) for pattern in entry.pop("patterns"))
        found.append(FailureSignature(name, patterns, **(entry | {"follows": tuple(entry.get("follows", ()))})))
    return tuple(found)


def explain(text: str) -> tuple[Diagnosis, ...]:
    """The known failures that a traceback or a log speaks of, each once and without secrets, the root first.

    Python prints a cause before its consequence, so failures stand in the order of the text. One that only follows from
    another one found here comes after those, and warnings come last.
    """
    text = COLOURS.sub("", text)
    found: dict[str, tuple[FailureSignature, re.Match[str]]] = {}
    for signature in signatures():
        matches = [match for pattern in signature.patterns if (match := _first_match(pattern, text))]
        if matches:
            found[signature.name] = signature, min(matches, key=re.Match.start)

    def rank(entry: tuple[FailureSignature, re.Match[str]]) -> tuple[bool, bool, int]:
        signature, match = entry
        return not signature.fatal, any(name in found for name in signature.follows), match.start()

    return tuple(
        Diagnosis(one.name, one.cause, one.fix, _matched_line(text, match), text.count("\n", 0, match.start()) + 1)
        for one, match in sorted(found.values(), key=rank)
    )


def explain_text(text: str) -> Explanation:
    """`explain`, for printing: its text names cause, line and fix of each, or says plainly that nothing is known."""
    last = COLOURS.sub("", text[-10_000:]).rstrip().replace("\r", "\n").rsplit("\n", 1)[-1]
    return Explanation(explain(text), redact_text(_one_line(last)[:SHOWN]))


def _first_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The first match that is not in a line of source code."""
    for match in pattern.finditer(text):
        line = text.rfind("\n", max(0, match.start() - 1000), match.start()) + 1
        if not SOURCE_LINE.match(text, line, match.start()):
            return match
    return None


def _matched_line(text: str, match: re.Match[str]) -> str:
    """The line, or the wrapped lines, of a match: at most SHOWN characters, of a longer line those around the match."""
    # Far more than is shown, so that a secret is seen whole before the line is cut.
    start, end = max(0, match.start() - 4 * SHOWN), match.end() + 4 * SHOWN
    start = max(start, *(text.rfind(newline, start, match.start()) + 1 for newline in "\n\r"))
    end = min((at for newline in "\n\r" if (at := text.find(newline, match.end(), end)) >= 0), default=end)
    line = redact_text(_one_line(text[start:end]))
    if len(line) <= SHOWN:
        return line
    words = _one_line(match.group())
    at = max(0, line.find(words) - max(0, SHOWN - len(words)) // 2)
    return line[at : at + SHOWN]


def _one_line(text: str) -> str:
    return " ".join(text.split())
