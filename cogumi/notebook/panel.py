"""`run.dashboard()` and `run.report()`: a panel on a run directory, and report.html, which needs no machine and no script.

Both read files, so the run may be of another user, of yesterday, or over; what is not there (yet) is stated in the report.
A `RunSnapshot` is what they show. A thread redraws the panel; it waits over a hundred times as long as it worked, so it
takes less than one percent of a core. Its buttons are answered while no cell runs: a cell in `run.wait()` has to be
interrupted, which leaves the run alone.
"""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from cogumi.checkpoints.verify import CheckpointState, inspect, list_checkpoints
from cogumi.core import __version__
from cogumi.core.errors import UsageError, require_extra
from cogumi.core.formatting import format_duration, format_memory
from cogumi.core.notices import is_notebook
from cogumi.core.run_directory import DECISIONS, FORECAST, ROLLOUTS, SAMPLES_FILE, config_of, read_section, write_atomic
from cogumi.notebook import figures
from cogumi.notebook import html_components as html
from cogumi.notebook.completions import render_columns, render_recorded, render_samples
from cogumi.telemetry import status as run_status

REFRESH_SECONDS = 2.0
WAIT_PER_WORK = 120.0  # seconds of waiting for each second of computing: 0.8 % of a core
BETWEEN_CELLS = "; answered while no cell runs"
WIDGET = "application/vnd.jupyter.widget-view+json"
LOG_LINES, LINE_BYTES = 12, 12_000
ROLLOUT_BYTES = 1 << 20  # at the end of a file: more than one rollout writes
INSPECTED_CHECKPOINTS = 4  # the newest


@dataclass(frozen=True)
class RunSnapshot:
    """A run as it was at one look.

    judged: flags.json. samples: rows with step, prompt, completion, and reward or expected answer.
    """

    run_dir: Path
    status: run_status.Status
    curves: dict[str, figures.Curve]
    judged: dict[str, Any]
    samples: list[dict[str, Any]]
    checkpoints: list[CheckpointState]
    disk: list[str]


def take_snapshot(run_dir: Path, checkpoints: int | None = INSPECTED_CHECKPOINTS) -> RunSnapshot:
    """Read a run's directory. checkpoints: how many of the newest to inspect. Raises UsageError if there is no run."""
    status = run_status.status_of(run_dir)
    # Names and sizes are compared with what was verified at the save; retention may just have deleted one.
    newest = list_checkpoints(run_dir / "checkpoints")[:checkpoints]
    return RunSnapshot(
        run_dir=run_dir,
        status=status,
        curves=figures.read_curves(run_dir / "metrics.jsonl"),
        judged=run_status.read_json_or_empty(run_dir / "flags.json"),
        samples=read_newest_samples(run_dir),
        checkpoints=[state for state in (inspect(path, check_all=False) for path in newest) if state.path.exists()],
        disk=describe_disk(run_dir, status),
    )


def read_newest_samples(run_dir: Path) -> list[dict[str, Any]]:
    """Return the samples of the last rollout (worst to best), or the last completions of held-out prompts."""
    lines = run_status.tail_lines(run_dir / ROLLOUTS, ROLLOUT_BYTES)
    if lines:
        rollout = json.loads(lines[-1])
        return [{"step": rollout["step"], **sample} for sample in rollout["shown"]]
    rows = [json.loads(line) for line in run_status.tail_lines(run_dir / SAMPLES_FILE, ROLLOUT_BYTES)]
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def describe_disk(run_dir: Path, status: run_status.Status) -> list[str]:
    """Return lines on the free space, and on what the run was forecast to need before its first step."""
    lines = run_status.tail_lines(run_dir / "disk.jsonl", 4096)
    sample = json.loads(lines[-1]) if lines else {}
    free = (status.heartbeat.get("disk") or {}).get("free") or sample.get("free")
    level = f" ({sample['level']})" if sample.get("level") else ""
    forecast: list[str] = read_section(run_dir / FORECAST, "disks").get("lines", [])
    return forecast if free is None else [f"{free / 1e9:.1f} GB free{level}", *forecast]


# -------------------------------------------------------------------------------------------------------------- the panel


open_panels: dict[Path, "RunPanel"] = {}
"""The panels of this kernel that are being drawn, by run directory: a second one of the same run is the same one."""


def show_panel(run: Any) -> None:
    screen = run_status.format_screen(run.status())
    if not is_notebook():
        print(screen)
        return
    from IPython.display import display

    panel = open_panels.get(run.run_dir)
    if panel is None or not panel.thread.is_alive():
        panel = open_panels[run.run_dir] = RunPanel(run)
        panel.thread.start()
    display({WIDGET: panel.box._repr_mimebundle_()[WIDGET], "text/plain": screen}, raw=True)


