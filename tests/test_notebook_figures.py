"""Figures hold the numbers they are of, read on light and dark, and tell nothing by colour alone."""

import json
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from merge_models import EXPERTS, FUSED, LINEARS, SIZES, save_base, train_adapter

import cogumi
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import append_jsonl, read_json, write_json
from cogumi.forecast.preflight_report import Line, PreflightReport
from cogumi.notebook import figures
from cogumi.notebook.curves import INK, LEVELS
from cogumi.notebook.figures import COLOURS, DASHES, HATCHES, MARKERS
from cogumi.notebook.html_components import render_html

Write = Callable[..., Path]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def logged(tmp_path: Path) -> Write:
    """A run directory with these rows in metrics.jsonl, or another file."""

    def write(rows: list[dict[str, Any]], name: str = "metrics.jsonl") -> Path:
        for row in rows:
            append_jsonl(tmp_path / name, row)
        return tmp_path

    return write


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours written #rrggbb, from 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """WCAG's relative luminance: sRGB made linear, weighed as the eye does."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def axes_of(drawing: Any) -> dict[str, Any]:
    return {ax.get_title(loc="left"): ax for ax in drawing.figure.axes if ax.get_visible()}


def words_in(svg: str) -> str:
    root = ElementTree.fromstring(svg)
    return " | ".join("".join(each.itertext()) for each in root.iter(f"{SVG}text"))


# -------------------------------------------------------------------------------------------------------------- curves


def test_curves_are_what_was_logged(logged: Write) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "eval_loss": 4.5}]
    rows += [{"step": n, "loss": 5.0 - 0.1 * n, "grad_norm": 1.0, "learning_rate": 1e-4 * n} for n in range(1, 11)]
    drawing = figures.curves(logged(rows))
    found = axes_of(drawing)
    assert list(found) == ["loss", "gradient norm", "learning rate"]
    loss, evaluated = found["loss"].lines
    assert (loss.get_label(), evaluated.get_label()) == ("loss", "eval_loss")
    assert list(loss.get_xdata()) == list(range(1, 11))
    np.testing.assert_allclose(loss.get_ydata(), [row["loss"] for row in rows[1:]])
    assert list(evaluated.get_ydata()) == [4.5]
    assert (loss.get_linestyle(), loss.get_marker()) != (evaluated.get_linestyle(), evaluated.get_marker())
    np.testing.assert_allclose(found["learning rate"].lines[0].get_ydata(), [1e-4 * n for n in range(1, 11)])
    assert "loss from 4.9 to 4" in drawing.words


def test_what_is_not_finite_is_a_cross_at_its_step(logged: Write) -> None:
    rows = [{"step": n, "loss": float("nan") if n in (4, 7) else 2.0} for n in range(1, 9)]
    drawing = figures.curves(logged(rows))
    ax = axes_of(drawing)["loss"]
    assert list(ax.lines[0].get_xdata()) == [1, 2, 3, 5, 6, 8]
    crosses = ax.lines[1]
    assert (list(crosses.get_xdata()), crosses.get_marker(), set(crosses.get_ydata())) == ([4, 7], "x", {0.0})
    assert "loss not finite at 2 steps, the first is 4" in drawing.words
    assert "loss not finite" in words_in(drawing.svg())


def test_a_run_of_nothing_but_nan_is_drawn(logged: Write) -> None:
    drawing = figures.curves(logged([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("inf")}]))
    assert list(axes_of(drawing)["loss"].lines[1].get_xdata()) == [1, 2]
    assert drawing.svg()


def test_flags_are_lines_at_their_step_with_their_names(logged: Write) -> None:
    run = logged([{"step": n, "loss": 2.0, "grad_norm": float(n)} for n in range(1, 41)])
    flag = {"evidence": "", "threshold": "", "cause": "", "knob": ""}
    write_json(
        run / "flags.json",
        {
            "step": 38,
            "flags": [
                {"name": "gradient norm", "level": "red", **flag},
                {"name": "loss noise", "level": "yellow", **flag},
                {"name": "memory", "level": "green", **flag},
            ],
            "was_red": [{"step": 12, "name": "gradient norm", "level": "red", **flag}],
        },
    )
    drawing = figures.curves(run)
    for ax in axes_of(drawing).values():
        at = {
            line.get_xdata()[0]: line
            for line in ax.lines
            if len(line.get_xdata()) == 2 and len(set(line.get_xdata())) == 1
        }
        assert {step: line.get_color() for step, line in at.items()} == {12: LEVELS["red"], 38: LEVELS["yellow"]}
        assert at[12].get_linestyle() != at[38].get_linestyle()
    words = words_in(drawing.svg())
    assert "RED at step 12: gradient norm" in words
    assert "yellow at step 38: loss noise" in words
    assert "memory" not in words
    assert "red flag gradient norm at step 12" in drawing.words


