"""Figures of a run, of its data and of what it made, each a `Drawing`: a matplotlib figure that a notebook shows.

Nothing is told by colour alone, and every figure says in words what it shows. pyplot is never used, so no figure is
kept in memory. A notebook's own settings of matplotlib neither affect these figures nor are changed by them. Raises
UsageError where there is nothing to draw.
"""

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import BytesIO, StringIO
from itertools import cycle
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_memory
from cogumi.core.run_directory import ROLLOUTS
from cogumi.notebook.curves import BLUE, GREEN, INK, LEVELS, PURPLE, VERMILLION, Curves, axis_range, describe_plot
from cogumi.telemetry.status import read_json_or_empty

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cogumi.forecast.preflight_report import PreflightReport
    from cogumi.merge import MergeReport
    from cogumi.methods.preview import Preview

WIDTH = 10.0  # inches, of a page
COLUMNS = 3
FEW = 40  # points of a curve, each of which is marked
MERGE_MANIFEST = "cogumi-merge.json"  # cogumi.merge.merge_manifest.MANIFEST_NAME, which comes with torch
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.+)$")
SCALE = 8  # of the peak: free memory beyond it is not drawn, its bar has no end
MOST_BANDS = 120  # stretches of steps that quantiles are taken over
INKED = ["text.color", "hatch.color", "xtick.color", "ytick.color", "xtick.labelcolor", "ytick.labelcolor"]
INKED += ["axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "legend.labelcolor"]
SETTINGS: Any = {
    "svg.fonttype": "none",  # a fraction of the size with drawn letters
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,  # points; a figure of 10 inches is shown at the width of a page, so that this is some 12 pixels
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.handlelength": 3.6,  # long enough to show a dash
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "hatch.linewidth": 0.8,
    "lines.markersize": 4,
    "axes.formatter.useoffset": False,
    "text.parse_math": False,  # a name with a dollar in it is no formula
    **dict.fromkeys(INKED, INK),
}


# How one series is told from the next: a line by its dash and marker too, an area by its hatch.
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, INK, BLUE, VERMILLION, GREEN, PURPLE)
DASHES: Any = ("-", (0, (5, 2)), (0, (5, 2, 1, 2)), (0, (1, 1.5)), (0, (8, 2)), (0, (2, 2)),
               (0, (8, 2, 1, 2, 1, 2)), (0, (3, 1, 1, 1)), (0, (6, 1)))  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
HATCHES = ("", "///", "..", "xx", "\\\\\\", "++", "o", "||", "--")


@contextmanager
def figure_settings() -> Iterator[None]:
    """In the block matplotlib is as it comes, with what is set above; afterwards as it was."""
    import matplotlib
    from matplotlib.rcsetup import cycler

    defaults: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if "backend" not in key}
    series = cycler(color=COLOURS, linestyle=DASHES, marker=MARKERS)
    with matplotlib.rc_context({**defaults, **SETTINGS, "axes.prop_cycle": series}):
        yield


@dataclass(frozen=True)
class Drawing:
    """A matplotlib figure. `title` and `words` are what it says to those who do not see it."""

    figure: "Figure"
    title: str
    words: str

    def svg(self) -> str:
        with figure_settings():
            text = StringIO()
            self.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        return text.getvalue()

    def image(self) -> str:
        """An element of a page. As an image it shares neither names nor styles with the page, and runs nothing."""
        data = b64encode(self.svg().encode()).decode()
        style = f"width:100%;max-width:{96 * self.figure.get_figwidth():.0f}px"
        words = escape(f"{self.title}: {self.words}")
        return f'<img alt="{words}" style="{style}" src="data:image/svg+xml;base64,{data}"/>'

    def _repr_html_(self) -> str:
        return f"<figure style='margin:0'>{self.image()}</figure>"

    def _repr_png_(self) -> bytes:
        """For web pages that show saved notebooks and take SVG out of them."""
        with figure_settings():
            image = BytesIO()
            self.figure.savefig(image, format="png", dpi=80, facecolor="white")
        return image.getvalue()


