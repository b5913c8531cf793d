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
from cogumi.core.run_directory import append_jsonl, json_line, read_json, write_atomic, write_json
from cogumi.notebook import figures
from cogumi.notebook.figures import COLOURS, INK, LEVELS, LINES, MAX_BINS, PLOTS, Curves, format_number
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
    matches = re.findall(r'<img alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]+)"', piece._repr_html_())
    return {unescape(alt): ElementTree.fromstring(b64decode(data)) for alt, data in matches}


def heights(image: ElementTree.Element) -> list[list[float]]:
    """The points of each line, from 0 at the bottom of the plot to 1 at its top."""
    drawn = [each.get("points", "").split() for each in image.iter(f"{SVG}polyline")]
    return [[(122 - float(point.split(",")[1])) / 92 for point in points] for points in drawn]


# ------------------------------------------------------------------------------- curves, against numpy over all rows


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(map(json_line, rows)))
    return path


def losses(count: int, first: int = 1) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [{"step": n, "time": float(n), "loss": float(random.normal())} for n in range(first, first + count)]


def test_a_spike_of_one_step_stays_and_means_are_those_of_all_rows(tmp_path: Path) -> None:
    rows = losses(20_000)
    rows[12_345]["loss"] = 99.0
    curves = Curves(written(tmp_path / "metrics.jsonl", rows))
    assert curves.read()
    assert curves.rows == 20_000
    loss, values = curves.of["loss"], np.array([row["loss"] for row in rows])
    assert len(loss.mean) <= MAX_BINS < 2 * len(loss.mean)
    first, last, count = loss.bins[0], loss.bins[1], loss.bins[5]
    assert count.sum() == 20_000
    assert (first[0], last[-1]) == (1, 20_000)
    for place in (0, 7, len(first) - 1, int(np.argmax(loss.high))):
        of_bin = values[int(first[place]) - 1 : int(last[place])]
        actual = loss.low[place], loss.mean[place], loss.high[place]
        np.testing.assert_allclose(actual, (of_bin.min(), of_bin.mean(), of_bin.max()), rtol=1e-12)
    assert loss.high.max() == 99.0
    assert first[np.argmax(loss.high)] <= 12_346 <= last[np.argmax(loss.high)]


def test_what_is_read_bit_by_bit_is_what_is_read_at_once(tmp_path: Path) -> None:
    rows, path = losses(3000), tmp_path / "metrics.jsonl"
    bit_by_bit = Curves(path)
    assert not bit_by_bit.read()  # there is no file yet
    for begin in range(0, 3000, 100):
        with path.open("a") as file:
            file.writelines(map(json_line, rows[begin : begin + 100]))
        assert bit_by_bit.read()
    assert not bit_by_bit.read()
    at_once = Curves(path)
    at_once.read()
    np.testing.assert_allclose(bit_by_bit.of["loss"].bins, at_once.of["loss"].bins, rtol=1e-12)


def test_what_is_not_finite_is_kept_apart_and_null_is_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.5, "reward": None}, {"step": 2, "loss": 1.5}])
    for step, value in ((3, float("nan")), (4, float("inf")), (5, 0.5), (6, -float("inf"))):
        append_jsonl(path, {"step": step, "loss": value, "grad_norm": 1e-7, "extra": [1, {"deep": "text"}]})
    curves = Curves(path)
    curves.read()
    assert curves.of["loss"].broken == [3, 4, 6]
    assert curves.of["loss"].mean.tolist() == [2.5, 1.5, 0.5]
    np.testing.assert_allclose(curves.of["grad_norm"].mean, [1e-7] * 4, rtol=1e-9)
    assert not curves.of["reward"]
    assert [plot.title for plot, _ in curves.plots()] == ["loss", "gradient norm"]


def test_a_line_without_its_end_waits_for_it(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", losses(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    curves = Curves(path)
    curves.read()
    assert curves.rows == 2
    with path.open("ab") as file:
        file.write(whole[-10:])
    curves.read()
    assert curves.rows == 3


@pytest.mark.parametrize("replace", [True, False], ids=["another file", "cut"])
def test_a_run_that_goes_on_from_an_earlier_step_is_read_anew(replace: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", losses(50))
    curves = Curves(path)
    curves.read()
    fewer = "".join(map(json_line, losses(20)))
    if replace:
        write_atomic(path, fewer)
    else:
        path.write_text(fewer)
    curves.read()
    assert curves.rows == 20
    assert curves.of["loss"].bins[1].max() == 20


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
def test_a_million_lines_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    keys = ("loss", "grad_norm", "learning_rate", "perf/tokens_per_second", "entropy")
    with path.open("w") as file:
        for begin in range(0, 1_000_000, 10_000):
            rows = ({"step": n, **dict.fromkeys(keys, n % 7)} for n in range(begin + 1, begin + 10_001))
            file.write("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "status.json").write_text(json.dumps({"state": "finished", "time": 0.0}))
    looks = (
        "import re, sys; from pathlib import Path\n"
        "from cogumi.notebook.panel import RunSnapshot, render_plots\n"
        "looker = RunSnapshot(Path(sys.argv[1])); look = looker.look()\n"
        "drawn = render_plots(look)\n"
        "rows = sum(curve.bins[5].sum() for plot, curves in look.curves.plots() for curve in curves.values())\n"
        "kilobytes = re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]\n"  # the most it ever held
        "print(int(rows), len(drawn), int(kilobytes) * 1024, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", looks, str(tmp_path)], capture_output=True, text=True, check=True)
    rows, drawn, memory, torch = done.stdout.split()
    assert int(rows) == 5_000_000
    assert 20_000 < int(drawn) < 200_000  # characters that go to the browser
    assert int(memory) < 200e6, memory
    assert torch == "False"


def test_curves_are_what_was_logged(logged: Write) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "eval_loss": 4.5}]
    rows += [{"step": n, "loss": 5.0 - 0.1 * n, "grad_norm": 1.0, "learning_rate": 1e-4 * n} for n in range(1, 11)]
    drawn = figures.curves(logged(rows))
    actual = images(drawn)
    assert [words.partition(" by step")[0] for words in actual] == ["loss", "learning rate"]
    assert "the same at every step: gradient norm 1" in str(drawn)
    loss = actual["loss by step; loss from 4.9 to 4, between 4 and 4.9; eval_loss from 4.5 to 4.5, between 4.5 and 4.5"]
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
    words = re.sub("<[^>]*>", "", str(drawn))
    assert "⚑1 red at step 12: gradient norm" in words
    assert "⚑2 yellow at step 38: loss noise" in words
    assert "memory" not in words


def test_a_run_of_nothing_but_nan_is_drawn(logged: Write) -> None:
    actual = images(figures.curves(logged([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("inf")}])))
    assert list(actual) == ["loss by step; loss not finite at 2 steps, the first is 1"]


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
