"""Figures hold the numbers they are of, read on light and dark, and tell nothing by colour alone."""

import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from bs4 import BeautifulSoup
from builders import EXPERTS, FUSED, LINEARS, SIZES, save_base, train_adapter

import cogumi
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import append_jsonl, read_json, write_json
from cogumi.notebook import figures
from cogumi.notebook.figures import COLOURS, INK, LEVELS, LINES, format_number
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


def words_in(svg: str) -> str:
    root = ElementTree.fromstring(svg)
    return " | ".join("".join(each.itertext()) for each in root.iter(f"{SVG}text"))


def images(piece: Any) -> dict[str, ElementTree.Element]:
    """What is said of each image of a piece, and its SVG."""
    found = BeautifulSoup(piece._repr_html_(), "html.parser").find_all("img")
    return {str(each["alt"]): ElementTree.fromstring(b64decode(str(each["src"]).partition(",")[2])) for each in found}


def heights(image: ElementTree.Element) -> list[list[float]]:
    """The points of each line, from 0 at the bottom of the plot to 1 at its top."""
    drawn = [each.get("points", "").split() for each in image.iter(f"{SVG}polyline")]
    return [[(122 - float(point.split(",")[1])) / 92 for point in points] for points in drawn]


# -------------------------------------------------------------------------------------------------------------- curves


def test_curves_are_what_was_logged(logged: Write) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "eval_loss": 4.5}]
    rows += [{"step": n, "loss": 5.0 - 0.1 * n, "grad_norm": 1.0, "learning_rate": 1e-4 * n} for n in range(1, 11)]
    drawn = figures.curves(logged(rows))
    found = images(drawn)
    assert [words.partition(" by step")[0] for words in found] == ["loss", "learning rate"]
    assert "the same at every step: gradient norm 1" in str(drawn)
    loss = found["loss by step; loss from 4.9 to 4, between 4 and 4.9; eval_loss from 4.5 to 4.5, between 4.5 and 4.5"]
    np.testing.assert_allclose(heights(loss)[0], np.linspace(1, 0, 10), atol=0.01)
    assert len(list(loss.iter(f"{SVG}circle"))) == 1  # the one eval_loss


def test_flags_are_lines_at_their_step_with_their_names(logged: Write) -> None:
    run = logged([{"step": n, "loss": 2.0 - n / 40, "grad_norm": float(n)} for n in range(1, 41)])
    flag = {"evidence": "", "cause": "", "knob": ""}
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
    drawn = figures.curves(run)
    for image in images(drawn).values():
        lines = {each.get("stroke"): each for each in image.iter(f"{SVG}path") if each.get("stroke-dasharray") == "3 2"}
        assert set(lines) == {LEVELS["red"], LEVELS["yellow"]}
        assert {each.text for each in image.iter(f"{SVG}title")} == {"red: gradient norm", "yellow: loss noise"}
    words = BeautifulSoup(str(drawn), "html.parser").get_text()
    assert "⚑1 red at step 12: gradient norm" in words
    assert "⚑2 yellow at step 38: loss noise" in words
    assert "memory" not in words


def test_a_run_of_nothing_but_nan_is_drawn(logged: Write) -> None:
    found = images(figures.curves(logged([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("inf")}])))
    assert list(found) == ["loss by step; loss not finite at 2 steps, the first is 1"]


def test_nothing_logged_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is logged there yet"):
        figures.curves(tmp_path)


# ------------------------------------------------------------------------------------------------------------- rewards


def test_rewards_are_those_of_the_completions(logged: Write) -> None:
    rng = np.random.default_rng(1)
    rows = [{"step": n, "reward": rng.uniform(0, n / 16, 32).tolist()} for n in range(1, 17)]
    drawn = figures.rewards(logged(rows, "rollouts.jsonl"))
    early = np.concatenate([row["reward"] for row in rows[:4]])
    late = np.concatenate([row["reward"] for row in rows[12:]])
    edges = np.histogram_bin_edges(np.concatenate([row["reward"] for row in rows]), bins=20)
    shares = [np.histogram(part, edges)[0] / len(part) for part in (early, late)]
    (spread,) = images(drawn).items()
    assert spread[0].startswith("distribution by reward; first quarter from 0 to 0, between 0 and ")
    drawn_shares = [line[1:-1:2] for line in heights(spread[1])]
    np.testing.assert_allclose(drawn_shares, np.array(shares) / max(map(max, shares)), atol=0.01)
    assert f"mean reward {early.mean():.3g} in the first quarter of the steps, {late.mean():.3g} in the last" in str(
        drawn
    )
    strokes = [each.get("stroke-dasharray") for each in spread[1].iter(f"{SVG}polyline")]
    assert len(set(strokes)) == 2


