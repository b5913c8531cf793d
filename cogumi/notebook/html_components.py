"""Pieces of HTML that a notebook and report.html share; text of others cannot become markup.

Each returns HTML for inside of an element of the class `cogumi-piece`; `inline_styles` makes it one that stands alone.
Every state is a word beside its colour, and every kind of token a word, a background and an underline of its own.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def escape_text(value: object) -> str:
    """Any text as text of a page: without secrets, and with nothing in it that a browser would take for markup."""
    return escape(redact_text(str(value)))


def level(state: str, word: str | None = None) -> str:
    """A word with an edge in the colour of its state: green, yellow, red or unknown."""
    return f'<span class="level {state}">{escape_text(word or WORDS[state])}</span>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    numbers: Sequence[int] = (),
    kind: str = "wide",
) -> str:
    """head: plain words. rows: cells of HTML, the first of each row its header. numbers: columns set to the right."""
    right = [' class="n"' if column in numbers else "" for column in range(len(head))]
    columns = "".join(f'<th scope="col"{side}>{escape_text(each)}</th>' for side, each in zip(right, head, strict=True))
    body = ""
    for row in rows:
        cells = "".join(f"<td{side}>{cell}</td>" for side, cell in zip(right[1:], row[1:], strict=True))
        body += f'<tr><th scope="row"{right[0]}>{row[0]}</th>{cells}</tr>\n'
    return wrap_table(f"<thead><tr>{columns}</tr></thead>\n<tbody>{body}</tbody>", caption, kind)


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A table of two columns: a name, and HTML. Rows without content are left out."""
    said = "".join(f'<tr><th scope="row">{escape_text(name)}</th><td>{cell}</td></tr>\n' for name, cell in rows if cell)
    return wrap_table(f"<tbody>{said}</tbody>") if said else ""


def wrap_table(content: str, caption: str = "", kind: str = "") -> str:
    above = f"<caption>{escape_text(caption)}</caption>" if caption else ""
    return f'<div class="scrolls"><table class="{kind}">{above}{content}</table></div>'


def verbatim(value: object, most: int = 20_000) -> str:
    """Text with its lines and spaces as they are; of very long text the end, and how much is before it."""
    whole = redact_text(str(value))  # before it is cut: a part of a secret would not be known for one
    cut = f"[{len(whole) - most:,} characters before]\n" if len(whole) > most else ""
    return f"<pre>{escape_text(cut + whole[-most:])}</pre>"


def describe_blank(said: str) -> str:
    """Of a text that shows nothing what it is."""
    return f"(only white space, of length {len(said):,})" if said else "(nothing)"


def folded(summary: str, content: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape_text(summary)}</summary>{content}</details>"


@cache
def style() -> str:
    return files("cogumi.notebook").joinpath("style.css").read_text(encoding="utf-8")


def wrap_piece(*parts: str) -> str:
    return f'<div class="cogumi-piece">{"".join(parts)}</div>' if any(parts) else ""


def add_style(content: str) -> str:
    return f"<style>{style()}</style>{wrap_piece(content)}"


def inline_styles(content: str) -> str:
    """What a notebook shows of an object: every element has its own style, and a `mark` becomes a `span`.
    A page that does not trust the notebook takes out style sheets, and has colours of its own for `mark`."""
    from bs4 import BeautifulSoup

    page = BeautifulSoup(f'<div class="cogumi-piece">{content}</div>', "html.parser")
    for selector, declarations in rules():
        for element in page.select(selector):
            element["style"] = f"{element.get('style', '')}{declarations}"
    for element in page.select("mark"):
        element.name = "span"
    return str(page)


@cache
def rules() -> list[tuple[str, str]]:
    """(selector, declarations) of the style sheet, in its order: a later one is the one that holds."""
    plain = re.sub(r"/\*.*?\*/", "", style(), flags=re.DOTALL).replace(" !important", "")
    found = re.findall(r"([^{}]+)\{([^{}]*)\}", plain)
    return [(selector.strip(), f"{declarations.strip().rstrip(';')};") for selector, declarations in found]


LEGEND = {
    "context": "context, as it stands: read, not learned",
    "learned": '<mark class="learned"><small class="tag">learned</small>green, underlined</mark>: learned',
    "rejected": '<mark class="rejected"><small class="tag">rejected</small>orange, double line</mark>: the answer preferred less',
}


def preview(found: "Preview") -> str:
    """What a run would train on: examples with what is learned of them, lengths, what became of every row."""
    accounts = [asdict(each) for each in (found.train, found.held_out) if each is not None]
    said = "".join(f"<p>{escape_text(line)}</p>" for line in found.reports)
    return data(accounts, found.lengths, found.max_length) + said + examples(found.examples)


def data(accounts: Sequence[Mapping[str, Any]], lengths: Sequence[Sequence[int]], max_length: int | None) -> str:
    """accounts: of each part of the data, as `cogumi.methods.preview.Shares`."""
    drawn = figures.lengths(lengths, max_length) if lengths else ""
    return f'<div class="beside"><div>{"".join(map(shares, accounts))}</div>{drawn}</div>'


def shares(account: Mapping[str, Any]) -> str:
    """What became of the rows of one part of the data, in numbers and shares."""
    rows, tokens, learned = account["rows"], account["tokens"], account["learned"]
    of_rows = {
        "examples": account["examples"],
        **{f"dropped: {reason}": count for reason, count in account["dropped"].items()},
        "cut (truncated)": account["truncated"],
        "equal to an earlier row": account["duplicated"],
    }
    cells = [("rows", rows, ""), *((what, count, format_share(count, rows)) for what, count in of_rows.items())]
    cells += [("tokens", tokens, ""), ("learned tokens", learned, format_share(learned, tokens))]
    said = [[escape_text(what), f"{count:,}", escape(share)] for what, count, share in cells if count or what == "rows"]
    return table(["", "number", "share"], said, caption=account["name"], numbers=(1, 2), kind="narrow")


