"""Explain tracebacks and logs: cause and fix of the known failures in signatures.toml."""

import functools
import re
import signal
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.redact import redact_text

# Terminal colours, also as escaped in a notebook file, and terminal links.
COLOURS = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033)\[[0-9;:?]{0,40}[A-Za-z]|\x1b\][^\x07\x1b\n]{0,2000}(?:\x07|\x1b\\)")
# Text that may separate two words of a message: a wrapped line with indentation, the border of a box, and prefixes of
# launchers and log collectors: rank, process, time.
TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?"
GAP = rf"(?:[\s│|>]|\[rank\d{{1,4}}\]:|\(\w{{1,40}} pid=\d{{1,9}}\)|{TIME}){{1,200}}"
# The start of a source line that IPython and rich print around a frame. A message in such a line was not printed: the line
# `309 raise AssertionError("Torch not compiled with CUDA enabled")` may be context of another failure.
SOURCE_LINE = re.compile(r"[ \t│|]{0,40}(?:-{1,5}>|❱)?[ \t]{0,20}\d{1,6}[ \t]{1,20}(?:│|[^\d])")
MAX_LINE_CHARS = 240
EXIT_RETRY = 75  # EX_TEMPFAIL of sysexits.h: another try of the same command may succeed
TRANSIENT = {"gpu-broken", "gpu-lost", "hub-unreachable", "killed", "nccl-system-error", "nccl-timeout"}  # these too
NETWORK_ERROR = re.compile(
    r"(httpx2?|requests\.exceptions|aiohttp\.client_exceptions|botocore\.exceptions|torch\.distributed)\."
    r"((Network|Connection|ClientConnection|HTTPClient|RemoteProtocol|DistNetwork)Error|Timeout(Exception)?)"
)
AWS_TRANSIENT = re.compile("AWS Error (NETWORK_CONNECTION|REQUEST_TIMEOUT|SLOW_DOWN|SERVICE_UNAVAILABLE)")
NEXT_STEP = (
    "  next: `cogumi doctor` checks this environment; a CUDA error: once more with CUDA_LAUNCH_BLOCKING=1, "
    "which shows where it is"
)


@dataclass(frozen=True)
class FailureSignature:
    """A known failure and the patterns of its message. signatures.toml documents the fields."""

    name: str
    patterns: tuple[re.Pattern[str], ...]
    cause: str
    fix: str
    source: str
    fatal: bool = True
    follows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """A known failure found in a text, with its first matching line and that line's number, from 1."""

    name: str
    cause: str
    fix: str
    line: str
    line_number: int

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}\n  line {self.line_number}: {self.line}\n  fix: {self.fix}"


@dataclass(frozen=True)
class Explanation:
    """The known failures of a text, root cause first, and its last line."""

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
    entries = tomllib.loads(Path(__file__).with_name("signatures.toml").read_text(encoding="utf-8"))
    loaded = []
    for name, entry in entries.items():
        patterns = tuple(re.compile(pattern.replace(" ", GAP)) for pattern in entry.pop("patterns"))
        loaded.append(FailureSignature(name, patterns, **(entry | {"follows": tuple(entry.get("follows", ()))})))
    return tuple(loaded)


def explain(text: str) -> tuple[Diagnosis, ...]:
    """Find the known failures in a traceback or log, each once, secrets redacted, root cause first.

    Python prints a cause before its consequence, so failures keep the order of the text; those that follow from another
    match come after, and warnings last.
    """
    text = COLOURS.sub("", text)
    matched: dict[str, tuple[FailureSignature, re.Match[str]]] = {}
    for signature in signatures():
        matches = [match for pattern in signature.patterns if (match := _first_match(pattern, text))]
        if matches:
            matched[signature.name] = signature, min(matches, key=re.Match.start)

    def rank(entry: tuple[FailureSignature, re.Match[str]]) -> tuple[bool, bool, int]:
        signature, match = entry
        return not signature.fatal, any(name in matched for name in signature.follows), match.start()

    return tuple(
        Diagnosis(
            known.name, known.cause, known.fix, _matched_line(text, match), text.count("\n", 0, match.start()) + 1
        )
        for known, match in sorted(matched.values(), key=rank)
    )


