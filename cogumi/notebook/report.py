"""report.html: all there is to know of a run in one file, which needs neither the machine, nor a network, nor a script.

For a run at any stage: what is not there (yet) is said, not left out. Written whole; made again, it is replaced.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from cogumi.checkpoints.manifest import CheckpointDamaged, files_of, read_manifest
from cogumi.checkpoints.retention import checkpoints_in
from cogumi.core import __version__
from cogumi.core.errors import UsageError
from cogumi.core.formatting import duration, gib
from cogumi.core.run_directory import PREFLIGHT, ROLLOUTS, write_atomic
from cogumi.notebook import figures, html_components
from cogumi.notebook.completions import rollouts, side_by_side
from cogumi.notebook.figures import MERGE_MANIFEST
from cogumi.notebook.html_components import facts, figure, folded, level, style, table, text, verbatim
from cogumi.notebook.run_snapshot import broke
from cogumi.telemetry.status import (
    BROKEN_OFF,
    Status,
    checks,
    counted,
    failure,
    missed,
    read_if_there,
    reds,
    state_of,
    status_of,
    tail_lines,
)

FILE = "report.html"
LOG_BYTES = 1 << 20  # of a log, its end
MOST_LINES = 300  # of decisions
LAST_LINES = 40
TRACEBACK = "Traceback (most recent call last):"
A_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (\w+) (.*)$")
# Lines of the log that are told elsewhere: progress, checks.
NO_DECISIONS = re.compile(r"step \d+/\d+,|pass  |FAIL  |flags: ")


def write_report(run_dir: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write the report of a run and return its path: `report.html` in its directory, or the file `out`.

    Raises UsageError where there is no run, and where nothing can be written.
    """
    run = Path(run_dir)
    path = run / FILE if out is None else Path(out)
    page = report(status_of(run))
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", place=path, fix="name another file (--out)") from None
    return path


