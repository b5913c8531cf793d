"""The golden texts keep to the tests that say them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import golden as golden_texts
import pytest

SUITE = """
import pytest
from cogumi.core.errors import UsageError

def refuse(place, key="verify", value=42):
    raise UsageError(f"is {value}, two\\n\\nlines", key=key, place=place, fix="give 41")

def test_steady(golden, tmp_path):
    golden("disk", f"{tmp_path} and {tmp_path.parent}/model3/x")

def test_refused(golden, tmp_path):
    with golden.raises("merge", key="verify", place=tmp_path / "out", message="42"):
        refuse(tmp_path / "out")

def test_key(golden, tmp_path):
    with golden.raises("merge", key="verify"):
        refuse(tmp_path)

def test_value(golden, tmp_path):
    with golden.raises("merge", message="42"):
        refuse(tmp_path)

def test_twice(golden):
    golden("merge", "one")
    golden("merge", "another")

def test_named(golden):
    golden("merge", "one")
"""
CHANGES = {
    "give 41": "give 43",
    'tmp_path):\n    with golden.raises("merge", key="verify"):\n        refuse(tmp_path': "tmp_path):\n"
    '    with golden.raises("merge", key="verify"):\n        refuse(tmp_path, key="dtype"',
    'message="42"):\n        refuse(tmp_path)': 'message="42"):\n        refuse(tmp_path, value=40)',
    '    golden("merge", "another")\n': "",
    "test_named": "test_renamed",
}
MERGE = """## test_one.py::test_key
- <tmp>: verify: is 42, two
  |
  lines; give 41

## test_one.py::test_named
- one

## test_one.py::test_refused
- <tmp>/out: verify: is 42, two
  |
  lines; give 41

## test_one.py::test_twice
- one
- another

## test_one.py::test_value
- <tmp>: verify: is 42, two
  |
  lines; give 41
"""


def test_every_entry_has_its_test(request: pytest.FixtureRequest) -> None:
    lost = [
        f"tests/golden/{command}.txt: {test}"
        for command, texts in golden_texts.STORED.items()
        for test in texts
        if golden_texts.gone(test, request.config)
    ]
    assert not lost, "the tests of these entries are gone; `make golden` rewrites the files"


def run(tests: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not suite", *words, "tests"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist"}
    done = subprocess.run(command, cwd=tests.parent, env=alone, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_a_suite_that_changed_fails_until_rewritten(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "golden").mkdir(parents=True)
    shutil.copy(golden_texts.__file__, tests)
    shutil.copy(__file__, tests)
    (tests / "conftest.py").write_text('pytest_plugins = ["golden"]\n')
    suite = tests / "test_one.py"
    suite.write_text(SUITE)
    assert run(tests, "--golden")[0] == 0
    assert (tests / "golden" / "merge.txt").read_text() == MERGE
    assert (tests / "golden" / "disk.txt").read_text() == "## test_one.py::test_steady\n- <tmp> and <model>/x\n"
    assert run(tests, "-n", "2", "--dist", "worksteal")[0] == 0

    text = SUITE
    for old, new in CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    suite.write_text(text)
    status, output = run(tests, "-n", "2", "--dist", "worksteal")
    assert status == 1
    failed = set(re.findall(r"^FAILED tests/\w+\.py::(\w+)", output, re.MULTILINE))
    assert failed == {
        "test_refused",  # its wording
        "test_key",  # its key, which no rewriting makes right
        "test_value",  # the value that it names, likewise
        "test_twice",  # a second entry, unused
        "test_renamed",  # no entry
        "test_every_entry_has_its_test",  # the entry under its old name
    }
    run(tests, "--golden")
    status, output = run(tests)
    assert set(re.findall(r"^FAILED tests/\w+\.py::(\w+)", output, re.MULTILINE)) == {"test_key", "test_value"}
    assert "test_named" not in (tests / "golden" / "merge.txt").read_text()