def explain_text(text: str) -> Explanation:
    """Return the result of `explain` for printing, or the last line if nothing is known."""
    last = COLOURS.sub("", text[-10_000:]).rstrip().replace("\r", "\n").rsplit("\n", 1)[-1]
    return Explanation(explain(text), redact_text(_one_line(last)[:MAX_LINE_CHARS]))


def known_cause(text: str) -> dict[str, Any]:
    """Return `cause`, `fix` and `retriable` of what ended a process, from its output; {} if that is no known failure."""
    fatal = {signature.name for signature in signatures() if signature.fatal}
    match = next((match for match in explain(text) if match.name in fatal), None)
    if match is None:
        return {}
    return {"cause": f"{match.name}: {match.cause}", "fix": match.fix, "retriable": match.name in TRANSIENT}


def known_death(code: int, oom_kills: int, output: str) -> dict[str, Any]:
    """Return the same from an exit status, and the kernel's count of out-of-memory kills in the meantime."""
    if code != -signal.SIGKILL:  # its victim prints nothing, so a failure in the output did not end it
        return known_cause(output)
    cause = f"killed: the kernel counted {oom_kills} kills for lack of memory meanwhile, of which this was likely one."
    fix = next(signature.fix for signature in signatures() if signature.name == "killed")
    return {"retriable": True} | ({"cause": cause, "fix": fix} if oom_kills > 0 else {})


def known_cause_of(error: BaseException) -> dict[str, Any]:
    """Return the same of an error, always with `retriable`, from its message and those of its explicit causes alone."""
    chain = [error]  # without `__context__`: what was merely being handled need not have caused it
    while chain[0].__cause__ is not None:
        chain.insert(0, chain[0].__cause__)
    text = "".join(f"{type(link).__name__}: {link}\n" for link in chain)
    known = {} if isinstance(error, UsageError) else known_cause(text)  # which names its cause and fix itself
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for link in chain for kind in type(link).__mro__]
    statuses = [getattr(getattr(link, "response", None), "status_code", 0) for link in chain]
    again = known.get("retriable", False) or any(getattr(link, "retriable", False) for link in chain)
    again |= any(map(NETWORK_ERROR.fullmatch, kinds)) or any(status == 429 or status >= 500 for status in statuses)
    return {**known, "retriable": again or bool(AWS_TRANSIENT.search(text))}


def exit_status(error: BaseException) -> int:
    """Return the exit status of a process that an error ends: 75 if another try may succeed, 2 for wrong use, else 1."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        code = getattr(error, "code", 128 + signal.SIGINT)
        return code if isinstance(code, int) else 1
    return EXIT_RETRY if known_cause_of(error)["retriable"] else 2 if isinstance(error, UsageError) else 1


def _first_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the first match outside of source lines."""
    for match in pattern.finditer(text):
        line = text.rfind("\n", max(0, match.start() - 1000), match.start()) + 1
        if not SOURCE_LINE.match(text, line, match.start()):
            return match
    return None


def _matched_line(text: str, match: re.Match[str]) -> str:
    """Return the line or wrapped lines of a match, cut to MAX_LINE_CHARS characters around it."""
    # Far more than is shown, so that a secret is redacted before the line is cut.
    before = re.split(r"[\n\r]", text[max(0, match.start() - 4 * MAX_LINE_CHARS) : match.start()])[-1]
    after = re.split(r"[\n\r]", text[match.end() : match.end() + 4 * MAX_LINE_CHARS])[0]
    line, words = redact_text(_one_line(before + match.group() + after)), _one_line(match.group())
    at = max(0, line.find(words) - max(0, MAX_LINE_CHARS - len(words)) // 2) if len(line) > MAX_LINE_CHARS else 0
    return line[at : at + MAX_LINE_CHARS]


def _one_line(text: str) -> str:
    return " ".join(text.split())
