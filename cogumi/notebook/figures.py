"""Figures of a run, of its data and of what it made. Each is a `Drawing`: a matplotlib figure that a notebook shows as SVG.

Nothing is told by colour alone (`cogumi.notebook.palette`), and every figure says in words what it shows. matplotlib is
loaded by the first figure that is drawn. Raises UsageError where there is nothing to draw.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cogumi.core.errors import UsageError
from cogumi.core.formatting import gib
from cogumi.core.run_directory import ROLLOUTS
from cogumi.notebook.curve_drawing import FEW, draw_curves, draw_flags, draw_spread, make_room, whole_numbers
from cogumi.notebook.curves import Curve, Curves, Plot
from cogumi.notebook.palette import BLUE, INK, VERMILLION, style_of
from cogumi.telemetry.status import read_if_there

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cogumi.forecast.preflight_report import PreflightReport
    from cogumi.merge import MergeReport
    from cogumi.methods.preview import Preview
    from cogumi.notebook.drawing import Drawing

WIDTH = 10.0  # inches, of a page
COLUMNS = 3
# Where a flag is written: in the plot of what it judges, else in the first.
PLOT_OF = {
    "gradient norm": "gradient norm",
    "learning-rate schedule": "learning rate",
    "KL to the sampler": "KL",
    "KL to the reference": "KL",
    "clip fraction": "clipped",
    "entropy": "entropy",
    "reward trend": "reward",
    "reward varies": "reward",
    "preferences": "margin",
    "tokens per second": "speed",
    "waiting for data": "speed",
}
MERGE_MANIFEST = "cogumi-merge.json"  # cogumi.merge.merge_manifest.MANIFEST_NAME, which comes with torch
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.+)$")
FAR = 1 / 8  # of the free memory: a smaller peak is drawn to its own scale
MOST_BANDS = 120  # stretches of steps that quantiles are taken over


# ---------------------------------------------------------------------------------------------------------------- a run


def curves(run_dir: str | PathLike[str]) -> "Drawing":
    """What the run logged, each metric a small plot over its steps: the mean as a line, the range of a bin as an area.

    Flags that are or were red, and those that are yellow, stand at their step by name; what was not finite is a cross at
    the bottom, at its step.
    """
    from cogumi.notebook.drawing import own_settings, sheet

    run = Path(run_dir)
    found = Curves(run / "metrics.jsonl")
    found.read()
    plots = found.plots()
    if not plots:
        raise UsageError("nothing is logged there yet", place=run, fix="there are no curves")
    flags = flags_at(read_if_there(run / "flags.json"))
    marked = [(*flag, PLOT_OF.get(flag[2], "")) for flag in flags]
    titles = {plot.title for plot, _ in plots}
    rows = -(-len(plots) // COLUMNS)
    with own_settings():
        drawing, axes = sheet("Curves", in_words(plots, flags), WIDTH, 2.1 * rows + 0.2, rows, COLUMNS)
        first, last = ends([curve for _, of in plots for curve in of.values()])
        spread = found.of.get("reward_std")
        for number, (ax, (plot, of)) in enumerate(zip(axes, plots, strict=False)):
            draw_curves(ax, plot, of)
            if plot.title == "reward" and spread:
                draw_spread(ax, of["reward"], spread)
            here = [each for each in marked if each[3] == plot.title or (number == 0 and each[3] not in titles)]
            draw_flags(ax, here, last)
        for number, ax in enumerate(axes):
            if number >= len(plots):
                ax.set_visible(False)
                continue
            ax.set_xlim(first - 0.02 * (last - first) - 0.5, last + 0.02 * (last - first) + 0.5)
            whole_numbers(ax)
            if number + COLUMNS >= len(plots):
                ax.set_xlabel("step")
    return drawing


def flags_at(said: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """(step, level, name) of flags.json: what was red, when it first was; what is yellow, when that was said."""
    was_red = [(int(each["step"]), "red", str(each["name"])) for each in said.get("was_red", [])]
    known = {name for *_, name in was_red}
    now = [
        (int(said["step"]), str(each["level"]), str(each["name"]))
        for each in said.get("flags", [])
        if each["level"] != "green" and each["name"] not in known
    ]
    return [*was_red, *now]


def ends(found: Sequence[Curve]) -> tuple[float, float]:
    """The first and the last step of all of them."""
    steps = [float(step) for curve in found for step in (*curve.steps, *curve.broken)]
    return (min(steps), max(steps)) if steps else (0.0, 1.0)


def in_words(plots: Sequence[tuple[Plot, Mapping[str, Curve]]], flags: Sequence[tuple[int, str, str]]) -> str:
    said = []
    for _, of in plots:
        for key, curve in of.items():
            if len(curve.mean):
                said.append(f"{key} from {curve.mean[0]:.4g} to {curve.mean[-1]:.4g}")
            if curve.broken:
                said.append(f"{key} not finite at step {curve.broken[0]}")
    said += [f"{level} flag {name} at step {step}" for step, level, name in flags]
    return "; ".join(said)


def rewards(run_dir: str | PathLike[str]) -> "Drawing":
    """How the rewards of single completions are spread: the first quarter of the steps beside the last one, as shares of
    the completions, and their quantiles over the steps."""
    from cogumi.notebook.drawing import own_settings, sheet

    run = Path(run_dir)
    steps, values, broken = rewards_of(run / ROLLOUTS)
    if not len(steps):
        raise UsageError(f"no rewards of single completions there ({ROLLOUTS} is written by a gspo run)", place=run)
    quarter = max(1, math.ceil(len(np.unique(steps)) / 4))
    early, late = np.unique(steps)[quarter - 1], np.unique(steps)[-quarter]
    parts = [values[steps <= early], values[steps >= late]]
    means = [float(part.mean()) for part in parts]
    words = f"mean reward {means[0]:.3g} in the first quarter of the steps, {means[1]:.3g} in the last"
    with own_settings():
        drawing, (left, right) = sheet("Rewards of single completions", words, WIDTH, 2.8, 1, 2)
        bins = np.histogram_bin_edges(values, bins=20)
        for number, (part, when) in enumerate(zip(parts, ("first", "last"), strict=True)):
            style = style_of(number)
            shares = np.histogram(part, bins)[0] / len(part)
            left.stairs(
                shares, bins, color=style.colour, linestyle=style.dash, linewidth=2,
                label=f"{when} quarter, mean {means[number]:.3g}",
            )  # fmt: skip
        left.set_title("distribution")
        left.set_xlabel("reward of a completion")
        left.set_ylabel("share of completions")
        left.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
        left.margins(y=0.15)
        left.legend(loc="best")
        draw_bands(right, *bands(steps, values))
        if broken:
            right.set_title(f"over the steps ({broken:,} values not finite, left out)")
    return drawing


def rewards_of(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """(steps, rewards) of every completion of rollouts.jsonl, and how many rewards were no numbers."""
    steps: list[np.ndarray] = []
    values: list[np.ndarray] = []
    broken = 0
    for row in rows_of(path):
        said = np.array([float(each) for each in row.get("reward", []) if each is not None], dtype=np.float64)
        finite = said[np.isfinite(said)]
        broken += len(row.get("reward", [])) - len(finite)
        steps.append(np.full(len(finite), int(row["step"])))
        values.append(finite)
    none = np.empty(0)
    return np.concatenate(steps or [none]), np.concatenate(values or [none]), broken


def rows_of(path: Path) -> Iterable[dict[str, Any]]:
    """The whole lines of a file, one after the other, none where there is none: it may be larger than memory."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def bands(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(steps, quantiles): 0.1, 0.25, 0.5, 0.75 and 0.9 of the completions of each of at most 120 stretches of steps."""
    there = np.unique(steps)
    stretches = np.array_split(there, min(len(there), MOST_BANDS))
    found = [np.quantile(values[np.isin(steps, each)], (0.1, 0.25, 0.5, 0.75, 0.9)) for each in stretches]
    return np.array([each.mean() for each in stretches]), np.array(found).T


