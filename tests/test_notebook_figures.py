"""Figures hold the numbers they are of, read on light and dark, and tell nothing by colour alone."""

import json
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from builders import EXPERTS, FUSED, LINEARS, SIZES, save_base, train_adapter

import cogumi
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import json_line, read_json, write_json
from cogumi.notebook import figures
from cogumi.notebook.figures import COLOURS, INK, LEVELS, LINES, MAX_BINS, PLOTS, format_number, read_curves
from cogumi.notebook.html_components import render_html

Write = Callable[..., Path]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def logged(tmp_path: Path) -> Write:
    """A run directory with these rows in metrics.jsonl, or another file."""

    def write(rows: list[dict[str, Any]], name: str = "metrics.jsonl") -> Path:
        (tmp_path / name).write_text("".join(map(json_line, rows)))
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
    return " | ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))


def images(html: str) -> dict[str, ElementTree.Element]:
    """The text alternative of each image, and its SVG."""
    matches = re.findall(r'<img alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]+)"', html)
    return {unescape(alt): ElementTree.fromstring(b64decode(data)) for alt, data in matches}


def heights(image: ElementTree.Element) -> list[list[float]]:
    """The points of each line, from 0 at the bottom of the plot to 1 at its top."""
    drawn = [line.get("points", "").split() for line in image.iter(f"{SVG}polyline")]
    return [[(122 - float(point.split(",")[1])) / 92 for point in points] for points in drawn]


# ----------------------------------------------------------------------------------------------- curves, against numpy


def test_a_spike_of_one_step_stays_and_means_are_those_of_all_rows(logged: Write) -> None:
    random = np.random.default_rng(0)
    rows = [{"step": n, "time": float(n), "loss": float(random.normal())} for n in range(1, 20_001)]
    rows[12_345]["loss"] = 99.0
    loss = read_curves(logged(rows) / "metrics.jsonl")["loss"]
    width = 67  # 300 bins of 20,000 steps
    assert len(loss.x) == 299 <= MAX_BINS
    values = np.array([np.nan, *(row["loss"] for row in rows)])
    for place in (0, 7, 298, int(np.argmax(loss.high))):
        steps = np.arange(20_001)[place * width : (place + 1) * width]
        of_bin = values[steps][~np.isnan(values[steps])]
        assert loss.x[place] == pytest.approx(steps[steps > 0].mean())
        actual = loss.low[place], loss.mean[place], loss.high[place]
        np.testing.assert_allclose(actual, (of_bin.min(), of_bin.mean(), of_bin.max()), rtol=1e-5, atol=1e-6)
    assert loss.high.max() == 99.0
    assert int(loss.x[np.argmax(loss.high)]) // width == 12_346 // width


def test_what_is_not_finite_is_kept_apart_and_null_is_nothing(logged: Write) -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "loss": 2.5, "reward": None}, {"step": 2, "loss": 1.5}]
    for step, value in ((3, float("nan")), (4, float("inf")), (5, 0.5), (6, -float("inf"))):
        rows.append({"step": step, "loss": value, "grad_norm": 1e-7, "extra": [1, {"deep": "text"}]})
    curves = read_curves(logged(rows) / "metrics.jsonl")
    assert set(curves) == {"loss", "grad_norm"}
    assert curves["loss"].broken == [3, 4, 6]
    assert curves["loss"].mean.tolist() == [2.5, 1.5, 0.5]
    np.testing.assert_allclose(curves["grad_norm"].mean, [1e-7] * 4, rtol=1e-6)


def test_a_line_without_its_end_waits_for_it(logged: Write) -> None:
    path = logged([{"step": n, "loss": 2.0} for n in (1, 2, 3)]) / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert read_curves(path)["loss"].x.tolist() == [1, 2]
    path.write_text('{"step": 1, "lo')
    assert read_curves(path) == {}
    assert read_curves(path.with_name("none.jsonl")) == {}


def test_every_plot_is_of_names_that_are_logged() -> None:
    """As TRL 1.15 and cogumi spell them: a metric that was renamed upstream would leave its plot empty."""
    import trl.trainer.dpo_trainer as dpo
    import trl.trainer.grpo_trainer as grpo

    sources = "".join(Path(str(each.__file__)).read_text() for each in (grpo, dpo))
    ours = Path("cogumi")
    sources += "".join((ours / name).read_text() for name in ("rl/watch.py", "telemetry/recorder.py"))
    by_transformers = {"loss", "eval_loss", "grad_norm", "learning_rate"}
    for plot in PLOTS:
        for key in set(plot.keys) - by_transformers:
            name = key.removeprefix("policy/") if key.startswith("policy/") else key
            assert f'"{name}"' in sources, key