def test_a_long_run_is_a_small_figure_that_keeps_its_spike(logged: Write) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(2.0, 0.1, 20_000)
    values[12_345] = 50.0
    (logged([]) / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "loss": value, "grad_norm": 1.0}) + "\n" for n, value in enumerate(values))
    )
    drawing = figures.curves(logged([]))
    area = axes_of(drawing)["loss"].collections[0].get_paths()[0].vertices
    assert area[:, 1].max() == 50.0
    assert len(drawing.svg()) < 150_000


def test_one_row_has_one_tick_and_axes_about_its_values(logged: Write) -> None:
    drawing = figures.curves(logged([{"step": 7, "loss": 2.0, "learning_rate": 0.0}]))
    drawing.figure.draw_without_rendering()
    found = axes_of(drawing)
    for title, low, high in (("loss", 1.0, 3.0), ("learning rate", 0.0, 1.0)):
        steps, values = found[title].get_xlim(), found[title].get_ylim()
        assert [tick for tick in found[title].get_xticks() if steps[0] <= tick <= steps[1]] == [7]
        ticks = [tick for tick in found[title].get_yticks() if values[0] <= tick <= values[1]]
        assert (min(ticks), max(ticks)) == pytest.approx((low, high)), title


def test_nothing_logged_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is logged there yet"):
        figures.curves(tmp_path)


# ------------------------------------------------------------------------------------------------------------- rewards


def test_rewards_are_those_of_the_completions(logged: Write) -> None:
    rng = np.random.default_rng(1)
    rows = [{"step": n, "reward": rng.uniform(0, n / 16, 32).tolist()} for n in range(1, 17)]
    drawing = figures.rewards(logged(rows, "rollouts.jsonl"))
    found = axes_of(drawing)
    first, last = (patch.get_data() for patch in found["distribution"].patches)
    early = np.concatenate([row["reward"] for row in rows[:4]])
    late = np.concatenate([row["reward"] for row in rows[12:]])
    np.testing.assert_allclose(first.values, np.histogram(early, first.edges)[0] / len(early))
    np.testing.assert_allclose(last.values, np.histogram(late, last.edges)[0] / len(late))
    assert first.values.sum() == pytest.approx(1)
    median = next(line for line in found["over the steps"].lines if line.get_label() == "median")
    np.testing.assert_allclose(median.get_ydata(), [np.median(row["reward"]) for row in rows])
    assert list(median.get_xdata()) == list(range(1, 17))
    assert f"mean reward {early.mean():.3g} in the first quarter" in drawing.words
    styles = [(patch.get_edgecolor(), patch.get_linestyle()) for patch in found["distribution"].patches]
    assert styles[0][0] != styles[1][0]
    assert styles[0][1] != styles[1][1]


def test_rewards_that_are_no_numbers_are_left_out_and_counted(logged: Write) -> None:
    rows = [{"step": n, "reward": [0.5, float("nan"), 1.0]} for n in range(1, 4)]
    drawing = figures.rewards(logged(rows, "rollouts.jsonl"))
    assert "over the steps (3 values not finite, left out)" in axes_of(drawing)


def test_equal_rewards_and_one_step_are_drawn(logged: Write) -> None:
    drawing = figures.rewards(logged([{"step": 3, "reward": [0.0, 0.0]}], "rollouts.jsonl"))
    assert drawing.words.startswith("mean reward 0 ")
    assert drawing.svg()


def test_many_steps_of_rewards_become_some_bands() -> None:
    steps = np.repeat(np.arange(1000), 4)
    middles, quantiles = figures.reward_quantiles(steps, steps.astype(float))
    assert len(middles) == figures.MOST_BANDS
    assert quantiles.shape == (5, figures.MOST_BANDS)
    assert (np.diff(quantiles[2]) > 0).all()


def test_no_rewards_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rollouts\.jsonl"):
        figures.rewards(tmp_path)


