"""The standard library sample: real, parseable, the same every time."""

import ast
import re
import sysconfig
import warnings
from pathlib import Path

import polars as pl
import pytest

from cogumi.core import run_directory
from cogumi.core.errors import UsageError
from cogumi.data import stdlib_sample
from cogumi.data.source_files import locate
from cogumi.data.stdlib_sample import collect_functions, renamings, sample_path, write_sample


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "new" / "a.parquet")


def test_rows_are_functions_that_parse_on_their_own(shard):
    rows = pl.read_parquet(shard)
    assert rows.columns == ["path", "name", "source", "licence"]
    assert rows.height > 5000
    assert rows["licence"].unique().to_list() == ["PSF-2.0"]
    assert rows["source"].is_unique().all()
    assert not rows["path"].str.contains(r"(^|/)(site-packages|tests?|idlelib)/").any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, source in rows.select("name", "source").iter_rows():
            (function,) = ast.parse(source).body
            assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            assert function.name == name.split(".")[-1]
            assert stdlib_sample.MIN_LINES <= source.count("\n") <= stdlib_sample.MAX_LINES
    parts = [path.split("/") for path in rows["path"]]
    assert parts == sorted(parts)


@pytest.fixture
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """One package of the library instead of all of it, for tests that write several samples."""
    package = Path(sysconfig.get_paths()["stdlib"]) / "asyncio"
    monkeypatch.setattr(stdlib_sample.sysconfig, "get_paths", lambda: {"stdlib": str(package)})


@pytest.mark.usefixtures("small_library")
def test_two_runs_give_the_same_bytes_and_leave_nothing_behind(tmp_path):
    first, again = write_sample(tmp_path / "a.parquet"), write_sample(tmp_path / "b.parquet")
    assert again.read_bytes() == first.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"a.parquet", "b.parquet"}


def test_what_is_taken_and_what_is_left_out(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def t():\n    a = 1\n    return a\n")
    long = "def long():\n" + "    x = 1\n" * 40
    text = (
        "import os\n\x0c\n"  # a form feed is no line end to ast, though it is to str.splitlines
        "@decorated\ndef f(x):\n    return x\n\n"
        "class A:\n    class B:\n        async def m(self):\n"
        "            def inner():\n                pass\n            return 1\n\n"
        "    def stub(self): ...\n\n"
        "if os.name:\n    try:\n        def g(x):\n            y = x\n            return y\n"
        "    except OSError:\n        pass\n\n"
        'class C:\n    def text(self):\n        return """\nat column 0\n"""\n\n'
    )
    (tmp_path / "b.py").write_text(text + long)
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbf@decorated\r\ndef f(x):\r\n    return x\r\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "python2.py").write_text("print 'x'\n")
    rows = collect_functions(tmp_path)
    assert list(zip(rows["path"], rows["name"], strict=True)) == [("a.py", "f"), ("b.py", "A.B.m"), ("b.py", "g")]
    assert rows["source"][0] == "@decorated\ndef f(x):\n    return x\n"
    assert rows["source"][2] == "def g(x):\n    y = x\n    return y\n"


def test_a_python_without_sources_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no library source"):
        collect_functions(tmp_path)


def test_the_cache_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_sample.platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    monkeypatch.setattr(
        stdlib_sample, "write_sample", lambda path: Path(path).parent.mkdir() or Path(path).touch() or path
    )
    first = sample_path()
    assert first.parent == tmp_path / "cogumi"
    assert f"v{stdlib_sample.FORMAT_VERSION}" in first.name
    monkeypatch.delattr(stdlib_sample, "write_sample")
    assert sample_path() == first


@pytest.mark.usefixtures("small_library")
def test_the_tasks_are_made_on_first_use_and_once_for_all_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_sample.platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    chat = pl.read_parquet(sample_path("cogumi:stdlib-chat"))
    (made,) = tmp_path.glob("cogumi/*-renamings-*.parquet")
    before = made.stat()
    tasks = pl.read_parquet(sample_path("cogumi:stdlib-tasks"))
    assert 0 < tasks.height < chat.height == pl.read_parquet(made).height
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_failed_write_leaves_neither_file_nor_temporary(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(run_directory.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        stdlib_sample.write_frame(tmp_path / "a.parquet", pl.DataFrame({"a": [1]}))
    assert list(tmp_path.iterdir()) == []


def read(kind: str) -> pl.DataFrame:
    return pl.read_parquet(sample_path(f"cogumi:stdlib-{kind}"))


def renamed(code: str, old: str, new: str) -> str:
    """What Python's own parser makes of a renaming."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = new
    return ast.unparse(tree)


def test_each_task_asks_for_a_renaming_that_has_one_right_answer():
    rows = read("chat")
    assert rows.height > 1000
    assert len({prompt[-1]["content"] for prompt in rows["prompt"]}) == rows.height
    for prompt, answer in rows.select("prompt", "answer").iter_rows():
        asked, lines = prompt[-1]["content"].split("\n", 1)
        _, old, _, new = asked.removesuffix(":").split(" ")
        assert ast.unparse(ast.parse(answer)) == renamed(lines, old, new)
        assert new not in {node.id for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Name)}


def test_a_rejected_answer_renames_the_first_place_only():
    rows = read("pairs")
    for prompt, chosen, rejected in rows.iter_rows():
        asked, lines = prompt[-1]["content"].split("\n", 1)
        _, old, _, new = asked.removesuffix(":").split(" ")
        assert rejected[-1]["content"] == re.sub(rf"\b{old}\b", new, lines, count=1) != chosen[-1]["content"]
        assert old not in [node.id for node in ast.walk(ast.parse(chosen[-1]["content"])) if isinstance(node, ast.Name)]


def test_noisy_conversations_and_tasks_are_of_different_functions():
    """So that nothing of what SFT sees in the demonstration is a prompt of GSPO, or of the comparison after it."""
    right, noisy, tasks = (read(kind) for kind in ("chat", "chat-noisy", "tasks"))
    assert noisy.height + tasks.height == right.height
    assert noisy.join(tasks, on="prompt").is_empty()
    assert tasks.join(right, on=["prompt", "messages", "answer"]).height == tasks.height
    pairs = read("pairs")
    assert pairs["prompt"].to_list() == noisy["prompt"].to_list()
    answers = noisy.join(right, on="prompt", suffix="_right").join(pairs, on="prompt")
    same = (answers["answer"] == answers["answer_right"]).to_numpy()
    assert 0.45 < same.mean() < 0.55
    assert (answers["messages"].list.last() == answers["rejected"].list.last()).to_list() == (~same).tolist()


def test_a_name_that_is_also_another_word_is_no_task():
    """`total` is an attribute, a keyword or a string as well: replacing words would change those."""
    ask = "def f(total, other):\n    other = other + 1\n    {}\n    return other\n"
    for line in ("self.total = total + total", "g(total=total + total)", "total = 'total' + total"):
        source = ask.format(line)
        common = [f"def g{n}(common):\n    return common\n" for n in range(stdlib_sample.COMMON_NAME)]
        assert not [task for task in renamings([source, *common])["task"] if task.startswith("Rename total")]


@pytest.mark.usefixtures("small_library")
def test_a_cache_that_takes_nothing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"cogumi:stdlib: cannot be written .*; set XDG_CACHE_HOME"):
        locate("cogumi:stdlib")