def test_rewards_that_are_no_numbers_are_left_out_and_counted(logged: Write) -> None:
    rows = [{"step": n, "reward": [0.5, float("nan"), n]} for n in range(1, 4)]
    assert "3 values not finite are left out" in str(figures.rewards(logged(rows, "rollouts.jsonl")))


def test_equal_rewards_and_one_step_are_drawn(logged: Write) -> None:
    drawn = figures.rewards(logged([{"step": 3, "reward": [0.0, 0.0]}], "rollouts.jsonl"))
    assert "mean reward 0 " in str(drawn)
    assert images(drawn)


def test_no_rewards_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rollouts\.jsonl"):
        figures.rewards(tmp_path)


# --------------------------------------------------------------------------------------------------------------- lengths


def test_lengths_are_the_examples() -> None:
    drawn = figures.lengths([(0, 9, 3), (10, 19, 20), (20, 29, 5)], 24)
    ((words, image),) = images(drawn).items()
    assert words == "lengths of the examples by tokens; examples from 0 to 0, between 0 and 20"
    np.testing.assert_allclose(heights(image)[0], np.array([0, 3, 3, 20, 20, 5, 5, 0]) / 20, atol=0.01)
    assert [each.text for each in image.iter(f"{SVG}title")] == ["yellow: max_length 24"]
    assert "28 examples, most of 10 to 19 tokens; ⚑1 is max_length 24" in str(drawn)
    with pytest.raises(UsageError, match="no lengths"):
        figures.lengths([])


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
    drawn = figures.delta_by_layer(report)
    tensors = read_json(tmp_path / "out" / MANIFEST_NAME)["tensors"]
    said = list(images(drawn))
    assert len(said) == 2  # attention and the rest

    def told(kind: str, values: list[float]) -> str:
        return f"{kind} from {format_number(values[0])} to {format_number(values[-1])}, between"

    q = [tensors[f"model.layers.{n}.self_attn.q_proj.weight"]["delta_over_weight"] for n in (0, 1)]
    assert any(each.startswith("self_attn by layer") and told("q_proj", q) in each for each in said)
    largest = max(each["delta_over_weight"] for name, each in tensors.items() if ".layers." in name)
    assert f"the largest change is {largest:.2%} of" in str(drawn)
    if experts:
        down = [
            max(
                each["delta_over_weight"]
                for name, each in tensors.items()
                if f"layers.{n}.mlp" in name and "down_proj" in name
            )
            for n in (0, 1)
        ]
        assert any(told("down_proj", down) in each for each in said)
    else:
        assert f"lm_head {tensors['lm_head.weight']['delta_over_weight']:.2%}" in str(drawn)
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
    dashes = [dash for _, dash in LINES]
    assert len(set(dashes)) == len(dashes)


def test_text_and_axes_read_on_any_page_and_no_image_runs_anything(logged: Write) -> None:
    assert all(contrast(INK, page) >= 4.5 for page in ("#ffffff", "#000000"))
    drawn = figures.curves(logged([{"step": n, "loss": 2.0 / n, "eval_loss": 1.0} for n in (1, 2)]))
    for image in images(drawn).values():
        assert f"color:{INK}" in image.get("style", "")
        assert all(each.get("fill") == "currentColor" for each in image.iter(f"{SVG}text"))
        assert not list(image.iter(f"{SVG}script"))
    assert re.search(r'<img alt="loss by step; loss from 2 to 1', str(drawn))


def test_a_figure_loads_no_matplotlib_and_no_torch(logged: Write) -> None:
    run = logged([{"step": n, "loss": 2.0} for n in (1, 2)])
    write_json(run / "status.json", {"state": "finished", "time": 0.0})
    code = f"""
import sys, cogumi
cogumi.attach({str(run)!r}).report()
from cogumi.notebook import figures
figures.curves({str(run)!r})
assert not {{"matplotlib", "torch"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
