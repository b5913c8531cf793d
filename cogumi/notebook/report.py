"""report.html: all there is to know of a run in one file, which needs neither the machine, nor a network, nor a script.

For a run at any stage: what is not there (yet) is said, not left out. Written whole; made again, it is replaced.
"""

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from cogumi.checkpoints.manifest import CheckpointDamaged, list_manifest_files, read_manifest
from cogumi.checkpoints.retention import list_checkpoints
from cogumi.core import __version__
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_duration, format_memory
from cogumi.core.run_directory import DECISIONS, FORECAST, ROLLOUTS, read_section, write_atomic
from cogumi.notebook import figures, html_components
from cogumi.notebook.completions import render_rollouts, side_by_side
from cogumi.notebook.curves import Curves, render_plots
from cogumi.notebook.html_components import escape_text, facts, figure, folded, level, style, table, verbatim
from cogumi.notebook.run_snapshot import describe_broken_checkpoints
from cogumi.telemetry.status import (
    BROKEN_OFF,
    Status,
    checks,
    count_checks,
    failed_checks,
    format_missed_check,
    format_state,
    read_json_or_empty,
    reds,
    status_of,
    tail_lines,
)

FILE = "report.html"
LOG_BYTES = 1 << 20  # of a log, its end
MOST_LINES = 300  # of decisions
LAST_LINES = 40
TRACEBACK = "Traceback (most recent call last):"
# A line of the log with its level, but for those that are told elsewhere: progress, checks.
DECISION = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (\w+) (?!step \d+/\d+,|pass  |FAIL  |flags: )(.*)$")
LOUD = {"WARNING": level("yellow", "warning") + " ", "ERROR": level("red", "ERROR") + " "}


