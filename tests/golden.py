"""Texts that users read, one file a command in tests/golden/, which `make golden` rewrites and a review reads.

A test asserts what an error is (its key, its place, the value it names) and leaves the wording to these files: better prose
changes them alone. A test fails when a text differs from its entry, and when it leaves an entry of its own unused;
test_golden.py fails when the test of an entry is gone.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cogumi.core.errors import UsageError

FILES = Path(__file__).parent / "golden"
TESTS = pytest.StashKey[dict[str, bool]]()  # every test that was collected, also one deselected: does it use `golden`?
WHOLE = pytest.StashKey[bool]()  # whether the files given were collected whole, not single tests of them
Texts = dict[str, list[str]]  # of one command, by test


def read(file: Path) -> Texts:
    texts: Texts = defaultdict(list)
    for line in file.read_text().splitlines():
        if line.startswith("## "):
            of = texts[line[3:]]
        elif line.startswith("- "):
            of.append(line[2:])
        elif line:
            of[-1] += f"\n{line[2:]}" if line != "  |" else "\n"
    return texts


def write(file: Path, texts: Texts) -> None:
    entries = [
        f"## {test}\n"
        + "".join("- " + text.replace("\n\n", "\n|\n").replace("\n", "\n  ") + "\n" for text in texts[test])
        for test in sorted(texts)
    ]
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(entries))
    if not entries:
        file.unlink()


STORED = {file.stem: read(file) for file in sorted(FILES.glob("*.txt"))}
WRITTEN: dict[str, Texts] = {}  # by test, of those that passed


class Golden:
    def __init__(self, temporary: dict[str, str], rewriting: bool, test: str) -> None:
        self.temporary, self.rewriting, self.test = temporary, rewriting, test
        self.said: Texts = defaultdict(list)  # by command

    def __call__(self, command: str, text: str) -> None:
        for pattern, name in self.temporary.items():
            text = re.sub(pattern, name, text)
        said = self.said[command]
        said.append("\n".join(line.rstrip() for line in text.strip().splitlines()))
        if not self.rewriting:
            expected = STORED.get(command, {}).get(self.test, [])[len(said) - 1 : len(said)]
            assert said[-1:] == expected, f"tests/golden/{command}.txt says otherwise; `make golden` rewrites it"

    @contextmanager
    def raises(
        self,
        command: str,
        kind: type[Exception] = UsageError,
        *,
        message: str = "",
        place: Path | str | None = None,
        key: str | None = None,
        fix: str = "",
    ) -> Iterator[pytest.ExceptionInfo[Any]]:
        """An error of this kind is raised here. message and fix: what it names there; place and key: as they are."""
        assert message or fix or key or place, "what the error is, beside its wording"
        with pytest.raises(kind) as raised:
            yield raised
        error = raised.value
        assert message in getattr(error, "message", str(error))
        assert place is None or getattr(error, "place", "") == str(place)
        assert key is None or getattr(error, "key", "") == key
        assert fix in getattr(error, "fix", "")
        self(command, str(error))


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    temporary = {
        re.escape(str(tmp_path)): "<tmp>",
        re.escape(str(tmp_path_factory.getbasetemp())) + r"/([\w-]*?)\d+\b": r"<\1>",
        r"\S+( -m pip )": r"<python>\1",
        re.escape(str(FILES.parents[1])): "<repository>",
        r"\b(bitsandbytes|peft|transformers|trl) \d[\w.]+": r"\1 <version>",
    }
    return Golden(temporary, request.config.getoption("golden"), name(request.node))


def name(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """After a test that passed: each of its entries was used."""
    result = yield
    golden = pyfuncitem.funcargs.get("golden")
    said = golden.said if isinstance(golden, Golden) else {}
    if pyfuncitem.config.getoption("golden"):
        WRITTEN[name(pyfuncitem)] = said
        return result
    for command, texts in STORED.items():
        unused = texts.get(name(pyfuncitem), [])[len(said.get(command, [])) :]
        assert not unused, f"unused in tests/golden/{command}.txt; `make golden` rewrites it"
    return result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="rewrite tests/golden/ from the tests that use it")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[TESTS] = {name(item): "golden" in getattr(item, "fixturenames", ()) for item in items}
    config.stash[WHOLE] = not any("::" in argument for argument in config.args)
    if config.getoption("golden"):
        if hasattr(config, "workerinput"):
            raise pytest.UsageError("--golden writes from one process: leave --numprocesses out")
        items[:] = [item for item in items if config.stash[TESTS][name(item)]]


def gone(test: str, config: pytest.Config) -> bool:
    """Whether an entry is of a test that is no longer there, or no longer uses `golden`, as far as was collected."""
    tests, file = config.stash[TESTS], test.split("::")[0]
    collected = config.stash[WHOLE] and any(other.startswith(f"{file}::") for other in tests)
    return not tests[test] if test in tests else collected or not (FILES.parent / file).exists()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("golden"):
        return
    for command in STORED.keys() | {command for said in WRITTEN.values() for command in said}:
        texts = {
            test: of
            for test, of in STORED.get(command, {}).items()
            if test not in WRITTEN and not gone(test, session.config)  # skipped here, or of another file
        }
        write(
            FILES / f"{command}.txt", texts | {test: said[command] for test, said in WRITTEN.items() if command in said}
        )
