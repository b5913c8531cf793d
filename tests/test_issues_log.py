"""ISSUES_LOG.md can be read by fields, and the files, tests and benchmarks that its entries name exist."""

import ast
import re
from functools import cache
from pathlib import Path

from cogumi.config.source import there_are

REPOSITORY = Path(__file__).parents[1]
FIELDS = ["date", "issue", "symptoms", "root cause", "solution", "files", "lesson", "status"]
HEADING = re.compile(r"## (\d+)\. (\S.*)")
FIELD = re.compile(r"- \*\*([a-z ]+)\*\*: (\S.*)")
QUOTED = re.compile(r"`([^`]+)`")


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


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def named_tests(status: str) -> list[str]:
    return [each for each in QUOTED.findall(status) if each.startswith("tests/")]


def test_no_entry_is_hidden_from_the_tests_below() -> None:
    """A heading or a field that is spelled otherwise would be read as part of the entry before, or not at all."""
    assert ENTRIES
    assert OTHER == []
    assert not any(line.startswith(("#", "-")) for line in ABOVE[1:])
    assert [title for title, fields in ENTRIES if list(fields) != FIELDS] == []


def test_entries_are_counted() -> None:
    """Others name them by their numbers. Two branches that add an entry each take the same one."""
    assert [int(title.split(".")[0]) for title, _ in ENTRIES] == list(range(1, len(ENTRIES) + 1))


def test_the_template_for_a_log_of_ones_own_has_the_same_fields() -> None:
    above, ((title, fields),), other = log(there_are()["ISSUES_LOG.md"])
    assert above[0].startswith("# Issues log")
    assert title.startswith("1. ")
    assert list(fields) == FIELDS
    assert other == []


def test_the_files_it_names_exist() -> None:
    named = [(title, name) for title, fields in ENTRIES for name in QUOTED.findall(fields["files"])]
    assert [each for each in named if not (REPOSITORY / each[1]).is_file()] == []
    assert {title for title, _ in named} == {title for title, _ in ENTRIES}


def exists(test: str) -> bool:
    file, _, function = test.partition("::")
    path = REPOSITORY / file
    return path.is_file() and (not function or function in functions_of(path))


def test_what_keeps_it_fixed_exists() -> None:
    assert [
        (title, name) for title, fields in ENTRIES for name in named_tests(fields["status"]) if not exists(name)
    ] == []
    # Where no test can look, the status has to say what does.
    other = "fixed, held by a benchmark: `python -m benchmarks [a-z_]+`|fixed; looked at by hand, "
    assert [
        title
        for title, fields in ENTRIES
        if not re.match("fixed, kept by `tests/" if named_tests(fields["status"]) else other, fields["status"])
    ] == []


def test_a_benchmark_that_holds_an_entry_is_one() -> None:
    named = {
        name for _, fields in ENTRIES for name in re.findall(r"`python -m benchmarks ([a-z_]+)`", fields["status"])
    }
    assert named
    assert [name for name in named if not (REPOSITORY / "benchmarks" / f"{name}.py").is_file()] == []