def draw_bands(ax: "Axes", steps: np.ndarray, quantiles: np.ndarray) -> None:
    ax.fill_between(
        steps, quantiles[0], quantiles[4], color=BLUE, alpha=0.18, linewidth=0, label="80 % of the completions"
    )
    ax.fill_between(
        steps, quantiles[1], quantiles[3], facecolor=BLUE, alpha=0.35, linewidth=0, label="half of the completions"
    )
    for row in (quantiles[0], quantiles[4]):
        ax.plot(steps, row, color=BLUE, linewidth=0.8, linestyle=(0, (1, 1.5)))
    marker = "o" if len(steps) <= FEW else ""
    ax.plot(steps, quantiles[2], color=BLUE, linewidth=1.8, marker=marker, markersize=3.5, label="median")
    ax.set_title("over the steps")
    ax.set_xlabel("step")
    ax.set_ylabel("reward of a completion")
    ax.margins(y=0.1)
    whole_numbers(ax)
    make_room(ax, 2)
    ax.legend(loc="upper left", ncols=2, borderaxespad=0)


def taken_for(figure: str, call: str, given: object) -> UsageError:
    """The other figures take a run's directory, so these are given one too."""
    return UsageError(
        f"takes what {call} returned, not the {type(given).__name__} {given!s:.100}",
        key=f"figures.{figure}",
        fix="of a run that is there it is drawn by its report: run.report()",
    )


