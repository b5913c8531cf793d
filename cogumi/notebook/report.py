"""report.html: all there is to know of a run in one file, which needs neither the machine, nor a network, nor a script.

For a run at any stage: what is not there (yet) is said, not left out. Written whole; made again, it is replaced.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from cogumi.core import __version__
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_duration, format_memory
from cogumi.core.run_directory import DECISIONS, FORECAST, ROLLOUTS, read_section, write_atomic
from cogumi.notebook import figures, html_components
from cogumi.notebook.completions import render_columns, render_rollouts
from cogumi.notebook.curves import render_curves
from cogumi.notebook.html_components import checkpoints, escape_text, facts, folded, level, style, verbatim
from cogumi.notebook.panel import RunSnapshot
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
    tail_lines,
)

FILE = "report.html"
LOG_BYTES = 1 << 20  # of a log, its end
MOST_LINES = 300
PEAKS = {
    "gpu_peak_allocated": "peak on the GPU (tensors)",
    "gpu_peak_reserved": "reserved on the GPU",
    "gpu_peak_forecast": "forecast of the peak (tensors)",
    "peak_rss": "peak of the process, main memory",
}


def write_report(run_dir: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write the report of a run and return its path: `report.html` in its directory, or the file `out`. Raises UsageError where
    there is no run, and where nothing can be written."""
    run = Path(run_dir)
    path = run / FILE if out is None else Path(out)
    page = render_report(RunSnapshot(run, None).look())
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", place=path, fix="name another file (--out)") from None
    return path


def render_report(look: RunSnapshot) -> str:
    """The whole page, of a run as it stands."""
    status, run = look.status, Path(look.status.run_dir)
    config, came_to = config_of(run), read_json_or_empty(run / "metrics.json")
    parts = {
        "Verdict": verdict(run, status),
        "What it was": summary(status, config, came_to),
        "Flags": flags(look),
        "Curves": render_curves(look.curves.plots(), look.judged)
        or "<p>Nothing was logged: there is no metrics.jsonl.</p>",
        "Rewards": rewards(run),
        "Completions": completions(run),
        "Data": data(run),
        "Memory": memory(run, came_to.get("memory", {})),
        "Merge": merge(run),
        "Checkpoints": checkpoints(look.checkpoints, look.broke),
        "Log": logs(run, status),
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


def flags(look: RunSnapshot) -> str:
    if not look.judged:
        return "<p>Nothing was judged yet: there is no flags.json.</p>"
    at = f"<p>As of step {look.judged['step']}.</p>" if "step" in look.judged else ""
    green = ", ".join(each["name"] for each in look.flags if each["level"] == "green")
    return at + html_components.flags(look.flags, look.was_red) + f"<p>Green: {escape_text(green)}.</p>"


def summary(status: Status, config: Mapping[str, Any], came_to: Mapping[str, Any]) -> str:
    """config: the run's. came_to: metrics.json, {} of a run under way."""
    run, beat = Path(status.run_dir), status.heartbeat
    model, asked = config.get("model", {}), config.get("cogumi", {})
    names = model.get("name"), read_section(run / DECISIONS, "base").get("commit")
    tuning = {"lora": "LoRA", "full": "every weight"}.get(asked.get("tuning"), "")
    on_quantized = "on a quantized base" if model.get("quantization_config") else ""
    found = beat | {key: value for key, value in came_to.items() if value is not None}
    began, took, cost = beat.get("started"), found.get("elapsed_seconds"), found.get("cost", beat.get("cost_so_far"))
    stages = [f"{stage} {format_duration(each)}" for stage, each in found.get("seconds", {}).items() if each >= 1]
    gpu, cpu, store = (beat.get(key) or {} for key in ("gpu", "cpu", "memory"))
    card = f"{gpu['name']} with {format_memory(gpu['total'])}" if gpu else "no GPU"
    machine = [card, f"{cpu['cores']} cores", f"{format_memory(store['total'])} of memory"] if cpu else []
    rows = {
        "model": ", at commit ".join(filter(None, names)),
        "method": ", ".join(filter(None, (asked.get("method"), tuning, on_quantized))),
        "state": format_state(status),
        "steps": "" if status.step is None else f"{status.step:,}" + (f" of {status.steps:,}" if status.steps else ""),
        "began": format_time(began or status.began),
        "last sign of life": format_time(status.last_sign),
        "took": format_duration(took) + (f" ({', '.join(stages)})" if stages else "") if took else "",
        "cost": "not known: no cogumi.price_per_hour was given" if cost is None else f"${cost:.2f}",
        "tokens": f"{found['tokens']:,}" if found.get("tokens") else "",
        "speed": f"{found['tokens_per_second']:,.0f} tokens/s" if found.get("tokens_per_second") else "",
        "MFU": f"{found['mfu']:.1%}" if found.get("mfu") else "",
        "machine": ", ".join(filter(None, [status.host, *machine])),
        "sandbox": read_section(run / DECISIONS, "sandbox").get("what", "").removeprefix("sandbox: "),
    }
    directory = f"<code>{escape_text(run.absolute())}</code>"
    return facts([("directory", directory), *((name, escape_text(each)) for name, each in rows.items())])


def format_time(seconds: float | None) -> str:
    """A time as a person of any time zone reads it."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC" if seconds else ""


def config_of(run: Path) -> dict[str, Any]:
    path = run / "config.yaml"
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found or {}


def rewards(run: Path) -> str:
    try:
        return str(figures.rewards(run))
    except UsageError:  # of a run that samples nothing, or has not yet
        return ""


def completions(run: Path) -> str:
    try:
        said = render_columns(run)
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
        return "<p>What became of the rows is not in decisions.json.</p>"
    return html_components.data(accounts, found["train"]["lengths"], found.get("max_length"))


def memory(run: Path, took: Mapping[str, Any]) -> str:
    said = facts((name, format_memory(took[key])) for key, name in PEAKS.items() if took.get(key))
    forecast = read_section(run / FORECAST, "preflight")
    if not forecast:
        return said + "<p>No forecast: the run made none (a run without a GPU begins without one).</p>"
    return said + "<h4>Preflight</h4>" + html_components.preflight(forecast)


def merge(run: Path) -> str:
    if (run / "merged" / figures.MERGE_MANIFEST).exists():
        return html_components.merged(run / "merged")
    if (run / "merged").is_dir():
        return "<p>merged/ was trained whole (cogumi.tuning: full): there was nothing to merge.</p>"
    return "<p>There is no merged model" + (", and an adapter." if (run / "adapter").is_dir() else ".") + "</p>"


def logs(run: Path, status: Status) -> str:
    """The ends of run.log and, of a run in a process of its own, of what it printed; open where it broke off."""
    shown = []
    for path in dict.fromkeys((run / "run.log", Path(status.log))):
        if last := tail_lines(path, LOG_BYTES)[-MOST_LINES:]:
            content = verbatim("\n".join(last))
            shown.append(folded(f"the last {len(last)} lines of {path.name}", content, status.state in BROKEN_OFF))
    return "".join(shown) or "<p>It said nothing: there is no log.</p>"


def configuration(run: Path) -> str:
    path = run / "config.yaml"
    if not path.exists():
        return "<p>There is no config.yaml: it had not come as far.</p>"
    content = verbatim(path.read_text(encoding="utf-8"))
    return folded("config.yaml, resolved; secrets are redacted", content, is_open=True)
