"""HTML in small: text that cannot become markup, tables with headers, words with an edge of colour."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from cogumi.hidden import hide

WORDS = {"green": "ok", "yellow": "yellow", "red": "RED", "unknown": "?"}


def text(value: object) -> str:
    """Any text as text of a page: without secrets, and with nothing in it that a browser would take for markup."""
    return escape(hide(str(value)))


def level(state: str, word: str | None = None) -> str:
    """A word with an edge in the colour of its state: green, yellow, red or unknown."""
    return f'<span class="level {state}">{text(word or WORDS[state])}</span>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    numbers: Sequence[int] = (),
    kind: str = "wide",
) -> str:
    """head: plain words. rows: cells of HTML, the first of each row its header. numbers: columns set to the right."""

    def cell(tag: str, column: int, content: str, scope: str = "") -> str:
        right = ' class="n"' if column in numbers else ""
        return f"<{tag}{scope}{right}>{content}</{tag}>"

    columns = "".join(cell("th", number, text(each), ' scope="col"') for number, each in enumerate(head))
    body = "".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", number, each) for number, each in enumerate(row[1:], 1))
        + "</tr>\n"
        for row in rows
    )
    above = f"<caption>{text(caption)}</caption>" if caption else ""
    return (
        f'<div class="scrolls"><table class="{kind}">{above}<thead><tr>{columns}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(rows: Iterable[tuple[str, str]], caption: str = "") -> str:
    """A table of two columns: a name, and HTML. Rows without content are left out."""
    said = "".join(
        f'<tr><th scope="row">{text(name)}</th><td>{content}</td></tr>\n' for name, content in rows if content
    )
    above = f"<caption>{text(caption)}</caption>" if caption else ""
    return f'<div class="scrolls"><table>{above}<tbody>{said}</tbody></table></div>' if said else ""


def verbatim(value: object, most: int = 20_000) -> str:
    """Text with its lines and spaces as they are; of very long text the end, and how much is before it."""
    whole = hide(str(value))  # before it is cut: a part of a secret would not be known for one
    cut = f"[{len(whole) - most:,} characters before]\n" if len(whole) > most else ""
    return f"<pre>{text(cut + whole[-most:])}</pre>"


def blank(said: str) -> str:
    """Of a text that shows nothing what it is: `(nothing)`, or `(only white space: 64 spaces, 2 line ends)`."""
    names = {" ": "space", "\n": "line end", "\t": "tab"}
    of = Counter(names.get(each, "other") for each in said)
    counts = ", ".join(f"{count:,} {name}{'s' if count > 1 else ''}" for name, count in of.items())
    return f"(only white space: {counts})" if said else "(nothing)"


def folded(summary: str, content: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{text(summary)}</summary>{content}</details>"


def figure(svg: str) -> str:
    return f"<figure>{svg}</figure>"


@cache
def style() -> str:
    return files("cogumi.notebook").joinpath("style.css").read_text(encoding="utf-8")


def piece(content: str) -> str:
    """What a notebook shows of an object."""
    return f'<style>{style()}</style><div class="cogumi-piece">{content}</div>'
