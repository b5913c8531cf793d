"""Every notebook runs headless, in a real kernel, with its steps shortened through the environment."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["00_quickstart.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell.source.splitlines() for cell in notebook.cells if cell.cell_type == "code"]
    assert len(notebook.cells) <= 12
    assert sum(map(len, code)) <= 60


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COGUMI_TRAIN__MAX_STEPS", "6")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert "patched gspo" in text
    assert "held-out loss" in text
    assert text.count("pass  merged logits") == 2
