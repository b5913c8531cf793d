"""The panel as a person sees it: a real JupyterLab, a real Chromium, a real run that trains meanwhile."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
import yaml
from builders import run_config

import cogumi
from cogumi.checkpoints.verify import inspect
from cogumi.core.run_directory import is_running, write_json
from cogumi.notebook import html_components
from cogumi.notebook.panel import write_report
from tests.lab import chromium, command, lab, open_notebook, page, write_notebook

STEPS = 4000  # more than it is given time for


@pytest.fixture
def config(tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run that would take minutes; whatever is left of it is ended."""
    chromium()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    values = run_config(
        "sft", tiny_model, code_parquet, "run",
        data_section={"eval_rows": 8, "fim": {"max_length": 160, "middle_chars": [8, 32]}},
        train={"max_steps": STEPS, "learning_rate": 1e-3, "save_steps": 1000},
        cogumi={"compile": "off", "samples_every": 20, "price_per_hour": 2.5},
    )  # fmt: skip
    path = tmp_path / "long.yaml"
    path.write_text(yaml.safe_dump(values))
    yield path
    if (tmp_path / "run").exists():
        status = cogumi.attach(tmp_path / "run").status()
        if is_running(status.process):
            psutil.Process(status.pid).kill()


def step_shown(shown: Any) -> int:
    match = re.search(r"step (\d+)/", shown.locator(".cogumi-panel").inner_text())
    return int(match[1]) if match else 0


def wait_for_step(shown: Any, step: int) -> None:
    shown.wait_for_function(
        "least => Number((document.querySelector('.cogumi-panel')?.innerText.match(/step (\\d+)\\//) || [])[1]) >= least",
        arg=step,
    )


@pytest.mark.timeout(400)
def test_the_panel_follows_a_run_survives_a_reload_and_stops_it_with_a_checkpoint(config: Path, tmp_path: Path) -> None:
    write_notebook(tmp_path / "watch.ipynb", ["import cogumi\nrun = cogumi.start('long.yaml')", "run.dashboard()"])
    with lab(tmp_path) as address, page() as (shown, wrong):
        open_notebook(shown, address, "watch.ipynb")
        command(shown, "notebook:run-all-cells")
        shown.locator(".cogumi-panel .plots img").first.wait_for()
        run = cogumi.attach(tmp_path / "run")

        first = step_shown(shown)
        wait_for_step(shown, first + 5)  # it is drawn anew while the run trains, and no cell runs
        titles = shown.locator(".cogumi-panel .plots img").evaluate_all("all => all.map(each => each.alt)")
        plots = [title.split(" by step")[0] for title in titles]
        assert plots == ["loss", "gradient norm", "entropy", "learning rate", "speed"]

        shown.get_by_role("button", name="Checkpoint now").click()
        shown.get_by_text("verified when it was saved").first.wait_for()
        assert inspect(next((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))).state == "verified"

        shown.get_by_role("button", name=re.compile("Pause")).click()
        unpause = shown.get_by_role("button", name="Unpause")
        unpause.wait_for()
        assert run.status().state == "paused"
        unpause.click()
        shown.get_by_role("button", name=re.compile("Pause")).wait_for()

        reload(shown)
        # The same panel of the same kernel, without a cell run again.
        shown.locator(".cogumi-panel .plots img").first.wait_for()
        wait_for_step(shown, step_shown(shown) + 5)

        shown.get_by_role("button", name="Stop").click()
        shown.get_by_text("the run has ended").wait_for()
        ended = run.status()
        assert ended.state == "stopped", ended
        assert ended.checkpoint == f"checkpoint-{ended.step}"
        saved = cogumi.last_good_checkpoint(tmp_path / "run" / "checkpoints")
        assert saved is not None
        assert saved.name == ended.checkpoint
        assert all(shown.get_by_role("button", name=name).is_disabled() for name in ("Stop", "Checkpoint now", "Pause"))
        assert wrong == []


@pytest.mark.slow("a JupyterLab of its own; one page is in the fast tier")
@pytest.mark.timeout(400)
def test_the_panel_draws_while_a_cell_waits_and_stops_the_run_after_an_interrupt(config: Path, tmp_path: Path) -> None:
    cells = ["import cogumi\nrun = cogumi.start('long.yaml')\nrun.dashboard()", "run.wait()"]
    write_notebook(tmp_path / "wait.ipynb", cells)
    with lab(tmp_path) as address, page() as (shown, _):
        open_notebook(shown, address, "wait.ipynb")
        command(shown, "notebook:run-all-cells")
        shown.locator(".cogumi-panel .plots img").first.wait_for()
        shown.locator(
            ".jp-OutputArea progress, .jp-OutputArea .widget-hprogress"
        ).last.wait_for()  # the bar of `wait()`
        wait_for_step(shown, step_shown(shown) + 5)
        run = cogumi.attach(tmp_path / "run")
        command(shown, "kernelmenu:interrupt")
        shown.get_by_text("KeyboardInterrupt").first.wait_for()
        assert run.status().alive
        reload(shown)
        shown.locator(".cogumi-panel .plots img").first.wait_for()
        shown.get_by_role("button", name="Stop").click()
        shown.get_by_text("the run has ended").wait_for()
        assert run.status().state == "stopped"