def write_report(run_dir: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write the report of a run and return its path: `report.html` in its directory, or the file `out`. Raises UsageError where
    there is no run, and where nothing can be written."""
    run = Path(run_dir)
    path = run / FILE if out is None else Path(out)
    page = render_report(status_of(run))
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", place=path, fix="name another file (--out)") from None
    return path


def render_report(status: Status) -> str:
    """The whole page, of a run as it stands."""
    run = Path(status.run_dir)
    parts = {
        "Verdict": verdict(run, status),
        "What it was": summary(run, status),
        "Flags": flags(run),
        "Curves": curves(run),
        "Rewards": rewards(run),
        "Completions": completions(run),
        "Data": data(run),
        "Memory": memory(run),
        "Merge": merge(run),
        "Checkpoints": checkpoints(run),
        "Decisions and log": decisions(run, status),
        "Configuration": configuration(run),
    }
    nav = body = ""
    for title, content in parts.items():
        if content:
            anchor = title.lower().replace(" ", "-")
            nav += f'<li><a href="#{anchor}">{title}</a></li>'
            body += f'<section><h2 id="{anchor}">{title}</h2>\n{content}</section>\n'
    name = escape_text(run.absolute().name)
    state, word = headline(status)
    reason = f'<p class="reason">{escape_text(status.reason)}</p>' if status.reason else ""
    if not status.ended:
        reason = f'<p class="reason">It is still at work: this is how far it was, {format_time(time.time())}.</p>'
    sheets = style() + files("cogumi.notebook").joinpath("report.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{name}: {escape_text(word)}</title>
<style>{sheets}</style>
</head>
<body>
<main class="cogumi-piece">
<h1>{level(state, word)} {name}</h1>
{reason}
<nav aria-label="Sections"><ul>{nav}</ul></nav>
{body}<footer>Made by cogumi {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from the files of the run.</footer>
</main>
</body>
</html>
"""


def headline(status: Status) -> tuple[str, str]:
    """(level, word): `passed` only where a run came to its end, every check passed and no flag is red."""
    if status.passed:
        if red := reds(status):
            return "red", f"{status.state}, RED: {', '.join(red)}"
        return "green", "passed" if status.state == "finished" else f"{status.state}, passed"
    if not status.ended:
        return "unknown", format_state(status)
    if read_json_or_empty(Path(status.run_dir) / "verdict.json").get("passed") is False:
        failed = ", ".join(each["name"] for each in failed_checks(checks(status)))
        return "red", f"FAIL ({status.state}): {failed}"
    return ("red" if status.state in ("failed", "died", "refused") else "yellow"), status.state


def verdict(run: Path, status: Status) -> str:
    found = read_json_or_empty(run / "verdict.json")
    if not found:
        state = escape_text(format_state(status))
        return f"<p>There is no verdict: {state}. Checks are made when a training has ended by itself.</p>"
    red = reds(status)
    said = ". ".join([count_checks(found["checks"], red), *map(format_missed_check, failed_checks(found["checks"]))])
    if "safe_to_scale" in found:
        said += f". Safe to scale: {found['safe_to_scale']}"
    bad = "" if found["passed"] and not red else "RED" if found["passed"] else "FAIL"
    word = level("red", bad) if bad else level("green", "passed")
    return f"<p>{word} {escape_text(said)}.</p>" + html_components.checks(found["checks"])


def flags(run: Path) -> str:
    found = read_json_or_empty(run / "flags.json")
    if not found:
        return "<p>Nothing was judged yet: there is no flags.json.</p>"
    at = f"<p>As of step {found['step']}.</p>" if "step" in found else ""
    return at + html_components.flags(found["flags"], found["was_red"])


def summary(run: Path, status: Status) -> str:
    config, came_to, beat = config_of(run), read_json_or_empty(run / "metrics.json"), status.heartbeat
    model, asked = config.get("model", {}), config.get("cogumi", {})
    names = model.get("name"), read_section(run / DECISIONS, "base").get("commit")
    tuning = {"lora": "LoRA", "full": "every weight"}.get(asked.get("tuning"), "")
    if model.get("quantization_config"):
        tuning = f"{tuning}, on a quantized base"
    began = beat.get("started") or status.began
    took = came_to.get("elapsed_seconds", beat.get("elapsed_seconds"))
    stages = came_to.get("seconds") or beat.get("seconds") or {}
    said = ", ".join(f"{stage} {format_duration(each)}" for stage, each in stages.items() if each >= 1)
    cost = came_to.get("cost", beat.get("cost_so_far"))
    speed, mfu = came_to.get("tokens_per_second") or beat.get("tokens_per_second"), came_to.get("mfu")
    final = ", ".join(f"{key} {value:.4g}" for key, value in came_to.get("final", {}).items() if is_number(value))
    of_steps = f" of {status.steps:,}" if status.steps else ""
    rows = {
        "model": ", at commit ".join(str(each) for each in names if each),
        "method": ", ".join(filter(None, (asked.get("method"), tuning))),
        "state": format_state(status),
        "steps": "" if status.step is None else f"{status.step:,}{of_steps}",
        "began": format_time(began) if began else "",
        "last sign of life": format_time(status.last_sign) if status.last_sign else "",
        "took": format_duration(took) + (f" ({said})" if said else "") if took else "",
        "cost": f"${cost:.2f}" if is_number(cost) else "not known: no cogumi.price_per_hour was given",
        "tokens": f"{came_to['tokens']:,}" if came_to.get("tokens") else "",
        "speed": f"{speed:,.0f} tokens/s" if is_number(speed) else "",
        "MFU": f"{mfu:.1%}" if is_number(mfu) else "",
        "machine": describe_machine(status),
        "at the end": final,
    }
    directory = f"<code>{escape_text(run.absolute())}</code>"
    return facts([("directory", directory), *((name, escape_text(said)) for name, said in rows.items())])


def describe_machine(status: Status) -> str:
    beat = status.heartbeat
    gpu, cpu, store = (beat.get(key) or {} for key in ("gpu", "cpu", "memory"))
    card = f"{gpu.get('name', 'a GPU')} with {format_memory(gpu['total'])}" if gpu.get("total") else "no GPU"
    said = [
        str(status.host or ""),
        card if beat else "",
        f"{cpu['cores']} cores" if cpu.get("cores") else "",
        f"{format_memory(store['total'])} of memory" if store.get("total") else "",
    ]
    return ", ".join(filter(None, said))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def format_time(seconds: float) -> str:
    """A time as a person of any time zone reads it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def config_of(run: Path) -> dict[str, Any]:
    path = run / "config.yaml"
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found or {}


def curves(run: Path) -> str:
    """The plots of the panel, and by their numbers the flags that are or were red or yellow."""
    found = Curves(run / "metrics.jsonl")
    found.read()
    flags = figures.flag_steps(read_json_or_empty(run / "flags.json"))
    drawn = render_plots(found.plots(), flags)
    if not drawn:
        return "<p>Nothing was logged: there is no metrics.jsonl with a step in it.</p>"
    marks = ""
    for number, (step, state, name) in enumerate(flags, 1):
        marks += f"<p>{level(state, f'⚑{number} {state}')} at step {step}: {escape_text(name)}</p>"
    return drawn + marks


def rewards(run: Path) -> str:
    if config_of(run).get("cogumi", {}).get("method") != "gspo" and not (run / ROLLOUTS).exists():
        return ""
    try:
        return figure(figures.rewards(run))
    except UsageError:
        return f"<p>The rewards of single completions are not there: no {ROLLOUTS}, or nothing in it.</p>"


def completions(run: Path) -> str:
    try:
        said = str(side_by_side(run))
    except UsageError as error:
        said = f"<p>{escape_text(error)}</p>"
    sampled: list[Mapping[str, Any]] = []
    for row in figures.read_rows(run / ROLLOUTS):  # the first one and the last
        if row.get("shown"):
            sampled = [*sampled[:1], row]
    if sampled:
        said += folded("Sampled while it trained, first and last, with rewards", render_rollouts(sampled))
    return said


def data(run: Path) -> str:
    found = read_section(run / DECISIONS, "data")
    accounts = [found[part] for part in ("train", "held_out") if found.get(part)]
    if not accounts:
        return "<p>What became of the rows is not in decisions.json; lines of it may be among the decisions below.</p>"
    return html_components.data(accounts, found["train"]["lengths"], found.get("max_length"))


def memory(run: Path) -> str:
    forecast = read_section(run / FORECAST, "preflight")
    took = read_json_or_empty(run / "metrics.json").get("memory", {})
    peak, expected = took.get("gpu_peak_allocated"), took.get("gpu_peak_forecast")
    sizes = {
        "peak on the GPU (tensors)": peak,
        "reserved on the GPU": took.get("gpu_peak_reserved"),
        "forecast of the peak (tensors)": expected,
        "peak of the process, main memory": took.get("peak_rss"),
    }
    said = {name: format_memory(size) for name, size in sizes.items() if size}
    if expected and peak:
        said["forecast of the peak (tensors)"] += f", {100 * (expected / peak - 1):+.1f} % from what it was"
    if not forecast:
        return facts(said.items()) + "<p>No forecast: the run made none (a run without a GPU begins without one).</p>"
    return facts(said.items()) + "<h4>Preflight</h4>" + html_components.preflight(forecast, peak)


def merge(run: Path) -> str:
    if (run / "merged" / figures.MERGE_MANIFEST).exists():
        return html_components.merged(run / "merged")
    if (run / "merged").is_dir():
        return "<p>merged/ was trained whole (cogumi.tuning: full): there was nothing to merge.</p>"
    return "<p>There is no merged model" + (", and an adapter." if (run / "adapter").is_dir() else ".") + "</p>"


def checkpoints(run: Path) -> str:
    there = list_checkpoints(run / "checkpoints")
    if not there:
        return "<p>There is no checkpoint.</p>"
    rows = []
    for path in there:
        try:
            whole = read_manifest(path) is not None
            state = level("green", "there") if whole else level("yellow", "none: it was not saved whole")
        except CheckpointDamaged as error:
            state = f"{level('red', 'DAMAGED')} {escape_text(error)}"
        size = format_memory(sum(file.stat().st_size for file in list_manifest_files(path).values()))
        step = path.name.removeprefix("checkpoint-")
        rows.append([escape_text(path.name), escape_text(step), size, format_time(path.stat().st_mtime), state])
    said = table(["checkpoint", "step", "size", "saved", "manifest"], rows, numbers=(1, 2))
    if word := describe_broken_checkpoints(read_json_or_empty(run / "flags.json").get("was_red", []), there):
        said += f"<p>{escape_text(word)}.</p>"
    return f"{said}<p>Newest first. A resume reads every file and compares it with its manifest.</p>"


def decisions(run: Path, status: Status) -> str:
    log = Path(status.log)
    own, shown = tail_lines(run / "run.log", LOG_BYTES), tail_lines(log, LOG_BYTES)
    told = [found.groups() for line in own if (found := DECISION.match(line))]
    said = f"<p>{len(told) - MOST_LINES:,} earlier lines are in run.log.</p>" if len(told) > MOST_LINES else ""
    items = "".join(f"<li>{LOUD.get(kind, '')}{escape_text(line)}</li>\n" for kind, line in told[-MOST_LINES:])
    said += f"<ol>{items}</ol>" if items else ""
    failed = traceback_in(own) or traceback_in(shown)
    if failed and status.state in BROKEN_OFF:  # and not one of an earlier part, after which the run was resumed
        said = f"<h4>The error it ended in</h4>{verbatim(failed)}" + said
    if last := shown[-LAST_LINES:]:
        said += folded(f"the last {len(last)} lines of {log.name}", verbatim("\n".join(last)))
    return said or "<p>It said nothing: there is no log.</p>"


def traceback_in(lines: list[str]) -> str:
    """The last traceback of a log, up to the line that names the error; "" where there is none."""
    begins = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if not begins:
        return ""
    end = next((n for n in range(begins[-1] + 1, len(lines)) if lines[n][:1] not in (" ", "")), len(lines) - 1)
    return "\n".join(lines[begins[-1] : end + 1])


def configuration(run: Path) -> str:
    path = run / "config.yaml"
    if not path.exists():
        return "<p>There is no config.yaml: it had not come as far.</p>"
    content = verbatim(path.read_text(encoding="utf-8"))
    return folded("config.yaml, resolved; secrets are redacted", content, is_open=True)
