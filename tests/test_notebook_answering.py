"""A cell that waits: what its kernel answers meanwhile, what runs after it and in which order, and what ends it."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from cogumi.core import notices
from cogumi.core.run_directory import write_json
from tests.test_notebook_panel import run_in

PATIENCE = 60.0
SETUP = """
import contextvars, signal, time
from ipywidgets import Button
import cogumi
said, setting = [], contextvars.ContextVar("setting", default=0)
button = Button()
button.on_click(lambda _: said.append("clicked"))
run = cogumi.attach("run")
"""


class Page:
    """A kernel, and what a page in a browser would hear of it."""

    def __init__(self, directory: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(directory))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def send(self, kind: str, **content: Any) -> str:
        message = self.client.session.msg(kind, content)
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def reply(self, to: str) -> dict[str, Any]:
        """The reply to a message; those to others are left out."""
        while True:
            message: dict[str, Any] = self.client.get_shell_msg(timeout=PATIENCE)
            if message["parent_header"]["msg_id"] == to:
                return message["content"]  # type: ignore[no-any-return]

    def idle(self, after: str) -> None:
        """Until the kernel has said that it has dealt with a message."""
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            state = message["content"].get("execution_state")
            if message["parent_header"].get("msg_id") == after and state == "idle":
                return

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
            if (
                "data" in content
                and "transient" in content
                and without not in content["data"].get("text/plain", without)
            ):
                return content

    def value(self, expression: str) -> str:
        """The value of an expression. What follows a failed cell at once is aborted by ipykernel, and asked again."""
        while (reply := self.reply(self.client.execute("", user_expressions={"value": expression})))[
            "status"
        ] == "aborted":
            pass
        return str(reply["user_expressions"]["value"]["data"]["text/plain"])


@pytest.fixture
def waiting(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Page, str]]:
    """A page, and its cell that waits for a run of this process."""
    run_in(tmp_path / "run")
    page = Page(tmp_path)
    page.reply(page.client.execute(SETUP + getattr(request, "param", "")))
    sent = page.client.execute("setting.set(1)\nprint('waits')\nrun.wait()\nsetting.set(setting.get() + 1)")
    while page.client.get_iopub_msg(timeout=PATIENCE)["content"].get("text") != "waits\n":
        pass
    yield page, sent
    page.close()


@pytest.mark.timeout(200)
def test_widgets_are_answered_while_a_cell_waits_and_other_cells_run_after_it(
    waiting: tuple[Page, str], tmp_path: Path
) -> None:
    page, cell = waiting
    after = [page.client.execute(f"said.append({number})\nsetting.set(setting.get() * 10)") for number in (1, 2)]
    comms = page.send("comm_info_request")
    known = page.reply(comms)["comms"]
    page.idle(comms)
    assert page.reply(page.send("kernel_info_request"))["status"] == "ok"
    button = next(iter(known))
    for each in known:
        page.send("comm_msg", comm_id=each, data={"method": "custom", "content": {"event": "click"}})
    page.idle(page.send("comm_msg", comm_id=button, data={"method": "request_state"}))
    write_json(tmp_path / "run" / "status.json", {"state": "finished", "time": time.time()})
    assert page.reply(cell)["status"] == "ok"  # and none of the cells after it has been answered before
    assert [page.reply(each)["status"] for each in after] == ["ok", "ok"]
    assert page.value("said") == "['clicked', 1, 2]"
    assert page.value("setting.get()") == "200"  # what a cell sets in its context is there in the next one


@pytest.mark.timeout(200)
def test_an_interrupt_ends_the_waiting_and_the_cells_after_it_are_not_run(waiting: tuple[Page, str]) -> None:
    page, cell = waiting
    page.reply(page.send("comm_info_request"))
    after = page.client.execute("said.append(1)")
    page.reply(page.send("comm_info_request"))  # the cell after it has been taken by now
    page.manager.interrupt_kernel()
    assert page.reply(cell)["ename"] == "KeyboardInterrupt"
    assert page.reply(after)["status"] in ("aborted", "error")
    page.manager.interrupt_kernel()  # between two cells it does nothing
    assert page.value("said") == "[]"
    assert page.value("run.status().alive") == "True"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("waiting", ["button.on_click(lambda _: signal.raise_signal(signal.SIGINT))"], indirect=True)
def test_an_interrupt_within_an_answer_leaves_a_kernel_that_answers(waiting: tuple[Page, str]) -> None:
    page, cell = waiting
    comms = page.reply(page.send("comm_info_request"))["comms"]
    for each in comms:
        page.send("comm_msg", comm_id=each, data={"method": "custom", "content": {"event": "click"}})
    assert page.reply(cell)["ename"] == "KeyboardInterrupt"
    assert page.value("said") == "['clicked']"


def test_elsewhere_it_only_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(notices.time, "sleep", slept.append)
    notices.sleep_and_answer(0.25)
    assert slept == [0.25]


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