# ---------------------------------------------------------------------------------------------------------------- data


def lengths(preview: "Preview") -> "Drawing":
    """How long examples are, in tokens, and where train.max_length cuts. preview: what `cogumi.preview` returned."""
    if not hasattr(preview, "lengths"):
        raise taken_for("lengths", "cogumi.preview(CONFIG)", preview)
    return length_histogram(preview.lengths, preview.max_length)


def length_histogram(buckets: Sequence[Sequence[int]], max_length: int | None = None) -> "Drawing":
    """buckets: (first length, last length, examples), as `Preview.lengths`."""
    from cogumi.notebook.drawing import own_settings, sheet

    if not buckets:
        raise UsageError("no lengths are known: prompts are tokenized by the trainer, as they come")
    firsts, lasts, counts = (np.array(column) for column in zip(*buckets, strict=True))
    if max_length is not None:  # no bar goes beyond what no example does
        lasts = np.where(firsts <= max_length, np.minimum(lasts, max_length), lasts)
    words = f"{counts.sum():,} examples of up to {lasts[-1]:,} tokens, most of {modal(buckets)} tokens"
    with own_settings():
        drawing, (ax,) = sheet("Lengths of the examples", words, 5.6, 2.6)
        ax.bar(firsts - 0.5, counts, width=lasts - firsts + 1, align="edge", color=BLUE, edgecolor=INK, linewidth=0.6)
        ax.set_title("lengths of the examples")
        ax.set_xlabel("tokens")
        ax.set_ylabel("examples")
        ax.yaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        ax.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        ax.margins(y=0.18)
        if max_length is not None:
            ax.axvline(max_length + 0.5, color=VERMILLION, linestyle=(0, (5, 2)), linewidth=1.5)
            ax.annotate(
                f"max_length {max_length:,}", (max_length + 0.5, 1), xycoords=("data", "axes fraction"), xytext=(-4, 0),
                textcoords="offset points", ha="right", va="top", annotation_clip=False,
            )  # fmt: skip
    return drawing


def modal(buckets: Sequence[Sequence[int]]) -> str:
    first, last, _ = max(buckets, key=lambda bucket: bucket[2])
    return f"{first:,} to {last:,}"


# -------------------------------------------------------------------------------------------------------------- memory


def memory(report: "PreflightReport") -> "Drawing":
    """What the fullest moment of a step is made of, as one bar beside what is free. report: what `cogumi.preflight` returned."""
    if not hasattr(report, "figures"):
        raise taken_for("memory", "cogumi.preflight(CONFIG)", report)
    found = report.figures.get("memory")
    if found is None:
        raise UsageError("this preflight did not come as far as a forecast of memory")
    return memory_bar(found)


