"""Curves of a run, and figures of its rewards, data and merge, as SVG images with a text alternative.

Each bin of steps keeps the least, the mean and the greatest of its values, so a spike of one step in a million shows.
Lines differ by dash as well as by colour.
"""

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
WIDTH, HEIGHT = 310, 140
LEFT, RIGHT, TOP, BOTTOM = 52, 302, 30, 122  # edges of the plot in the image
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
    keys: tuple[str, ...] = ()
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


@dataclass(frozen=True)
class Curve:
    """The least, mean and greatest value of each bin over `x`. broken: steps whose value is NaN or infinite."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    broken: list[float] = field(default_factory=list)

    @classmethod
    def through(cls, x: np.ndarray, y: np.ndarray) -> "Curve":
        return cls(x, y, y, y)


Lines = Mapping[str, Curve]
Marks = Sequence[tuple[int, str, str]]  # (step, level, name) of flags, numbered in the plots and in the text below


def read_curves(path: Path) -> dict[str, Curve]:
    """Return what metrics.jsonl holds of `KEYS`, in at most MAX_BINS bins of steps; {} without a file."""
    import polars as pl

    if not path.exists():
        return {}
    frames = []
    with path.open("rb") as file:
        while lines := file.readlines(CHUNK_BYTES):
            text = b"".join(line for line in lines if line.endswith(b"\n"))  # the last one may not be complete yet
            # Values that are not finite are strings in the file (`run_directory.jsonable_numbers`): rare, and slower to read.
            dtype = pl.String if b'"nan"' in text or b'inf"' in text else pl.Float64
            rows = pl.read_ndjson(text or b"{}", schema=dict.fromkeys(("step", *KEYS), dtype), ignore_errors=True)
            frames.append(rows.cast(pl.Float32, strict=False).drop_nulls("step"))
    rows = pl.concat(frames) if frames else pl.DataFrame(schema=dict.fromkeys(("step", *KEYS), pl.Float32))
    width, y, curves = math.ceil((1 + max(rows["step"], default=0)) / MAX_BINS), pl.col("y"), {}
    for key in KEYS:
        logged = rows.select("step", y=key).drop_nulls()
        finite = logged.filter(y.is_finite())
        bins = finite.group_by(bin=pl.col("step") // width).agg(
            x=pl.col("step").mean(), mean=y.mean(), low=y.min(), high=y.max()
        )
        if len(logged):
            x, mean, low, high = bins.sort("bin").select("x", "mean", "low", "high").to_numpy().T
            curves[key] = Curve(x, mean, low, high, logged.filter(~y.is_finite())["step"].to_list())
    return curves


# ---------------------------------------------------------------------------------------------------------------- figures


def curves(run_dir: str | PathLike[str]) -> HtmlFigure:
    """Draw what the run logged, each metric a small plot over its steps: the mean as a line, the range of a bin as an area.

    A flag that is or was red, or that is yellow, is a line at its step. A cross marks a value that was not finite.
    """
    run = Path(run_dir)
    if html := render_curves(read_curves(run / "metrics.jsonl"), read_json_or_empty(run / "flags.json")):
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
    return HtmlFigure(render_plots([(plot, bars)]) + f"<p>{caption}</p>")


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
    return HtmlFigure(render_plots([(plot, bars)], marks) + f"<p>{caption}</p>")


def histogram(firsts: np.ndarray, lasts: np.ndarray, heights: np.ndarray) -> Curve:
    x = np.stack([firsts, lasts], axis=1).ravel()
    return Curve.through(np.array([x[0], *x, x[-1]]), np.array([0.0, *np.repeat(heights, 2), 0.0]))


def delta_by_layer(merged: "str | PathLike[str] | MergeReport") -> HtmlFigure:
    """Draw how much the merge changed each kind of weight, layer by layer: |change| / |weight|, by Frobenius norms.

    merged: the directory, or what the merge reported. Of several weights of one kind in a layer (experts), the largest.
    """
    directory = Path(getattr(merged, "out", None) or merged)  # type: ignore[arg-type]
    groups: dict[str, dict[str, dict[int, float]]] = {}  # group of modules -> kind of weight -> layer -> ratio
    changes: dict[str, float] = {}
    for name, entry in merge_manifest(directory)["tensors"].items():
        ratio, place = entry.get("delta_over_weight"), LAYER.search(name)
        if ratio is None:
            continue
        changes[name.removesuffix(".weight")] = ratio
        if place is not None:
            *modules, kind = [part for part in place[2].removesuffix(".weight").split(".") if not part.isdigit()]
            layers = groups.setdefault(".".join(modules) or "layer", {}).setdefault(kind, {})
            layers[int(place[1])] = max(layers.get(int(place[1]), 0.0), ratio)
    if not groups:
        raise UsageError("no layer was changed by a merge there", place=directory)
    plots = []
    for group, kinds in groups.items():
        lines = {kind: Curve.through(*np.array(sorted(layers.items())).T) for kind, layers in kinds.items()}
        plots.append((Plot(group, (), "|change| / |weight|", "layer"), lines))
    largest = max(changes, key=changes.__getitem__)
    caption = f"the largest change is {changes[largest]:.2%} of {largest}"
    return HtmlFigure(render_plots(plots) + f"<p>{escape(caption)}</p>")


def merge_manifest(directory: Path) -> dict[str, Any]:
    """Read what `cogumi.merge` wrote beside the model. Raises UsageError if there is nothing."""
    manifest = read_json_or_empty(directory / MERGE_MANIFEST)
    if not manifest:
        raise UsageError(f"no {MERGE_MANIFEST} there", place=directory, fix="name a directory that cogumi merged into")
    return manifest


# -------------------------------------------------------------------------------------------------------------------- SVG


def render_curves(logged: Lines, judged: Mapping[str, Any]) -> str:
    """Render the plots of a run and, by number, its flags that are or were red or yellow; "" if nothing was logged.

    judged: flags.json. A red flag is marked at its first red step, a yellow one at the step of the judgement.
    """
    marks = [(int(flag["step"]), "red", str(flag["name"])) for flag in judged.get("was_red", [])]
    marked = {name for *_, name in marks}
    for flag in judged.get("flags", []):
        if flag["level"] != "green" and flag["name"] not in marked:
            marks.append((int(judged["step"]), str(flag["level"]), str(flag["name"])))
    plots = [(plot, {key: logged[key] for key in plot.keys if key in logged}) for plot in PLOTS]
    html = render_plots([(plot, lines) for plot, lines in plots if lines], marks)
    for number, (step, level, name) in enumerate(marks if html else (), 1):
        html += f"<p>⚑{number} {level} at step {step}: {escape(name)}</p>"
    return html


def render_plots(plots: Iterable[tuple[Plot, Lines]], marks: Marks = ()) -> str:
    """Render plots as `img` elements, which a page that does not trust the notebook displays too."""
    images = ""
    for plot, lines in plots:
        svg = b64encode(render_svg(plot, lines, marks).encode()).decode()
        images += f'<img alt="{escape(describe_plot(plot, lines))}" src="data:image/svg+xml;base64,{svg}"/>'
    return f'<div class="plots">{images}</div>' if images else ""


def render_svg(plot: Plot, lines: Lines, marks: Marks = ()) -> str:
    broken = sorted({step for curve in lines.values() for step in curve.broken[:MAX_BINS]})
    x_values = [*np.concatenate([curve.x for curve in lines.values()]), *broken, *(step for step, *_ in marks)]
    first, last = min(x_values), max(x_values)
    low, high = axis_range(lines.values())

    def x_of(x: Any) -> Any:
        return np.interp(x, (first, last if last > first else first + 1), (LEFT, RIGHT))

    def y_of(y: np.ndarray) -> np.ndarray:
        return np.interp(y, (low, high), (BOTTOM, TOP))

    drawn = [
        f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="{INK}" stroke-opacity="0.5"/>',
        render_text(LEFT - 4, TOP + 8, format_number(high), "end"),
        render_text(LEFT - 4, BOTTOM, format_number(low), "end"),
        render_text(LEFT, HEIGHT - 4, f"{plot.x} {format_number(first)}"),
        render_text(RIGHT, HEIGHT - 4, format_number(last), "end") if last > first else "",
        f'<text x="2" y="11" font-size="12" font-weight="600">{escape(plot.title)}'
        f'<tspan font-weight="400" font-size="10" dx="6">{escape(plot.unit)}</tspan></text>',
    ]
    for number, (step, level, _) in enumerate(marks, 1):
        x = float(x_of(step))
        line = f'd="M{x:.1f} {TOP}V{BOTTOM}" stroke="{LEVELS[level]}" stroke-width="1.4" stroke-dasharray="3 2"'
        side, anchor = (-2, "end") if x > WIDTH - 40 else (2, "start")
        drawn.append(f"<path {line}/>" + render_text(x + side, TOP + 9, f"⚑{number}", anchor))
    legend_x = 2.0
    for (key, curve), (colour, dash) in zip(lines.items(), cycle(LINES), strict=False):
        stroke = f'stroke="{colour}" stroke-dasharray="{dash}"'
        label = describe_line(plot, key, curve, is_alone=len(lines) == 1)
        drawn.append(f'<path d="M{legend_x} 20h16" stroke-width="2" {stroke}/>' + render_text(legend_x + 20, 24, label))
        legend_x += 34 + 6 * len(label)
        x, low_y, mean, high_y = x_of(curve.x), y_of(curve.low), y_of(curve.mean), y_of(curve.high)
        if (curve.low < curve.high).any():
            outline = join_points(np.concatenate([x, x[::-1]]), np.concatenate([high_y, low_y[::-1]]))
            drawn.append(f'<polygon points="{outline}" fill="{colour}" fill-opacity="0.25"/>')
        if len(x) == 1:
            drawn.append(f'<circle cx="{x[0]:.1f}" cy="{mean[0]:.1f}" r="2.5" fill="{colour}"/>')
        else:
            drawn.append(f'<polyline points="{join_points(x, mean)}" fill="none" stroke-width="1.6" {stroke}/>')
    for broken_step in broken:
        cross = f"M{x_of(broken_step) - 3:.1f} {TOP + 2}l6 6m0 -6l-6 6"
        drawn.append(f'<path d="{cross}" stroke="{LEVELS["red"]}" stroke-width="1.8" fill="none"/>')
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" xmlns="http://www.w3.org/2000/svg"'
    return f'<svg {size} fill="{INK}" font-family="sans-serif">{"".join(drawn)}</svg>'


def axis_range(lines: Iterable[Curve]) -> tuple[float, float]:
    """Return the least and greatest value; around a constant value half of it on each side, for 0 from 0 to 1."""
    values = np.concatenate([part for curve in lines for part in (curve.low, curve.high)])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    if low < high:
        return low, high
    return (low - abs(low) / 2, low + abs(low) / 2) if low else (0.0, 1.0)


def describe_line(plot: Plot, key: str, curve: Curve, is_alone: bool) -> str:
    """Return the legend of a line: its name, and over steps its newest value."""
    if plot.x != "step":
        return key
    is_finite = len(curve.x) and (not curve.broken or curve.broken[-1] < curve.x[-1])
    newest = format_number(float(curve.mean[-1])) if is_finite else "not finite"
    return newest if is_alone else f"{key} {newest}"


def describe_plot(plot: Plot, lines: Lines) -> str:
    parts = [f"{plot.title} by {plot.x}"]
    for key, curve in lines.items():
        if len(curve.x):
            values = (curve.mean[0], curve.mean[-1], curve.low.min(), curve.high.max())
            first, last, low, high = (format_number(float(value)) for value in values)
            parts.append(f"{key} from {first} to {last}, between {low} and {high}")
        if curve.broken:
            parts.append(
                f"{key} not finite at {len(curve.broken)} steps, the first is {format_number(curve.broken[0])}"
            )
    return "; ".join(parts)


def join_points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def render_text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="10" text-anchor="{anchor}">{escape(text)}</text>'


def format_number(value: float) -> str:
    if abs(value) < 1e6 and value == int(value):
        return f"{value:,.0f}"
    if abs(value) >= 1e9 or abs(value) < 1e-4:
        return f"{value:.2g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
