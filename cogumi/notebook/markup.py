"""HTML in small: text that cannot become markup, tables with headers, words with an edge of colour."""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from cogumi.hidden import hide

ON_ANY_GROUND = "#767676"  # of a contrast above 4 with white and with JupyterLab's dark theme
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
    """What a notebook shows of an object: without a style sheet, SVG and `mark`, which a page that does not trust the
    notebook takes out or has in colours of its own."""
    from bs4 import BeautifulSoup

    drawn = re.sub(r"<svg.*?</svg>", lambda found: as_image(found[0]), content, flags=re.DOTALL)
    page = BeautifulSoup(f'<div class="cogumi-piece">{drawn}</div>', "html.parser")
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


def as_image(svg: str) -> str:
    """An SVG element as an image; its text, which cannot have the colour of the page, in one that reads on light and dark."""
    style, words = (re.search(rf'<svg[^>]* {name}="([^"]*)"', svg) for name in ("style", "aria-label"))
    whole = svg.replace("<svg ", f'<svg color="{ON_ANY_GROUND}" ', 1).encode()
    data = b64encode(whole).decode()
    said = f' alt="{words[1]}"' if words else ""
    return f'<img{said} style="{style[1] if style else ""}" src="data:image/svg+xml;base64,{data}"/>'
