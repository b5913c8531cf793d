"""`run.dashboard()`: a panel on a run directory. It reads files, so the run may be anybody's, of yesterday, or over.

A thread of its own draws it anew, so that it goes on beside a cell that computes; it takes less than one percent of a core
by waiting a hundred times as long as it worked. Buttons do what `run.stop()`, `run.checkpoint()` and `run.pause()` do.
"""

import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from cogumi.checkpoints.retention import checkpoints_in
from cogumi.core.errors import UsageError
from cogumi.core.notices import in_a_kernel
from cogumi.core.run_directory import CHECKPOINT, PAUSE
from cogumi.notebook import panel_html as html
from cogumi.notebook.run_snapshot import Look, Looker
from cogumi.telemetry.status import Status, on_a_screen

REFRESH_SECONDS = 2.0
WAIT_PER_WORK = 120.0  # seconds of waiting for each second of computing: 0.8 % of a core
WIDGET = "application/vnd.jupyter.widget-view+json"

STOP, RESUME = "STOP", "RESUME"  # what buttons ask for beside CHECKPOINT and PAUSE, which are files as well


class Run(Protocol):
    """Of `cogumi.runs.handle.Run`, what the panel needs: how it stands, and what its buttons do."""

    @property
    def run_dir(self) -> Path: ...
    def status(self) -> Status: ...
    def ask_to_stop(self) -> Any: ...
    def checkpoint(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


shown: dict[Path, "Panel"] = {}
"""The panels of this kernel that are drawn anew, by run directory: a second one of the same run is the same one."""


def show(run: Run) -> None:
    """Display the panel in a notebook; elsewhere, and where widgets are not shown, one screen of text."""
    text = on_a_screen(run.status())
    if not in_a_kernel() or find_spec("ipywidgets") is None:
        print(text)
        return
    from IPython.display import display

    panel = shown.get(run.run_dir)
    if panel is None or not panel.thread.is_alive():
        panel = shown[run.run_dir] = Panel(run)
        panel.thread.start()
    bundle: dict[str, Any] = panel.box._repr_mimebundle_()
    display({WIDGET: bundle[WIDGET], "text/plain": text}, raw=True)


class Panel:
    """The widgets, and the thread that draws them until the run has ended."""

    def __init__(self, run: Run) -> None:
        from ipywidgets import HTML, Button, HBox, VBox

        self.run, self.looker = run, Looker(run.run_dir)
        self.head, self.flags, self.plots = HTML(), HTML(), HTML()
        self.samples, self.rest, self.said = HTML(), HTML(), HTML()
        self.stop = Button(description="Stop", icon="stop", tooltip="Finish the step, save a checkpoint, end")
        self.save = Button(
            description="Checkpoint now", icon="save", tooltip="Save a checkpoint after this step, train on"
        )
        self.pause = Button(
            description="Pause", icon="pause", tooltip="Save after this step and wait; keeps the machine"
        )
        self.stop.on_click(self.on_stop)
        self.save.on_click(self.on_save)
        self.pause.on_click(self.on_pause)
        for button in (self.stop, self.save, self.pause):
            button.layout.width = "max-content"  # whatever stands beside it
            button.layout.flex = "none"
        self.buttons = HBox([self.stop, self.save, self.pause, self.said])
        self.buttons.layout.flex_flow = "row wrap"  # in a narrow window
        self.box = VBox([self.head, self.buttons, self.flags, self.plots, self.samples, self.rest])
        self.box.add_class("cogumi-panel")
        self.asked_to_stop = False
        self.asked, self.newest = "", ""  # what a button asked for, until it is done; the newest checkpoint then
        self.state = ""
        self.marked: list[dict[str, Any]] = []  # in the plots as they stand
        self.now = threading.Event()  # a button was pressed: do not wait
        self.thread = threading.Thread(target=self.follow, name=f"cogumi panel {run.run_dir.name}", daemon=True)
        self.head.value = html.STYLE + "looking"

    def follow(self) -> None:
        """Draw until the run has ended. What goes wrong is said in the panel, and raised."""
        try:
            while True:
                began = time.thread_time()
                look = self.looker.look()
                self.draw(look)
                if look.behind:
                    continue
                if look.status.ended:
                    return
                self.now.wait(max(REFRESH_SECONDS, WAIT_PER_WORK * (time.thread_time() - began)))
                self.now.clear()
        except UsageError as gone:  # the directory, say
            self.end(str(gone))
        except BaseException as error:
            self.end(f"the panel has stopped: {type(error).__name__}: {error}")
            raise

    def draw(self, look: Look) -> None:
        """Only what has another value than before is sent to the browser."""
        ended, paused = look.status.ended, look.status.state == "paused"
        self.head.value = html.STYLE + html.head(look)
        self.flags.value = html.flags(look)
        if look.changed or look.was_red != self.marked:  # a flag is judged after its row is written
            self.plots.value, self.marked = html.plots(look), look.was_red
        self.samples.value = html.samples(look)
        self.rest.value = html.rest(look)
        self.pause.description, self.pause.icon = ("Resume", "play") if paused else ("Pause", "pause")
        self.stop.disabled = ended or self.asked_to_stop
        self.save.disabled = ended or paused
        self.pause.disabled = ended
        if word := self.done(look):
            self.asked, self.said.value = "", html.said(word)
        elif look.status.state != self.state:  # it came without a button
            self.said.value = ""
        self.state = look.status.state

    def done(self, look: Look) -> str:
        """What the run has done of what was asked; "" while there is nothing to tell."""
        status, newest = look.status, newest_in(self.run.run_dir)
        if status.ended:
            return f"the run has ended, and this is how it ended: {status}"
        if self.asked == PAUSE and status.state == "paused":
            return f"done: training waits, {newest} is saved"
        if self.asked == RESUME and status.state != "paused":
            return "done: training has resumed"
        if self.asked in (CHECKPOINT, PAUSE) and not (self.run.run_dir / self.asked).exists():  # it was taken
            if self.asked == CHECKPOINT and newest != self.newest:
                return f"done: {newest} is saved"
            if status.stage in ("samples", "merge"):
                return f"it came too late: training is over, the newest is {newest or 'no checkpoint'}"
        return ""

    def end(self, reason: str) -> None:
        self.head.value = html.STYLE + html.gone(reason)
        for button in (self.stop, self.save, self.pause):
            button.disabled = True

    def on_stop(self, _: Any) -> None:
        self.stop.disabled = True  # a second signal would end it without saving
        self.asked_to_stop = self.do(STOP, self.run.ask_to_stop, "asked to finish its step, save and end")

    def on_save(self, _: Any) -> None:
        self.do(CHECKPOINT, self.run.checkpoint, "asked for a checkpoint after this step")

    def on_pause(self, _: Any) -> None:
        if self.pause.description == "Resume":
            self.do(RESUME, self.run.resume, "asked to resume")
        else:
            self.do(PAUSE, self.run.pause, "asked to save and wait after this step")

    def do(self, what: str, ask: Any, word: str) -> bool:
        """What a button asks for; a refusal is said beside it. Whether it was asked."""
        newest = newest_in(self.run.run_dir)  # before it is asked
        asked = True
        try:
            ask()
        except UsageError as error:
            asked, word = False, str(error)
        self.asked, self.newest = what if asked else "", newest
        self.said.value = html.said(word)
        self.now.set()
        return asked


def newest_in(run_dir: Path) -> str:
    """The name of the newest checkpoint, "" of none."""
    return next((path.name for path in checkpoints_in(run_dir / "checkpoints")), "")