class RunPanel:
    """The widgets, and the thread that draws them until the run has ended."""

    def __init__(self, run: Any) -> None:
        require_extra("ipywidgets", "notebook")
        from ipywidgets import HTML, Button, HBox, VBox

        def button(description: str, icon: str, tooltip: str, press: Any) -> Button:
            layout = {"width": "max-content", "flex": "none"}
            made = Button(description=description, icon=icon, tooltip=f"{tooltip}{BETWEEN_CELLS}", layout=layout)
            made.on_click(press)
            return made

        self.run = run
        self.head, self.note = HTML(), HTML()
        self.parts = [HTML() for _ in PARTS]
        self.stop = button("Stop", "stop", "Finish the step, save a checkpoint, end", self.on_stop)
        self.save = button("Checkpoint now", "save", "Save a checkpoint after this step, train on", self.on_save)
        self.pause = button("Pause", "pause", "Save after this step and wait; keeps the machine", self.on_pause)
        buttons = HBox([self.stop, self.save, self.pause, self.note], layout={"flex_flow": "row wrap"})
        self.box = VBox([self.head, buttons, *self.parts])
        self.box.add_class("cogumi-panel")
        self.asked_to_stop = False
        self.pressed = threading.Event()  # ends the wait between two redraws
        self.thread = threading.Thread(target=self.follow, name=f"cogumi panel {run.run_dir.name}", daemon=True)
        self.head.value = html.add_style("reading the run")

    def follow(self) -> None:
        """Draw until the run has ended. Errors are shown in the panel; unexpected ones are raised as well."""
        try:
            while True:
                began = time.process_time()  # of all threads: polars reads with several
                look = take_snapshot(self.run.run_dir)
                self.draw(look)
                if look.status.ended:
                    return
                self.pressed.wait(max(REFRESH_SECONDS, WAIT_PER_WORK * (time.process_time() - began)))
                self.pressed.clear()
        except UsageError as error:  # the directory is gone, for example
            self.end(str(error))
        except BaseException as error:
            self.end(f"the panel has stopped: {type(error).__name__}: {error}")
            raise

    def draw(self, look: RunSnapshot) -> None:
        """Update the widgets; ipywidgets sends the browser only values that changed."""
        ended, paused = look.status.ended, look.status.state == "paused"
        self.head.value = html.add_style(render_head(look))
        for widget, render in zip(self.parts, PARTS, strict=True):
            widget.value = html.wrap_piece(render(look))
        self.pause.description, self.pause.icon = ("Unpause", "play") if paused else ("Pause", "pause")
        self.stop.disabled = ended or self.asked_to_stop
        self.save.disabled = ended or paused
        self.pause.disabled = ended
        if ended:
            self.show_note(f"the run has ended, and this is how it ended: {look.status}")

    def end(self, reason: str) -> None:
        last = "What stands below is the last that was seen."
        self.head.value = html.add_style(f"<b>{html.escape_text(reason)}</b><br>{last}")
        for button in (self.stop, self.save, self.pause):
            button.disabled = True

    def show_note(self, text: str) -> None:
        self.note.value = f'<span class="cogumi-piece" role="status">{html.escape_text(text)}</span>'

    def on_stop(self, _: Any) -> None:
        self.stop.disabled = True  # a second signal would end it without saving
        self.asked_to_stop = self.ask(self.run.ask_to_stop, "asked to save its last finished step and end")

    def on_save(self, _: Any) -> None:
        self.ask(self.run.checkpoint, "asked for a checkpoint after this step")

    def on_pause(self, _: Any) -> None:
        if self.pause.description == "Unpause":
            self.ask(self.run.unpause, "asked to end the pause")
        else:
            self.ask(self.run.pause, "asked to save and wait after this step")

    def ask(self, request: Any, note: str) -> bool:
        """Make a request of the run and say so, or why it was refused; return whether it was made."""
        accepted = True
        try:
            request()
        except UsageError as error:
            accepted, note = False, str(error)
        self.show_note(note)
        self.pressed.set()
        return accepted


# ------------------------------------------------------------------------------------------------------ its parts as HTML


def render_head(look: RunSnapshot) -> str:
    status = look.status
    lines = [f"<b>{html.escape_text(run_status.format_headline(status))}</b>"]
    if status.step is not None and status.steps:
        share = min(1.0, status.step / status.steps)
        label = f"step {status.step} of {status.steps}"
        lines.append(f'<progress max="1" value="{share:.4f}" aria-label="{label}">{share:.0%}</progress>')
    reason = " ".join((status.reason or "").split())
    texts = (
        reason,
        run_status.format_cause(status),
        run_status.format_metrics(status),
        run_status.format_machine(status.heartbeat),
    )
    lines += [html.escape_text(text.replace("  ", " · ")) for text in texts if text]
    return "<br>".join(lines)


