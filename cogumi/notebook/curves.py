"""The metrics of a run as curves, and their small plots as SVG.

Each bin of steps has the least, the mean and the greatest of its values: a spike of one step in a million still shows.
Lines differ by dash as well as by colour, and a label says in words what is drawn.
"""

import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

# Of Okabe and Ito's eight (https://jfly.uni-koeln.de/color/) the four that have a contrast of 3:1 or more with white and
# with #111 alike, as WCAG 2.2 asks of graphics (success criterion 1.4.11), and their orange, darkened until it has.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B77D00"
INK = "#767676"
"""Text and axes of what cannot take the colour of the page: a contrast of 4.5:1, as text asks for, with white and black."""
# Of a flag, a check, a line of the preflight: the edge beside the word that says the same.
LEVELS = {"red": VERMILLION, "yellow": ORANGE, "unknown": PURPLE, "green": GREEN}

CHUNK_BYTES = 4 << 20
MOST_BINS = 300  # of a curve: as many as a small plot has pixels
MOST_BROKEN = 100


@dataclass(frozen=True)
class Plot:
    """Curves that are shown together. keys: as TRL and cogumi log them; those that a run does not log are left out. x: what
    they are drawn over."""

    title: str
    keys: tuple[str, ...]
    unit: str = ""
    x: str = "step"


PLOTS = (
    Plot("loss", ("loss", "eval_loss")),
    Plot("reward", ("reward",), "mean of a batch"),
    Plot("reward spread", ("reward_std",), "standard deviation"),
    Plot("margin", ("rewards/margins",), "chosen - rejected"),
    Plot("KL", ("policy/kl_new_old", "kl"), "nats per token"),
    Plot("clipped", ("policy/clipped_ratio_fraction",), "share of completions"),
    Plot("gradient norm", ("grad_norm",), "before clipping"),
    Plot("entropy", ("entropy",), "nats per token"),
    Plot("learning rate", ("learning_rate",)),
    Plot("speed", ("perf/tokens_per_second",), "tokens per second"),
)
KEYS = tuple(dict.fromkeys(key for plot in PLOTS for key in plot.keys))
FIRST, LAST, LOW, SUM, HIGH, COUNT = range(6)


