"""What is said of environment variables is what the installed packages do with them."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogumi.compile.compile_report import KNOWN, list_variables

PACKAGES = ("torch", "transformers", "accelerate")
# Which of them holds the name, spelled out in quotes. unsloth is not installed where the tests run.
READ_BY = {
    "TORCHDYNAMO_DISABLE": {"torch"},
    "TORCH_COMPILE_DISABLE": {"torch"},
    "TORCH_COMPILE": set(),
    "UNSLOTH_DISABLE_DYNAMO": set(),
    "UNSLOTH_COMPILE_DISABLE": set(),
    "TORCHDYNAMO_SUPPRESS_ERRORS": {"torch"},
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": {"torch"},
    "ACCELERATE_DYNAMO_BACKEND": {"transformers", "accelerate"},
}
# How many graphs Dynamo made of something compiled, and what is said to have switched it off.
TRY = """
import torch, torch._dynamo
from cogumi.patches.torch_internals import dynamo_switched_off_by
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"], dynamo_switched_off_by() or "on")
"""
# The same, and what becomes of 4-bit layers.
TRY_BITSANDBYTES = (
    TRY
    + """
import bitsandbytes
from cogumi.patches import graph_break
before = bitsandbytes.matmul_4bit
print(graph_break.apply("auto").reason)
print(bitsandbytes.matmul_4bit is before)
"""
)


def sources(package: str) -> Iterator[bytes]:
    spec = importlib.util.find_spec(package)
    for path in Path(spec.origin).parent.rglob("*.py"):
        if "testing" not in path.parts:
            yield path.read_bytes()


def test_each_variable_is_read_where_its_meaning_says() -> None:
    collected: dict[str, set[str]] = {name: set() for name in KNOWN}
    quoted = {name: (f'"{name}"'.encode(), f"'{name}'".encode()) for name in KNOWN}
    for package in PACKAGES:
        for text in sources(package):
            for name, spellings in quoted.items():
                if any(spelled in text for spelled in spellings):
                    collected[name].add(package)
    assert collected == READ_BY
    for name, (_, meaning) in KNOWN.items():
        assert bool(READ_BY[name]) or "unsloth" in meaning


@pytest.mark.parametrize(
    ("environ", "lines"),
    [
        (
            {"PATH": "/bin", "TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE": "0", "UNSLOTH_DISABLE_DYNAMO": "1"},
            [
                "TORCHDYNAMO_DISABLE=1: torch compiles nothing in this process; leave it out",
                "TORCH_COMPILE=0: read by nothing in torch, transformers or unsloth; leave it out",
                "UNSLOTH_DISABLE_DYNAMO=1: read by nothing, unsloth included; leave it out",
            ],
        ),
        ({"TORCHDYNAMO_DISABLE": "true"}, ["TORCHDYNAMO_DISABLE=true: only 1 has an effect; leave it out"]),
        ({"ACCELERATE_DYNAMO_BACKEND": "no"}, []),  # which accelerate launch always sets
        ({"ACCELERATE_DYNAMO_BACKEND": "NO"}, []),
        ({}, []),
    ],
)
def test_variables_are_explained(environ: dict[str, str], lines: list[str]) -> None:
    assert list_variables(environ) == lines


def test_this_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KNOWN:
        monkeypatch.delenv(name, raising=False)
    assert list_variables() == []
    monkeypatch.setenv("TORCH_COMPILE", "1")
    (found,) = list_variables()
    assert found.startswith("TORCH_COMPILE=1: read by nothing")


@pytest.mark.slow("eight processes that import torch")
def test_what_is_said_to_switch_compiling_off_does_and_nothing_else() -> None:
    """In processes of their own, side by side, as importing torch reads the environment."""
    clean = {name: value for name, value in os.environ.items() if name not in KNOWN}
    off = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
    nothing = [name for name, read_by in READ_BY.items() if not read_by]
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=clean | each, stdout=subprocess.PIPE, text=True)
        for code, each in (
            (TRY, {"TORCHDYNAMO_DISABLE": "1"}),
            (TRY_BITSANDBYTES, {"TORCH_COMPILE_DISABLE": "1"}),
            (TRY, dict.fromkeys(nothing, "1") | dict.fromkeys(off, "true")),
        )
    ]
    said = [process.communicate()[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    why = "Dynamo is switched off by TORCH_COMPILE_DISABLE=1: nothing is compiled; unset it to compile"
    assert said == [["0 TORCHDYNAMO_DISABLE=1"], ["0 TORCH_COMPILE_DISABLE=1", why, "True"], ["1 on"]]
