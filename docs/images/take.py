"""The pictures of README and docs: the quickstart, run in a real JupyterLab in a real Chromium. `python -m docs.images.take`

panel.png: the panel while GSPO trains, light; compare.png: base, SFT and GSPO side by side; panel-dark.png: another kernel
on the same run, dark; report.png: a screen of the report, opened as a
file.
"""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat

import cogumi
from notebooks.generate import notebook_of
from tests.lab import command, lab, open_notebook, page, write_notebook

HERE = Path(__file__).parent
NOTEBOOK = HERE.parents[1] / "notebooks" / "00_quickstart.py"
PATIENCE_MS = 400_000
SHOWN_AT = 25  # of the 36 steps: there is something to see, and something to come


def take(directory: Path) -> None:
    nbformat.write(notebook_of(NOTEBOOK), directory / "quickstart.ipynb")
    with lab(directory) as address, page(width=1180, height=1500) as (shown, wrong):
        shown.set_default_timeout(PATIENCE_MS)
        open_notebook(shown, address, "quickstart.ipynb")
        command(shown, "application:toggle-left-area")
        command(shown, "notebook:run-all-cells")
        until_step(shown, directory, SHOWN_AT)
        shown.locator(".cogumi-panel").last.screenshot(path=HERE / "panel.png")
        shown.get_by_text("report.html").wait_for()
        shown.locator(".jp-RenderedHTML").filter(has_text="exactly right").screenshot(path=HERE / "compare.png")
        assert not wrong, wrong
    write_notebook(directory / "attach.ipynb", ["import cogumi\ncogumi.attach('runs/quickstart/gspo').dashboard()"])
    shutil.rmtree(directory / ".jupyter")
    with lab(directory, "dark") as address, page("dark", width=1180, height=1900) as (shown, wrong):
        open_notebook(shown, address, "attach.ipynb")
        command(shown, "application:toggle-left-area")
        command(shown, "notebook:run-all-cells")
        shown.get_by_text("the run has ended").wait_for()
        shown.locator(".cogumi-panel").screenshot(path=HERE / "panel-dark.png")
        assert not wrong, wrong
    report(directory / "runs" / "quickstart" / "gspo" / "report.html")


def until_step(shown: Any, directory: Path, step: int) -> None:
    run_dir = directory / "runs" / "quickstart" / "gspo"
    while not run_dir.exists() or (cogumi.attach(run_dir).status().step or 0) < step:
        shown.wait_for_timeout(500)
    shown.locator(".cogumi-panel").last.scroll_into_view_if_needed()
    shown.wait_for_timeout(3000)


def report(path: Path) -> None:
    """A screen of a report, as it is when the box is gone: a file, without a server."""
    with page(width=1180, height=1500) as (shown, wrong):
        shown.goto(path.as_uri())
        shown.get_by_role("heading", name="Curves").scroll_into_view_if_needed()
        shown.evaluate("document.getElementById('curves')?.scrollIntoView() ?? 0")
        shown.screenshot(path=HERE / "report.png")
        assert not wrong, wrong


if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        take(Path(place))
    for path in sorted(HERE.glob("*.png")):
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
    print(f"{time.monotonic() - began:.0f} s")