def memory_bar(figures: Mapping[str, Any], measured: float | None = None) -> "Drawing":
    """figures: `PreflightReport.figures["memory"]`. measured: what the run then took, in bytes, of tensors."""
    from cogumi.notebook.drawing import own_settings, sheet

    parts, peak, free = figures["breakdown"], figures["peak"], figures["free"]
    said = f"{gib(peak)} forecast of {gib(free)} free: "
    said += f"{gib(free - peak)} to spare" if peak <= free else f"{gib(peak - free)} too much"
    is_small = max(peak, measured or 0) < FAR * free  # a bar to the scale of what is free would be a line
    widest = max(peak, measured or 0, 0 if is_small else free)
    unit, name = (2**30, "GiB") if widest >= 2**30 else (2**20, "MiB")
    words = f"{said}. Made of {', '.join(f'{kind} {gib(size)}' for kind, size in parts.items())}"
    with own_settings():
        drawing, (ax,) = sheet("Memory at its fullest", words, WIDTH, 1.9)
        left = 0.0
        for number, (kind, size) in enumerate(parts.items()):
            style = style_of(number)
            ax.barh(
                0, size / unit, left=left, height=0.7, edgecolor=INK, linewidth=0.8, hatch=style.hatch,
                facecolor="none" if style.colour == INK else style.colour, label=f"{kind} {gib(size)}",
            )  # fmt: skip
            left += size / unit
        if is_small:
            ax.annotate(
                f"free: up to {gib(free)}, far to the right \N{RIGHTWARDS ARROW}", (1, 0.5), xycoords="axes fraction",
                ha="right", va="center",
            )  # fmt: skip
        else:
            ax.barh(
                0, free / unit, height=0.9, facecolor="none", edgecolor=INK, linewidth=1.6, label=f"free {gib(free)}"
            )  # fmt: skip
        if measured is not None:
            ax.plot(
                [measured / unit] * 2, [-0.6, 0.6], color=INK, linewidth=2.5, linestyle=(0, (2, 1)),
                label=f"measured {gib(measured)}",
            )  # fmt: skip
        ax.set_title(said)
        ax.set_xlabel(name)
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.set_xlim(0, (1.6 if is_small else 1.02) * widest / unit)
        drawing.legend(loc="outside lower center", ncols=4)
    return drawing


# --------------------------------------------------------------------------------------------------------------- merge


def delta_by_layer(merged: "str | PathLike[str] | MergeReport") -> "Drawing":
    """How much the merge changed each kind of weight, layer by layer: |change| beside |weight| (Frobenius norms, in percent)
    above, the largest change of a single element below. merged: the directory, or what the merge reported."""
    from cogumi.notebook.drawing import own_settings, sheet

    directory = Path(getattr(merged, "out", None) or merged)  # type: ignore[arg-type]
    groups, outside = deltas(directory)
    if not groups:
        raise UsageError("no layer was changed by a merge there", place=directory)
    most = max((of[kind][layer][0], kind, layer) for of in groups.values() for kind in of for layer in of[kind])
    words = f"the largest change is {most[0]:.2%} of {most[1]} of layer {most[2]}"
    if outside:
        words += f"; outside the layers {', '.join(f'{name} {ratio:.2%}' for name, (ratio, _) in outside.items())}"
    figures = ("|change| / |weight|, %", "largest change of an element")
    with own_settings():
        drawing, axes = sheet("Change by layer", words, WIDTH, 4.6, 2, len(groups), sharex=True, sharey="row")
        for column, (group, of) in enumerate(groups.items()):
            for row, (scale, label) in enumerate(zip((100.0, 1.0), figures, strict=True)):
                ax = axes[row * len(groups) + column]
                for number, (kind, by_layer) in enumerate(of.items()):
                    style = style_of(number)
                    ax.plot(
                        list(by_layer), [scale * both[row] for both in by_layer.values()], color=style.colour,
                        linestyle=style.dash, marker=style.marker, markersize=4, linewidth=1.4, label=kind,
                    )  # fmt: skip
                whole_numbers(ax)
                if row == 0:
                    ax.set_title(group)
                    ax.legend(loc="upper center", ncols=min(len(of), 4), columnspacing=1.0)
                else:
                    ax.set_xlabel("layer")
                if column == 0:
                    ax.set_ylabel(label)
        for row, top in ((0, 1.35), (1, 1.1)):  # the legend is above
            ax = axes[row * len(groups)]
            ax.set_ylim(0, top * ax.get_ylim()[1])
    return drawing


Deltas = dict[str, dict[str, dict[int, tuple[float, float]]]]


def deltas(directory: Path) -> tuple[Deltas, dict[str, tuple[float, float]]]:
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
    return {
        group: {kind: dict(sorted(by_layer.items())) for kind, by_layer in of.items()} for group, of in groups.items()
    }, outside


def merge_manifest(directory: Path) -> dict[str, Any]:
    """What `cogumi.merge` wrote beside the model. Raises UsageError where it wrote nothing."""
    found = read_if_there(directory / MERGE_MANIFEST)
    if not found:
        raise UsageError(f"no {MERGE_MANIFEST} there", place=directory, fix="name a directory that cogumi merged into")
    return found
