"""What a cell shows while a function works: a line at once, and a bar with its total."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from cogumi.core.run_directory import write_json
from tests.test_notebook_panel import run_in

PATIENCE = 60.0


class Page:
    """A kernel, and what a page in a browser would hear of it."""

    def __init__(self, directory: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(directory))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def reply(self, to: str) -> dict[str, Any]:
        """The reply to a message; those to others are left out."""
        while True:
            message: dict[str, Any] = self.client.get_shell_msg(timeout=PATIENCE)
            if message["parent_header"]["msg_id"] == to:
                return message["content"]  # type: ignore[no-any-return]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def outputs(self, code: str) -> list[dict[str, Any]]:
        """What a cell shows: the contents of its displays and of their updates, in order."""
        sent, shown = self.client.execute(code), []
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            content = message["content"]
            if message["parent_header"].get("msg_id") != sent:
                continue
            if message["msg_type"] in ("display_data", "update_display_data"):
                shown.append(content)
            if content.get("execution_state") == "idle":
                return shown

    def next_output(self, without: str = "nothing at all") -> dict[str, Any]:
        """The next display that is shown, or changed, whose text is another."""
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            content: dict[str, Any] = message["content"]
            if {"data", "transient"} <= content.keys() and without not in content["data"].get("text/plain", without):
                return content


def check_first_outputs(directory: Path, cells: dict[str, str]) -> list[str]:
    """Run cells in a kernel, each of which first shows these words; what the first cell showed."""
    page = Page(directory)
    shown = {code: page.outputs(code) for code in cells}
    page.close()
    for code, said in cells.items():
        assert shown[code][0]["data"]["text/plain"].startswith(said), shown[code][0]
    return [each["data"]["text/plain"] for each in next(iter(shown.values()))]


@pytest.mark.timeout(200)
def test_a_function_that_works_says_so_in_the_cell_before_it_works(tmp_path: Path) -> None:
    cells = {
        "import time\nfrom cogumi.core.notices import show_seconds\n"
        "@show_seconds('looked for')\ndef work(): time.sleep(1.5)\nwork()": "looked for",
        "import cogumi\ncogumi.start('none.yaml')": "start: ",
        "cogumi.doctor(timeout=0.01)": "doctor: ",
    }
    first = check_first_outputs(tmp_path, cells)
    said, over = first
    assert said == "looked for ..."
    assert re.fullmatch(r"looked for: \d+ s", over)


@pytest.mark.slow("a kernel that imports torch, transformers, trl and peft")
@pytest.mark.timeout(200)
def test_a_function_that_imports_torch_says_so_in_the_cell_before_it_works(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    cells = {
        "import cogumi\ncogumi.preview('smoke/sft', data__source='empty.jsonl')": "torch and transformers are being imported",
        "cogumi.preview('smoke/sft', data__source='empty.jsonl')": "preview: ",
        "cogumi.preflight('smoke/sft', data__source='empty.jsonl')": "preflight: ",
        "cogumi.train('smoke/sft', data__source='empty.jsonl')": "train: ",
        "cogumi.merge_adapter('none', 'out')": "merge: ",
    }
    check_first_outputs(tmp_path, cells)


@pytest.mark.timeout(200)
def test_a_bar_in_a_notebook_has_its_total(tmp_path: Path) -> None:
    run_in(tmp_path / "run")
    beat = tmp_path / "run" / "heartbeat.json"
    early = beat.read_text()
    beat.unlink()
    page = Page(tmp_path)
    sent = page.client.execute("import cogumi\ncogumi.attach('run').wait()")
    assert "the first step is being waited for" in page.next_output()["data"]["text/plain"]
    beat.write_text(early)
    bar = page.next_output(without="being waited for")
    write_json(tmp_path / "run" / "status.json", {"state": "finished", "time": time.time()})
    assert page.reply(sent)["status"] == "ok"
    merging = page.outputs(
        "from cogumi.merge.stream import progress_bar\nwith progress_bar(True, 'merging', 4000) as done: done(4000)"
    )
    page.close()
    assert "/100 [" in bar["data"]["text/plain"]
    assert "/4.00k [" in merging[0]["data"]["text/plain"]
