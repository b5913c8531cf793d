"""The pages are true where a machine can tell: what they tell a reader to type is typed here, in a directory like a fresh clone.

Of README.md and docs/*.md every fence tagged `sh` or `python` is run, page by page and in its order, and has to end with
status 0. Runs are shortened by the environment, as a reader could. All pages are one session: what was typed already is not
typed again. NOT_RUN is what cannot run here; its `cogumi` commands have to parse all the same.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click
import polars as pl
import prepared_process
import pytest
import typer
import yaml

from cogumi.cli.app import app
from cogumi.config.schema import load_config

REPOSITORY = Path(__file__).parents[1]
DOCS = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]
AGENT_DOCS = "cogumi/templates/agent-docs.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Patterns of what cannot run here, and the reason.
NOT_RUN = {
    r"make (smoke|lab|lint|test|test-slow)|\.venv/bin/python -m pytest .*": "tests/test_smoke.py, test_box.py; part of this run",
    r"(cd |export \w+=)/workspace/.*|(ssh|rsync|srun|accelerate launch) .*|.* (runpodctl|vastai) .*": "needs a rented box",
    r"sh requirements/install\.sh": "downloads a lane; tests/test_requirements_install.py runs the script",
    r"export HF_TOKEN=.*": "a secret of the reader's",
    r"\.venv/bin/cogumi (preflight|preview|start) my-run\.yaml.*|cogumi preflight configs/llama.*": "asks the hub",
    r"\.venv/bin/(hf upload|cogumi push) .*": "writes to the hub",
    r"\.venv/bin/cogumi export .*": "takes llama.cpp's converter; tests/test_export.py runs it",
    r"cogumi doctor --json": "a second examination; tests/test_stack_doctor.py has the JSON",
    r"cogumi start my-sft\.yaml cogumi\.sanity=100": "a hundred steps; tests/test_training_sentinel.py makes them",
    r"cogumi train my\.yaml cogumi\.processes=2 .*": "tests/test_training_processes.py",
}
# Typed with one page only, of those that say it: one that is slow.
WITH = {"cogumi doctor": "docs/doctor.md"}

# What a page takes for granted: typed before it, or made. Pages share a directory, and each wants a my.yaml of its own.
START = ["cogumi start configs/smoke/llama-3.1-8b-sft.yaml"]
MINE = "cogumi train configs/smoke/sft.yaml data.source=my_code.parquet data.column=text cogumi.run_dir=runs/mine"
BEFORE = {
    "docs/quickstart.md": ["cogumi cp qwen3-4b-sft my-run.yaml"],
    "docs/runs.md": START,
    "docs/merging.md": [MINE],
    "docs/preflight.md": ["rm -f my.yaml; cogumi cp smoke/llama-3.1-8b-sft my.yaml"],
    "docs/reliability.md": [*START, "rm -f my.yaml; cogumi cp smoke/llama-3.1-8b-sft my.yaml", MINE],
    "docs/scale.md": ["rm -f my.yaml; cogumi cp smoke/sft my.yaml"],
}
TRAINER = """
import torch, cogumi
from transformers import Trainer, TrainingArguments
class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x, y):
        return {"loss": (self.layer(x) - y).pow(2).mean()}