@pytest.mark.timeout(120)
def test_a_million_lines_stay_small_and_load_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    keys = ("loss", "grad_norm", "learning_rate", "perf/tokens_per_second", "entropy")
    with path.open("w") as file:
        for begin in range(0, 1_000_000, 10_000):
            rows = ({"step": n, **dict.fromkeys(keys, n % 7)} for n in range(begin + 1, begin + 10_001))
            file.write("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "status.json").write_text(json.dumps({"state": "finished", "time": 0.0}))
    looks = (
        "import re, sys; from pathlib import Path\n"
        "from cogumi.notebook.panel import render_plots, take_snapshot\n"
        "drawn = render_plots(take_snapshot(Path(sys.argv[1])))\n"
        "kilobytes = re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]\n"  # the most it ever held
        "from cogumi.notebook import figures\n"
        "figures.curves(sys.argv[1])\n"
        "print(drawn.count('<img'), len(drawn), int(kilobytes) * 1024, {'torch', 'matplotlib'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", looks, str(tmp_path)], capture_output=True, text=True, check=True)
    plots, drawn, memory, loaded = done.stdout.split()
    assert plots == "5"
    assert 20_000 < int(drawn) < 200_000  # characters that go to the browser
    assert int(memory) < 200e6, memory
    assert loaded == "set()"


def test_curves_are_what_was_logged(logged: Write) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "eval_loss": 4.5}]
    rows += [{"step": n, "loss": 5.0 - 0.1 * n, "grad_norm": 1.0, "learning_rate": 1e-4 * n} for n in range(1, 11)]
    actual = images(figures.curves(logged(rows)))
    assert [words.partition(" by step")[0] for words in actual] == ["loss", "gradient norm", "learning rate"]
    loss = actual["loss by step; loss from 4.9 to 4, between 4 and 4.9; eval_loss from 4.5 to 4.5, between 4.5 and 4.5"]
    np.testing.assert_allclose(heights(loss)[0], np.linspace(1, 0, 10), atol=0.01)
    assert len(list(loss.iter(f"{SVG}circle"))) == 1  # the one eval_loss


def test_flags_are_lines_at_their_step_with_their_names(logged: Write) -> None:
    run = logged([{"step": n, "loss": 2.0 - n / 40, "grad_norm": float(n)} for n in range(1, 41)])
    flag = {"evidence": "", "cause": "", "knob": ""}
    levels = {"gradient norm": "red", "loss noise": "yellow", "memory": "green"}
    flags = [{"name": name, "level": level, **flag} for name, level in levels.items()]
    write_json(run / "flags.json", {"step": 38, "flags": flags, "was_red": [{"step": 12, **flags[0]}]})
    drawn = figures.curves(run)
    for image in images(drawn).values():
        lines = {path.get("stroke") for path in image.iter(f"{SVG}path") if path.get("stroke-dasharray") == "3 2"}
        assert lines == {LEVELS["red"], LEVELS["yellow"]}
    words = re.sub("<[^>]*>", "", drawn)
    assert "⚑1 red at step 12: gradient norm" in words
    assert "⚑2 yellow at step 38: loss noise" in words
    assert "memory" not in words


def test_a_run_of_nothing_but_nan_is_drawn(logged: Write) -> None:
    drawn = images(figures.curves(logged([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("inf")}])))
    assert list(drawn) == ["loss by step; loss not finite at 2 steps, the first is 1"]


@pytest.mark.parametrize(("value", "axis"), [(0.0, ["1", "0"]), (2.0, ["3", "1"]), (-2.0, ["-1", "-3"])])
def test_the_plot_of_one_step_has_one_tick_and_an_axis_about_its_value(
    value: float, axis: list[str], logged: Write
) -> None:
    ((_, image),) = images(figures.curves(logged([{"step": 7, "learning_rate": value}]))).items()
    words = [text.text for text in image.iter(f"{SVG}text")]
    assert words == [*axis, "step 7", "learning rate", format_number(value)]


def test_numbers_are_short() -> None:
    expected = {
        1.23e30: "1.2e+30",
        2.5e6: "2.5M",
        12_345.6: "12,346",
        0.000123: "0.000123",
        -7.456e-5: "-7.5e-05",
        0: "0",
    }
    assert {value: format_number(value) for value in expected} == expected