def make_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure of so many inches and its axes, row by row. Call it, and draw, inside `figure_settings()`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def use_integer_ticks(ax: "Axes") -> None:
    """There is no step, and no layer, between two others."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def curves(run_dir: str | PathLike[str]) -> Drawing:
    """What the run logged, each metric a small plot over its steps: the mean as a line, the range of a bin as an area.

    A flag that is or was red, or that is yellow, is a line at its step. A cross at the bottom marks the step of a value
    that was not finite.
    """
    run = Path(run_dir)
    found = Curves(run / "metrics.jsonl")
    found.read()
    plots = found.plots()
    if not plots:
        raise UsageError("nothing is logged there yet", place=run, fix="there are no curves")
    flags = flag_steps(read_json_or_empty(run / "flags.json"))
    words = [describe_plot(plot, of) for plot, of in plots]
    words += [f"{level} flag {name} at step {step}" for step, level, name in flags]
    rows = math.ceil(len(plots) / COLUMNS)
    with figure_settings():
        figure, axes = make_figure(WIDTH, 2.1 * rows + 0.2, rows, COLUMNS, sharex=True)
        for ax, (plot, of) in zip(axes, plots, strict=False):
            for colour, (key, curve) in zip(COLOURS, of.items(), strict=False):
                ax.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
                ax.plot(curve.steps, curve.mean, markersize=3.5 if len(curve.steps) <= FEW else 0, label=key)
                if curve.broken:
                    at_the_bottom = ax.get_xaxis_transform()
                    zeros, label = [0.0] * len(curve.broken), f"{key} not finite"
                    ax.plot(curve.broken, zeros, "x", color=VERMILLION, transform=at_the_bottom, label=label)
            if len(ax.lines) > 1:
                ax.legend(loc="best")
            ax.update_datalim([(0, end) for end in axis_range(of.values())], updatex=False)
            ax.set_title(plot.title)
            ax.set_ylabel(plot.unit)
            ax.xaxis.set_tick_params(labelbottom=True)
            use_integer_ticks(ax)
            for dash, (step, level, _) in zip(cycle(DASHES), flags, strict=False):
                ax.axvline(step, color=LEVELS[level], linestyle=dash, linewidth=1.2)
        for ax in axes[len(plots) :]:
            ax.set_visible(False)
        if flags:
            names = [f"{'RED' if level == 'red' else level} at step {step}: {name}" for step, level, name in flags]
            figure.legend(axes[0].lines[-len(flags) :], names, loc="outside lower center", ncols=2)
    return Drawing(figure, "Curves", "; ".join(words))


def flag_steps(said: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """(step, level, name) of flags.json: what was red, when it first was; what is yellow, when that was said."""
    was_red = [(int(each["step"]), "red", str(each["name"])) for each in said.get("was_red", [])]
    known = {name for *_, name in was_red}
    now = [
        (int(said["step"]), str(each["level"]), str(each["name"]))
        for each in said.get("flags", [])
        if each["level"] != "green" and each["name"] not in known
    ]
    return [*was_red, *now]


def rewards(run_dir: str | PathLike[str]) -> Drawing:
    """How the rewards of single completions are spread, and their quantiles over the steps.
    The spread is given as shares of the completions, for the first quarter of the steps beside the last one."""
    run = Path(run_dir)
    steps, values, broken = read_rewards(run / ROLLOUTS)
    if not len(steps):
        raise UsageError(f"no rewards of single completions there ({ROLLOUTS} is written by a gspo run)", place=run)
    there = np.unique(steps)
    quarter = math.ceil(len(there) / 4)
    parts = {"first": values[steps <= there[quarter - 1]], "last": values[steps >= there[-quarter]]}
    means = [float(part.mean()) for part in parts.values()]
    with figure_settings():
        figure, (left, right) = make_figure(WIDTH, 2.8, 1, 2)
        bins = np.histogram_bin_edges(values, bins=20)
        for colour, dash, (when, part), mean in zip(COLOURS, DASHES, parts.items(), means, strict=False):
            shares = np.histogram(part, bins)[0] / len(part)
            label = f"{when} quarter, mean {mean:.3g}"
            left.stairs(shares, bins, color=colour, linestyle=dash, linewidth=2, label=label)
        left.set_title("distribution")
        left.set_xlabel("reward of a completion")
        left.set_ylabel("share of completions")
        left.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
        left.margins(y=0.25)
        left.legend(loc="best")
        middles, quantiles = reward_quantiles(steps, values)
        lowest, low, median, high, highest = quantiles
        right.fill_between(middles, lowest, highest, color=BLUE, alpha=0.18, label="80 % of the completions")
        right.fill_between(middles, low, high, color=BLUE, alpha=0.35, label="half of the completions")
        right.plot(middles, median, markersize=3.5 if len(middles) <= FEW else 0, label="median")
        right.set_title("over the steps" + (f" ({broken:,} values not finite, left out)" if broken else ""))
        right.set_xlabel("step")
        right.margins(y=0.25)
        use_integer_ticks(right)
        right.legend(loc="best", ncols=2)
    words = f"mean reward {means[0]:.3g} in the first quarter of the steps, {means[1]:.3g} in the last"
    return Drawing(figure, "Rewards of single completions", words)


def read_rewards(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """(steps, rewards) of every completion of rollouts.jsonl, and how many rewards were no numbers."""
    scored = ((row["step"], each) for row in read_rows(path) for each in row.get("reward", []))
    pairs = [(step, float(each)) for step, each in scored if each is not None]
    steps, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    finite = np.isfinite(values)
    return steps[finite], values[finite], int((~finite).sum())


def read_rows(path: Path) -> Iterable[dict[str, Any]]:
    """The whole lines of a file, one after the other, none where there is none: it may be larger than memory."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def reward_quantiles(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(steps, quantiles): 0.1, 0.25, 0.5, 0.75 and 0.9 of the completions of each of at most 120 stretches of steps."""
    there = np.unique(steps)
    stretches = np.array_split(there, min(len(there), MOST_BANDS))
    found = [np.quantile(values[np.isin(steps, each)], (0.1, 0.25, 0.5, 0.75, 0.9)) for each in stretches]
    return np.array([each.mean() for each in stretches]), np.array(found).T