# ---------------------------------------------------------------------------------------------------- lengths and memory


def test_lengths_are_the_examples() -> None:
    buckets = [(0, 9, 3), (10, 19, 20), (20, 29, 5)]
    drawing = figures.length_histogram(buckets, 24)
    (ax,) = drawing.figure.axes
    bars = [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in ax.patches]
    assert bars == [(-0.5, 10, 3), (9.5, 10, 20), (19.5, 5, 5)]  # no bar beyond the limit
    assert ax.lines[0].get_xdata()[0] == 24.5
    assert "max_length 24" in words_in(drawing.svg())
    assert "28 examples" in drawing.words
    assert "most of 10 to 19 tokens" in drawing.words
    with pytest.raises(UsageError, match="no lengths"):
        figures.length_histogram([])


def report_with(free: int) -> PreflightReport:
    parts = {"weights": 30 * 2**30, "activations": 20 * 2**30, "logits": 6 * 2**30, "optimizer": 3 * 2**30}
    figures_of = {"memory": {"peak": sum(parts.values()), "free": free, "breakdown": parts}}
    return PreflightReport("a card", (Line("memory", "59 GiB"),), figures_of)


def test_a_directory_in_place_of_a_preview_or_a_preflight_is_refused_with_what_to_give(tmp_path: Path) -> None:
    for draw, call in ((figures.lengths, "cogumi.preview"), (figures.memory, "cogumi.preflight")):
        for given in (tmp_path, str(tmp_path)):
            with pytest.raises(UsageError, match=rf"{draw.__name__}: takes what {call}\(CONFIG\) returned") as refused:
                draw(given)  # type: ignore[operator]
            assert str(tmp_path) in str(refused.value)
            assert "\n" not in str(refused.value)


def test_memory_is_a_stack_of_its_parts() -> None:
    drawing = figures.memory(report_with(int(74.2 * 2**30)))
    (ax,) = drawing.figure.axes
    *parts, free = ax.patches
    assert [bar.get_width() for bar in parts] == pytest.approx([30, 20, 6, 3])
    assert [bar.get_x() for bar in parts] == pytest.approx([0, 30, 50, 56])
    assert free.get_width() == pytest.approx(74.2)
    assert len({bar.get_hatch() for bar in parts}) == len(parts)
    words = words_in(drawing.svg())
    for said in (
        "weights 30.0 GiB",
        "logits 6.0 GiB",
        "free 74.2 GiB",
        "59.0 GiB forecast",
        "15.2 GiB to spare",
        "GiB",
    ):
        assert said in words
    assert "Made of weights 30.0 GiB" in drawing.words


def test_memory_that_does_not_fit_says_by_how_much() -> None:
    drawing = figures.memory(report_with(40 * 2**30))
    assert "19.0 GiB too much" in drawing.words
    assert drawing.figure.axes[0].get_xlim()[1] > 59


def test_little_memory_of_much_is_drawn_to_its_own_scale_and_what_was_measured_stands_beside() -> None:
    found = report_with(2**20 * 2**30).figures["memory"]
    drawing = figures.memory_bar(found, measured=70 * 2**30)
    (ax,) = drawing.figure.axes
    assert 8 * 70 <= ax.get_xlim()[1] < 1000
    assert list(ax.lines[0].get_xdata()) == [70, 70]
    words = words_in(drawing.svg())
    assert "measured 70.0 GiB" in words
    assert "free 1048576.0 GiB" in words
    with pytest.raises(UsageError, match="did not come as far"):
        figures.memory(PreflightReport("a card", (), {}))


# --------------------------------------------------------------------------------------------------------------- merge


