"""The tests that ISSUES_LOG.md names exist, its entries are numbered and indexed, and its template has every field."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LOG = (REPOSITORY / "ISSUES_LOG.md").read_text(encoding="utf-8")
FIELDS = ["Symptom", "Cause", "Fix", "Lesson", "Test"]
TEMPLATE_FIELDS = {*FIELDS, "Date", "Issue", "Files", "Related Guidelines", "Status"}


def test_every_entry_has_its_number_and_all_fields() -> None:
    entries = LOG.partition("\n## Template")[0]
    _, *parts = re.split(r"^### (\d+)\. .+$", entries, flags=re.MULTILINE)
    assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        assert re.findall(r"^- \*\*(\w+)\*\*: ", text, re.MULTILINE) == FIELDS, number


def test_the_index_covers_every_entry() -> None:
    ranges = re.findall(r"^\| \[(.+)\]\(#.+\) \| (\d+) to (\d+) \|$", LOG, re.MULTILINE)
    for kind, first, last in ranges:
        section = LOG.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
        numbers = re.findall(r"^### (\d+)\.", section, re.MULTILINE)
        assert (numbers[0], numbers[-1]) == (first, last), kind
    assert len(ranges) == LOG.count("\n## ") - 1


def test_the_tests_of_entries_exist() -> None:
    names = set(re.findall(r"`(tests/[\w/]+\.py)`", LOG))
    assert sorted(name for name in names if not (REPOSITORY / name).is_file()) == []


def test_the_templates_have_every_field() -> None:
    shipped = (REPOSITORY / "cogumi/templates/ISSUES_LOG.md").read_text(encoding="utf-8")
    for template in (LOG.partition("\n## Template")[2], shipped):
        assert set(re.findall(r"^- \*\*([\w ]+)\*\*: ", template, re.MULTILINE)) == TEMPLATE_FIELDS