def refuse_argument(figure: str, call: str, given: object) -> UsageError:
    """The other figures take a run's directory, so these are given one too."""
    message = f"takes what {call} returned, not the {type(given).__name__} {given!s:.100}"
    return UsageError(message, key=f"figures.{figure}", fix="run.report() draws it of a run that is there")


def lengths(preview: "Preview") -> Drawing:
    """How long examples are, in tokens, and where train.max_length cuts. preview: what `cogumi.preview` returned."""
    if not hasattr(preview, "lengths"):
        raise refuse_argument("lengths", "cogumi.preview(CONFIG)", preview)
    return length_histogram(preview.lengths, preview.max_length)


def length_histogram(buckets: Sequence[Sequence[int]], max_length: int | None = None) -> Drawing:
    """buckets: (first length, last length, examples), as `Preview.lengths`."""
    if not buckets:
        raise UsageError("no lengths are known: prompts are tokenized by the trainer, as they come")
    firsts, lasts, counts = (np.array(column) for column in zip(*buckets, strict=True))
    if max_length is not None:  # no bar goes beyond what no example does
        lasts = np.where(firsts <= max_length, np.minimum(lasts, max_length), lasts)
    with figure_settings():
        figure, (ax,) = make_figure(5.6, 2.6)
        ax.bar(firsts - 0.5, counts, width=lasts - firsts + 1, align="edge", color=BLUE, edgecolor=INK, linewidth=0.6)
        ax.set_title("lengths of the examples")
        ax.set_xlabel("tokens")
        ax.set_ylabel("examples")
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_major_formatter("{x:,.0f}")
        if max_length is not None:
            label = f"max_length {max_length:,}"
            ax.axvline(max_length + 0.5, color=VERMILLION, linestyle=(0, (5, 2)), linewidth=1.5, label=label)
            ax.margins(y=0.25)
            ax.legend(loc="upper right")
    first, last, _ = max(buckets, key=lambda bucket: bucket[2])
    words = f"{counts.sum():,} examples of up to {lasts[-1]:,} tokens, most of {first:,} to {last:,} tokens"
    return Drawing(figure, "Lengths of the examples", words)


def memory(report: "PreflightReport") -> Drawing:
    """What the peak memory of a step is made of, as one bar beside what is free. report: what `cogumi.preflight` returned."""
    if not hasattr(report, "figures"):
        raise refuse_argument("memory", "cogumi.preflight(CONFIG)", report)
    found = report.figures.get("memory")
    if found is None:
        raise UsageError("this preflight did not come as far as a forecast of memory")
    return memory_bar(found)


