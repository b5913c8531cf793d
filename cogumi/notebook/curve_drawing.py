"""One plot of a run's curves, on matplotlib axes: lines with the range of their bins, flags at their steps, room for words."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cogumi.notebook.curves import Curve, Plot, range_of
from cogumi.notebook.palette import INK, LEVELS, VERMILLION, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 40  # points of a curve, each of which is marked
WIDE = 100.0  # from this ratio of its largest to its smallest value on, a positive curve is on a logarithmic scale
ROOM = 0.12  # of the height of a plot, for a line of words


def draw_curves(ax: "Axes", plot: Plot, of: Mapping[str, Curve]) -> None:
    ax.set_title(plot.title)
    handles: list[Any] = []
    names: list[str] = []
    for number, (key, curve) in enumerate(of.items()):
        style = style_of(number)
        marker = style.marker if len(curve.steps) <= FEW else ""
        ax.fill_between(curve.steps, curve.low, curve.high, color=style.colour, alpha=0.2, linewidth=0)
        (line,) = ax.plot(
            curve.steps, curve.mean, color=style.colour, linestyle=style.dash, marker=marker, markersize=3.5,
            linewidth=1.5, label=key,
        )  # fmt: skip
        if len(of) > 1:
            handles, names = [*handles, line], [*names, key]
        if curve.broken:
            (cross,) = ax.plot(
                curve.broken, [0.0] * len(curve.broken), transform=ax.get_xaxis_transform(), linestyle="", marker="x",
                markersize=7, markeredgewidth=2, color=VERMILLION, clip_on=False, zorder=5, label=f"{key} not finite",
            )  # fmt: skip
            handles, names = [*handles, cross], [*names, f"{key} not finite"]
    ax.update_datalim([(0, end) for end in range_of(of.values())], updatex=False)
    log = plot.title in ("gradient norm", "KL") and is_wide(of.values())
    if log:
        ax.set_yscale("log")
    unit = ", ".join(filter(None, (plot.unit, "log scale" if log else "")))
    if unit:
        ax.set_ylabel(unit)
    if handles:
        ax.legend(handles, names, loc="best")


def draw_spread(ax: "Axes", reward: Curve, spread: Curve) -> None:
    """The standard deviation of a batch's rewards, to either side of their mean, where both were logged."""
    known = np.interp(reward.steps, spread.steps, spread.mean) if len(spread.steps) else np.zeros(0)
    if len(known):
        for side in (-1, 1):
            ax.plot(
                reward.steps, reward.mean + side * known, color=INK, linewidth=0.8, linestyle=(0, (1, 2)),
                label="one standard deviation",
            )  # fmt: skip
        make_room(ax, 1)
        ax.legend(ax.lines[-1:], ["one standard deviation"], loc="upper left", borderaxespad=0)


def draw_flags(ax: "Axes", flags: Sequence[tuple[int, str, str, str]], last: float) -> None:
    """Lines at their steps, and above the curve a line of words for each, to the side where there is room."""
    for number, (step, level, name, _) in enumerate(flags):
        ax.axvline(step, color=LEVELS[level], linestyle=(0, (1, 1)), linewidth=1.5)
        to_left = step > last / 2
        note = ax.annotate(
            f"{'RED' if level == 'red' else level}: {name}", (step, 1 - ROOM * number),
            xycoords=("data", "axes fraction"), xytext=(-3 if to_left else 3, 0), textcoords="offset points",
            va="top", ha="right" if to_left else "left", fontsize=8, weight="bold",
        )  # fmt: skip
        note.set_in_layout(False)
    make_room(ax, min(len(flags), 4))


def make_room(ax: "Axes", lines: int) -> None:
    """For so many lines of words above what is drawn."""
    scale = ax.yaxis.get_transform()
    low, high = scale.transform(ax.get_ylim())
    ax.set_ylim(top=float(scale.inverted().transform(low + (high - low) / (1 - ROOM * lines))))


def whole_numbers(ax: "Axes") -> None:
    """There is no step, and no layer, between two others."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def is_wide(of: Iterable[Curve]) -> bool:
    low = [float(curve.low.min()) for curve in of if len(curve.low)]
    high = [float(curve.high.max()) for curve in of if len(curve.high)]
    return bool(low) and min(low) > 0 and max(high) / min(low) > WIDE
