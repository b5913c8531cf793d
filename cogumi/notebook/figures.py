"""Curves of a run, and figures of its rewards, data and merge, as SVG.

Each bin of steps keeps the least, the mean and the greatest of its values, so a spike of one step in a million shows.
Lines differ by dash as well as by colour, and every image has a text alternative.
"""

import json
import math
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import cycle
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cogumi.core.errors import UsageError
from cogumi.core.run_directory import ROLLOUTS
from cogumi.telemetry.status import read_json_or_empty

if TYPE_CHECKING:
    from cogumi.merge import MergeReport

# Colours of Okabe and Ito (https://jfly.uni-koeln.de/color/) with a contrast of at least 3:1 to white and to #111, as
# WCAG 2.2 asks of graphics (success criterion 1.4.11); their orange is darkened until it has that.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B77D00"
INK = "#767676"  # text and axes of an image, which cannot inherit the page's colour: 4.5:1 to white and to black
LEVELS = {"red": VERMILLION, "yellow": ORANGE, "unknown": PURPLE, "green": GREEN}
DASHES = ("none", "5 2", "5 2 1 2", "1 1", "8 2", "2 2", "8 2 1 2 1 2")
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, INK)
LINES = tuple(zip((*COLOURS, BLUE, VERMILLION), DASHES, strict=True))

CHUNK_BYTES = 4 << 20
MAX_BINS = 300  # of a curve: as many as a small plot has pixels
MAX_BROKEN_STEPS = 100
WIDTH, HEIGHT = 310, 140
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 30, 18
MERGE_MANIFEST = "cogumi-merge.json"  # cogumi.merge.merge_manifest.MANIFEST_NAME; importing that would load torch
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.+)$")


class HtmlFigure(str):
    """HTML that a notebook displays as the value of a cell."""

    def __repr__(self) -> str:
        return "HtmlFigure()"

    def _repr_html_(self) -> str:
        return f"<div>{self}</div>"


@dataclass(frozen=True)
class Plot:
    """Curves drawn together over `x`. keys: metrics as TRL and cogumi log them; those that a run lacks are left out."""

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
FIRST, LAST, LOW, SUM, HIGH, COUNT = range(6)  # rows of `Curve.bins`
MERGE_BINS = (np.minimum, np.maximum, np.minimum, np.add, np.maximum, np.add)
Plots = Iterable[tuple[Plot, dict[str, "Curve"]]]
Marks = Sequence[tuple[int, str, str]]  # (step, level, name) of flags, numbered in the plots and in the text below