@dataclass
class Curve:
    """One metric. `bins`: an array of (first step, last step, least, sum, greatest, number of values) by bin."""

    bins: np.ndarray = field(default_factory=lambda: np.empty((6, 0)))
    width: int = 1
    broken: list[int] = field(default_factory=list)
    """Steps, the first hundred, whose value is NaN or infinite."""

    @classmethod
    def through(cls, x: np.ndarray, y: np.ndarray) -> "Curve":
        return cls(np.stack([x, x, y, y, y, np.ones(len(x))]))

    @property
    def steps(self) -> np.ndarray:  # the middle of each bin
        return (self.bins[FIRST] + self.bins[LAST]) / 2

    @property
    def low(self) -> np.ndarray:
        return self.bins[LOW]

    @property
    def mean(self) -> np.ndarray:
        return self.bins[SUM] / self.bins[COUNT]

    @property
    def high(self) -> np.ndarray:
        return self.bins[HIGH]

    @property
    def is_constant(self) -> bool:
        """Whether two values or more were logged and all of them are equal."""
        return not self.broken and self.bins[COUNT].sum() > 1 and bool(self.low.min() == self.high.max())

    def __bool__(self) -> bool:
        return bool(self.bins.shape[1] or self.broken)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Values of later steps than those that are there."""
        finite = np.isfinite(values)
        self.broken += steps[~finite][: MOST_BROKEN - len(self.broken)].astype(int).tolist()
        steps, values = steps[finite], values[finite]
        bins = np.concatenate([self.bins, [steps, steps, values, values, values, np.ones_like(values)]], axis=1)
        while len(begins := np.flatnonzero(np.diff(bins[FIRST] // self.width, prepend=np.nan))) > MOST_BINS:
            self.width *= 2
        if len(begins):
            together = (np.minimum, np.maximum, np.minimum, np.add, np.maximum, np.add)
            rows = zip(together, bins, strict=True)
            self.bins = np.stack([function.reduceat(row, begins) for function, row in rows])


class Curves:
    """The curves of one metrics.jsonl, read on with each `read()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()

    def forget(self) -> None:
        self.of = {key: Curve() for key in KEYS}
        self.offset = self.rows = 0
        self.file_number: int | None = None

    def read(self) -> bool:
        """Take in the lines written since the last time; whether there were any. A file that was cut or replaced is read anew."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            now = os.fstat(file.fileno())
            if self.file_number not in (None, now.st_ino) or now.st_size < self.offset:
                self.forget()
            self.file_number = now.st_ino
            before, rest = self.offset, b""
            file.seek(self.offset)
            while data := file.read(CHUNK_BYTES):
                lines, newline, rest = (rest + data).rpartition(b"\n")
                if newline:
                    self.offset += len(lines) + 1
                    self.take(lines + newline)
        return self.offset > before

    def take(self, lines: bytes) -> None:
        import polars as pl

        # Values that are not finite are strings in the file (`run_directory.jsonable_numbers`): rare, and slower to read.
        said = pl.String if b'"nan"' in lines or b'inf"' in lines else pl.Float64
        schema = dict.fromkeys(("step", *KEYS), said)
        rows = pl.read_ndjson(lines, schema=schema, ignore_errors=True)
        self.rows += len(rows)
        there = ~rows.select(pl.all().is_null()).to_numpy()  # null and NaN are one in an array of numbers
        values = rows.cast(pl.Float64, strict=False).to_numpy()
        for column, key in enumerate(KEYS, 1):
            logged = there[:, 0] & there[:, column]
            if logged.any():
                self.of[key].add(values[logged, 0], values[logged, column])

    def plots(self) -> list[tuple[Plot, dict[str, Curve]]]:
        """What there is to be shown, in the order of PLOTS."""
        found = [(plot, {key: self.of[key] for key in plot.keys if self.of[key]}) for plot in PLOTS]
        return [(plot, curves) for plot, curves in found if curves]


def axis_range(curves: Iterable[Curve]) -> tuple[float, float]:
    """From the least to the greatest value, for an axis. About a value that stays the same by half of it; of 0 up to 1."""
    there = [curve for curve in curves if len(curve.low)]
    low = min((float(curve.low.min()) for curve in there), default=0.0)
    high = max((float(curve.high.max()) for curve in there), default=1.0)
    if low < high:
        return low, high
    return (low - abs(low) / 2, low + abs(low) / 2) if low else (0.0, 1.0)


# ------------------------------------------------------------------------------------------------------------------ plots

WIDTH, HEIGHT = 310, 140
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 30, 18
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, INK)
DASHES = ("none", "5 2", "5 2 1 2", "1 1", "8 2", "2 2", "8 2 1 2 1 2")
LINES = tuple(zip((*COLOURS, BLUE, VERMILLION), DASHES, strict=True))
"""Colour and dash: what is a line's own."""


class HtmlFigure(str):
    """HTML that a notebook shows as the last word of a cell."""

    def __repr__(self) -> str:
        return "HtmlFigure()"

    def _repr_html_(self) -> str:
        return f"<div>{self}</div>"


Plots = Iterable[tuple[Plot, dict[str, Curve]]]
Marks = Sequence[tuple[int, str, str]]
"""(step, level, name) of flags: their numbers are in the plots and in the list below them."""


def flag_steps(judged: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """The marks of flags.json: what was red, when it first was; what is yellow, when that was said."""
    was_red = [(int(each["step"]), "red", str(each["name"])) for each in judged.get("was_red", [])]
    known = {name for *_, name in was_red}
    raised = [each for each in judged.get("flags", []) if each["level"] != "green" and each["name"] not in known]
    return [*was_red, *((int(judged["step"]), str(each["level"]), str(each["name"])) for each in raised)]


def render_curves(plots: Plots, judged: Mapping[str, Any], as_images: bool = False) -> str:
    """The plots of a run, and by their numbers the flags that are or were red or yellow; "" where nothing was logged."""
    marks = flag_steps(judged)
    drawn = render_plots(plots, marks, as_images)
    for number, (step, level, name) in enumerate(marks if drawn else (), 1):
        drawn += f"<p>⚑{number} {level} at step {step}: {escape(name)}</p>"
    return drawn


def render_plots(plots: Plots, marks: Marks = (), as_images: bool = False) -> str:
    """The plots, and below them in words what had the same value at every step. as_images: as elements that a page which
    does not trust a notebook shows."""
    drawn, same = [], []
    for plot, curves in plots:
        if all(curve.is_constant for curve in curves.values()):
            same += [f"{plot.title} {format_number(float(curve.low[0]))}" for curve in curves.values()]
        elif as_images:  # an image shares neither names nor styles with the page
            data = b64encode(render_svg(plot, curves, marks, f"color:{INK};font-family:sans-serif").encode()).decode()
            words = escape(describe_plot(plot, curves))
            drawn.append(f'<img alt="{words}" src="data:image/svg+xml;base64,{data}"/>')
        else:
            drawn.append(render_svg(plot, curves, marks))
    words = f"<p>the same at every step: {escape(', '.join(same))}</p>" if same else ""
    return f'<div class="plots">{"".join(drawn)}</div>{words}' if drawn or same else ""


def render_svg(plot: Plot, curves: Mapping[str, Curve], marks: Marks = (), style: str = "color:inherit") -> str:
    steps = np.concatenate([curve.steps for curve in curves.values()])
    broken = sorted({step for curve in curves.values() for step in curve.broken})
    at = [*steps, *broken, *(step for step, *_ in marks)]
    first, last = min(at), max(at)
    low, high = axis_range(curves.values())
    x_of = partial(np.interp, xp=(first, last if last > first else first + 1), fp=(LEFT, WIDTH - RIGHT))
    y_of = partial(np.interp, xp=(low, high), fp=(HEIGHT - BOTTOM, TOP))
    drawn = [render_axes(plot.x, first, last, low, high), render_title(plot, curves)]
    for number, (step, level, name) in enumerate(marks, 1):
        drawn.append(render_flag(float(x_of(step)), number, level, name))
    for curve, (colour, dash) in zip(curves.values(), cycle(LINES), strict=False):
        if len(curve.low):
            drawn.append(render_line(curve, x_of, y_of, colour, dash))
    for step in broken:
        cross = f"M{x_of(step) - 3:.1f} {TOP + 2}l6 6m0 -6l-6 6"
        title = f"<title>not finite at step {step}</title>"
        drawn.append(f'<path d="{cross}" stroke="{LEVELS["red"]}" stroke-width="1.8" fill="none">{title}</path>')
    label = escape(describe_plot(plot, curves))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" xmlns="http://www.w3.org/2000/svg"'
    return f'<svg {size} role="img" aria-label="{label}" style="{style}">{"".join(drawn)}</svg>'


def render_line(curve: Curve, x_of: Callable[..., Any], y_of: Callable[..., Any], colour: str, dash: str) -> str:
    """The means, over an area from the least to the greatest value of each bin."""
    x, low, mean, high = x_of(curve.steps), y_of(curve.low), y_of(curve.mean), y_of(curve.high)
    drawn = ""
    if curve.width > 1 or (curve.low < curve.high).any():
        area = points(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
        drawn = f'<polygon points="{area}" fill="{colour}" fill-opacity="0.25" stroke="none"/>'
    if len(x) == 1:
        return f'{drawn}<circle cx="{x[0]:.1f}" cy="{mean[0]:.1f}" r="2.5" fill="{colour}"/>'
    style = f'stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"'
    return f'{drawn}<polyline points="{points(x, mean)}" fill="none" {style}/>'


def points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def render_axes(x: str, first: float, last: float, low: float, high: float) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    drawn = f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="currentColor" stroke-opacity="0.5"/>'
    drawn += render_text(LEFT - 4, TOP + 8, format_number(high), "end")
    drawn += render_text(LEFT - 4, bottom, format_number(low), "end")
    drawn += render_text(LEFT, HEIGHT - 4, f"{x} {format_place(first)}", "start")
    return drawn + (render_text(right, HEIGHT - 4, format_place(last), "end") if last > first else "")


def render_title(plot: Plot, curves: Mapping[str, Curve]) -> str:
    """The name and the newest value of each line, with a piece of the line before it."""
    said = f'<text x="2" y="11" font-size="12" font-weight="600" fill="currentColor">{escape(plot.title)}'
    said += f'<tspan font-weight="400" font-size="10" dx="6">{escape(plot.unit)}</tspan></text>'
    place = 2
    for (key, curve), (colour, dash) in zip(curves.items(), cycle(LINES), strict=False):
        finite = len(curve.low) and (not curve.broken or curve.broken[-1] < curve.bins[LAST][-1])
        label = f"{key} " if len(curves) > 1 or plot.x != "step" else ""
        if plot.x == "step":  # the others have no newest value
            label += format_number(float(curve.mean[-1])) if finite else "not finite"
        said += f'<path d="M{place} 20h16" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        said += render_text(place + 20, 24, label, "start")
        place += 34 + 6 * len(label)
    return said


def render_flag(x: float, number: int, level: str, name: str) -> str:
    """A flag: a dashed line with its number."""
    side, anchor = (-2, "end") if x > WIDTH - 40 else (2, "start")
    title = f"<title>{escape(f'{level}: {name}')}</title>"
    line = f'd="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{LEVELS[level]}" stroke-width="1.4" stroke-dasharray="3 2"'
    return f"<g>{title}<path {line}/>{render_text(x + side, TOP + 9, f'⚑{number}', anchor)}</g>"


def render_text(x: float, y: float, said: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="10" text-anchor="{anchor}" fill="currentColor">{escape(said)}</text>'


def describe_plot(plot: Plot, curves: Mapping[str, Curve]) -> str:
    """For those who do not see the drawing."""
    said = [f"{plot.title} by {plot.x}"]
    for key, curve in curves.items():
        if len(curve.low):
            values = (curve.mean[0], curve.mean[-1], curve.low.min(), curve.high.max())
            first, last, low, high = (format_number(float(value)) for value in values)
            said.append(f"{key} from {first} to {last}, between {low} and {high}")
        if curve.broken:
            said.append(f"{key} not finite at {len(curve.broken)} steps, the first is {curve.broken[0]}")
    return "; ".join(said)


def format_place(value: float) -> str:
    """Of a step, a layer or a length in whole numbers."""
    return f"{value:,.0f}" if value == int(value) else format_number(value)


def format_number(value: float) -> str:
    """`0.0123`, `1,234`, `12.3k`, `-7.5e-05`: what fits beside an axis."""
    if abs(value) >= 1e9 or abs(value) < 1e-4:
        return f"{value:.2g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
