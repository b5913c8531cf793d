"""Pieces of HTML that a notebook and report.html share; other people's text cannot become markup.

Each function returns HTML for inside an element of class `cogumi-piece`; `add_style` makes it stand alone. Every state is a
word beside its colour, and every kind of token a word, a background and an underline of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogumi.core.disk_space import format_bytes
from cogumi.core.errors import UsageError
from cogumi.core.formatting import flag_sentence, format_memory, format_share
from cogumi.core.redact import redact_text
from cogumi.notebook import figures

if TYPE_CHECKING:
    from cogumi.checkpoints.verify import CheckpointState
    from cogumi.merge import MergeReport
    from cogumi.methods.preview import Preview

WORDS = {"green": "ok", "yellow": "yellow", "red": "RED", "unknown": "?"}
# As attributes: a page that does not trust the notebook drops its style sheet.
LOOKS = {
    "context": "",
    "learned": "background: #009E7338; border-bottom: 2px solid #009E73",
    "rejected": "background: #D55E0030; border-bottom: 4px double #D55E00",
}
LEGEND = {
    "context": "as it stands: read, not learned",
    "learned": "green, underlined: learned",
    "rejected": "orange, double line: the answer preferred less",
}


def escape_text(value: object) -> str:
    """Return text without secrets and without anything that a browser would take for markup."""
    return escape(redact_text(str(value)))


def level(state: str, word: str | None = None) -> str:
    """Render a word with an edge in the colour of its state: green, yellow, red or unknown."""
    return f'<span class="level {state}">{escape_text(word or WORDS[state])}</span>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    numbers: Sequence[int] = (),
    kind: str = "wide",
) -> str:
    """Render a table. head: plain words. rows: cells of HTML, the first is the row's header. numbers: right-aligned columns."""
    side = dict.fromkeys(numbers, ' class="n"')
    columns = "".join(f'<th scope="col"{side.get(n, "")}>{escape_text(name)}</th>' for n, name in enumerate(head))
    title = f"<caption>{escape_text(caption)}</caption>" if caption else ""
    lines = f"{title}<thead><tr>{columns}</tr></thead>\n" if head else title
    for first, *others in rows:
        cells = "".join(f"<td{side.get(column, '')}>{cell}</td>" for column, cell in enumerate(others, 1))
        lines += f'<tr><th scope="row">{first}</th>{cells}</tr>\n'
    return f'<div class="scrolls"><table class="{kind}">{lines}</table></div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Render (name, HTML) pairs as a table; pairs without content are left out."""
    lines = [(escape_text(name), cell) for name, cell in rows if cell]
    return table((), lines, kind="") if lines else ""


def verbatim(value: object, max_characters: int = 20_000) -> str:
    """Render text with its lines and spaces; of longer text the end, and how much is left out."""
    text = redact_text(str(value))  # before it is cut: a part of a secret would not be recognized
    omitted = len(text) - max_characters
    note = f"[{omitted:,} characters before]\n" if omitted > 0 else ""
    return f"<pre>{escape_text(note + text[-max_characters:])}</pre>"


def describe_blank(text: str) -> str:
    return f"(only white space, of length {len(text):,})" if text else "(nothing)"


def folded(summary: str, content: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape_text(summary)}</summary>{content}</details>"


@cache
def style() -> str:
    return files("cogumi.notebook").joinpath("style.css").read_text(encoding="utf-8")


def wrap_piece(*parts: str) -> str:
    return f'<div class="cogumi-piece">{"".join(parts)}</div>' if any(parts) else ""


def add_style(content: str) -> str:
    return f"<style>{style()}</style>{wrap_piece(content)}"


# ------------------------------------------------------------------------------------------- parts of a run and its data


def preview(report: "Preview") -> str:
    """Render what a run would train on: examples with what is learned of them, lengths, what became of every row."""
    accounts = [asdict(part) for part in (report.train, report.held_out) if part is not None]
    notes = "".join(f"<p>{escape_text(line)}</p>" for line in report.reports)
    present = {kind for pieces in report.examples for kind, _ in pieces}
    kinds = [kind for kind in LEGEND if kind in present]
    legend = "".join(mark_tokens(kind, LEGEND[kind]) for kind in kinds)
    examples = [f'<p class="legend">{legend}</p>'] if kinds else []
    for number, pieces in enumerate(report.examples, 1):
        text = "".join(mark_tokens(kind, content) for kind, content in pieces)
        examples.append(f"<h4>Example {number}</h4><pre>{text}</pre>")
    return data(accounts, report.lengths, report.max_length) + notes + "\n".join(examples)


def mark_tokens(kind: str, content: str) -> str:
    """Render a piece of an example; tokens that are not just read have their kind before them."""
    tag = "" if kind == "context" else f'<small class="tag">{kind}</small>'
    return f'<span class="{kind}" style="{LOOKS[kind]}">{tag}{escape_text(content)}</span>'