rows = [{"x": torch.tensor([float(n)]), "y": torch.tensor([2.0 * n])} for n in range(8)]
args = TrainingArguments("protected", max_steps=2, save_steps=1, report_to=[], use_cpu=True, logging_steps=1)
trainer = Trainer(Line(), args, train_dataset=rows)
"""
GIVEN = {"docs/reliability.md": TRAINER}  # to a page's Python: what it says is there
STANDS_FOR = {"runs/NAME": "runs/smoke-llama-sft"}  # for a run of the reader's
SHORT = {
    "COGUMI_TRAIN__MAX_STEPS": "2",
    "COGUMI_DATA__MAX_ROWS": "64",
    "COGUMI_DATA__EVAL_ROWS": "8",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "160",
}
LONGER = {
    "cogumi start my-sft.yaml": {"COGUMI_COGUMI__RUN_DIR": "runs/my-sft"},
    # At the file's rate two steps from a model of so few steps end in one that repeats itself, which rightly fails.
    "cogumi start configs/smoke/chat-gspo.yaml model.name=runs/smoke-llama-dpo/merged": {
        "COGUMI_TRAIN__LEARNING_RATE": "1e-5"
    },
    "cogumi start configs/smoke/llama-3.1-8b-dpo.yaml": {"COGUMI_TRAIN__MAX_STEPS": "6"},
    "cogumi train configs/smoke/sft.yaml": {"COGUMI_TRAIN__WARMUP_STEPS": "0"},  # else two steps train next to nothing
    "cogumi train my.yaml cogumi.processes": {"COGUMI_TRAIN__WARMUP_STEPS": "0"},
}
SECONDS = 300  # for one command, on a machine that others use as well
# These pages are what people paste first.
QUICK = {"README.md", "docs/quickstart.md", "CONTRIBUTING.md"}
LINKED = ("cogumi", "configs", "recipes", "notebooks", "docs", "benchmarks", "requirements", "tests")


def fences(page: str) -> list[tuple[str, str]]:
    """The tag and the content of each fence."""
    return FENCE.findall((REPOSITORY / page).read_text(encoding="utf-8"))


def commands(block: str) -> list[str]:
    """The commands of a shell block, one a line: without comments, and with what a backslash continues."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    found = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines)
    return [line for line in found if line]


def typed(page: str) -> list[str]:
    return [command for tag, block in fences(page) if tag == "sh" for command in commands(block)]


def shown(page: str) -> list[str]:
    """Commands in a fence of output, after a prompt."""
    lines = (line for tag, block in fences(page) if not tag for line in block.splitlines())
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def of_cogumi(command: str) -> list[list[str]]:
    """The words of each call of `cogumi` in a line of the shell."""
    calls = re.findall(r"(?:^|[;&'] ?)(?:\.venv/bin/)?cogumi(?![/.\w])([^;&|']*)", command)
    return [shlex.split(call) for call in calls]


def plain(command: str) -> str:
    """The command with a program's name for its path."""
    return command.replace(".venv/bin/cogumi", "cogumi")


def cannot_run(command: str) -> bool:
    return any(re.fullmatch(pattern, command) for pattern in NOT_RUN)


def parse(words: list[str]) -> None:
    """Raises click.UsageError where the command line does not take the words."""
    context = typer.main.get_command(app).make_context("cogumi", [*words])
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)


# -------------------------------------------------------------------------------------------------- what is said is there


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_cogumi_parses_and_its_config_exists(page: str) -> None:
    for command in [*typed(page), *shown(page)]:
        for words in of_cogumi(command):
            parse(words)
            configs = [word for word in words if word.startswith(("configs/", "recipes/"))]
            assert [word for word in configs if not (REPOSITORY / word).exists()] == [], command


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_the_text_are_known(page: str) -> None:
    text = FENCE.sub("", (REPOSITORY / page).read_text(encoding="utf-8"))
    for command in re.findall(r"`(cogumi [^`\n]+)`", text):
        words = [word for word in shlex.split(command) if word != "..."]
        try:
            parse(words[1:])
        except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
            pass  # a command named without what it is given
        except click.UsageError as error:
            pytest.fail(f"{page}: `{command}`: {error.format_message()}")


def test_what_is_not_run_is_still_on_a_page() -> None:
    there = {command for page in PAGES for command in typed(page)}
    assert [pattern for pattern in NOT_RUN if not any(re.fullmatch(pattern, command) for command in there)] == []
    assert [command for command, page in WITH.items() if command not in typed(page)] == []


def test_agent_docs_name_commands_and_keys_that_exist() -> None:
    (_, typed_by_agents), (_, config) = fences(AGENT_DOCS)
    assert [parse(words) for command in commands(typed_by_agents) for words in of_cogumi(command)]
    load_config(yaml.safe_load(config))


@pytest.mark.parametrize("page", [*PAGES, "AGENTS.md", AGENT_DOCS])
def test_links_lead_somewhere(page: str) -> None:
    text = FENCE.sub("", (REPOSITORY / page).read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not ((REPOSITORY / page).parent / link).exists()] == []


