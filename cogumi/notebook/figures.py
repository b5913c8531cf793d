"""Pieces of a run, of its data and of what it made: SVG images that a notebook shows.

Nothing is told by colour alone, and every figure says in words what it shows. Raises UsageError where there is nothing to
draw.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cogumi.core.errors import UsageError
from cogumi.core.run_directory import ROLLOUTS
from cogumi.notebook.curves import Curve, Curves, HtmlFigure, Plot, render_curves, render_plots
from cogumi.telemetry.status import read_json_or_empty

if TYPE_CHECKING:
    from cogumi.merge import MergeReport

MERGE_MANIFEST = "cogumi-merge.json"  # cogumi.merge.merge_manifest.MANIFEST_NAME, which comes with torch
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.+)$")
Deltas = dict[str, dict[str, dict[int, float]]]


def curves(run_dir: str | PathLike[str]) -> HtmlFigure:
    """What the run logged, each metric a small plot over its steps: the mean as a line, the range of a bin as an area.

    A flag that is or was red, or that is yellow, is a line at its step. A cross marks a value that was not finite.
    """
    run = Path(run_dir)
    found = Curves(run / "metrics.jsonl")
    found.read()
    if drawn := render_curves(found.plots(), read_json_or_empty(run / "flags.json"), as_images=True):
        return HtmlFigure(drawn)
    raise UsageError("nothing is logged there yet", place=run, fix="there are no curves")


def rewards(run_dir: str | PathLike[str]) -> HtmlFigure:
    """How the rewards of single completions are spread, as shares: the first quarter of the steps beside the last one."""
    run = Path(run_dir)
    scored = ((row["step"], each) for row in read_rows(run / ROLLOUTS) for each in row.get("reward", []))
    pairs = np.array([(step, float(each)) for step, each in scored if each is not None]).reshape(-1, 2)
    finite = np.isfinite(pairs[:, 1])
    steps, values = pairs[finite].T
    if not len(steps):
        raise UsageError(f"no rewards of single completions there ({ROLLOUTS} is written by a gspo run)", place=run)
    there = np.unique(steps)
    quarter = math.ceil(len(there) / 4)
    parts = {"first": values[steps <= there[quarter - 1]], "last": values[steps >= there[-quarter]]}
    edges = np.histogram_bin_edges(values, bins=20)
    shares = {when: np.histogram(part, edges)[0] / len(part) for when, part in parts.items()}
    spread = {f"{when} quarter": histogram(edges[:-1], edges[1:], share) for when, share in shares.items()}
    first, last = (float(part.mean()) for part in parts.values())
    words = f"mean reward {first:.3g} in the first quarter of the steps, {last:.3g} in the last"
    words += "" if finite.all() else f"; {(~finite).sum():,} values not finite are left out"
    drawn = render_plots([(Plot("distribution", (), "share of the completions", "reward"), spread)], as_images=True)
    return HtmlFigure(f"{drawn}<p>{words}</p>")


def read_rows(path: Path) -> Iterable[dict[str, Any]]:
    """The whole lines of a file, one after the other, none where there is none: it may be larger than memory."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def lengths(buckets: Sequence[Sequence[int]], max_length: int | None = None) -> HtmlFigure:
    """How long examples are, in tokens, and where train.max_length cuts.

    buckets: (first length, last length, examples), as `Preview.lengths`.
    """
    if not buckets:
        raise UsageError("no lengths are known: prompts are tokenized by the trainer, as they come")
    firsts, lasts, counts = np.array(buckets, dtype=float).T
    plot = Plot("lengths of the examples", (), "examples", "tokens")
    marks = [] if max_length is None else [(max_length, "yellow", f"max_length {max_length:,}")]
    first, last, _ = max(buckets, key=lambda bucket: bucket[2])
    words = f"{sum(each[2] for each in buckets):,} examples, most of {first:,} to {last:,} tokens"
    words += f"; ⚑1 is max_length {max_length:,}" if max_length is not None else ""
    curve = histogram(firsts, lasts, counts)
    return HtmlFigure(render_plots([(plot, {"examples": curve})], marks, as_images=True) + f"<p>{words}</p>")


def histogram(firsts: np.ndarray, lasts: np.ndarray, heights: np.ndarray) -> Curve:
    """The outline of bars."""
    x = np.stack([firsts, lasts], axis=1).ravel()
    return Curve.through(np.array([x[0], *x, x[-1]]), np.array([0.0, *np.repeat(heights, 2), 0.0]))


def delta_by_layer(merged: "str | PathLike[str] | MergeReport") -> HtmlFigure:
    """How much the merge changed each kind of weight, layer by layer: |change| / |weight|, by Frobenius norms.

    merged: the directory, or what the merge reported.
    """
    directory = Path(getattr(merged, "out", None) or merged)  # type: ignore[arg-type]
    groups, outside = read_deltas(directory)
    if not groups:
        raise UsageError("no layer was changed by a merge there", place=directory)
    plots = []
    for group, kinds in groups.items():
        found = {kind: Curve.through(*np.array(sorted(by.items())).T) for kind, by in kinds.items()}
        plots.append((Plot(group, (), "|change| / |weight|", "layer"), found))
    changes = ((by[layer], kind, layer) for kinds in groups.values() for kind, by in kinds.items() for layer in by)
    most, kind, layer = max(changes)
    words = f"the largest change is {most:.2%} of {kind} of layer {layer}"
    if outside:
        words += f"; outside the layers {', '.join(f'{name} {ratio:.2%}' for name, ratio in outside.items())}"
    return HtmlFigure(render_plots(plots, as_images=True) + f"<p>{escape(words)}</p>")


def read_deltas(directory: Path) -> tuple[Deltas, dict[str, float]]:
    """|change| / |weight| by group, kind and layer, and by name outside the layers. Of several of a kind in a layer, as
    experts are, the largest."""
    groups: Deltas = {}
    outside: dict[str, float] = {}
    for name, entry in merge_manifest(directory)["tensors"].items():
        change, place = entry.get("delta_over_weight"), LAYER.search(name)
        if change is None:
            continue
        if place is None:
            outside[name.removesuffix(".weight")] = change
            continue
        *above, kind = [part for part in place[2].removesuffix(".weight").split(".") if not part.isdigit()]
        layers = groups.setdefault(".".join(above) or "layer", {}).setdefault(kind, {})
        layers[int(place[1])] = max(layers.get(int(place[1]), 0.0), change)
    return groups, outside


def merge_manifest(directory: Path) -> dict[str, Any]:
    """What `cogumi.merge` wrote beside the model. Raises UsageError where it wrote nothing."""
    found = read_json_or_empty(directory / MERGE_MANIFEST)
    if not found:
        raise UsageError(f"no {MERGE_MANIFEST} there", place=directory, fix="name a directory that cogumi merged into")
    return found
