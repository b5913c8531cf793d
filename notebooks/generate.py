"""Make each .ipynb from its .py, with the outputs of a real run: `make notebooks`, or `python notebooks/generate.py 03 07`.

The .py (jupytext's percent format) is what is edited. A notebook runs in an empty directory, so its runs are its own.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
CELL_SECONDS = 600
HERE_KERNEL = "python3"  # of this environment, also where none called cogumi is registered


def sources(names: list[str]) -> list[Path]:
    """The notebooks' sources whose names begin with one of these; all of them by default."""
    return [path for path in sorted(HERE.glob("[0-9][0-9]_*.py")) if not names or path.name.startswith(tuple(names))]


def notebook_of(source: Path) -> nbformat.NotebookNode:
    """The cells of a source, without outputs. Cells are numbered, so that the same source is the same file."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": {"name": "cogumi", "display_name": "cogumi", "language": "python"}}
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
    return notebook


def executed(source: Path) -> nbformat.NotebookNode:
    notebook = notebook_of(source)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # a run may still be at work after a failure
        client = NotebookClient(
            notebook, timeout=CELL_SECONDS, kernel_name=HERE_KERNEL, resources={"metadata": {"path": directory}}
        )
        client.store_widget_state = False  # a panel is of its kernel; its text stays
        client.execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if not is_progress(output)]
                for output in cell.outputs:
                    tidy(output, directory)
            cell.metadata.pop("execution", None)
    return notebook


def is_progress(output: nbformat.NotebookNode) -> bool:
    """Whether it is a bar, of which only the beginning would be kept."""
    return bool(re.search(r"\| 0/|\?\w+/s\]", output.get("data", {}).get("text/plain", "")))


def tidy(output: nbformat.NotebookNode, directory: str) -> None:
    """Take out where it ran, and what only its kernel can show."""
    data = output.get("data", {})
    for mime in [mime for mime in data if mime.startswith("application/vnd.jupyter.widget")]:
        del data[mime]
    places = {f"{directory}/": "", directory: ".", str(HERE.parent): "cogumi", str(Path.home()): "~"}
    for holder, key in ((output, "text"), *((data, mime) for mime in data if mime.startswith("text/"))):
        for place, name in places.items():
            if key in holder:
                holder[key] = holder[key].replace(place, name)


def main(names: list[str]) -> None:
    for source in sources(names):
        began = time.monotonic()
        nbformat.write(executed(source), source.with_suffix(".ipynb"))
        print(f"{source.stem}: {time.monotonic() - began:.0f} s, {source.with_suffix('.ipynb').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
