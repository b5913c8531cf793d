"""The panel of a run: what it shows of a directory, in a real kernel and where there is none."""

import json
import re
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

import cogumi
from cogumi.checkpoints.manifest import write_manifest
from cogumi.core.run_directory import append_jsonl, this_process, write_json
from cogumi.notebook import panel
from cogumi.notebook.figures import Curves, format_number, render_plots, render_svg
from cogumi.notebook.panel import RunPanel, RunSnapshot, write_report

EVIL = "</pre><script>alert(1)</script>"
FLAG = {"cause": "a rate too high", "knob": "train.learning_rate"}


def run_in(path: Path, state: str = "running", **more: Any) -> Path:
    """A run's directory as one of this process leaves it."""
    path.mkdir(exist_ok=True)
    now = time.time()
    write_json(path / "status.json", {"state": state, "stage": "train", "time": now, **this_process(), **more})
    beat = {"stage": "train", "step": 40, "steps": 100, "time": now, "eta_seconds": 90.0, "cost_so_far": 1.25}
    disk = {"free": 5e9, "total": 1e10}
    write_json(path / "heartbeat.json", {**beat, "cost_at_end": 3.5, "tokens_per_second": 4321.0, "disk": disk})
    for step in range(1, 41):
        append_jsonl(path / "metrics.jsonl", {"step": step, "time": now, "loss": 3 - step / 20, "grad_norm": 0.5})
    append_jsonl(path / "metrics.jsonl", {"step": 41, "time": now, "loss": float("nan")})
    flags = [{"name": "loss trend", "level": "red", "evidence": f"it climbs {EVIL}", **FLAG}]
    flags += [{"name": "entropy", "level": "green", "evidence": "0.4", **FLAG}]
    write_json(path / "flags.json", {"step": 40, "flags": flags, "was_red": [{"step": 20, **flags[0]}]})
    shown = [{"prompt": "x" * 500 + f"p{EVIL}", "completion": f"c{EVIL}", "reward": 0.25}]
    append_jsonl(path / "rollouts.jsonl", {"step": 37, "reward": [0.25], "rewards": {"a": [0.25]}, "shown": shown})
    write_json(path / "forecast.json", {"disks": {"fits": True, "lines": ["one checkpoint is 2.0 MB"]}})
    (path / "run.log").write_text("the last line of the log\n")
    return path


def html_of(path: Path) -> str:
    look = RunSnapshot(path).look()
    parts = (panel.render_head, panel.render_flags, panel.render_plots, panel.render_samples, panel.render_rest)
    return "".join(part(look) for part in parts)


def test_everything_that_is_asked_of_a_run_is_there_in_words(tmp_path: Path) -> None:
    shown = html_of(run_in(tmp_path / "run"))
    for word in ("running (train), step 4", "2 min to go", "4,321 tokens/s", "$1.25 so far", "$3.50 at the end",
                 "RED loss trend", "train.learning_rate", "1 of 2 flags are green", "red at step 20: loss trend",
                 "newest samples, step 37", "0.25", "5.0 GB free", "one checkpoint is 2.0 MB", "the last line of the log",
                 'aria-label="loss by step; loss from 2.95 to 1, between 1 and 2.95; loss not finite at 1 steps, the first is 41',
                 "not finite at step 41", "<title>red: loss trend</title>"):  # fmt: skip
        assert word in shown, word


def test_a_value_that_is_older_than_the_newest_says_its_step(tmp_path: Path) -> None:
    home = run_in(tmp_path / "run")
    append_jsonl(home / "metrics.jsonl", {"step": 42, "loss": 1.25, "eval_loss": 1.5})
    assert "loss 1.25 · eval_loss 1.5 · grad_norm 0.5 (step 40)" in html_of(home)


def test_nothing_that_a_model_writes_is_taken_for_html(tmp_path: Path) -> None:
    shown = html_of(run_in(tmp_path / "run"))
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;") == 4  # a flag, what was red, prompt, completion
    assert shown.count("x" * 360) == 1  # of a prompt its end
    assert "x" * 401 not in shown


def test_a_panel_draws_until_the_run_has_ended_and_its_buttons_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(panel, "WAIT_PER_WORK", 0.0)
    home = run_in(tmp_path / "run")
    shown = RunPanel(cogumi.attach(home))
    shown.thread.start()
    until(lambda: "step 4" in shown.head.value)
    assert not shown.stop.disabled
    shown.save.click()
    assert (home / "CHECKPOINT").exists()
    shown.pause.click()
    assert (home / "PAUSE").exists()
    run_in(home, "paused")
    (home / "PAUSE").unlink()
    (home / "PAUSED").touch()
    until(lambda: shown.pause.description == "Unpause")
    assert shown.save.disabled
    shown.pause.click()
    assert not (home / "PAUSED").exists()
    run_in(home, "finished")
    shown.thread.join(20)
    assert not shown.thread.is_alive()
    assert "the run has ended, and this is how it ended" in shown.said.value
    assert shown.stop.disabled and shown.save.disabled and shown.pause.disabled  # noqa: PT018
    shown.save.click()  # nothing that a dead run would find later
    assert "this run is not training" in shown.said.value