@dataclass
class Curve:
    """One metric. bins: array (6, n) of first step, last step, least, sum, greatest, count of each bin.

    broken: steps, at most MAX_BROKEN_STEPS, whose value is NaN or infinite.
    """

    bins: np.ndarray = field(default_factory=lambda: np.empty((6, 0)))
    width: int = 1
    broken: list[int] = field(default_factory=list)

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
        return not self.broken and self.bins[COUNT].sum() > 1 and bool(self.low.min() == self.high.max())

    def __bool__(self) -> bool:
        return bool(self.bins.shape[1] or self.broken)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Add values of later steps; widen the bins when there are more than MAX_BINS."""
        finite = np.isfinite(values)
        self.broken += steps[~finite][: MAX_BROKEN_STEPS - len(self.broken)].astype(int).tolist()
        steps, values = steps[finite], values[finite]
        bins = np.concatenate([self.bins, [steps, steps, values, values, values, np.ones_like(values)]], axis=1)
        while len(starts := np.flatnonzero(np.diff(bins[FIRST] // self.width, prepend=np.nan))) > MAX_BINS:
            self.width *= 2
        if len(starts):
            self.bins = np.stack([merge.reduceat(row, starts) for merge, row in zip(MERGE_BINS, bins, strict=True)])


class Curves:
    """The curves of one metrics.jsonl; each `read()` continues where the last one ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()

    def forget(self) -> None:
        self.of = {key: Curve() for key in KEYS}
        self.offset = self.rows = 0
        self.inode: int | None = None

    def read(self) -> bool:
        """Read the lines written since the last call; a file that was cut or replaced is read anew.

        Returns:
            Whether there were new lines.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            stat = os.fstat(file.fileno())
            if self.inode not in (None, stat.st_ino) or stat.st_size < self.offset:
                self.forget()
            self.inode = stat.st_ino
            before, rest = self.offset, b""
            file.seek(self.offset)
            while data := file.read(CHUNK_BYTES):
                lines, newline, rest = (rest + data).rpartition(b"\n")
                if newline:
                    self.offset += len(lines) + 1
                    self.add_rows(lines + newline)
        return self.offset > before

    def add_rows(self, lines: bytes) -> None:
        import polars as pl

        # Values that are not finite are strings in the file (`run_directory.jsonable_numbers`): rare, and slower to read.
        dtype = pl.String if b'"nan"' in lines or b'inf"' in lines else pl.Float64
        rows = pl.read_ndjson(lines, schema=dict.fromkeys(("step", *KEYS), dtype), ignore_errors=True)
        self.rows += len(rows)
        logged = ~rows.select(pl.all().is_null()).to_numpy()  # in an array of numbers null and NaN look the same
        values = rows.cast(pl.Float64, strict=False).to_numpy()
        for column, key in enumerate(KEYS, 1):
            present = logged[:, 0] & logged[:, column]
            if present.any():
                self.of[key].add(values[present, 0], values[present, column])

    def plots(self) -> list[tuple[Plot, dict[str, Curve]]]:
        plots = [(plot, {key: self.of[key] for key in plot.keys if self.of[key]}) for plot in PLOTS]
        return [(plot, curves) for plot, curves in plots if curves]


# ---------------------------------------------------------------------------------------------------------------- figures


def curves(run_dir: str | PathLike[str]) -> HtmlFigure:
    """Draw what the run logged, each metric a small plot over its steps: the mean as a line, the range of a bin as an area.

    A flag that is or was red, or that is yellow, is a line at its step. A cross marks a value that was not finite.
    """
    run = Path(run_dir)
    logged = Curves(run / "metrics.jsonl")
    logged.read()
    if html := render_curves(logged.plots(), read_json_or_empty(run / "flags.json"), as_images=True):
        return HtmlFigure(html)
    raise UsageError("nothing is logged there yet", place=run, fix="there are no curves")


def rewards(run_dir: str | PathLike[str]) -> HtmlFigure:
    """Draw how the rewards of single completions are spread: the first quarter of the steps beside the last one."""
    run = Path(run_dir)
    scored = ((row["step"], value) for row in read_rows(run / ROLLOUTS) for value in row.get("reward", []))
    pairs = np.array([(step, float(value)) for step, value in scored if value is not None]).reshape(-1, 2)
    finite = np.isfinite(pairs[:, 1])
    steps, values = pairs[finite].T
    if not len(steps):
        raise UsageError(f"no rewards of single completions there ({ROLLOUTS} is written by a gspo run)", place=run)
    distinct_steps = np.unique(steps)
    quarter = math.ceil(len(distinct_steps) / 4)
    parts = {
        "first": values[steps <= distinct_steps[quarter - 1]],
        "last": values[steps >= distinct_steps[-quarter]],
    }
    edges = np.histogram_bin_edges(values, bins=20)
    shares = {name: np.histogram(part, edges)[0] / len(part) for name, part in parts.items()}
    bars = {f"{name} quarter": histogram(edges[:-1], edges[1:], share) for name, share in shares.items()}
    first, last = (float(part.mean()) for part in parts.values())
    caption = f"mean reward {first:.3g} in the first quarter of the steps, {last:.3g} in the last"
    caption += "" if finite.all() else f"; {(~finite).sum():,} values not finite are left out"
    plot = Plot("distribution", (), "share of the completions", "reward")
    return HtmlFigure(render_plots([(plot, bars)], as_images=True) + f"<p>{caption}</p>")


def read_rows(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the complete lines of a JSON-lines file, which may be larger than memory; none if there is no file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def lengths(buckets: Sequence[Sequence[int]], max_length: int | None = None) -> HtmlFigure:
    """Draw how long examples are, in tokens, and where train.max_length cuts.

    buckets: (first length, last length, examples), as `Preview.lengths`.
    """
    if not buckets:
        raise UsageError("no lengths are known: prompts are tokenized by the trainer, as they come")
    firsts, lasts, counts = np.array(buckets, dtype=float).T
    plot = Plot("lengths of the examples", (), "examples", "tokens")
    marks = [] if max_length is None else [(max_length, "yellow", f"max_length {max_length:,}")]
    first, last, _ = max(buckets, key=lambda bucket: bucket[2])
    caption = f"{sum(count for *_, count in buckets):,} examples, most of {first:,} to {last:,} tokens"
    caption += f"; ⚑1 is max_length {max_length:,}" if max_length is not None else ""
    bars = {"examples": histogram(firsts, lasts, counts)}
    return HtmlFigure(render_plots([(plot, bars)], marks, as_images=True) + f"<p>{caption}</p>")


def histogram(firsts: np.ndarray, lasts: np.ndarray, heights: np.ndarray) -> Curve:
    x = np.stack([firsts, lasts], axis=1).ravel()
    return Curve.through(np.array([x[0], *x, x[-1]]), np.array([0.0, *np.repeat(heights, 2), 0.0]))


def delta_by_layer(merged: "str | PathLike[str] | MergeReport") -> HtmlFigure:
    """Draw how much the merge changed each kind of weight, layer by layer: |change| / |weight|, by Frobenius norms.

    merged: the directory, or what the merge reported. Of several weights of one kind in a layer (experts), the largest.
    """
    directory = Path(getattr(merged, "out", None) or merged)  # type: ignore[arg-type]
    groups: dict[str, dict[str, dict[int, float]]] = {}  # group of modules -> kind of weight -> layer -> ratio
    outside: dict[str, float] = {}
    largest = (0.0, "", 0)
    for name, entry in merge_manifest(directory)["tensors"].items():
        ratio, place = entry.get("delta_over_weight"), LAYER.search(name)
        if ratio is None:
            continue
        if place is None:
            outside[name.removesuffix(".weight")] = ratio
            continue
        *modules, kind = [part for part in place[2].removesuffix(".weight").split(".") if not part.isdigit()]
        layer = int(place[1])
        layers = groups.setdefault(".".join(modules) or "layer", {}).setdefault(kind, {})
        layers[layer] = max(layers.get(layer, 0.0), ratio)
        largest = max(largest, (ratio, kind, layer))
    if not groups:
        raise UsageError("no layer was changed by a merge there", place=directory)
    plots = []
    for group, kinds in groups.items():
        lines = {kind: Curve.through(*np.array(sorted(layers.items())).T) for kind, layers in kinds.items()}
        plots.append((Plot(group, (), "|change| / |weight|", "layer"), lines))
    caption = f"the largest change is {largest[0]:.2%} of {largest[1]} of layer {largest[2]}"
    if outside:
        caption += f"; outside the layers {', '.join(f'{name} {ratio:.2%}' for name, ratio in outside.items())}"
    return HtmlFigure(render_plots(plots, as_images=True) + f"<p>{escape(caption)}</p>")


def merge_manifest(directory: Path) -> dict[str, Any]:
    """Read what `cogumi.merge` wrote beside the model. Raises UsageError if there is nothing."""
    manifest = read_json_or_empty(directory / MERGE_MANIFEST)
    if not manifest:
        raise UsageError(f"no {MERGE_MANIFEST} there", place=directory, fix="name a directory that cogumi merged into")
    return manifest


# -------------------------------------------------------------------------------------------------------------------- SVG


def flag_marks(judged: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """Return the marks of flags.json: red flags at their first red step, yellow ones at the step of the judgement."""
    was_red = [(int(flag["step"]), "red", str(flag["name"])) for flag in judged.get("was_red", [])]
    known = {name for *_, name in was_red}
    raised = [flag for flag in judged.get("flags", []) if flag["level"] != "green" and flag["name"] not in known]
    return [*was_red, *((int(judged["step"]), str(flag["level"]), str(flag["name"])) for flag in raised)]


def render_curves(plots: Plots, judged: Mapping[str, Any], as_images: bool = False) -> str:
    """Render the plots of a run and, by number, its flags that are or were red or yellow; "" if nothing was logged."""
    marks = flag_marks(judged)
    html = render_plots(plots, marks, as_images)
    for number, (step, level, name) in enumerate(marks if html else (), 1):
        html += f"<p>⚑{number} {level} at step {step}: {escape(name)}</p>"
    return html


def render_plots(plots: Plots, marks: Marks = (), as_images: bool = False) -> str:
    """Render the plots, and list in words what had the same value at every step.

    as_images: as `img` elements, which a page that does not trust the notebook displays too.
    """
    drawn, constant = [], []
    for plot, lines in plots:
        if all(curve.is_constant for curve in lines.values()):
            constant += [f"{plot.title} {format_number(float(curve.low[0]))}" for curve in lines.values()]
        elif as_images:
            svg = render_svg(plot, lines, marks, f"color:{INK};font-family:sans-serif")
            data, alt = b64encode(svg.encode()).decode(), escape(describe_plot(plot, lines))
            drawn.append(f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}"/>')
        else:
            drawn.append(render_svg(plot, lines, marks))
    note = f"<p>the same at every step: {escape(', '.join(constant))}</p>" if constant else ""
    return f'<div class="plots">{"".join(drawn)}</div>{note}' if drawn or constant else ""


def render_svg(plot: Plot, lines: Mapping[str, Curve], marks: Marks = (), style: str = "color:inherit") -> str:
    broken = sorted({step for curve in lines.values() for step in curve.broken})
    steps = np.concatenate([curve.steps for curve in lines.values()])
    x_values = [*steps, *broken, *(step for step, *_ in marks)]
    first, last = min(x_values), max(x_values)
    low, high = axis_range(lines.values())
    x_of = partial(np.interp, xp=(first, last if last > first else first + 1), fp=(LEFT, WIDTH - RIGHT))
    y_of = partial(np.interp, xp=(low, high), fp=(HEIGHT - BOTTOM, TOP))
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    drawn = [
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="currentColor" stroke-opacity="0.5"/>',
        render_text(LEFT - 4, TOP + 8, format_number(high), "end"),
        render_text(LEFT - 4, bottom, format_number(low), "end"),
        render_text(LEFT, HEIGHT - 4, f"{plot.x} {format_step(first)}", "start"),
        render_text(right, HEIGHT - 4, format_step(last), "end") if last > first else "",
        render_title(plot, lines),
    ]
    for number, (step, level, name) in enumerate(marks, 1):
        x = float(x_of(step))
        side, anchor = (-2, "end") if x > WIDTH - 40 else (2, "start")
        path = f'd="M{x:.1f} {TOP}V{bottom}" stroke="{LEVELS[level]}" stroke-width="1.4" stroke-dasharray="3 2"'
        label = render_text(x + side, TOP + 9, f"⚑{number}", anchor)
        drawn.append(f"<g><title>{escape(f'{level}: {name}')}</title><path {path}/>{label}</g>")
    for curve, (colour, dash) in zip(lines.values(), cycle(LINES), strict=False):
        if len(curve.low):
            drawn.append(render_line(curve, x_of, y_of, colour, dash))
    for step in broken:
        cross = f"M{x_of(step) - 3:.1f} {TOP + 2}l6 6m0 -6l-6 6"
        title = f"<title>not finite at step {step}</title>"
        drawn.append(f'<path d="{cross}" stroke="{LEVELS["red"]}" stroke-width="1.8" fill="none">{title}</path>')
    alt = escape(describe_plot(plot, lines))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" xmlns="http://www.w3.org/2000/svg"'
    return f'<svg {size} role="img" aria-label="{alt}" style="{style}">{"".join(drawn)}</svg>'


def axis_range(lines: Iterable[Curve]) -> tuple[float, float]:
    """Return the least and greatest value; around a constant value half of it on each side, for 0 from 0 to 1."""
    drawn = [curve for curve in lines if len(curve.low)]
    low = min((float(curve.low.min()) for curve in drawn), default=0.0)
    high = max((float(curve.high.max()) for curve in drawn), default=1.0)
    if low < high:
        return low, high
    return (low - abs(low) / 2, low + abs(low) / 2) if low else (0.0, 1.0)


def render_line(curve: Curve, x_of: Callable[..., Any], y_of: Callable[..., Any], colour: str, dash: str) -> str:
    """Draw the means, over an area from the least to the greatest value of each bin."""

    def points(x: np.ndarray, y: np.ndarray) -> str:
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))

    x, low, mean, high = x_of(curve.steps), y_of(curve.low), y_of(curve.mean), y_of(curve.high)
    area = ""
    if curve.width > 1 or (curve.low < curve.high).any():
        outline = points(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
        area = f'<polygon points="{outline}" fill="{colour}" fill-opacity="0.25" stroke="none"/>'
    if len(x) == 1:
        return f'{area}<circle cx="{x[0]:.1f}" cy="{mean[0]:.1f}" r="2.5" fill="{colour}"/>'
    style = f'stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"'
    return f'{area}<polyline points="{points(x, mean)}" fill="none" {style}/>'


def render_title(plot: Plot, lines: Mapping[str, Curve]) -> str:
    """Render the title and the legend: a piece of each line and, over steps, its newest value."""
    html = f'<text x="2" y="11" font-size="12" font-weight="600" fill="currentColor">{escape(plot.title)}'
    html += f'<tspan font-weight="400" font-size="10" dx="6">{escape(plot.unit)}</tspan></text>'
    x = 2
    for (key, curve), (colour, dash) in zip(lines.items(), cycle(LINES), strict=False):
        label = f"{key} " if len(lines) > 1 or plot.x != "step" else ""
        if plot.x == "step":
            finite = len(curve.low) and (not curve.broken or curve.broken[-1] < curve.bins[LAST][-1])
            label += format_number(float(curve.mean[-1])) if finite else "not finite"
        html += f'<path d="M{x} 20h16" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        html += render_text(x + 20, 24, label, "start")
        x += 34 + 6 * len(label)
    return html


def render_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="10" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'


def describe_plot(plot: Plot, lines: Mapping[str, Curve]) -> str:
    parts = [f"{plot.title} by {plot.x}"]
    for key, curve in lines.items():
        if len(curve.low):
            values = (curve.mean[0], curve.mean[-1], curve.low.min(), curve.high.max())
            first, last, low, high = (format_number(float(value)) for value in values)
            parts.append(f"{key} from {first} to {last}, between {low} and {high}")
        if curve.broken:
            parts.append(f"{key} not finite at {len(curve.broken)} steps, the first is {curve.broken[0]}")
    return "; ".join(parts)


def format_step(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else format_number(value)


def format_number(value: float) -> str:
    if abs(value) >= 1e9 or abs(value) < 1e-4:
        return f"{value:.2g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