def data(accounts: Sequence[Mapping[str, Any]], lengths: Sequence[Sequence[int]], max_length: int | None) -> str:
    """Render what became of the rows. accounts: `cogumi.methods.preview.Shares` of each part of the data, as mappings."""
    histogram = figures.lengths(lengths, max_length) if lengths else ""
    tables = ""
    for account in accounts:
        rows, tokens, learned = account["rows"], account["tokens"], account["learned"]
        counts = {
            "examples": account["examples"],
            **{f"dropped: {reason}": count for reason, count in account["dropped"].items()},
            "cut (truncated)": account["truncated"],
            "equal to an earlier row": account["duplicated"],
        }
        cells = [
            ("rows", rows, ""),
            *((name, count, format_share(count, rows)) for name, count in counts.items() if count),
        ]
        cells += [("tokens", tokens, ""), ("learned tokens", learned, format_share(learned, tokens))] if tokens else []
        lines = [[escape_text(name), f"{count:,}", escape(share)] for name, count, share in cells]
        tables += table(["", "number", "share"], lines, caption=account["name"], numbers=(1, 2), kind="narrow")
    drawn = f'<div class="column">{histogram}</div>' if histogram else ""
    return f'<div class="beside"><div class="column">{tables}</div>{drawn}</div>'


def checks(verdict_checks: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for check in sorted(verdict_checks, key=lambda check: bool(check["passed"])):
        state = level("green", "pass") if check["passed"] else level("red", "FAIL")
        state = level("yellow", "warn") if check["passed"] and check.get("warning") else state
        figure = "; ".join(filter(None, (check["figure"], check.get("fix"))))
        rows.append([state, escape_text(check["name"]), escape_text(figure), escape_text(check["requirement"])])
    return table(["", "check", "figure", "required"], rows)


def flags(judged: Mapping[str, Any]) -> str:
    """Render the flags of flags.json that are not green, and those that were red, numbered as in the plots."""
    current = judged.get("flags", [])
    raised = [flag for flag in current if flag["level"] != "green"]
    lines = []
    for flag in raised:
        word = level(flag["level"], f"{flag['level'].upper()} {flag['name']}")
        lines.append(f"{word} {escape_text(flag_sentence(flag))}")
    if current:
        lines.append(level("green", f"{len(current) - len(raised)} of {len(current)} flags are green"))
    for number, flag in enumerate(judged.get("was_red", []), 1):
        lines.append(escape_text(f"⚑{number} red at step {flag['step']}: {flag['name']}: {flag['evidence']}"))
    return "".join(f"<p>{line}</p>" for line in lines)


def checkpoints(states: "Sequence[CheckpointState]") -> str:
    """Render the checkpoints, newest first."""
    if not states:
        return "<p>There is no checkpoint.</p>"
    rows = []
    for checkpoint in states:
        state = f"{checkpoint.state}: {checkpoint.reason}"
        if checkpoint.state == "verified":
            state = "verified when it was saved, sizes unchanged"
        rows.append([escape_text(checkpoint.path.name), escape_text(state), format_bytes(checkpoint.bytes)])
    return table(["newest first", "state", "size"], rows)


def preflight(report: Mapping[str, Any]) -> str:
    verdict = level("green", "nothing is red") if report["fits"] else level("red", "RED: it does not fit")
    rows = []
    for line in report["lines"]:
        state = level(line["state"], "note" if line["state"] == "yellow" else None)
        rows.append([state, *(escape_text(line[key]) for key in ("stage", "figure", "fix"))])
    lines = table(["", "stage", "found", "what to do"], rows)
    return f"<p>{verdict} Planned for: {escape_text(report['target'])}.</p>{lines}"


def merged(directory: Path, report: "MergeReport | None" = None) -> str:
    """Render what a merge did, from its manifest; with its report also how long it took."""
    manifest = figures.merge_manifest(directory)
    tensors = manifest["tensors"].values()
    checked = sum(entry.get("elements") or 0 for entry in tensors)
    verified = f"{checked:,} elements read back from the disk" if checked else "not verified"
    took = f", in {report.seconds:.1f} s" if report else ""
    changed = sum("rank" in entry for entry in tensors)
    rows = {
        "into": str(directory),
        "base": manifest["base"]["name"],
        "adapters": ", ".join(f"{adapter['path']} x {adapter['weight']:g}" for adapter in manifest["adapters"]),
        "tensors": f"{changed:,} merged, {manifest['tensors_copied']:,} copied byte by byte",
        "size": format_memory(sum(shard["bytes"] for shard in manifest["shards"].values())),
        "verified": verified,
        "notes": "; ".join(manifest.get("notes", ())),
        "logits": str(report.logits or "") if report else "",
        "written": f"{manifest['created']}{took}",
    }
    try:
        drawn = str(figures.delta_by_layer(directory))
    except UsageError as error:
        drawn = f"<p>{escape_text(error)}</p>"
    return facts((name, escape_text(value)) for name, value in rows.items()) + drawn


def render_html(report: Any) -> str:
    """Return what a notebook shows of a report of a public function: a merge's, an adapter's, a preflight's, a preview."""
    renderers = {
        "AdapterReport": lambda report: facts((name, escape_text(text)) for name, text in report.rows.items()),
        "MergeReport": lambda report: merged(report.out, report),
        "PreflightReport": lambda report: preflight(report.as_dict()),
        "Preview": preview,
    }
    return add_style(renderers[type(report).__name__](report))
