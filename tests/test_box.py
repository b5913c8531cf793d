"""The first minute on a rented box: a clone, the README's commands, as root, with a Jupyter of the image beside it.

The environment is made on top of the one that the tests run in: the installer finds every pin there and downloads nothing.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cogumi.cli.app import app
from cogumi.config.schema import read_config
from cogumi.config.source import copy_template
from tests.broken_environments import REMOVED, make_venv, nvidia_smi
from tests.lab import answering

ROOT = Path(__file__).parents[1]
NOT_CLONED = shutil.ignore_patterns(
    ".venv*", ".git", ".python", "runs", "__pycache__", ".*_cache", "*.egg-info", "build"
)
FOREIGN = (*REMOVED, "XDG_DATA_HOME", "JUPYTER_CONFIG_DIR", "MAKEFLAGS", "MAKELEVEL")
# Run by another Jupyter's Python: the first cell of the notebook, under the kernel that it names and under that Python's own.
FIRST_CELL = """
import json, sys
from pathlib import Path
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

outputs = {}
for kernel in ("the one it names", "python3"):
    notebook = nbformat.read(sys.argv[1], as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:1]
    given = {"kernel_name": kernel} if kernel == "python3" else {}
    where = {"metadata": {"path": str(Path(sys.argv[1]).parent)}}
    NotebookClient(notebook, allow_errors=True, resources=where, **given).execute()
    outputs[kernel] = notebook.cells[0].outputs
kernels = {name: spec["spec"]["argv"][0] for name, spec in KernelSpecManager().get_all_specs().items()}
print(json.dumps({"outputs": outputs, "kernels": kernels}))
"""


@dataclass
class Box:
    """clone: what `git clone` leaves, with a .venv. foreign: the Python of a Jupyter that knows nothing of cogumi."""

    clone: Path
    foreign: Path
    environment: dict[str, str]
    installed: str

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.clone, env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )


def environment_at(place: Path) -> Path:
    """A virtual environment that sees the packages of this one, but for cogumi; its Python."""
    python, _ = make_venv(place, sysconfig.get_path("purelib"))
    (place / "share/jupyter").mkdir(parents=True)
    (place / "share/jupyter/lab").symlink_to(Path(sys.prefix) / "share/jupyter/lab")
    return python


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    place = tmp_path_factory.mktemp("box")
    shutil.copytree(ROOT, place / "cogumi", ignore=NOT_CLONED)
    environment_at(place / "cogumi/.venv")
    foreign = environment_at(place / "image")
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    # The CPU lane, also where the tests have a GPU.
    environment = kept | {"HOME": str(place / "home")} | nvidia_smi(place / "bin", "", 9)
    made = Box(place / "cogumi", foreign, environment, "")
    done = made.run("sh", "requirements/install.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    made.installed = done.stdout
    (made.clone / ".venv/lane").touch()
    return made


def test_the_installer_registers_the_kernel_and_says_where(box: Box) -> None:
    where = Path(box.environment["HOME"]) / ".local/share/jupyter/kernels/cogumi"
    assert str(where) in box.installed
    assert json.loads((where / "kernel.json").read_text())["argv"][0] == str(box.clone / ".venv/bin/python")


def test_make_lab_opens_as_root_and_prints_the_address(box: Box) -> None:
    """As the user who runs the tests, which on a box is root. Without make the same script is started."""
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^make lab\b", readme, re.MULTILINE)
    assert "`sh notebooks/lab.sh`" in readme
    assert box.run("make", "--dry-run", "lab").stdout == "sh notebooks/lab.sh\n"
    server = subprocess.Popen(
        ["make", "lab"],
        cwd=box.clone,
        env=box.environment | ({} if os.geteuid() == 0 else {"BROWSER": "true"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    patience = threading.Timer(300, os.killpg, (server.pid, signal.SIGKILL))
    patience.start()
    try:
        message, found = "", None
        assert server.stdout is not None
        while not found and (line := server.stdout.readline()):
            message += line
            found = re.match(r"\s+(http://(?:localhost|127\.0\.0\.1):\d+)(/lab/tree/\S+)\?token=(\w+)$", line)
        assert found, message
        address, page, token = found.groups()
        assert page == "/lab/tree/notebooks/00_quickstart.ipynb"
        headers = {"Authorization": f"token {token}"}

        def ask(path: str) -> Any:
            with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers), timeout=60) as answer:
                return answer.read()

        answering(address + page, Path(os.devnull))  # the address is printed before the server listens
        assert b"JupyterLab" in ask(page)
        notebook = json.loads(ask("/api/contents/notebooks/00_quickstart.ipynb"))["content"]
        kernel = json.loads(ask("/api/kernelspecs"))["kernelspecs"][notebook["metadata"]["kernelspec"]["name"]]
        assert kernel["spec"]["argv"][0] == str(box.clone / ".venv/bin/python")
    finally:
        patience.cancel()
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def test_under_another_jupyter_the_first_cell_runs_or_says_which_kernel_to_choose(box: Box) -> None:
    done = box.run(box.foreign, "-c", FIRST_CELL, box.clone / "notebooks/00_quickstart.ipynb")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kernels"]["cogumi"] == str(box.clone / ".venv/bin/python")
    assert said["outputs"]["the one it names"] == []
    (error,) = (each for each in said["outputs"]["python3"] if each["output_type"] == "error")
    assert error["ename"] == "SystemExit"
    assert "the kernel cogumi" in error["evalue"]
    assert "sh requirements/install.sh" in error["evalue"]
    assert "ModuleNotFoundError" not in json.dumps(said)


@pytest.mark.parametrize("unpacked", [True, False], ids=["links as text", "no links"])
def test_the_package_s_own_configs_are_found(unpacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's zipfile writes a link as a text file with the name of its target."""
    if unpacked:
        with zipfile.ZipFile(tmp_path / "clone.zip", "w") as archive:
            for name in ("configs", "recipes"):
                link = zipfile.ZipInfo(name)
                link.create_system, link.external_attr = 3, 0o120777 << 16
                archive.writestr(link, os.readlink(ROOT / name))
        with zipfile.ZipFile(tmp_path / "clone.zip") as archive:
            archive.extractall(tmp_path)
        assert (tmp_path / "configs").read_text() == "cogumi/configs"
    monkeypatch.chdir(tmp_path)
    run, _ = read_config("configs/smoke/llama-3.1-8b-sft.yaml", {})
    assert run.cogumi.method == "sft"
    assert copy_template("configs/smoke/sft.yaml", Path("my.yaml")).read_text().startswith("#")
    assert copy_template("recipes/sft.py", Path("my.py")).exists()
    result = CliRunner().invoke(app, ["preview", "configs/smoke/nothing.yaml"])
    assert "no such config file" in str(result.exception)