@pytest.mark.parametrize("experts", [False, True])
def test_change_by_layer_is_what_the_merge_measured(experts: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, Qwen3MoeConfig

    from cogumi.merge.merge_manifest import MANIFEST_NAME

    assert figures.MERGE_MANIFEST == MANIFEST_NAME
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16) if experts else LlamaConfig(**SIZES)
    base = save_base(tmp_path / "base", config)
    lora: dict[str, Any] = {"target_modules": ["q_proj", "o_proj"], "target_parameters": FUSED} if experts else {
        "target_modules": [*LINEARS, "lm_head"]
    }  # fmt: skip
    adapter = train_adapter(base, tmp_path / "adapter", **lora)
    report = cogumi.merge_adapter(adapter, tmp_path / "out")
    drawing = figures.delta_by_layer(report)
    tensors = read_json(tmp_path / "out" / MANIFEST_NAME)["tensors"]
    lines = {line.get_label(): line for ax in drawing.figure.axes[: len(drawing.figure.axes) // 2] for line in ax.lines}
    q = [tensors[f"model.layers.{n}.self_attn.q_proj.weight"]["delta_over_weight"] for n in (0, 1)]
    np.testing.assert_allclose(lines["q_proj"].get_ydata(), [100 * each for each in q])
    assert list(lines["q_proj"].get_xdata()) == [0, 1]
    assert len(
        {(line.get_color(), line.get_marker()) for line in lines.values() if line.axes is lines["q_proj"].axes}
    ) == (2 if experts else 4)
    largest = max(each["delta_over_weight"] for name, each in tensors.items() if ".layers." in name)
    assert f"{largest:.2%}" in drawing.words
    if experts:
        down = [
            max(
                each["max_abs_delta"]
                for name, each in tensors.items()
                if f"layers.{n}.mlp" in name and "down_proj" in name
            )
            for n in (0, 1)
        ]
        below = {
            line.get_label(): line for ax in drawing.figure.axes[len(drawing.figure.axes) // 2 :] for line in ax.lines
        }
        np.testing.assert_allclose(below["down_proj"].get_ydata(), down)
    else:
        assert f"lm_head {tensors['lm_head.weight']['delta_over_weight']:.2%}" in drawing.words
    html = render_html(report)
    assert f"{report.elements:,} elements read back" in html
    assert "largest change" in html


def test_a_directory_without_a_merge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no cogumi-merge\.json there"):
        figures.delta_by_layer(tmp_path)


# -------------------------------------------------------------------------------------------------- colours, and pages


def test_every_colour_reads_on_white_and_on_black() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # as WCAG's own example has it
    drawn = {*COLOURS} - {INK} | set(LEVELS.values())
    assert len(drawn) == 5
    for colour in drawn:
        for page in ("#ffffff", "#111111"):
            assert contrast(colour, page) >= 3, (colour, page)


def test_no_two_series_differ_by_colour_alone() -> None:
    for values in (DASHES, MARKERS, HATCHES):
        assert len(set(values)) == len(values) == len(COLOURS)


def test_text_and_axes_read_on_any_page_and_the_image_has_words(logged: Write) -> None:
    assert all(contrast(INK, page) >= 4.5 for page in ("#ffffff", "#000000"))
    drawing = figures.curves(logged([{"step": n, "loss": 2.0, "eval_loss": 1.0} for n in (1, 2)]))
    svg = drawing.svg()
    texts = list(ElementTree.fromstring(svg).iter(f"{SVG}text"))
    assert len(texts) > 10
    assert all(f"fill: {INK}" in each.get("style", "") for each in texts)
    assert set(re.findall(r"#[0-9a-fA-F]{6}\b", svg)) <= {colour.lower() for colour in COLOURS}
    assert not re.search(r"fill: (white|#fff)", svg)
    image = drawing.image()
    assert re.search(r'<img alt="Curves: loss by step; loss from 2 to 2', image)
    (data,) = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", image)
    assert ElementTree.fromstring(b64decode(data)).tag == f"{SVG}svg"


def test_settings_of_the_notebook_neither_reach_figures_nor_are_changed(logged: Write) -> None:
    run = logged([{"step": n, "loss": 2.0} for n in (1, 2)])
    with matplotlib.rc_context({"text.color": "#ff0000", "axes.facecolor": "#000000", "font.size": 30}):
        before = dict(matplotlib.rcParams)
        svg = figures.curves(run).svg()
        assert dict(matplotlib.rcParams) == before
    assert "#ff0000" not in svg
    assert "font-size: 30px" not in svg


def test_a_look_at_a_run_loads_no_matplotlib_and_a_figure_no_pyplot_and_no_torch(logged: Write) -> None:
    run = logged([{"step": n, "loss": 2.0} for n in (1, 2)])
    write_json(run / "status.json", {"state": "finished", "time": 0.0})
    code = f"""
import sys, cogumi
cogumi.attach({str(run)!r}).status()
assert "matplotlib" not in sys.modules
from cogumi.notebook import figures, html_components as pieces, report
assert "matplotlib" not in sys.modules
figures.curves({str(run)!r}).svg()
assert "matplotlib.figure" in sys.modules and "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