# ------------------------------------------------------------------------------------------------- rewards and lengths


def test_rewards_are_those_of_the_completions(logged: Write) -> None:
    rng = np.random.default_rng(1)
    rows = [{"step": n, "reward": rng.uniform(0, n / 16, 32).tolist()} for n in range(1, 17)]
    drawn = figures.rewards(logged(rows, "rollouts.jsonl"))
    early = np.concatenate([row["reward"] for row in rows[:4]])
    late = np.concatenate([row["reward"] for row in rows[12:]])
    edges = np.histogram_bin_edges(np.concatenate([row["reward"] for row in rows]), bins=20)
    shares = [np.histogram(part, edges)[0] / len(part) for part in (early, late)]
    ((words, image),) = images(drawn).items()
    assert words.startswith("distribution by reward; first quarter from 0 to 0, between 0 and ")
    drawn_shares = [line[1:-1:2] for line in heights(image)]
    np.testing.assert_allclose(drawn_shares, np.array(shares) / max(map(max, shares)), atol=0.01)
    caption = f"mean reward {early.mean():.3g} in the first quarter of the steps, {late.mean():.3g} in the last"
    assert caption in drawn
    strokes = [line.get("stroke-dasharray") for line in image.iter(f"{SVG}polyline")]
    assert len(set(strokes)) == 2


@pytest.mark.parametrize(
    ("rewards", "words"),
    [([0.5, float("nan"), 2.0], "1 values not finite are left out"), ([0.0, 0.0], "mean reward 0 ")],
)
def test_odd_rewards_of_one_step_are_drawn(rewards: list[float], words: str, logged: Write) -> None:
    drawn = figures.rewards(logged([{"step": 3, "reward": rewards}], "rollouts.jsonl"))
    assert words in drawn
    assert images(drawn)


def test_lengths_are_the_examples() -> None:
    drawn = figures.lengths([(0, 9, 3), (10, 19, 20), (20, 29, 5)], 24)
    ((words, image),) = images(drawn).items()
    assert words == "lengths of the examples by tokens; examples from 0 to 0, between 0 and 20"
    np.testing.assert_allclose(heights(image)[0], np.array([0, 3, 3, 20, 20, 5, 5, 0]) / 20, atol=0.01)
    assert "28 examples, most of 10 to 19 tokens; ⚑1 is max_length 24" in drawn


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (figures.curves, "nothing is logged there yet"),
        (figures.rewards, r"rollouts\.jsonl"),
        (figures.delta_by_layer, r"no cogumi-merge\.json there"),
        (lambda _: figures.lengths([]), "no lengths"),
    ],
)
def test_what_there_is_nothing_of_is_refused(draw: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        draw(tmp_path)


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
    ratios = {name: tensor["delta_over_weight"] for name, tensor in tensors.items()}
    alternatives = list(images(drawn))
    assert len(alternatives) == 2  # attention and the rest

    def check_told(kind: str, values: list[float]) -> None:
        words = f"{kind} from {format_number(values[0])} to {format_number(values[-1])}, between"
        assert any(words in alternative for alternative in alternatives)

    check_told("q_proj", [ratios[f"model.layers.{n}.self_attn.q_proj.weight"] for n in (0, 1)])
    if experts:
        downs = [
            [ratio for name, ratio in ratios.items() if f"layers.{n}.mlp" in name and "down_proj" in name]
            for n in (0, 1)
        ]
        check_told("down_proj", [max(layer) for layer in downs])
    largest = max(ratios, key=ratios.__getitem__)
    assert f"the largest change is {ratios[largest]:.2%} of {largest.removesuffix('.weight')}" in drawn
    html = render_html(report)
    assert f"{report.elements:,} elements read back" in html
    assert "largest change" in html


# --------------------------------------------------------------------------------------------------------------- colours


def test_every_colour_reads_on_white_and_on_black() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # as WCAG's own example has it
    drawn = {*COLOURS} - {INK} | set(LEVELS.values())
    assert len(drawn) == 5
    for page in ("#ffffff", "#111111"):
        assert all(contrast(colour, page) >= 3 for colour in drawn)
    assert all(contrast(INK, page) >= 4.5 for page in ("#ffffff", "#000000"))
    dashes = [dash for _, dash in LINES]
    assert len(set(dashes)) == len(dashes)  # no two lines differ by colour alone
