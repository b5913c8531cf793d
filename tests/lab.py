"""A real JupyterLab on a directory, and a page of it in a real Chromium."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

import nbformat
import pytest

CHROMIUM = shutil.which("chromium")
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
IMPATIENCE_MS = 90_000


def chromium() -> str:
    """Where Debian's chromium is. Without it a test is skipped; in CI it fails."""
    if CHROMIUM is None:
        why = "there is no chromium: `make browser` installs it on Debian and Ubuntu"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    return CHROMIUM


def write_notebook(path: Path, cells: list[str]) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


@contextmanager
def lab(directory: Path, theme: str = "light") -> Iterator[str]:
    """JupyterLab with its settings below `directory`; the address of its pages."""
    settings = directory / ".jupyter" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": THEMES[theme]}))
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
    ]
    words += [f"--ServerApp.root_dir={directory}", "--LabApp.expose_app_in_browser=True"]
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(directory / ".jupyter")}
    with (directory / "lab.log").open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *words], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield answering(f"http://127.0.0.1:{port}/lab", directory / "lab.log")
        finally:
            server.terminate()
            server.wait()


def answering(address: str, log: Path) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10):
                return address
        except URLError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


@contextmanager
def page(theme: str = "light", width: int = 1280, height: int = 1700) -> Iterator[tuple[Any, list[str]]]:
    """A page, and what its console says was wrong."""
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        opened.set_default_timeout(IMPATIENCE_MS)
        opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        yield opened, wrong
        browser.close()


def open_notebook(shown: Any, address: str, name: str) -> None:
    shown.goto(f"{address}/tree/{name}")
    shown.get_by_text("| Idle").wait_for()


def command(shown: Any, name: str) -> None:
    """One of JupyterLab's own commands, as its menus give it."""
    shown.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)