def render_flags(look: RunSnapshot) -> str:
    return html.flags(look.judged) + (verdict(look.run_dir, look.status) if run_status.checks(look.status) else "")


def render_plots(look: RunSnapshot) -> str:
    return figures.render_curves(look.curves, look.judged)


def render_newest_samples(look: RunSnapshot) -> str:
    return f"<h4>newest samples</h4>{render_samples(look.samples)}" if look.samples else ""


def render_rest(look: RunSnapshot) -> str:
    content = ""
    if look.checkpoints:
        content += f"<h4>checkpoints</h4>{html.checkpoints(look.checkpoints)}"
    if look.disk:
        content += f"<h4>disk</h4>{'<br>'.join(map(html.escape_text, look.disk))}"
    if log := run_status.tail_lines(Path(look.status.log), LINE_BYTES)[-LOG_LINES:]:
        content += html.folded(run_status.relative_path(look.status.log), html.verbatim("\n".join(log)))
    return content


PARTS = (render_flags, render_plots, render_newest_samples, render_rest)


# ------------------------------------------------------------------------------------------------------------ report.html

REPORT = "report.html"
REPORT_LOG_BYTES, REPORT_LOG_LINES = 1 << 20, 300  # at the end of a log
PEAKS = {
    "gpu_peak_allocated": "peak on the GPU (tensors)",
    "gpu_peak_reserved": "reserved on the GPU",
    "gpu_peak_forecast": "forecast of the peak (tensors)",
    "peak_rss": "peak of the process, main memory",
}


