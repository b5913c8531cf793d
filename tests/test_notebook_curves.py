"""Curves against numpy over all rows: what is in bins, what is read on, what a million lines hold of the memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cogumi.core.run_directory import append_jsonl, json_line, write_atomic
from cogumi.notebook.figures import MAX_BINS, PLOTS, Curves


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
        found = loss.low[place], loss.mean[place], loss.high[place]
        np.testing.assert_allclose(found, (of_bin.min(), of_bin.mean(), of_bin.max()), rtol=1e-12)
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