def test_what_a_button_asked_for_stands_until_the_run_has_done_it(tmp_path: Path) -> None:
    home = run_in(tmp_path / "run")
    shown = RunPanel(cogumi.attach(home))

    def said() -> str:
        shown.draw(shown.snapshot.look())
        return str(shown.said.value)

    def saved(step: int) -> None:
        place = home / "checkpoints" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        (place / "a").write_text("x")
        write_manifest(place, step)

    saved(30)
    assert said() == ""
    shown.save.click()
    assert "asked for a checkpoint" in said()  # the one that was there is no answer
    saved(41)
    assert said() == ""
    assert "checkpoint-41" in shown.rest.value
    shown.pause.click()
    assert "asked to save and wait" in said()
    (home / "PAUSE").rename(home / "PAUSED")
    run_in(home, "paused")
    assert said() == ""
    shown.pause.click()
    assert "asked to end the pause" in said()
    run_in(home, "running")
    assert said() == ""
    run_in(home, "finished")
    assert "the run has ended" in said()


def test_a_flag_that_comes_after_its_row_is_marked_and_a_refused_stop_can_be_tried_again(tmp_path: Path) -> None:
    home = run_in(tmp_path / "run")
    (home / "flags.json").rename(tmp_path / "flags.json")
    shown = RunPanel(cogumi.attach(home))
    shown.draw(shown.snapshot.look())
    assert "red: loss trend" not in shown.plots.value
    (tmp_path / "flags.json").rename(home / "flags.json")
    look = shown.snapshot.look()
    assert not look.changed
    shown.draw(look)
    assert "<title>red: loss trend</title>" in shown.plots.value
    write_json(
        home / "status.json", {"state": "running", "stage": "train", "time": time.time(), "pid": 1, "host": "far"}
    )
    shown.stop.click()  # its process is on another machine
    assert "stop it there" in shown.said.value
    shown.draw(shown.snapshot.look())
    assert not shown.stop.disabled


def test_a_checkpoint_that_is_cut_short_is_no_longer_called_verified(tmp_path: Path) -> None:
    home = run_in(tmp_path / "run")
    place = home / "checkpoints" / "checkpoint-3"
    place.mkdir(parents=True)
    (place / "optimizer.pt").write_bytes(b"0123456789")
    write_manifest(place, 3)
    looker = RunSnapshot(home)
    assert "verified when it was saved" in panel.render_rest(looker.look())
    (place / "optimizer.pt").write_bytes(b"01234")
    assert "rejected: optimizer.pt has 5 bytes, and 10 were saved" in panel.render_rest(looker.look())


def test_a_checkpoint_from_after_numbers_broke_is_told_apart(tmp_path: Path) -> None:
    path = run_in(tmp_path / "run", "finished, checks failed")
    for step in (10, 30):
        checkpoint = path / "checkpoints" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "a").write_text("x")
        write_manifest(checkpoint, step)
    assert "stopped being finite" not in html_of(path)
    red = {"name": "finite numbers", "level": "red", "evidence": "step 20: the loss is not finite", **FLAG}
    write_json(path / "flags.json", {"step": 40, "flags": [red], "was_red": [{"step": 20, **red}]})
    message = "saved after numbers stopped being finite (step 20): checkpoint-30"
    assert message in html_of(path)
    assert message in write_report(path).read_text()


def test_a_directory_that_goes_is_said_in_the_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel, "REFRESH_SECONDS", 0.05)
    home = run_in(tmp_path / "run")
    shown = RunPanel(cogumi.attach(home))
    shown.thread.start()
    until(lambda: "step 4" in shown.head.value)
    home.rename(tmp_path / "elsewhere")
    shown.pressed.set()
    shown.thread.join(20)
    assert "no run there" in shown.head.value
    assert "the last that was seen" in shown.head.value
    assert shown.stop.disabled


def without_widgets(notebook: Any) -> Any:
    """As it is saved where nobody keeps the state of widgets."""
    plain = nbformat.from_dict(json.loads(json.dumps(notebook)))
    del plain.metadata["widgets"]
    return plain


