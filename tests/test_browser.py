"""The panel as a person sees it: a real JupyterLab, a real Chromium, a real run that trains meanwhile."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
import yaml

import cogumi
from cogumi.checkpoints.verify import inspect
from cogumi.core.run_directory import is_running, write_json
from cogumi.notebook import html_components, panel
from cogumi.notebook.panel import write_report
from tests.lab import chromium, command, lab, open_notebook, page, write_notebook

STEPS = 4000  # more than it is given time for


@pytest.fixture
def config(tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run that would take minutes; whatever is left of it is ended."""
    chromium()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    values: dict[str, Any] = {
        "model": {"name": str(tiny_model)},
        "lora": {"r": 4},
        "data": {"source": str(code_parquet), "eval_rows": 8, "fim": {"max_length": 160, "middle_chars": [8, 32]}},
        "train": {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1,
                  "gradient_checkpointing": False, "save_steps": 1000},
        "cogumi": {"method": "sft", "run_dir": "run", "merge": False, "compile": "off", "samples_every": 20,
                   "price_per_hour": 2.5},
    }  # fmt: skip
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
        shown.locator(".cogumi-panel svg[role=img]").first.wait_for()
        run = cogumi.attach(tmp_path / "run")

        first = step_shown(shown)
        wait_for_step(shown, first + 5)  # it is drawn anew while the run trains, and no cell runs
        titles = shown.locator(".cogumi-panel svg").evaluate_all(
            "all => all.map(each => each.getAttribute('aria-label'))"
        )
        assert [title.split(" by step")[0] for title in titles] == [
            "loss",
            "gradient norm",
            "entropy",
            "learning rate",
            "speed",
        ]

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
        shown.locator(".cogumi-panel svg").first.wait_for()
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
        shown.locator(".cogumi-panel svg[role=img]").first.wait_for()
        shown.locator(
            ".jp-OutputArea progress, .jp-OutputArea .widget-hprogress"
        ).last.wait_for()  # the bar of `wait()`
        wait_for_step(shown, step_shown(shown) + 5)
        run = cogumi.attach(tmp_path / "run")
        command(shown, "kernelmenu:interrupt")
        shown.get_by_text("KeyboardInterrupt").first.wait_for()
        assert run.status().alive
        reload(shown)
        shown.locator(".cogumi-panel svg").first.wait_for()
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
def test_another_kernel_attaches_to_what_the_first_one_started(config: Path, tmp_path: Path) -> None:
    run = cogumi.start(config, cogumi__run_dir=str(tmp_path / "run"))
    write_notebook(tmp_path / "attach.ipynb", ["import cogumi\ncogumi.attach('run').dashboard()"])
    with lab(tmp_path, "dark") as address, page("dark") as (shown, wrong):
        open_notebook(shown, address, "attach.ipynb")
        command(shown, "notebook:run-all-cells")
        wait_for_step(shown, 3)
        command(shown, "kernelmenu:restart-and-clear")
        shown.locator(".jp-Dialog .jp-mod-accept").click()
        shown.locator(".cogumi-panel").wait_for(state="detached")
        shown.get_by_text("| Idle").wait_for()
        assert run.status().alive
        command(shown, "notebook:run-all-cells")
        wait_for_step(shown, 5)
        colours = shown.locator(".cogumi-panel").evaluate(
            "panel => [getComputedStyle(panel.querySelector('.cogumi-piece')).color, "
            "getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor]"
        )
        text, ground = (tuple(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert min(text) > 180 > 60 > max(ground)  # light letters on a dark page
        assert wrong == []
    run.stop()


@pytest.mark.slow("a JupyterLab of its own; one page is in the fast tier")
@pytest.mark.timeout(300)
def test_a_config_is_changed_in_the_form_and_written(config: Path, tmp_path: Path) -> None:
    write_notebook(tmp_path / "form.ipynb", ["import cogumi\ncogumi.configure('long.yaml', save_as='mine.yaml')"])
    with lab(tmp_path) as address, page() as (shown, wrong):
        open_notebook(shown, address, "form.ipynb")
        command(shown, "notebook:run-all-cells")
        form = shown.locator(".cogumi-form").first
        steps = form.get_by_label("train.max_steps")
        for entered, note in (("many", "problem: train.max_steps"), ("7", "is a config for sft")):
            steps.fill(entered)
            steps.press("Enter")
            shown.get_by_text(note).first.wait_for()
        form.get_by_role("button", name="write", exact=True).click()
        shown.get_by_text("cogumi.start('mine.yaml')").first.wait_for()
        assert wrong == []
    before = yaml.safe_load(config.read_text())
    expected = before | {"train": before["train"] | {"max_steps": 7}}
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text()) == expected


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


def test_a_long_sample_is_cut_between_two_lines() -> None:
    sample = html_components.wrap_piece(panel.render_excerpt("<fim_middle>\n" * 30))
    with page() as (shown, wrong):
        shown.set_content(html_components.add_style(sample))
        seen, whole, line = shown.locator("pre").evaluate(
            "pre => [pre.clientHeight, pre.scrollHeight, parseFloat(getComputedStyle(pre).lineHeight)]"
        )
        assert whole == 30 * line
        assert seen < whole
        assert seen % line == 0
        assert wrong == []


def test_on_a_phone_the_report_is_as_wide_as_the_page_and_the_key_to_change_is_on_it(tmp_path: Path) -> None:
    flag = {
        "evidence": "loss 9.1 at step 3, 2.1 at its least",
        "cause": "the learning rate is too high",
    }
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
def test_saved_outputs_read_alike_where_the_notebook_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cogumi.methods.preview import Preview, Shares

    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "nobody"))  # whose notebooks are trusted is kept there
    shares = Shares("rows", 9, 8, {"too long": 1}, 0, 0, 90, 30)
    pieces = (("context", "def f():"), ("learned", "return 1"), ("rejected", "return 2"))
    actual = Preview(shares, None, (), ((0, 4, 3), (5, 9, 5)), (pieces,), 12)
    outputs = [nbformat.v4.new_output("display_data", data={"text/html": html_components.render_html(actual)})]
    write_notebook(tmp_path / "saved.ipynb", ["found"])
    saved = nbformat.read(tmp_path / "saved.ipynb", as_version=4)
    saved.cells[0].outputs = outputs
    nbformat.write(saved, tmp_path / "saved.ipynb")
    assert "<img" in html_components.preview(actual)
    with lab(tmp_path) as address, page() as (shown, wrong):
        open_notebook(shown, address, "saved.ipynb")
        shown.locator(".cogumi-piece .learned").first.wait_for()
        assert (
            shown.evaluate("document.querySelectorAll('.jp-OutputArea-output style, .jp-OutputArea-output svg').length")
            == 0
        )
        drawn = shown.locator(".cogumi-piece img")
        assert drawn.evaluate("image => image.naturalWidth > 0 && image.alt.includes('lengths of the examples')")
        assert "max_length" not in shown.locator(".cogumi-piece .plots").inner_text()  # no words of a picture astray

        def looks(selector: str, *names: str) -> list[str]:
            return shown.locator(selector).first.evaluate(
                "(element, names) => names.map(name => getComputedStyle(element)[name])", names
            )

        assert looks(".cogumi-piece pre .learned", "borderBottomStyle") == ["solid"]
        assert looks(".cogumi-piece pre .rejected", "borderBottomStyle") == ["double"]
        assert looks(".cogumi-piece tbody th", "textAlign") == ["left"]
        assert looks(".cogumi-piece td.n", "textAlign") == ["right"]
        assert looks(".cogumi-piece .legend", "display") == ["flex"]
        assert wrong == []
