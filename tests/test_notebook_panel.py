"""The panel of a run: what it shows of a directory, in a real kernel and where there is none."""

import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from processes import until

import cogumi
from cogumi.checkpoints.manifest import write_manifest
from cogumi.core.run_directory import append_jsonl, this_process, write_json
from cogumi.notebook import panel
from cogumi.notebook.panel import PARTS, RunPanel, take_snapshot, write_report
from tests.test_notebook_figures import images, words_in

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
    look = take_snapshot(path)
    return "".join(part(look) for part in (panel.render_head, *PARTS))


def test_everything_that_is_asked_of_a_run_is_there_in_words(tmp_path: Path) -> None:
    home = run_in(tmp_path / "run")
    shown = html_of(home)
    for word in ("running (train), step 4", "2 min to go", "4,321 tokens/s", "$1.25 so far", "$3.50 at the end",
                 "RED loss trend", "train.learning_rate", "1 of 2 flags are green", "red at step 20: loss trend",
                 "newest samples", "0.25", "5.0 GB free", "one checkpoint is 2.0 MB", "the last line of the log"):  # fmt: skip
        assert word in shown, word
    drawn = images(shown)
    loss = "loss by step; loss from 2.95 to 1, between 1 and 2.95; loss not finite at 1 steps, the first is 41"
    assert "not finite" in words_in(ElementTree.tostring(drawn[loss], encoding="unicode"))
    # Nothing that a model writes is taken for HTML: a flag, what was red, prompt, completion.
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;") == 4
    append_jsonl(home / "metrics.jsonl", {"step": 42, "loss": 1.25, "eval_loss": 1.5})
    assert "loss 1.25 · eval_loss 1.5 · grad_norm 0.5 (step 40)" in html_of(home)


def test_a_panel_draws_until_the_run_has_ended_and_its_buttons_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(panel, "WAIT_PER_WORK", 0.0)
    home = run_in(tmp_path / "run")
    shown = RunPanel(cogumi.attach(home))
    shown.thread.start()
    until(lambda: "step 4" in shown.head.value)
    assert "loss by step" in shown.parts[1].value
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
    assert "the run has ended, and this is how it ended" in shown.note.value
    assert shown.stop.disabled and shown.save.disabled and shown.pause.disabled  # noqa: PT018
    shown.save.click()  # nothing that a dead run would find later
    assert "this run is not training" in shown.note.value


def test_a_refused_stop_can_be_tried_again(tmp_path: Path) -> None:
    home = run_in(tmp_path / "run")
    elsewhere = {"state": "running", "stage": "train", "time": time.time(), "pid": 1, "host": "far"}
    write_json(home / "status.json", elsewhere)
    shown = RunPanel(cogumi.attach(home))
    shown.stop.click()
    assert "stop it there" in shown.note.value
    shown.draw(take_snapshot(home))
    assert not shown.stop.disabled


def test_a_checkpoint_that_is_cut_short_is_no_longer_called_verified(tmp_path: Path) -> None:
    home = run_in(tmp_path / "run")
    place = home / "checkpoints" / "checkpoint-3"
    place.mkdir(parents=True)
    (place / "optimizer.pt").write_bytes(b"0123456789")
    write_manifest(place, 3)
    assert "verified when it was saved" in html_of(home)
    (place / "optimizer.pt").write_bytes(b"01234")
    for shown in (html_of(home), write_report(home).read_text()):
        assert "rejected: optimizer.pt has 5 bytes, and 10 were saved" in shown


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


def test_without_a_kernel_it_is_one_screen_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cogumi.attach(run_in(tmp_path / "run")).dashboard()
    printed = capsys.readouterr().out
    assert "running (train), step 4" in printed
    assert "red: loss trend" in printed
    assert "<div" not in printed


@pytest.mark.timeout(120)
def test_in_a_real_kernel_there_is_a_widget_and_text_for_who_has_none(tmp_path: Path) -> None:
    run_in(tmp_path / "run")
    code = [
        "import cogumi, sys\nrun = cogumi.attach('run')\nrun.dashboard()",
        "run.dashboard()",
        "from cogumi.notebook.panel import open_panels\nimport time\npanel, = open_panels.values()\n"
        "while '<img' not in panel.parts[1].value: time.sleep(0.05)\n"
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
    assert any("<img" in json.dumps(value) for value in state.values())
