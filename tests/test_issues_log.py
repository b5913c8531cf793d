"""ISSUES_LOG.md is what it says: eight fields an entry, dates in order, files and tests that exist, and nothing else."""

import ast
import re
from datetime import date
from functools import cache
from pathlib import Path

import pytest

from cogumi.handing_out import there_are

REPOSITORY = Path(__file__).parents[1]
FIELDS = ["date", "issue", "symptoms", "root cause", "solution", "files", "lesson", "status"]
HEADING = re.compile(r"## (\d+)\. (\S.*)")
FIELD = re.compile(r"- \*\*([a-z ]+)\*\*: (\S.*)")
QUOTED = re.compile(r"`([^`]+)`")
LONGEST = 260  # characters of a line: a field is a sentence or two


def log(path: Path) -> tuple[list[str], list[tuple[str, dict[str, str]]], list[str]]:
    """The lines above the first entry; each entry's title and fields; the lines that are neither."""
    above: list[str] = []
    entries: list[tuple[str, dict[str, str]]] = []
    other: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if heading := HEADING.fullmatch(line):
            entries.append((f"{heading[1]}. {heading[2]}", {}))
        elif not entries:
            above.append(line)
        elif (field := FIELD.fullmatch(line)) and field[1] not in entries[-1][1]:
            entries[-1][1][field[1]] = field[2]
        elif line:
            other.append(line)
    return above, entries, other


ABOVE, ENTRIES, OTHER = log(REPOSITORY / "ISSUES_LOG.md")
each_entry = pytest.mark.parametrize(("title", "fields"), ENTRIES, ids=[title for title, _ in ENTRIES])


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def named_tests(status: str) -> list[str]:
    return [each for each in QUOTED.findall(status) if each.startswith("tests/")]


def test_there_is_no_other_kind_of_line() -> None:
    assert OTHER == []
    assert ABOVE[0] == "# Issues log"
    assert not any(line.startswith(("#", "|", "-")) for line in ABOVE[1:])
    assert len(ENTRIES) > 80


def test_entries_are_counted_and_each_is_another() -> None:
    titles = [title for title, _ in ENTRIES]
    assert [int(title.split(".")[0]) for title in titles] == list(range(1, len(titles) + 1))
    assert len({title.split(". ", 1)[1].casefold() for title in titles}) == len(titles)
    assert len({fields["issue"] for _, fields in ENTRIES}) == len(titles)


def test_dates_do_not_decrease() -> None:
    dates = [date.fromisoformat(fields["date"]) for _, fields in ENTRIES]
    assert dates == sorted(dates)


@each_entry
def test_an_entry_has_the_eight_fields_in_their_order(title: str, fields: dict[str, str]) -> None:
    assert list(fields) == FIELDS
    assert [name for name, value in fields.items() if len(value) > LONGEST and name != "status"] == []


def test_the_template_for_a_log_of_ones_own_has_the_same_fields() -> None:
    above, ((title, fields),), other = log(there_are()["ISSUES_LOG.md"])
    assert above[0].startswith("# Issues log")
    assert title.startswith("1. ")
    assert list(fields) == FIELDS
    assert other == []


@each_entry
def test_the_files_it_names_exist(title: str, fields: dict[str, str]) -> None:
    named = QUOTED.findall(fields["files"])
    assert fields["files"] == ", ".join(f"`{name}`" for name in named)
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []


@each_entry
def test_what_keeps_it_fixed_exists(title: str, fields: dict[str, str]) -> None:
    status = fields["status"]
    missing = []
    for name in named_tests(status):
        file, _, function = name.partition("::")
        path = REPOSITORY / file
        if not path.is_file() or (function and function not in functions_of(path)):
            missing.append(name)
    assert missing == []
    if named_tests(status):
        assert status.startswith("fixed, kept by `tests/")
    else:  # no test can look there, which the status has to say
        assert re.match("fixed, held by a benchmark: `python -m benchmarks [a-z_]+`|fixed; looked at by hand, ", status)


def test_a_benchmark_that_holds_an_entry_is_one() -> None:
    named = {
        name for _, fields in ENTRIES for name in re.findall(r"`python -m benchmarks ([a-z_]+)`", fields["status"])
    }
    assert named
    assert [name for name in named if not (REPOSITORY / "benchmarks" / f"{name}.py").is_file()] == []
