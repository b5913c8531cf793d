"""Small plots as SVG text, some milliseconds each, for a panel that is drawn again every few seconds.

The figures of reports are matplotlib's (`cogumi.notebook.figures`), which takes a hundred times as long. A line is told
from another by dash as well as by colour, text has the colour of the page, and the title says in words what is drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from cogumi.notebook.curves import LAST, Curve, Plot, range_of
from cogumi.notebook.palette import LEVELS, SERIES

WIDTH, HEIGHT = 310, 140
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 30, 18
DASHES = ("", "5 2", "5 2 1 2")

Scale = Callable[[Any], Any]


def svg_of(plot: Plot, curves: Mapping[str, Curve], marks: Sequence[tuple[int, str]] = ()) -> str:
    """One plot. marks: (step, name) of what was red at that step."""
    steps = np.concatenate([curve.steps for curve in curves.values()])
    broken = sorted({step for curve in curves.values() for step in curve.broken})
    at = [*steps, *broken, *(step for step, _ in marks)]
    first, last = min(at), max(at)
    low, high = range_of(curves.values())
    x_of = scale(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    y_of = scale(low, high, HEIGHT - BOTTOM, TOP)
    drawn = [axes(first, last, low, high), title(plot, curves)]
    for number, (step, name) in enumerate(marks, 1):
        drawn.append(mark(float(x_of(step)), number, name))
    for number, curve in enumerate(curves.values()):
        if len(curve.low):
            drawn.append(line(curve, x_of, y_of, SERIES[number].colour, DASHES[number % len(DASHES)]))
    drawn += [cross(float(x_of(step)), step) for step in broken]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(in_words(plot, curves, broken))}" style="color:inherit">{"".join(drawn)}</svg>'
    )


def scale(first: float, last: float, begin: float, end: float) -> Scale:
    """The straight line through two points, for a number or an array."""
    return lambda value: begin + (value - first) / (last - first) * (end - begin)


def line(curve: Curve, x_of: Scale, y_of: Scale, colour: str, dash: str) -> str:
    """The means, over an area from the least to the greatest value of each bin."""
    x, low, mean, high = x_of(curve.steps), y_of(curve.low), y_of(curve.mean), y_of(curve.high)
    drawn = ""
    if curve.width > 1 or (curve.low < curve.high).any():
        area = points(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
        drawn = f'<polygon points="{area}" fill="{colour}" fill-opacity="0.25" stroke="none"/>'
    if len(x) == 1:
        return f'{drawn}<circle cx="{x[0]:.1f}" cy="{mean[0]:.1f}" r="2.5" fill="{colour}"/>'
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'{drawn}<polyline points="{points(x, mean)}" fill="none" stroke="{colour}" stroke-width="1.6"{style}/>'


def points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def axes(first: float, last: float, low: float, high: float) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    frame = f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="currentColor" stroke-opacity="0.5"/>'
    return (
        frame
        + text(LEFT - 4, TOP + 8, short(high), "end")
        + text(LEFT - 4, bottom, short(low), "end")
        + text(LEFT, HEIGHT - 4, f"step {first:,.0f}", "start")
        + (text(right, HEIGHT - 4, f"{last:,.0f}", "end") if last > first else "")
    )


def title(plot: Plot, curves: Mapping[str, Curve]) -> str:
    """The name and the newest value of each line, with a piece of the line before it where there are several."""
    said = f'<text x="2" y="11" font-size="12" font-weight="600" fill="currentColor">{escape(plot.title)}'
    said += f'<tspan font-weight="400" font-size="10" dx="6">{escape(plot.unit)}</tspan></text>'
    place = 2
    for number, (key, curve) in enumerate(curves.items()):
        name = f"{key} " if len(curves) > 1 else ""
        label = name + newest(curve)
        colour, dash = SERIES[number].colour, DASHES[number % len(DASHES)]
        style = f' stroke-dasharray="{dash}"' if dash else ""
        said += f'<path d="M{place} 20h16" stroke="{colour}" stroke-width="2"{style}/>'
        said += text(place + 20, 24, label, "start")
        place += 34 + 6 * len(label)
    return said


def newest(curve: Curve) -> str:
    """The last value, in words where it was none."""
    if not len(curve.low) or (curve.broken and curve.broken[-1] > curve.bins[LAST][-1]):
        return "not finite"
    return short(float(curve.mean[-1]))


def mark(x: float, number: int, name: str) -> str:
    """A red flag: a dashed line with its number, which the list beside the plots has as well."""
    x = min(x, WIDTH - RIGHT)
    return (
        f'<g><title>red: {escape(name)}</title><path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{LEVELS["red"]}" '
        f'stroke-width="1.4" stroke-dasharray="3 2"/>{text(x + 2, TOP + 9, f"⚑{number}", "start")}</g>'
    )


def cross(x: float, step: int) -> str:
    """Where a value was NaN or infinite."""
    y = TOP + 5
    return (
        f'<path d="M{x - 3:.1f} {y - 3}l6 6m0 -6l-6 6" stroke="{LEVELS["red"]}" stroke-width="1.8" fill="none">'
        f"<title>not finite at step {step}</title></path>"
    )


def text(x: float, y: float, said: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="10" text-anchor="{anchor}" fill="currentColor">{escape(said)}</text>'


def in_words(plot: Plot, curves: Mapping[str, Curve], broken: Sequence[int]) -> str:
    """For who does not see the drawing."""
    said = [f"{plot.title} by step"]
    for key, curve in curves.items():
        if len(curve.low):
            first, newest = float(curve.mean[0]), float(curve.mean[-1])
            between = f"between {short(float(curve.low.min()))} and {short(float(curve.high.max()))}"
            said.append(f"{key} from {short(first)} to {short(newest)}, {between}")
    if broken:
        said.append(f"not finite at {len(broken)} steps, the first is {broken[0]}")
    return "; ".join(said)


def short(value: float) -> str:
    """`0.0123`, `1,234`, `12.3k`, `2e-05`: what fits beside an axis."""
    if abs(value) >= 1e9:
        return f"{value:.2g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
