"""Reading rows: the right ones, and for each wrong input one line that names the file and the fix."""

import json
from pathlib import Path

import polars as pl
import pytest

from cogumi.data.fim import FimConfig, tokenize_for_sft
from cogumi.data.sources import read_rows
from cogumi.errors import UsageError


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    pl.DataFrame({"source": ["a", None, "c"], "stars": [1, 2, 3], "text": ["x", "y", "z"]}).write_parquet(path)
    return path


def test_reads_only_the_columns_asked_for_and_keeps_nulls(shard):
    assert read_rows(shard, ["source"]).to_dict(as_series=False) == {"source": ["a", None, "c"]}
    assert read_rows(str(shard), ["text", "source"]).columns == ["text", "source"]


def test_directories_and_globs_in_name_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, value in (("b.parquet", "2"), ("a.parquet", "1"), ("sub/c.parquet", "3")):
        pl.DataFrame({"source": [value], name: [0]}).write_parquet(tmp_path / name)
    (tmp_path / "README.md").write_text("not data")
    assert read_rows(tmp_path, ["source"])["source"].to_list() == ["1", "2", "3"]
    assert read_rows(tmp_path / "*.parquet", ["source"])["source"].to_list() == ["1", "2"]
    assert read_rows(tmp_path / "**/c.parquet", ["source"])["source"].to_list() == ["3"]


def test_json_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    records = [{"source": "é\n"}, {"other": 1}, *({"source": "x"} for _ in range(300)), {"late": "y", "source": None}]
    path.write_text("\n".join(json.dumps(record) for record in records))
    assert read_rows(path, ["source"])["source"].to_list() == ["é\n", None, *["x"] * 300, None]
    assert read_rows(path, ["late"])["late"].to_list()[-1] == "y"
    assert read_rows(tmp_path, ["source"]).height == 303


def test_categories_become_text_and_bytes_stay_bytes(tmp_path):
    path = tmp_path / "rows.parquet"
    frame = pl.DataFrame({"kind": pl.Series(["a", "b"], dtype=pl.Categorical), "raw": [b"ok", b"\xff"]})
    frame.write_parquet(path)
    rows = read_rows(path, ["kind", "raw"])
    assert rows.dtypes == [pl.String, pl.Binary]


def test_nested_columns_on_request(tmp_path):
    path = tmp_path / "chat.parquet"
    pl.DataFrame({"messages": [[{"role": "user", "content": "hi"}]]}).write_parquet(path)
    with pytest.raises(UsageError, match="not text"):
        read_rows(path, ["messages"])
    assert read_rows(path, ["messages"], text_only=False)["messages"][0][0]["content"] == "hi"


def error(path: Path | str, columns: list[str]) -> str:
    with pytest.raises(UsageError) as caught:
        read_rows(path, columns)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path).rstrip("*") in message
    return message


def test_missing_file_names_the_nearest(shard):
    assert "did you mean rows.parquet?" in error(shard.with_name("row.parquet"), ["source"])
    assert "no such file" in error(shard.parent / "zzz" / "q.parquet", ["source"])


def test_directory_or_pattern_without_data(tmp_path):
    assert "holds no .parquet or .jsonl file" in error(tmp_path, ["source"])
    assert "no file matches" in error(f"{tmp_path}/*.parquet", ["source"])


def test_not_parquet_and_damaged_parquet(tmp_path, shard):
    text = tmp_path / "text.parquet"
    text.write_text("hello " * 100)
    assert "not a parquet file, or a damaged one" in error(text, ["source"])
    empty = tmp_path / "empty.parquet"
    empty.touch()
    assert "not a parquet file" in error(empty, ["source"])
    whole = shard.read_bytes()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole[: len(whole) // 2])
    assert "not a parquet file" in error(cut, ["source"])
    # The footer is sound and the pages are not: found when the rows are read.
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])
    assert "cannot be read" in error(torn, ["source"])


def test_damaged_json_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"source": "a"}\n{"source": \n')
    assert "not a JSON lines file" in error(path, ["source"])
    path.write_text("")
    assert "empty" in error(path, ["source"])


def test_no_rows(tmp_path):
    path = tmp_path / "none.parquet"
    pl.DataFrame({"source": []}, schema={"source": pl.String}).write_parquet(path)
    assert "it has no rows" in error(path, ["source"])


def test_missing_and_wrong_columns(shard):
    message = error(shard, ["sources"])
    assert "no column 'sources'; did you mean 'source'? it has: source, stars, text" in message
    assert "holds Int64, not text; name a text column of: source, text" in error(shard, ["stars"])


def test_bytes_that_are_not_utf8_become_counted_drops(tmp_path):
    from benchmarks.fim_data import starcoder_like

    path = tmp_path / "raw.parquet"
    good = b"def f(x):\n    return x\n"
    pl.DataFrame({"source": [good, b"\xff\xfe" + good, None]}).write_parquet(path)
    data = tokenize_for_sft(read_rows(path, ["source"]), starcoder_like([good.decode()], 300), FimConfig())
    assert data.dropped == {"null": 1, "not UTF-8": 1}
