"""The parts of the panel as HTML. Colours of text are the theme's; every level, state and reward is said in words as well."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from cogumi.core.disk_space import spoken
from cogumi.core.formatting import flag_sentence
from cogumi.notebook.html_components import blank
from cogumi.notebook.palette import BLUE, LEVELS
from cogumi.notebook.run_snapshot import Look, broke
from cogumi.notebook.svg import svg_of
from cogumi.telemetry.status import (
    checked,
    checks,
    failed,
    figures,
    in_short,
    machine,
    missed,
    near_here,
    number,
    reds,
    tail_lines,
)

MOST_CHARACTERS = 400  # of a prompt or completion: what is read at a glance
SAMPLE_LINES = 7  # of it that stand there unscrolled: whole ones, so that none is cut at its foot
LOG_LINES, LINE_BYTES = 12, 12_000

STYLE = f"""<style>
.cogumi {{ color: var(--jp-content-font-color1, inherit); font-size: 13px; line-height: 1.45; }}
.cogumi[role="status"] {{ display: inline-block; }} /* lines of its own height beside the buttons */
.cogumi progress {{ width: 100%; height: 12px; accent-color: {BLUE}; }}
.cogumi .plots {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 290px), 1fr)); gap: 6px 14px; }}
.cogumi .plots svg {{ width: 100%; height: auto; }}
.cogumi .flag {{ border-left: 5px solid; padding: 2px 8px; margin: 3px 0; }}
.cogumi table {{ border-collapse: collapse; margin: 2px 0; }}
.cogumi th, .cogumi td {{ text-align: left; vertical-align: top; padding: 2px 10px 2px 0; background: transparent; }}
.cogumi pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; max-width: 46em; overflow: auto;
  font-size: 12px; line-height: 16px; max-height: {SAMPLE_LINES * 16}px; color: inherit; background: transparent; }}
.cogumi pre.end {{ display: flex; flex-direction: column-reverse; }} /* scrolled to its end */
.cogumi h4 {{ margin: 10px 0 2px; font-size: 13px; }}
</style>"""


def within(*parts: str) -> str:
    return f'<div class="cogumi">{"".join(parts)}</div>' if any(parts) else ""


def head(look: Look) -> str:
    """Where, what, how far, how long yet, what it costs, what the machine does."""
    status = look.status
    lines = [f"<b>{escape(in_short(status))}</b>"]
    if status.step is not None and status.steps:
        share = min(1.0, status.step / status.steps)
        word = f"step {status.step} of {status.steps}"
        lines.append(f'<progress max="1" value="{share:.4f}" aria-label="{word}">{share:.0%}</progress>')
    if status.reason:
        lines.append(escape(" ".join(status.reason.split())))
    lines += [escape(" · ".join(each.split("  "))) for each in (figures(status), machine(status.heartbeat)) if each]
    return within("<br>".join(lines))


def gone(reason: str) -> str:
    """In place of the head, where there is nothing more to be read."""
    return within(f"<b>{escape(reason)}</b><br>What stands below is the last that was seen.")


def flags(look: Look) -> str:
    """What is not green with its evidence and what to turn; what was red before, numbered as in the plots; the verdict."""
    said = []
    for flag in look.troubles:
        words = escape(flag_sentence(flag))
        said.append(edged(flag["level"], f"<b>{flag['level'].upper()} {escape(flag['name'])}</b>: {words}"))
    if look.flags:
        green = sum(flag["level"] == "green" for flag in look.flags)
        said.append(edged("green", f"{green} of {len(look.flags)} flags are green"))
    said += [
        f"<div>⚑{number} red at step {each['step']}: {escape(each['name'])}: {escape(each['evidence'])}</div>"
        for number, each in enumerate(look.was_red, 1)
    ]
    verdict = checks(look.status)
    if verdict:
        bad = missed(verdict)
        lines = [f"FAIL {failed(each)} (required: {each['requirement']})" for each in bad]
        words = "<br>".join(map(escape, [checked(look.status), *lines]))
        said.append(edged("red" if bad or reds(look.status) else "green", f"<b>verdict</b>: {words}"))
    return within(*said)


def edged(level: str, words: str) -> str:
    return f'<div class="flag" style="border-color:{LEVELS[level]}">{words}</div>'


def plots(look: Look) -> str:
    marks = [(int(each["step"]), each["name"]) for each in look.was_red]
    drawn = [svg_of(plot, curves, marks) for plot, curves in look.plots]
    return within(f'<div class="plots">{"".join(drawn)}</div>') if drawn else ""


def samples(look: Look) -> str:
    if not look.samples:
        return ""
    last = next((key for key in ("reward", "middle", "answer") if key in look.samples[0]), None)
    rows = []
    for each in look.samples:
        cells = [pre(cut(str(each["prompt"]), ends=True), "end"), pre(cut(str(each["completion"])))]
        if last is not None:
            cells.append(number(each[last]) if last == "reward" else pre(cut(str(each[last]))))
        rows.append(cells)
    more = {None: [], "reward": ["reward"]}.get(last, ["expected"])
    columns = ["prompt (its end)", "completion", *more]
    return within(f"<h4>newest samples, step {look.sampled_at}</h4>", table(columns, rows))


def cut(said: str, ends: bool = False) -> str:
    """What is read at a glance."""
    if not said.strip():
        return blank(said)
    if len(said) <= MOST_CHARACTERS:
        return said
    return "…" + said[-MOST_CHARACTERS:] if ends else said[:MOST_CHARACTERS] + "…"


def rest(look: Look) -> str:
    """Checkpoints, disk, the end of the log."""
    found = []
    if look.checkpoints:
        words = {"verified": "verified when it was saved, sizes unchanged"}
        rows = [
            [escape(each.path.name), escape(words.get(each.state, f"{each.state}: {each.reason}")), spoken(each.bytes)]
            for each in look.checkpoints
        ]
        found += ["<h4>checkpoints</h4>", table(["newest first", "state", "size"], rows)]
        found += [escape(broke(look.was_red, [each.path for each in look.checkpoints]))]
    if look.disk:
        found += ["<h4>disk</h4>", "<br>".join(map(escape, look.disk))]
    log = tail_lines(Path(look.status.log), LINE_BYTES)[-LOG_LINES:]
    if log:
        name = escape(near_here(look.status.log))
        found.append(f"<details><summary>{name}</summary>{pre(chr(10).join(log), 'end')}</details>")
    return within(*found)


def said(word: str) -> str:
    return f'<span class="cogumi" role="status">{escape(word)}</span>'


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def pre(said: str, shows: str = "start") -> str:
    """shows: what of a long text is seen before it is scrolled, "start" or "end"."""
    return f'<pre class="{shows}">{escape(said)}</pre>'
