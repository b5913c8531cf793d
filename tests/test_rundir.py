"""Files of a run directory are whole or absent."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from golden import Golden

from cogumi.core.errors import UsageError
from cogumi.core.run_directory import append_jsonl, create_run_dir, is_empty, read_jsonl, write_atomic, write_json


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_list_of_numbers_is_one_line_and_texts_are_as_they_were(tmp_path: Path) -> None:
    value = {
        "lengths": [[22, 32, 0], [1, -2, 3.5e-7]], "texts": ["[\n  1,\n  2\n]", "1"], "none": [], "mixed": [1, "a"],
    }  # fmt: skip
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == value
    assert "    [22, 32, 0],\n    [1, -2, 3.5e-07]\n" in text


def test_nan_is_kept_visible_and_the_json_stays_valid(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": float("nan"), "more": [float("-inf"), 1.5]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": "nan", "more": ["-inf", 1.5]}


def test_lines_append_whole(tmp_path: Path) -> None:
    for step in range(3):
        append_jsonl(tmp_path / "m.jsonl", {"step": step, "text": "zwölf\n"})
    assert [row["step"] for row in read_jsonl(tmp_path / "m.jsonl")] == [0, 1, 2]
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_of_many_that_start_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def start(_: int) -> bool:
        barrier.wait()
        try:
            create_run_dir(tmp_path / "run")
        except UsageError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(start, range(8))) == 1


def test_half_a_line_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, line: len(line) // 2)  # what a nearly full disk does
    with pytest.raises(OSError, match="only part of a line"):
        append_jsonl(tmp_path / "m.jsonl", {"step": 1})


def test_a_directory_in_use_is_refused_with_what_is_in_it(tmp_path: Path, golden: Golden) -> None:
    run = create_run_dir(tmp_path / "a" / "run")
    with golden.raises("train", message=str(run), fix="cogumi.run_dir"):
        create_run_dir(run)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with golden.raises("train", message="holds files", fix="cogumi.run_dir"):
        create_run_dir(tmp_path / "b")
    assert os.listdir(tmp_path / "b") == ["notes.txt"]
    with golden.raises("train", message="notes.txt", fix="cogumi.run_dir"):
        create_run_dir(tmp_path / "b" / "notes.txt")
    assert (tmp_path / "b" / "notes.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="cannot write the run directory: File name too long"):
        is_empty(tmp_path / ("x" * 300))