def memory_bar(figures: Mapping[str, Any], measured: float | None = None) -> Drawing:
    """figures: `PreflightReport.figures["memory"]`. measured: what the run then took, in bytes, of tensors."""
    parts, peak, free = figures["breakdown"], figures["peak"], figures["free"]
    said = f"{format_memory(peak)} forecast of {format_memory(free)} free: "
    said += f"{format_memory(free - peak)} to spare" if peak <= free else f"{format_memory(peak - free)} too much"
    most = max(peak, measured or 0)
    unit, name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    with figure_settings():
        figure, (ax,) = make_figure(WIDTH, 1.9)
        left = 0.0
        for colour, hatch, (kind, size) in zip(cycle(COLOURS), cycle(HATCHES), parts.items(), strict=False):
            face, label = "none" if colour == INK else colour, f"{kind} {format_memory(size)}"
            ax.barh(0, size / unit, left=left, height=0.7, facecolor=face, edgecolor=INK, hatch=hatch, label=label)
            left += size / unit
        label = f"free {format_memory(free)}"
        ax.barh(0, free / unit, height=0.9, facecolor="none", edgecolor=INK, linewidth=1.6, label=label)
        if measured is not None:
            label = f"measured {format_memory(measured)}"
            ax.axvline(measured / unit, color=INK, linewidth=2.5, linestyle="--", label=label)
        ax.set_title(said)
        ax.set_xlabel(name)
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.set_xlim(0, 1.02 * max(most, min(free, SCALE * most)) / unit)
        figure.legend(loc="outside lower center", ncols=4)
    words = f"{said}. Made of {', '.join(f'{kind} {format_memory(size)}' for kind, size in parts.items())}"
    return Drawing(figure, "Peak memory", words)


def delta_by_layer(merged: "str | PathLike[str] | MergeReport") -> Drawing:
    """How much the merge changed each kind of weight, layer by layer.
    Above is |change| / |weight| in percent (Frobenius norms). Below is the largest change of a single element. merged:
    the directory, or what the merge reported."""
    directory = Path(getattr(merged, "out", None) or merged)  # type: ignore[arg-type]
    groups, outside = read_deltas(directory)
    if not groups:
        raise UsageError("no layer was changed by a merge there", place=directory)
    found = ((*of[kind][layer][:1], kind, layer) for of in groups.values() for kind in of for layer in of[kind])
    most, kind, layer = max(found)
    words = f"the largest change is {most:.2%} of {kind} of layer {layer}"
    if outside:
        words += f"; outside the layers {', '.join(f'{name} {ratio:.2%}' for name, (ratio, _) in outside.items())}"
    with figure_settings():
        figure, axes = make_figure(WIDTH, 4.6, 2, len(groups), sharex=True, sharey="row")
        above, below = axes[: len(groups)], axes[len(groups) :]
        above[0].set_ylabel("|change| / |weight|, %")
        below[0].set_ylabel("largest change of an element")
        for upper, lower, (group, of) in zip(above, below, groups.items(), strict=True):
            for kind, by_layer in of.items():
                upper.plot(list(by_layer), [100 * ratio for ratio, _ in by_layer.values()], label=kind)
                lower.plot(list(by_layer), [largest for _, largest in by_layer.values()], label=kind)
            upper.set_title(group)
            upper.legend(loc="upper center", ncols=min(len(of), 4), columnspacing=1.0)
            lower.set_xlabel("layer")
            use_integer_ticks(lower)
        above[0].set_ylim(0, 1.35 * above[0].get_ylim()[1])  # the legend is above the curves
        below[0].set_ylim(0)
    return Drawing(figure, "Change by layer", words)


Deltas = dict[str, dict[str, dict[int, tuple[float, float]]]]


def read_deltas(directory: Path) -> tuple[Deltas, dict[str, tuple[float, float]]]:
    """group -> kind -> layer -> (|change| / |weight|, largest change of an element); and the same of tensors by name
    outside the layers. Of several of a kind in a layer, as experts are, the larger. UsageError where nothing says so."""
    groups: Deltas = {}
    outside: dict[str, tuple[float, float]] = {}
    for name, entry in merge_manifest(directory)["tensors"].items():
        if entry.get("max_abs_delta") is None:
            continue
        change = float(entry["delta_over_weight"] or 0.0), float(entry["max_abs_delta"])
        place = LAYER.search(name)
        if place is None:
            outside[name.removesuffix(".weight")] = change
            continue
        parts = [part for part in place[2].removesuffix(".weight").split(".") if not part.isdigit()]
        layers = groups.setdefault(".".join(parts[:-1]) or "layer", {}).setdefault(parts[-1], {})
        before = layers.get(int(place[1]), (0.0, 0.0))
        layers[int(place[1])] = max(before[0], change[0]), max(before[1], change[1])
    ordered = {group: {kind: dict(sorted(by.items())) for kind, by in of.items()} for group, of in groups.items()}
    return ordered, outside


def merge_manifest(directory: Path) -> dict[str, Any]:
    """What `cogumi.merge` wrote beside the model. Raises UsageError where it wrote nothing."""
    found = read_json_or_empty(directory / MERGE_MANIFEST)
    if not found:
        raise UsageError(f"no {MERGE_MANIFEST} there", place=directory, fix="name a directory that cogumi merged into")
    return found