def examples(found: Iterable[Sequence[tuple[str, str]]]) -> str:
    """Examples as the model sees them: (kind, text) pieces, kind being context, learned or rejected."""
    shown = list(found)
    kinds = [kind for kind in LEGEND if any(kind == each for pieces in shown for each, _ in pieces)]
    legend = "".join(f"<span>{LEGEND[kind]}</span>" for kind in kinds)
    said = [f'<p class="legend">{legend}</p>'] if kinds else []
    for number, pieces in enumerate(shown, 1):
        text = ""
        for kind, content in pieces:
            tag, word = ("span", "") if kind == "context" else ("mark", f'<small class="tag">{kind}</small>')
            text += f'<{tag} class="{kind}">{word}{escape_text(content)}</{tag}>'
        said.append(f"<h4>Example {number}</h4><pre>{text}</pre>")
    return "\n".join(said)


def checks(found: Iterable[Mapping[str, Any]]) -> str:
    """The checks of a verdict, those that failed first."""
    rows = []
    for check in sorted(found, key=lambda check: bool(check["passed"])):
        state = level("green", "pass") if check["passed"] else level("red", "FAIL")
        said = "; ".join(filter(None, (check["figure"], check.get("fix"))))
        rows.append([state, escape_text(check["name"]), escape_text(said), escape_text(check["requirement"])])
    return table(["", "check", "figure", "required"], rows)


def flags(found: Sequence[Mapping[str, Any]], was_red: Iterable[Mapping[str, Any]]) -> str:
    """What is not green, with its likely cause and the key to change, and what was red before, numbered as in the plots."""
    shown = [each for each in found if each["level"] != "green"]
    lines = []
    for each in shown:
        word = level(each["level"], f"{each['level'].upper()} {each['name']}")
        lines.append(f"{word} {escape_text(flag_sentence(each))}")
    if found:
        lines.append(level("green", f"{len(found) - len(shown)} of {len(found)} flags are green"))
    for number, each in enumerate(was_red, 1):
        lines.append(escape_text(f"⚑{number} red at step {each['step']}: {each['name']}: {each['evidence']}"))
    return "".join(f"<p>{line}</p>" for line in lines)


def checkpoints(found: "Sequence[CheckpointState]", broke: str) -> str:
    """broke: as `RunSnapshot.broke`."""
    if not found:
        return "<p>There is no checkpoint.</p>"
    rows = []
    for each in found:
        whole = each.state == "verified"
        state = "verified when it was saved, sizes unchanged" if whole else f"{each.state}: {each.reason}"
        rows.append([escape_text(each.path.name), escape_text(state), format_bytes(each.bytes)])
    return table(["newest first", "state", "size"], rows) + (f"<p>{escape_text(broke)}</p>" if broke else "")


def preflight(found: Mapping[str, Any]) -> str:
    """A preflight as `PreflightReport.as_dict()` gives it."""
    verdict = level("green", "nothing is red") if found["fits"] else level("red", "RED: it does not fit")
    rows = []
    for each in found["lines"]:
        state = level(each["state"], "note" if each["state"] == "yellow" else None)
        rows.append([state, *(escape_text(each[key]) for key in ("stage", "figure", "fix"))])
    lines = table(["", "stage", "found", "what to do"], rows)
    return f"<p>{verdict} Planned for: {escape_text(found['target'])}.</p>{lines}"


def merged(directory: Path, report: "MergeReport | None" = None) -> str:
    """What a merge did, from its manifest; with its report also how long it took."""
    found = figures.merge_manifest(directory)
    tensors = found["tensors"].values()
    checked = sum(each.get("elements") or 0 for each in tensors)
    beside = sum(each.get("not_nearest") or 0 for each in tensors)
    worst = max((each["largest_error"] for each in tensors if each.get("largest_error") is not None), default=None)
    verified = "not verified"
    if worst is not None:
        verified = f"{checked:,} elements read back from the disk, {beside:,} of them next to a tie"
        verified += f", the worst at {worst:.2f} of what rounding allows"
    adapters = ", ".join(f"{each['path']} x {each['weight']:g}" for each in found["adapters"])
    merged_ones, took = sum("rank" in each for each in tensors), f", in {report.seconds:.1f} s" if report else ""
    rows = {
        "into": str(directory),
        "base": found["base"]["name"],
        "adapters": adapters,
        "tensors": f"{merged_ones:,} merged, {found['tensors_copied']:,} copied byte by byte",
        "size": format_memory(sum(shard["bytes"] for shard in found["shards"].values())),
        "verified": verified,
        "logits": str(report.logits or "") if report else "",
        "written": f"{found['created']}{took}",
    }
    try:
        drawn = str(figures.delta_by_layer(directory))
    except UsageError as error:
        drawn = f"<p>{escape_text(error)}</p>"
    said = facts((name, escape_text(each)) for name, each in rows.items())
    return said + drawn


def render_html(report: Any) -> str:
    """What a notebook shows of a report that a public function returned: a merge's, a preflight's, a preview."""
    return inline_styles(REPORTS[type(report).__name__](report))


REPORTS: dict[str, Callable[[Any], str]] = {
    "MergeReport": lambda report: merged(report.out, report),
    "PreflightReport": lambda report: preflight(report.as_dict()),
    "Preview": preview,
}