def test_a_page_is_linked_from_another() -> None:
    linked = {
        ((REPOSITORY / page).parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"\]\(([^)#:]+\.md)\)", (REPOSITORY / page).read_text(encoding="utf-8"))
    }
    assert [page for page in PAGES[1:] if (REPOSITORY / page).resolve() not in linked] == []


@pytest.mark.parametrize("page", PAGES)
def test_yaml_binds(page: str) -> None:
    for tag, block in fences(page):
        if tag == "yaml":
            given = yaml.safe_load(block)
            overrides = {}
            if "run" in given:  # a task of SkyPilot's
                words = shlex.split(given["run"])
                assert words[0] in (".venv/bin/cogumi", ".venv/bin/torchrun")
                overrides = dict(word.split("=", 1) for word in words[words.index("my.yaml") + 1 :])
                given = {}
            rest = {"model": {"name": "x"}, "data": {"source": "cogumi:stdlib"}, "cogumi": {"method": "sft"}}
            load_config({key: rest.get(key, {}) | given.get(key, {}) for key in rest | given}, **overrides)


# ------------------------------------------------------------------------------------------------------- what is typed runs


@dataclass
class Clone:
    """A directory like a fresh clone with its .venv, and what was typed in it."""

    directory: Path
    environment: dict[str, str]
    done: set[str] = field(default_factory=set)

    def type(self, command: str) -> None:
        """Type a command, and wait for what it starts. A second time it is passed over."""
        words = plain(command)
        for placeholder, run in STANDS_FOR.items():
            words = words.replace(placeholder, run)
        if words in self.done:
            return
        longer = next((variables for begins, variables in LONGER.items() if words.startswith(begins)), {})
        output = self.run(["bash", "-c", words], command, longer)
        self.done.add(words)
        for run in re.findall(r"^follow it: cogumi attach (\S+)", output, re.MULTILINE):
            self.run(["cogumi", "wait", run], f"the run of: {command}")

    def run(self, words: list[str], what: str, variables: Mapping[str, str] = {}) -> str:
        where = {"cwd": self.directory, "env": self.environment | variables, "stdin": subprocess.DEVNULL}
        done = subprocess.run(words, **where, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, f"{what}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> Iterator[Clone]:
    directory = tmp_path_factory.mktemp("clone")
    for name in LINKED:
        (directory / name).symlink_to(REPOSITORY / name)
    (directory / ".venv/bin").mkdir(parents=True)
    path = f"{directory / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COGUMI_")}
    environment = kept | SHORT | {"PATH": path, "PYTHONPATH": str(REPOSITORY)}
    # In the place of Python, which would import torch for every command.
    prepared = prepared_process.as_program(directory / "prepared", environment)
    for name, words in {"python": [sys.executable], "cogumi": [prepared, "-m", "cogumi"]}.items():
        program = directory / ".venv/bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
    pl.DataFrame({"text": sources}).write_parquet(directory / "my_code.parquet")
    (directory / "log.txt").write_bytes((REPOSITORY / "tests/signatures/torchvision-pair.txt").read_bytes())
    made = Clone(directory, environment)
    yield made
    for run in (path.parent for path in directory.glob("runs/*/status.json") if not (path.parent / "DONE").exists()):
        made.run(["cogumi", "stop", str(run), "--kill-after", "10"], "the end of a run that a failed test left")


def pages_to_type() -> list[object]:
    slow = pytest.mark.slow("nearly every command imports torch")
    some = [page for page in PAGES if {"sh", "python"} & {tag for tag, _ in fences(page)}]
    return [pytest.param(page, marks=[] if page in QUICK else slow) for page in some]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", pages_to_type())
def test_what_a_page_tells_to_type_runs(page: str, clone: Clone) -> None:
    for command in BEFORE.get(page, []):
        clone.type(command)
    for tag, block in fences(page):
        if tag == "sh":
            for command in commands(block):
                if not cannot_run(command) and WITH.get(plain(command), page) == page:
                    clone.type(command)
        elif tag == "python":
            python = prepared_process.python(clone.environment)
            clone.run([*python, "-c", GIVEN.get(page, "") + block], f"{page}: {block}")


def test_the_reference_is_written_from_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    reference = importlib.import_module("reference")
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "make reference"
