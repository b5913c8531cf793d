"""The notebooks: short, each cell alone, the .ipynb what the .py says, and run headless in a real kernel and as scripts."""

import ast
import builtins
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

from notebooks import generate

HOME = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(HOME.glob("[0-9]*.py"))
MOST_CODE_LINES = 60

RUNS_LONG = pytest.mark.slow("a kernel, and the runs that the notebook starts")
of_each = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def code_of(source: Path) -> list[Any]:
    return [cell for cell in generate.notebook_of(source).cells if cell.cell_type == "code"]


def text_of(notebook: Any) -> str:
    """What the cells of a notebook say, each kind of output at its plainest."""
    said = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            said.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
            said.append(output.get("data", {}).get("text/html", ""))
    return "\n".join(said)


def test_there_are_ten() -> None:
    assert [path.stem[:2] for path in SOURCES] == [f"{number:02}" for number in range(10)]
    assert sorted(path.stem for path in HOME.glob("*.ipynb")) == [path.stem for path in SOURCES]


@of_each
def test_it_is_short_and_has_one_cell_of_parameters(source: Path) -> None:
    cells = code_of(source)
    lines = [line for cell in cells for line in cell.source.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= MOST_CODE_LINES
    assert [cell.metadata.get("tags", []) for cell in cells] == [["parameters"], *([] for _ in cells[1:])]


def test_all_name_the_kernel_cogumi_and_say_so_alike_where_it_is_another() -> None:
    collected = [
        nbformat.read(source.with_suffix(".ipynb"), as_version=4).metadata.kernelspec.name for source in SOURCES
    ]
    assert collected == ["cogumi"] * len(SOURCES)
    firsts = [re.findall(r"^try: import cogumi\n.*\n", code_of(source)[0].source, re.MULTILINE) for source in SOURCES]
    assert all(len(first) == 1 for first in firsts)
    assert len({first[0] for first in firsts}) == 1
    assert "sh requirements/install.sh" in firsts[0][0]


def names_bound(tree: ast.AST) -> set[str]:
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return bound


@of_each
def test_every_cell_can_be_run_alone_after_the_first(source: Path) -> None:
    trees = [ast.parse(cell.source) for cell in code_of(source)]
    shared = names_bound(trees[0]) | set(dir(builtins))
    for tree in trees[1:]:
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        assert used <= shared | names_bound(tree), ast.unparse(tree)


@of_each
def test_the_notebook_is_its_source_and_was_run(source: Path) -> None:
    """`make notebooks` makes it again after a change of the source."""
    expected, actual = generate.notebook_of(source), nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(actual)

    def cells(notebook: Any) -> list[tuple[str, str, list[str]]]:
        return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]

    assert cells(actual) == cells(expected)
    code = [cell for cell in actual.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    assert len(text_of(actual)) > 500
    assert not re.search(r"(?<![\w~.])/(tmp|root|home)/", text_of(actual))  # a reader's machine is another


def calls_of_modules(source: Path) -> Iterator[tuple[str, Any, ast.Call]]:
    """(name, function, call) for every `module.function(...)` of a module of cogumi's that a notebook imports."""
    tree = ast.parse(source.read_text())
    modules: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {
                alias.name: importlib.import_module(alias.name) for alias in node.names if alias.name == "cogumi"
            }
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cogumi"):
            module = importlib.import_module(node.module)
            for each in node.names:
                try:
                    modules[each.name] = importlib.import_module(f"{node.module}.{each.name}")
                except ModuleNotFoundError:
                    modules[each.name] = getattr(module, each.name)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in modules:
            yield node.func.id, modules[node.func.id], node
        elif (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in modules
        ):
            yield node.func.attr, getattr(modules[node.func.value.id], node.func.attr), node


@of_each
def test_what_it_calls_is_there_and_takes_what_it_is_given(source: Path) -> None:
    results = list(calls_of_modules(source))
    assert results
    for name, function, call in results:
        options = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        try:
            inspect.signature(function).bind(*call.args, **options)
        except TypeError as error:
            pytest.fail(f"{name}: {error}")


# What each is to have said when it was run. Steps are few (COGUMI_TRAIN__MAX_STEPS), where the notebook does not say itself.
SAID = {
    "00": ["finished, step 8/8", "data:image/svg+xml", "report.html", "exactly right"],
    "01": ["Python", "memory", "H100 SXM", "form.write("],
    "02": ["1,265", 'class="learned"', "data:image/svg+xml"],
    "03": ["step 16/16", "safe to scale: yes", "pass  merged logits", "data:image/svg+xml"],
    "04": ["rejected", "finished, step 8/8", "data:image/svg+xml"],
    "05": ["gradient", "finished, step 8/8", "data:image/svg+xml"],
    "06": ["paused", "checkpoint-", "whole: ", "finished, step"],
    "07": ["finished, step 8/8", "data:image/svg+xml", "are what the manifest says"],
    "08": ["free of", "wants", "checkpoint-"],
    "09": ["tool: prize", "finished", "data:image/svg+xml"],
}


FEWER = {"06": {"STEPS": 100}, "09": {"REWARD_STEPS": 8, "TOOL_STEPS": 8}}  # those that say themselves how many steps


# When it is imported in a kernel, the package tells it how its values are shown.
PREPARED_KERNEL = """
import sys
from ipykernel import kernelapp
del sys.modules["cogumi"]
kernelapp.launch_new_instance()
"""


@pytest.fixture
def prepared_kernel(prepared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a kernel that need not import torch first."""
    place = tmp_path / "jupyter/kernels/prepared"
    place.mkdir(parents=True)
    words = [prepared, "-c", PREPARED_KERNEL, "-f", "{connection_file}"]
    (place / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "prepared", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    return place.name


def execute(source: Path, directory: Path, parameters: dict[str, Any], kernel: str) -> Any:
    """The notebook of a source, executed in a directory."""
    nbformat.write(generate.notebook_of(source), directory / "in.ipynb")
    where = {"cwd": str(directory), "kernel_name": kernel}
    options = {"progress_bar": False, "execution_timeout": 600}
    return papermill.execute_notebook(directory / "in.ipynb", None, parameters, **where, **options)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "source",
    [path if path.stem.startswith("00") else pytest.param(path, marks=RUNS_LONG) for path in SOURCES],
    ids=lambda path: path.stem,
)
def test_it_runs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared_kernel: str) -> None:
    kernel = generate.HERE_KERNEL if source.stem.startswith("00") else prepared_kernel
    if source.stem[:2] not in FEWER:
        # After 8 steps the small base repeats itself.
        monkeypatch.setenv("COGUMI_TRAIN__MAX_STEPS", "16" if source.stem.startswith("03") else "8")
        monkeypatch.setenv(
            "COGUMI_COGUMI__FROM_FAILED", "true"
        )  # a check fails for it, and a next stage would refuse it
        monkeypatch.setenv("COGUMI_TRAIN__LOGGING_STEPS", "1")  # eight rows are what a sanity check judges by
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = text_of(execute(source, tmp_path, FEWER.get(source.stem[:2], {}), kernel))
    for word in SAID[source.stem[:2]]:
        assert word in said, (word, said[-3000:])


@pytest.mark.slow("a kernel of its own; the quickstart is run by the fast tier")
def test_papermills_parameters_are_taken(tmp_path: Path, prepared_kernel: str) -> None:
    execute(HOME / "02_data.py", tmp_path, {"RUNS": "elsewhere"}, prepared_kernel)
    assert (tmp_path / "elsewhere" / "mine.jsonl").is_file()


@pytest.mark.parametrize(
    "source",
    [pytest.param(path, marks=RUNS_LONG if path.stem == "02_data" else pytest.mark.sweep) for path in SOURCES],
    ids=lambda path: path.stem,
)
def test_it_is_a_script_as_it_is(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COGUMI_TRAIN__MAX_STEPS", "8")
    monkeypatch.setenv("COGUMI_COGUMI__FROM_FAILED", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    subprocess.run([sys.executable, source], cwd=tmp_path, check=True, timeout=600)