def write_report(run_dir: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write the report of a run to the file `out`, or as report.html into a directory, by default its own. Return the path.

    Raises UsageError where there is no run, and where nothing can be written.
    """
    run = Path(run_dir)
    path = Path(run if out is None else out)
    path = path / REPORT if path.is_dir() else path
    page = render_report(take_snapshot(run, checkpoints=None))
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", place=path, fix="name another file (--out)") from None
    return path


def render_report(look: RunSnapshot) -> str:
    status, run = look.status, Path(look.status.run_dir)
    config, metrics = config_of(run), run_status.read_json_or_empty(run / "metrics.json")
    parts = {
        "Verdict": verdict(run, status),
        "What it was": summary(status, config, metrics),
        "Flags": flags(look),
        "Curves": figures.render_curves(look.curves, look.judged)
        or "<p>Nothing was logged: there is no metrics.jsonl.</p>",
        "Rewards": rewards(run),
        "Completions": completions(run),
        "What broke": forgetting(run),
        "Comparison": render_recorded(run),
        "Data": data(run),
        "Memory": memory(run, metrics.get("memory", {})),
        "Merge": merge(run),
        "Checkpoints": html.checkpoints(look.checkpoints),
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
    texts = filter(None, (status.reason, run_status.format_cause(status)))
    reason = "".join(f'<p class="reason">{html.escape_text(text)}</p>' for text in texts)
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


def headline(status: run_status.Status) -> tuple[str, str]:
    """Return (level, word); `passed` only if the run came to its end, every check passed and no flag is red."""
    if status.passed:
        if red := run_status.reds(status):
            return "red", f"{status.state}, RED: {', '.join(red)}"
        return "green", "passed" if status.state == "finished" else f"{status.state}, passed"
    if not status.ended:
        return "unknown", run_status.format_state(status)
    if run_status.read_json_or_empty(Path(status.run_dir) / "verdict.json").get("passed") is False:
        failed = ", ".join(check["name"] for check in run_status.failed_checks(run_status.checks(status)))
        return "red", f"FAIL ({status.state}): {failed}"
    return ("red" if status.state in ("failed", "died", "refused") else "yellow"), status.state


def verdict(run: Path, status: run_status.Status) -> str:
    judged = run_status.read_json_or_empty(run / "verdict.json")
    if not judged:
        state = html.escape_text(run_status.format_state(status))
        return f"<p>There is no verdict: {state}. Checks are made when a training has ended by itself.</p>"
    red = run_status.reds(status)
    missed = map(run_status.format_missed_check, run_status.failed_checks(judged["checks"]))
    text = ". ".join([run_status.count_checks(judged["checks"], red), *missed])
    if "safe_to_scale" in judged:
        text += f". Safe to scale: {judged['safe_to_scale']}"
    failed = "" if judged["passed"] and not red else "RED" if judged["passed"] else "FAIL"
    word = html.level("red", failed) if failed else html.level("green", "passed")
    return f"<p>{word} {html.escape_text(text)}.</p>" + html.checks(judged["checks"])


def flags(look: RunSnapshot) -> str:
    if not look.judged:
        return "<p>Nothing was judged yet: there is no flags.json.</p>"
    at = f"<p>As of step {look.judged['step']}.</p>" if "step" in look.judged else ""
    green = ", ".join(flag["name"] for flag in look.judged.get("flags", []) if flag["level"] == "green")
    return at + html.flags(look.judged) + f"<p>Green: {html.escape_text(green)}.</p>"


def summary(status: run_status.Status, config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Render what the run was. metrics: metrics.json, {} before the end of a run."""
    run, beat = Path(status.run_dir), status.heartbeat
    model, ours = config.get("model", {}), config.get("cogumi", {})
    names = model.get("name"), read_section(run / DECISIONS, "base").get("commit")
    tuning = {"lora": "LoRA", "full": "every weight"}.get(ours.get("tuning"), "")
    on_quantized = "on a quantized base" if model.get("quantization_config") else ""
    values = beat | {key: value for key, value in metrics.items() if value is not None}
    took, cost = values.get("elapsed_seconds"), values.get("cost", beat.get("cost_so_far"))
    stages = [
        f"{stage} {format_duration(duration)}" for stage, duration in values.get("seconds", {}).items() if duration >= 1
    ]
    gpu, cpu, store = (beat.get(key) or {} for key in ("gpu", "cpu", "memory"))
    card = f"{gpu['name']} with {format_memory(gpu['total'])}" if gpu else "no GPU"
    machine = [card, f"{cpu['cores']} cores", f"{format_memory(store['total'])} of memory"] if cpu else []
    rows = {
        "model": ", at commit ".join(filter(None, names)),
        "method": ", ".join(filter(None, (ours.get("method"), tuning, on_quantized))),
        "state": run_status.format_state(status),
        "steps": "" if status.step is None else f"{status.step:,}" + (f" of {status.steps:,}" if status.steps else ""),
        "began": format_time(beat.get("started") or status.began),
        "last sign of life": format_time(status.last_sign),
        "took": format_duration(took) + (f" ({', '.join(stages)})" if stages else "") if took else "",
        "cost": "not known: no cogumi.price_per_hour was given" if cost is None else f"${cost:.2f}",
        "tokens": f"{values['tokens']:,}" if values.get("tokens") else "",
        "speed": f"{values['tokens_per_second']:,.0f} tokens/s" if values.get("tokens_per_second") else "",
        "MFU": f"{values['mfu']:.1%}" if values.get("mfu") else "",
        "trackers": ", ".join((status.trackers or {}).values()),
        "machine": ", ".join(filter(None, [status.host, *machine])),
        "sandbox": read_section(run / DECISIONS, "sandbox").get("what", "").removeprefix("sandbox: "),
    }
    directory = f"<code>{html.escape_text(run.absolute())}</code>"
    return html.facts([("directory", directory), *((name, html.escape_text(value)) for name, value in rows.items())])


def format_time(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC" if seconds else ""


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
    first = last = dict[str, Any]()
    for row in figures.read_rows(run / ROLLOUTS):
        if row.get("shown"):
            first, last = first or row, row
    steps = {row["step"]: row["shown"] for row in (first, last) if row}
    if samples := [{"step": step, **sample} for step, shown in steps.items() for sample in shown]:
        content += html.folded("Sampled while it trained, first and last, with rewards", render_samples(samples))
    return content


def forgetting(run: Path) -> str:
    hint = "Not measured: set cogumi.forgetting: true, or run: cogumi compare base RUN_DIR --panel"
    lines = run_status.read_json_or_empty(run / "forgetting.json").get("lines", [hint])
    return "".join(f"<p>{html.escape_text(line)}</p>" for line in lines)


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


def logs(run: Path, status: run_status.Status) -> str:
    """Render the ends of run.log and of what a detached process printed; open if the run broke off."""
    content = ""
    for path in dict.fromkeys((run / "run.log", Path(status.log))):
        if lines := run_status.tail_lines(path, REPORT_LOG_BYTES)[-REPORT_LOG_LINES:]:
            summary = f"the last {len(lines)} lines of {path.name}"
            content += html.folded(summary, html.verbatim("\n".join(lines)), status.state in run_status.BROKEN_OFF)
    return content or "<p>There is no log.</p>"


def configuration(run: Path) -> str:
    path = run / "config.yaml"
    if not path.exists():
        return "<p>There is no config.yaml: the run had not come as far.</p>"
    content = html.verbatim(path.read_text(encoding="utf-8"))
    return html.folded("config.yaml, resolved; secrets are redacted", content, is_open=True)
