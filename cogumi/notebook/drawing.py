"""A matplotlib figure that becomes SVG in a page: transparent, its text real text in the colour of the page around it.

matplotlib's objects alone are used, never pyplot: no figure is kept, no backend is chosen, and what a notebook has set
for its own figures (a dark style, say) neither reaches these nor is changed by them.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import BytesIO, StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from cogumi.notebook.palette import INK

SIZE = 9  # points; a figure of 10 inches is shown at the width of a page, so that this is some 12 pixels
# Text stays text: a browser's reader says it, its search finds it, and the file is a fraction of that with drawn letters.
# It is laid out by DejaVu Sans, wider than what a browser has instead, so that nothing runs over.
SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": SIZE,
    "axes.titlesize": SIZE + 1,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": SIZE,
    "xtick.labelsize": SIZE,
    "ytick.labelsize": SIZE,
    "legend.fontsize": SIZE,
    "legend.frameon": False,
    "legend.handlelength": 3.6,  # long enough to show a dash
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "hatch.linewidth": 0.8,
    "axes.formatter.useoffset": False,
    "text.parse_math": False,  # a name with a dollar in it is no formula
    **dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
            "xtick.labelcolor",
            "ytick.labelcolor",
            "grid.color",
            "hatch.color",
            "legend.labelcolor",
        ),
        INK,
    ),
}
FONTS = "system-ui, 'DejaVu Sans', Verdana, sans-serif"


@contextmanager
def own_settings() -> Iterator[None]:
    """In the block matplotlib is as it comes, with what is set above; afterwards as it was."""
    as_it_comes: Any = {
        key: matplotlib.rcParamsDefault[key] for key in matplotlib.rcParamsDefault if "backend" not in key
    }
    with matplotlib.rc_context({**as_it_comes, **SETTINGS}):
        yield


class Drawing(Figure):
    """A figure that a notebook shows as SVG. `title` and `words` are what it says to whoever does not see it."""

    title: str
    words: str

    def svg(self) -> str:
        """One <svg> element to be put into a page."""
        with own_settings():
            text = StringIO()
            # Not `savefig`, which draws a figure of constrained layout twice.
            FigureCanvasSVG(self).print_svg(text, metadata={"Date": None, "Creator": None})
        return inlined(text.getvalue(), self.title, self.words)

    def _repr_html_(self) -> str:
        return f"<figure style='margin:0'>{self.svg()}</figure>"

    def _repr_png_(self) -> bytes:
        """For web pages that show saved notebooks and take SVG out of them."""
        with own_settings():
            image = BytesIO()
            self.savefig(image, format="png", dpi=80, facecolor="white")
        return image.getvalue()


def inlined(text: str, title: str, words: str) -> str:
    """matplotlib's SVG file as an element of a page that scales, reads in light and dark, and has a name."""
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", text))
    # Those that nothing refers to ("axes_1") would be there once for each figure of a page.
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r'<defs>\s*<style type="text/css">.*?</style>\s*</defs>| transform="rotate\(-0 [^"]*"', "", text)
    text = text.replace("'DejaVu Sans'", FONTS)
    # A hundredth of a point is more than a screen shows.
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}: {escape(words)}" fill="currentColor" stroke-linejoin="round" '
        f'style="width:100%;max-width:{float(width) * 4 / 3:.0f}px;height:auto">'
        f"<title>{escape(title)}</title><desc>{escape(words)}</desc>"
    )
    return head + re.sub(r"\n\s*", "\n", text[text.index(">") + 1 :])


def sheet(
    title: str, words: str, width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Drawing, list[Axes]]:
    """A drawing of so many inches and its axes, row by row. Call it, and draw, inside `own_settings()`."""
    drawing = Drawing(figsize=(width, height), layout="constrained")
    drawing.title, drawing.words = title, words
    axes = drawing.subplots(rows, columns, squeeze=False, **options)
    return drawing, [each for row in axes for each in row]