def until(happened: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_a_kernel_it_is_one_screen_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cogumi.attach(run_in(tmp_path / "run")).dashboard()
    printed = capsys.readouterr().out
    assert "running (train), step 4" in printed
    assert "red: loss trend" in printed
    assert "<div" not in printed


def test_what_a_curve_is_now_is_not_its_last_number_where_that_was_none(tmp_path: Path) -> None:
    shown = html_of(run_in(tmp_path / "run"))
    assert shown.count("not finite<") == 1  # the legend of the loss
    assert format_number(1.23e30) == "1.2e+30"
    assert (format_number(12_345.6), format_number(1234.5), format_number(0.000123)) == ("12.3k", "1,234", "0.000123")
    assert (format_number(-7.456e-5), format_number(0.0)) == ("-7.5e-05", "0")


def test_completions_that_show_nothing_are_told_in_words(tmp_path: Path) -> None:
    home = run_in(tmp_path / "run")
    shown = [{"prompt": "p", "completion": each, "reward": 0.0} for each in ("", " " * 64 + "\n\n", "\t\r")]
    append_jsonl(home / "rollouts.jsonl", {"step": 41, "reward": [0.0] * 3, "rewards": {}, "shown": shown})
    html = html_of(home)
    for words in ("(nothing)", "(only white space, of length 66)", "(only white space, of length 2)"):
        assert words in html


def test_the_plot_of_one_step_has_one_tick_and_an_axis_about_its_value(tmp_path: Path) -> None:
    def words_of(value: float) -> list[str]:
        curves = Curves(tmp_path / f"{value}.jsonl")
        append_jsonl(curves.path, {"step": 7, "learning_rate": value})
        curves.read()
        ((plot, of),) = curves.plots()
        return re.findall(r'font-size="10"[^>]*>([^<>]+)</text>', render_svg(plot, of))

    assert words_of(0.0) == ["1", "0", "step 7", "0"]
    assert words_of(2.0) == ["3", "1", "step 7", "2"]
    assert words_of(-2.0) == ["-1", "-3", "step 7", "-2"]


def test_what_has_the_same_value_at_every_step_is_said_in_words(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "metrics.jsonl")

    def shown() -> tuple[list[str], str]:
        curves.read()
        html = render_plots(curves.plots())
        return re.findall(r'aria-label="(.+?) by step', html), "".join(re.findall("<p>(.+?)</p>", html))

    append_jsonl(curves.path, {"step": 1, "loss": 2.0, "kl": 0.0, "learning_rate": 1e-3})
    assert shown() == (["loss", "KL", "learning rate"], "")  # one value is neither constant nor moving
    append_jsonl(curves.path, {"step": 2, "loss": 1.0, "kl": 0.0, "learning_rate": 1e-3})
    assert shown() == (["loss"], "the same at every step: KL 0, learning rate 0.001")
    append_jsonl(curves.path, {"step": 3, "loss": 1.0, "kl": 0.0, "learning_rate": 5e-4})
    assert shown() == (["loss", "learning rate"], "the same at every step: KL 0")
    append_jsonl(curves.path, {"step": 4, "loss": 1.0, "kl": float("nan")})
    assert shown() == (["loss", "KL", "learning rate"], "")


@pytest.mark.timeout(120)
def test_in_a_real_kernel_there_is_a_widget_and_text_for_who_has_none(tmp_path: Path) -> None:
    run_in(tmp_path / "run")
    code = [
        "import cogumi, sys\nrun = cogumi.attach('run')\nrun.dashboard()",
        "run.dashboard()",
        "from cogumi.notebook.panel import open_panels\nimport time\npanel, = open_panels.values()\n"
        "while 'step 4' not in panel.head.value: time.sleep(0.05)\n"
        "print('torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)",
        "raise cogumi.UsageError('one line')",
    ]
    cells = [nbformat.v4.new_code_cell(each) for each in code]
    cells[-1].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (first,), (second,) = (cell.outputs for cell in cells[:2])
    widget = "application/vnd.jupyter.widget-view+json"
    assert first.data[widget]["model_id"] == second.data[widget]["model_id"]  # one panel, shown twice
    assert "running (train), step 4" in first.data["text/plain"]
    assert "<div" not in first.data["text/plain"]
    assert cells[2].outputs[0].text == "False False\n"
    assert cells[3].outputs[0].traceback == ["cogumi: one line"]
    page, _ = HTMLExporter().from_notebook_node(without_widgets(notebook))
    assert "running (train), step 4" in page  # as a page on the web shows it
    state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    buttons = [widget["state"]["description"] for widget in state.values() if widget["model_name"] == "ButtonModel"]
    assert sorted(buttons) == ["Checkpoint now", "Pause", "Stop"]
    assert any("<svg" in json.dumps(value) for value in state.values())
