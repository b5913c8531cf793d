"""The files, tests and benchmarks that the entries of ISSUES_LOG.md name exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.__main__ import ALONE, CPU

REPOSITORY = Path(__file__).parents[1]
HEADING = re.compile(r"^## (\d+)\. (.+)$", re.MULTILINE)
FIELD = re.compile(r"^- \*\*([a-z ]+)\*\*: (.+)$", re.MULTILINE)
QUOTED = re.compile(r"`([^`]+)`")


def entries() -> list[tuple[str, dict[str, str]]]:
    """(number, fields) of each entry."""
    _, *parts = HEADING.split((REPOSITORY / "ISSUES_LOG.md").read_text(encoding="utf-8"))
    return [(number, dict(FIELD.findall(text))) for number, text in zip(parts[::3], parts[2::3], strict=True)]


ENTRIES = entries()


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def exists(test: str) -> bool:
    file, _, function = test.partition("::")
    path = REPOSITORY / file
    return path.is_file() and (not function or function in functions_of(path))


def test_a_number_names_one_entry() -> None:
    """Others name entries by their numbers. Two branches that add an entry each take the same one."""
    assert [int(number) for number, _ in ENTRIES] == list(range(1, len(ENTRIES) + 1))


@pytest.mark.parametrize(("number", "fields"), ENTRIES, ids=[number for number, _ in ENTRIES])
def test_the_files_and_what_keeps_it_fixed_exist(number: str, fields: dict[str, str]) -> None:
    files = QUOTED.findall(fields["files"])
    assert [name for name in files if not (REPOSITORY / name).is_file()] == []
    assert files
    status = fields["status"]
    tests = [each for each in QUOTED.findall(status) if each.startswith("tests/")]
    assert [each for each in tests if not exists(each)] == []
    named = re.findall(r"`python -m benchmarks ([a-z_]+)`", status)
    assert [each for each in named if each not in {*CPU, *ALONE, "gpu"}] == []
    # Where no test can look, the status has to say what does.
    assert tests or named or status.startswith("fixed; looked at by hand, ")