def reload(shown: Any) -> None:
    """Reload the page, its notebook saved."""
    command(shown, "docmanager:save")
    shown.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    shown.reload()


@pytest.mark.slow("a JupyterLab of its own; one page is in the fast tier")
@pytest.mark.timeout(300)
def test_a_message_is_typed_and_both_models_answer_side_by_side(tmp_path: Path) -> None:
    cogumi.train("smoke/chat-sft", train__max_steps=2, cogumi__run_dir=tmp_path / "run")
    write_notebook(tmp_path / "chat.ipynb", ["import cogumi\ncogumi.attach('run').chat(max_new_tokens=16)"])
    with lab(tmp_path) as address, page() as (shown, wrong):
        open_notebook(shown, address, "chat.ipynb")
        command(shown, "notebook:run-all-cells")
        box = shown.locator(".cogumi-panel")
        typed = box.get_by_placeholder("a message")
        for said in ("Rename n to count:\nn = n + 1", "<b>and now n to total</b>"):
            typed.fill(said)
            box.get_by_role("button", name="Send").click()
            row = box.locator("tr").filter(has_text=said.splitlines()[0])
            row.wait_for()  # from here on the button is disabled until all have answered
            box.get_by_role("button", name="Send", disabled=False).wait_for()
            cells = row.locator("td, th").all_inner_texts()
            assert cells[0] == said  # as it was typed, markup and all
            assert all(cells[1:])
        assert box.locator("tr").first.locator("th").all_inner_texts() == ["message", "base", "merged"]
        assert wrong == []


def test_on_a_phone_the_report_is_as_wide_as_the_page_and_the_key_to_change_is_on_it(tmp_path: Path) -> None:
    flag = {"evidence": "loss 9.1 at step 3, 2.1 at its least", "cause": "the learning rate is too high"}
    red = {"name": "loss trend", "level": "red", **flag, "knob": "train.learning_rate, train.max_grad_norm"}
    write_json(tmp_path / "flags.json", {"step": 4, "flags": [red], "was_red": []})
    write_json(tmp_path / "status.json", {"state": "finished", "time": 0.0})
    (tmp_path / "run.log").write_text(f"2026-11-22 18:39:13,856 INFO patched {'one.long.name' * 9}\n")
    path = write_report(tmp_path)
    for width in (390, 1200):
        with page(width=width) as (shown, wrong):
            shown.goto(path.as_uri())
            assert shown.evaluate("document.documentElement.scrollWidth") == width
            knob = shown.get_by_text("train.max_grad_norm").bounding_box()
            assert knob["x"] + knob["width"] <= width
            assert wrong == []


@pytest.mark.slow("a JupyterLab of its own; one page is in the fast tier")
@pytest.mark.timeout(300)
def test_saved_outputs_are_read_where_the_notebook_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cogumi.methods.preview import Preview, Shares

    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "nobody"))  # whose notebooks are trusted is kept there
    pieces = (("context", "def f():"), ("learned", "return 1"), ("rejected", "return 2"))
    actual = Preview(Shares("rows", 9, 8, {}, 0, 0, 90, 30), None, (), ((0, 4, 3), (5, 9, 5)), (pieces,), 12)
    write_notebook(tmp_path / "saved.ipynb", ["found"])
    saved = nbformat.read(tmp_path / "saved.ipynb", as_version=4)
    data = {"text/html": html_components.render_html(actual)}
    saved.cells[0].outputs = [nbformat.v4.new_output("display_data", data=data)]
    nbformat.write(saved, tmp_path / "saved.ipynb")
    with lab(tmp_path) as address, page() as (shown, wrong):
        open_notebook(shown, address, "saved.ipynb")
        piece = shown.locator(".cogumi-piece")
        piece.locator("pre .learned").wait_for()
        drawn = piece.locator("img")
        assert drawn.evaluate("image => image.naturalWidth > 0 && image.alt.includes('lengths of the examples')")
        assert "border" not in shown.locator(".jp-OutputArea-output").inner_text()  # no words of the style sheet astray
        borders = piece.locator("pre span").evaluate_all(
            "all => all.map(each => getComputedStyle(each).borderBottomStyle)"
        )
        assert borders == ["none", "solid", "double"]
        assert wrong == []