def report(status: Status) -> str:
    """The whole page, of a run as it stands."""
    run = Path(status.run_dir)
    parts: list[tuple[str, Callable[[Path, Status], str]]] = [
        ("What it was", what_it_was),
        ("Verdict", verdict),
        ("Flags", flags),
        ("Curves", curves),
        ("Rewards", rewards),
        ("Completions", completions),
        ("Data", data),
        ("Memory", memory),
        ("Merge", merge),
        ("Checkpoints", checkpoints),
        ("Decisions and log", decisions),
        ("Configuration", configuration),
    ]
    # A verdict is read first; what was run comes after it.
    parts[:2] = [parts[1], parts[0]]
    sections = [(title, content) for title, make in parts if (content := make(run, status))]
    nav = "".join(f'<li><a href="#{anchor(title)}">{title}</a></li>' for title, _ in sections)
    body = "\n".join(
        f'<section><h2 id="{anchor(title)}">{title}</h2>\n{content}</section>' for title, content in sections
    )
    name = run.absolute().name
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    sheets = style() + files("cogumi.notebook").joinpath("report.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{text(name)}: {text(in_a_word(status)[1])}</title>
<style>{sheets}</style>
</head>
<body>
<main class="cogumi-piece">
<h1>{level(*in_a_word(status))} {text(name)}</h1>
{reason(status)}
<nav aria-label="Sections"><ul>{nav}</ul></nav>
{body}
<footer>Made by cogumi {__version__} on {now} from the files of the run.</footer>
</main>
</body>
</html>
"""


def anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


# -------------------------------------------------------------------------------------------------------- how it stands


def in_a_word(status: Status) -> tuple[str, str]:
    """(level, word): `passed` only where a run came to its end, every check passed and no flag is red."""
    if status.passed:
        if red := reds(status):
            return "red", f"{status.state}, RED: {', '.join(red)}"
        return "green", "passed" if status.state == "finished" else f"{status.state}, passed"
    if not status.ended:
        return "unknown", state_of(status)
    if read_if_there(Path(status.run_dir) / "verdict.json").get("passed") is False:
        return "red", f"FAIL ({status.state}): {', '.join(each['name'] for each in missed(checks(status)))}"
    return ("red" if status.state in ("failed", "died", "refused") else "yellow"), status.state


def reason(status: Status) -> str:
    if not status.ended:
        return f'<p class="reason">It is still at work: this is how far it was, {when(time.time())}.</p>'
    return f'<p class="reason">{text(status.reason)}</p>' if status.reason else ""


def verdict(run: Path, status: Status) -> str:
    found = read_if_there(run / "verdict.json")
    if not found:
        return f"<p>There is no verdict: {text(state_of(status))}. Checks are made when a training has ended by itself.</p>"
    said = text(". ".join([counted(found["checks"], reds(status)), *map(failure, missed(found["checks"]))])) + "."
    if "safe_to_scale" in found:
        said += f" Safe to scale: {text(found['safe_to_scale'])}."
    word = level("red", "FAIL")
    if found["passed"]:
        word = level("red", "RED") if reds(status) else level("green", "passed")
    return f"<p>{word} {said}</p>" + html_components.checks(found["checks"])


def flags(run: Path, status: Status) -> str:
    found = read_if_there(run / "flags.json")
    if not found:
        return "<p>Nothing was judged yet: there is no flags.json.</p>"
    at = f"<p>As of step {found['step']}.</p>" if "step" in found else ""
    return at + html_components.flags(found["flags"], found["was_red"])


# ------------------------------------------------------------------------------------------------------------ what it was


def what_it_was(run: Path, status: Status) -> str:
    config, came_to = config_of(run), read_if_there(run / "metrics.json")
    beat = status.heartbeat
    model, base = config.get("model", {}), read_if_there(run / "base.json")
    method = config.get("cogumi", {}).get("method")
    tuning = {"lora": "LoRA", "full": "every weight"}.get(config.get("cogumi", {}).get("tuning"), "")
    if model.get("quantization_config"):
        tuning = f"{tuning}, on a quantized base"
    began = beat.get("started") or status.began
    took = came_to.get("elapsed_seconds", beat.get("elapsed_seconds"))
    cost = came_to.get("cost", beat.get("cost_so_far"))
    speed = came_to.get("tokens_per_second") or beat.get("tokens_per_second")
    done = "" if status.step is None else f"{status.step:,}" + (f" of {status.steps:,}" if status.steps else "")
    rows = [
        ("directory", f"<code>{text(run.absolute())}</code>"),
        ("model", text(", at commit ".join(str(each) for each in (model.get("name"), base.get("commit")) if each))),
        ("method", text(", ".join(filter(None, (method, tuning))))),
        ("state", text(state_of(status))),
        ("steps", done),
        ("began", when(began) if began else ""),
        ("last sign of life", when(status.last_sign) if status.last_sign else ""),
        ("took", duration(took) + stages(came_to.get("seconds") or beat.get("seconds") or {}) if took else ""),
        ("cost", f"${cost:.2f}" if isinstance(cost, int | float) else "not known: no cogumi.price_per_hour was given"),
        ("tokens", f"{came_to['tokens']:,}" if came_to.get("tokens") else ""),
        ("speed", speed_in_words(speed, came_to)),
        ("machine", text(machine(status))),
        ("at the end", text(", ".join(f"{key} {value:.4g}" for key, value in numbers(came_to.get("final", {}))))),
    ]
    return facts(rows)


def stages(seconds: Mapping[str, float]) -> str:
    said = ", ".join(f"{stage} {duration(each)}" for stage, each in seconds.items() if each >= 1)
    return f" ({text(said)})" if said else ""


def speed_in_words(speed: Any, came_to: Mapping[str, Any]) -> str:
    if not isinstance(speed, int | float):
        return ""
    mfu = came_to.get("mfu")
    return f"{speed:,.0f} tokens/s" + (f", MFU {mfu:.1%}" if isinstance(mfu, int | float) else "")


def machine(status: Status) -> str:
    beat = status.heartbeat
    gpu, cpu, store = (beat.get(key) or {} for key in ("gpu", "cpu", "memory"))
    said = [
        str(status.host or ""),
        f"{gpu.get('name', 'a GPU')} with {gib(gpu['total'])}" if gpu.get("total") else ("no GPU" if beat else ""),
        f"{cpu['cores']} cores" if cpu.get("cores") else "",
        f"{gib(store['total'])} of memory" if store.get("total") else "",
    ]
    return ", ".join(filter(None, said))


def numbers(values: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    return ((key, value) for key, value in values.items() if isinstance(value, int | float))


def when(seconds: float) -> str:
    """A time as a person of any time zone reads it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ------------------------------------------------------------------------------------------------------------ the training


def curves(run: Path, status: Status) -> str:
    try:
        return figure(figures.curves(run).svg())
    except UsageError:
        return "<p>Nothing was logged: there is no metrics.jsonl with a step in it.</p>"


def rewards(run: Path, status: Status) -> str:
    if config_of(run).get("cogumi", {}).get("method") != "gspo" and not (run / ROLLOUTS).exists():
        return ""
    try:
        return figure(figures.rewards(run).svg())
    except UsageError:
        return f"<p>The rewards of single completions are not there: no {ROLLOUTS}, or nothing in it.</p>"


def completions(run: Path, status: Status) -> str:
    try:
        said = str(side_by_side(run))
    except UsageError as error:
        said = f"<p>{text(error)}</p>"
    sampled = first_and_last(row for row in figures.rows_of(run / ROLLOUTS) if row.get("shown"))
    return said + (
        folded("Sampled while it trained, first and last, with rewards", rollouts(sampled)) if sampled else ""
    )


def first_and_last(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for row in rows:
        found[1:] = [row]
        if not found:
            found = [row]
    return found


def data(run: Path, status: Status) -> str:
    found = read_if_there(run / "data.json")
    accounts = [found[part] for part in ("train", "held_out") if found.get(part)]
    if not accounts:
        return "<p>What became of the rows is not in data.json; lines of it may be among the decisions below.</p>"
    return html_components.data(accounts, found["train"]["lengths"], found.get("max_length"))


def memory(run: Path, status: Status) -> str:
    forecast, took = read_if_there(run / PREFLIGHT), read_if_there(run / "metrics.json").get("memory", {})
    peak = took.get("gpu_peak_allocated")
    rows = [
        ("peak on the GPU (tensors)", gib(peak) if peak else ""),
        ("reserved on the GPU", gib(took["gpu_peak_reserved"]) if took.get("gpu_peak_reserved") else ""),
        ("forecast of the peak (tensors)", compared(took.get("gpu_peak_forecast"), peak)),
        ("peak of the process, main memory", gib(took["peak_rss"]) if took.get("peak_rss") else ""),
    ]
    said = facts(rows)
    if not forecast:
        return said + "<p>No forecast: there is no preflight.json (a run without a GPU begins without one).</p>"
    return said + "<h4>Preflight</h4>" + html_components.preflight(forecast, peak)


def compared(forecast: float | None, peak: float | None) -> str:
    if not forecast:
        return ""
    return gib(forecast) + (f", {100 * (forecast / peak - 1):+.1f} % from what it was" if peak else "")


def merge(run: Path, status: Status) -> str:
    if (run / "merged" / MERGE_MANIFEST).exists():
        return html_components.merged(run / "merged")
    if (run / "merged").is_dir():
        return "<p>merged/ was trained whole (cogumi.tuning: full): there was nothing to merge.</p>"
    return "<p>There is no merged model" + (", and an adapter." if (run / "adapter").is_dir() else ".") + "</p>"


def checkpoints(run: Path, status: Status) -> str:
    there = checkpoints_in(run / "checkpoints")
    if not there:
        return "<p>There is no checkpoint.</p>"
    rows = [
        [text(path.name), text(path.name.removeprefix("checkpoint-")), size_of(path), *state_of_checkpoint(path)]
        for path in there
    ]
    said = table(["checkpoint", "step", "size", "saved", "manifest"], rows, numbers=(1, 2))
    if word := broke(read_if_there(run / "flags.json").get("was_red", []), there):
        said += f"<p>{text(word)}.</p>"
    return f"{said}<p>Newest first. Whether each file still is what was saved, <code>cogumi</code> reads when it goes on.</p>"


def size_of(checkpoint: Path) -> str:
    return gib(sum(path.stat().st_size for path in files_of(checkpoint).values()))


def state_of_checkpoint(path: Path) -> tuple[str, str]:
    try:
        there = read_manifest(path) is not None
        said = level("green", "there") if there else level("yellow", "none: it was not saved whole")
    except CheckpointDamaged as error:
        said = f"{level('red', 'DAMAGED')} {text(error)}"
    return when(path.stat().st_mtime), said


# ----------------------------------------------------------------------------------------------------------- what it said


def decisions(run: Path, status: Status) -> str:
    log = Path(status.log)
    own = tail_lines(run / "run.log", LOG_BYTES)
    lines = [found.groups() for line in own if (found := A_LINE.match(line))]
    told = [(kind, line) for kind, line in lines if not NO_DECISIONS.match(line)]
    said = ""
    if told:
        shown = "".join(f"<li>{loudness(kind)}{text(line)}</li>\n" for kind, line in told[-MOST_LINES:])
        more = len(told) - MOST_LINES
        said = (f"<p>{more:,} earlier lines are in run.log.</p>" if more > 0 else "") + f"<ol>{shown}</ol>"
    failed = traceback_in(own) or traceback_in(tail_lines(log, LOG_BYTES))
    if failed and status.state in BROKEN_OFF:  # and not one of an earlier part, which the run has gone on after
        said = f"<h4>The error it ended in</h4>{verbatim(failed)}" + said
    last = tail_lines(log, LOG_BYTES)[-LAST_LINES:]
    if last:
        said += folded(f"the last {len(last)} lines of {log.name}", verbatim("\n".join(last)))
    return said or "<p>It said nothing: there is no log.</p>"


def loudness(kind: str) -> str:
    return {"WARNING": level("yellow", "warning") + " ", "ERROR": level("red", "ERROR") + " "}.get(kind, "")


def traceback_in(lines: list[str]) -> str:
    """The last traceback of a log, up to the line that names the error; "" where there is none."""
    begins = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if not begins:
        return ""
    end = next((n for n in range(begins[-1] + 1, len(lines)) if lines[n][:1] not in (" ", "")), len(lines) - 1)
    return "\n".join(lines[begins[-1] : end + 1])


def configuration(run: Path, status: Status) -> str:
    path = run / "config.yaml"
    if not path.exists():
        return "<p>There is no config.yaml: it had not come as far.</p>"
    return folded(
        "config.yaml, resolved; secrets are redacted", verbatim(path.read_text(encoding="utf-8")), is_open=True
    )


def config_of(run: Path) -> dict[str, Any]:
    path = run / "config.yaml"
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found or {}
