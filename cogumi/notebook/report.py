"""report.html: a run in one file that needs neither the machine, nor a network, nor a script.

It can be written at any stage of a run; what is not there (yet) is stated, not left out.
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
from cogumi.notebook import figures
from cogumi.notebook import html_components as html
from cogumi.notebook.completions import render_columns, render_rollouts
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
LOG_BYTES, LOG_LINES = 1 << 20, 300  # at the end of a log
PEAKS = {
    "gpu_peak_allocated": "peak on the GPU (tensors)",
    "gpu_peak_reserved": "reserved on the GPU",
    "gpu_peak_forecast": "forecast of the peak (tensors)",
    "peak_rss": "peak of the process, main memory",
}


def write_report(run_dir: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write the report of a run to `out`, by default report.html in its directory, and return the path.

    Raises UsageError where there is no run, and where nothing can be written.
    """
    run = Path(run_dir)
    path = run / FILE if out is None else Path(out)
    page = render_report(RunSnapshot(run, None).look())
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", place=path, fix="name another file (--out)") from None
    return path


def render_report(look: RunSnapshot) -> str:
    """Render the whole page."""
    status, run = look.status, Path(look.status.run_dir)
    config, metrics = config_of(run), read_json_or_empty(run / "metrics.json")
    parts = {
        "Verdict": verdict(run, status),
        "What it was": summary(status, config, metrics),
        "Flags": flags(look),
        "Curves": figures.render_curves(look.curves.plots(), look.judged)
        or "<p>Nothing was logged: there is no metrics.jsonl.</p>",
        "Rewards": rewards(run),
        "Completions": completions(run),
        "Data": data(run),
        "Memory": memory(run, metrics.get("memory", {})),
        "Merge": merge(run),
        "Checkpoints": html.checkpoints(look.checkpoints, look.broke),
        "Log": logs(run, status),
        "Configuration": configuration(run),
    }
    nav = body = ""
    for title, content in parts.items():
        if content:
            anchor = title.lower().replace(" ", "-")
            nav += f'<li><a href="#{anchor}">{title}</a></li>'
            body += f'<section><h2 id="{anchor}">{title}</h2>\n{content}</section>\n'
    name = html.escape_text(run.absolute().name)
    state, word = headline(status)
    reason = f'<p class="reason">{html.escape_text(status.reason)}</p>' if status.reason else ""
    if not status.ended:
        reason = f'<p class="reason">It is still at work: this is how far it was, {format_time(time.time())}.</p>'
    sheets = html.style() + files("cogumi.notebook").joinpath("report.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{name}: {html.escape_text(word)}</title>
<style>{sheets}</style>
</head>
<body>
<main class="cogumi-piece">
<h1>{html.level(state, word)} {name}</h1>
{reason}
<nav aria-label="Sections"><ul>{nav}</ul></nav>
{body}<footer>Made by cogumi {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from the files of the run.</footer>
</main>
</body>
</html>
"""


def headline(status: Status) -> tuple[str, str]:
    """Return (level, word); `passed` only if the run came to its end, every check passed and no flag is red."""
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
    judged = read_json_or_empty(run / "verdict.json")
    if not judged:
        state = html.escape_text(format_state(status))
        return f"<p>There is no verdict: {state}. Checks are made when a training has ended by itself.</p>"
    red = reds(status)
    missed = map(format_missed_check, failed_checks(judged["checks"]))
    text = ". ".join([count_checks(judged["checks"], red), *missed])
    if "safe_to_scale" in judged:
        text += f". Safe to scale: {judged['safe_to_scale']}"
    failed = "" if judged["passed"] and not red else "RED" if judged["passed"] else "FAIL"
    word = html.level("red", failed) if failed else html.level("green", "passed")
    return f"<p>{word} {html.escape_text(text)}.</p>" + html.checks(judged["checks"])


def flags(look: RunSnapshot) -> str:
    if not look.judged:
        return "<p>Nothing was judged yet: there is no flags.json.</p>"
    at = f"<p>As of step {look.judged['step']}.</p>" if "step" in look.judged else ""
    green = ", ".join(flag["name"] for flag in look.flags if flag["level"] == "green")
    return at + html.flags(look.flags, look.was_red) + f"<p>Green: {html.escape_text(green)}.</p>"


def summary(status: Status, config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Render what the run was. metrics: metrics.json, {} before the end of a run."""
    run, beat = Path(status.run_dir), status.heartbeat
    model, ours = config.get("model", {}), config.get("cogumi", {})
    names = model.get("name"), read_section(run / DECISIONS, "base").get("commit")
    tuning = {"lora": "LoRA", "full": "every weight"}.get(ours.get("tuning"), "")
    on_quantized = "on a quantized base" if model.get("quantization_config") else ""
    values = beat | {key: value for key, value in metrics.items() if value is not None}
    took, cost = values.get("elapsed_seconds"), values.get("cost", beat.get("cost_so_far"))
    stages = [f"{stage} {format_duration(each)}" for stage, each in values.get("seconds", {}).items() if each >= 1]
    gpu, cpu, store = (beat.get(key) or {} for key in ("gpu", "cpu", "memory"))
    card = f"{gpu['name']} with {format_memory(gpu['total'])}" if gpu else "no GPU"
    machine = [card, f"{cpu['cores']} cores", f"{format_memory(store['total'])} of memory"] if cpu else []
    rows = {
        "model": ", at commit ".join(filter(None, names)),
        "method": ", ".join(filter(None, (ours.get("method"), tuning, on_quantized))),
        "state": format_state(status),
        "steps": "" if status.step is None else f"{status.step:,}" + (f" of {status.steps:,}" if status.steps else ""),
        "began": format_time(beat.get("started") or status.began),
        "last sign of life": format_time(status.last_sign),
        "took": format_duration(took) + (f" ({', '.join(stages)})" if stages else "") if took else "",
        "cost": "not known: no cogumi.price_per_hour was given" if cost is None else f"${cost:.2f}",
        "tokens": f"{values['tokens']:,}" if values.get("tokens") else "",
        "speed": f"{values['tokens_per_second']:,.0f} tokens/s" if values.get("tokens_per_second") else "",
        "MFU": f"{values['mfu']:.1%}" if values.get("mfu") else "",
        "machine": ", ".join(filter(None, [status.host, *machine])),
        "sandbox": read_section(run / DECISIONS, "sandbox").get("what", "").removeprefix("sandbox: "),
    }
    directory = f"<code>{html.escape_text(run.absolute())}</code>"
    return html.facts([("directory", directory), *((name, html.escape_text(value)) for name, value in rows.items())])


def format_time(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC" if seconds else ""


def config_of(run: Path) -> dict[str, Any]:
    path = run / "config.yaml"
    return (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}


def rewards(run: Path) -> str:
    try:
        return str(figures.rewards(run))
    except UsageError:  # a run that samples nothing, or has not yet
        return ""


def completions(run: Path) -> str:
    try:
        content = render_columns(run)
    except UsageError as error:
        content = f"<p>{html.escape_text(error)}</p>"
    sampled: list[Mapping[str, Any]] = []
    for row in figures.read_rows(run / ROLLOUTS):  # keep the first one and the last
        if row.get("shown"):
            sampled = [*sampled[:1], row]
    if sampled:
        content += html.folded("Sampled while it trained, first and last, with rewards", render_rollouts(sampled))
    return content


def data(run: Path) -> str:
    section = read_section(run / DECISIONS, "data")
    accounts = [section[part] for part in ("train", "held_out") if section.get(part)]
    if not accounts:
        return "<p>What became of the rows is not in decisions.json.</p>"
    return html.data(accounts, section["train"]["lengths"], section.get("max_length"))


def memory(run: Path, peaks: Mapping[str, Any]) -> str:
    content = html.facts((name, format_memory(peaks[key])) for key, name in PEAKS.items() if peaks.get(key))
    forecast = read_section(run / FORECAST, "preflight")
    if not forecast:
        return content + "<p>No forecast: the run made none (a run without a GPU begins without one).</p>"
    return content + "<h4>Preflight</h4>" + html.preflight(forecast)


def merge(run: Path) -> str:
    if (run / "merged" / figures.MERGE_MANIFEST).exists():
        return html.merged(run / "merged")
    if (run / "merged").is_dir():
        return "<p>merged/ was trained whole (cogumi.tuning: full): there was nothing to merge.</p>"
    return "<p>There is no merged model" + (", and an adapter." if (run / "adapter").is_dir() else ".") + "</p>"


def logs(run: Path, status: Status) -> str:
    """Render the ends of run.log and of what a detached process printed; open if the run broke off."""
    content = ""
    for path in dict.fromkeys((run / "run.log", Path(status.log))):
        if lines := tail_lines(path, LOG_BYTES)[-LOG_LINES:]:
            summary = f"the last {len(lines)} lines of {path.name}"
            content += html.folded(summary, html.verbatim("\n".join(lines)), status.state in BROKEN_OFF)
    return content or "<p>There is no log.</p>"


def configuration(run: Path) -> str:
    path = run / "config.yaml"
    if not path.exists():
        return "<p>There is no config.yaml: the run had not come as far.</p>"
    content = html.verbatim(path.read_text(encoding="utf-8"))
    return html.folded("config.yaml, resolved; secrets are redacted", content, is_open=True)
