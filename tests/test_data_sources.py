"""Reading rows: the right ones, and for each wrong input one line that names the file and the fix."""

import json
from pathlib import Path

import polars as pl
import pytest
from golden import Golden

from cogumi.core.errors import UsageError
from cogumi.data import sources
from cogumi.data.fim import FimConfig, tokenize_for_sft
from cogumi.data.sources import batches, column_names, read_rows
from cogumi.hub.source_files import find_files


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


def test_nested_columns_on_request(tmp_path, golden: Golden):
    path = tmp_path / "chat.parquet"
    pl.DataFrame({"messages": [[{"role": "user", "content": "hi"}]]}).write_parquet(path)
    with golden.raises("data", message="not text"):
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
    assert "rows.jsonl:2: not JSON, or cut short" in error(path, ["source"])
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
    from benchmarks.data import starcoder_like

    path = tmp_path / "raw.parquet"
    good = b"def f(x):\n    return x\n"
    pl.DataFrame({"source": [good, b"\xff\xfe" + good, None]}).write_parquet(path)
    data = tokenize_for_sft(read_rows(path, ["source"]), starcoder_like([good.decode()], 300), FimConfig())
    assert data.dropped == {"null": 1, "not UTF-8": 1}


def rows_of(files: list[Path], columns: list[str], **options) -> list[dict[str, object]]:
    return [row for frame in batches(files, columns, **options) for row in frame.iter_rows(named=True)]


def test_batches_are_the_file_in_order_however_small(tmp_path, monkeypatch):
    from cogumi.data import sources

    monkeypatch.setattr(sources, "BATCH_BYTES", 1000)
    expected = [{"text": f"{i} " * 20, "n": i} for i in range(200)]
    pl.DataFrame(expected).write_parquet(tmp_path / "a.parquet", row_group_size=70)
    pl.DataFrame(expected).write_csv(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, expected)))
    for name in ("a.parquet", "a.jsonl", "a.csv"):
        frames = list(batches([tmp_path / name], ["text", "n"]))
        assert len(frames) > 5, name
        rows = [row for frame in frames for row in frame.iter_rows(named=True)]
        assert [{**row, "n": int(row["n"])} for row in rows] == expected, name
        assert column_names([tmp_path / name]) == ["text", "n"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_and_tables(tmp_path, suffix):
    import pyarrow as pa

    for name, content in (("a.jsonl", b'{"a": "x"}\n'), ("b.csv", b"a,b\nx,1\n"), ("c.tsv", b"a\tb\nx\t1\n")):
        with pa.output_stream(str(tmp_path / (name + suffix)), compression="detect") as file:
            file.write(content)
        assert rows_of([tmp_path / (name + suffix)], ["a"]) == [{"a": "x"}]


def test_json_lines_keep_what_each_line_has(tmp_path):
    """A frame's types would give every message the keys of all others, and every argument of a tool."""
    rows = [
        {"messages": [{"role": "user", "content": "hi"}], "n": 1},
        {"messages": [{"role": "tool", "content": [{"type": "text"}], "tool_calls": [{"a": {"x": 1}}]}], "n": 2.5},
        {"messages": None, "n": None},
        {"messages": "text", "n": "3"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert rows_of([tmp_path / "a.jsonl"], ["messages", "n"]) == rows


def test_a_damaged_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"a": "x"}\n\n{"a": "y"}\n{"a": \n{"a": "z"}\n')
    assert "rows.jsonl:4: not JSON, or cut short (Expecting value)" in error(path, ["a"])
    path.write_text('{"a": "x"}\n[1]\n')
    assert "rows.jsonl:2: a row is one object, and this is a list" in error(path, ["a"])
    path.write_text("[" * 100_000)
    assert "one array, not one object a line; convert it: jq -c '.[]' rows.jsonl" in error(path, ["a"])
    path.write_text('{"a": 1}\n' + '{"a": ' * 100_000)
    assert "rows.jsonl:2: not JSON" in error(path, ["a"])
    path.write_text('{"a": "x"}\n{"a": {"b": 1}, "c": "y"}\n')
    assert "rows.jsonl:2: column 'a' holds an object, not text; name a text column of: c" in error(path, ["a"])


def test_a_column_of_several_kinds_is_refused_with_both_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST_ROWS", 2)  # the two lines are in different batches
    path = tmp_path / "rows.jsonl"
    for first, other, alike, said in (
        (1, "7", "throughout", "rows.jsonl:5: column 'a' holds text, but a number at rows.jsonl:1"),
        (
            {"x": [1]},
            {"x": ["7"]},
            "throughout",
            "rows.jsonl:5: column 'a.x[]' holds text, but a number at rows.jsonl:1",
        ),
        (
            "hi",
            [{"role": "user"}],
            "text or messages",
            "rows.jsonl:5: column 'a' holds a list, but text at rows.jsonl:1",
        ),
        ("hi", 7, "text or messages", None),
        (1, 2.5, "throughout", None),
    ):
        path.write_text(
            "\n".join(json.dumps({"a": each}) for each in (first, None, first)) + "\n\n" + json.dumps({"a": other})
        )
        if said is None:
            assert len(list(batches([path], ["a"], alike={"a": alike}))) == 2
            continue
        with pytest.raises(UsageError) as caught:
            list(batches([path], ["a"], alike={"a": alike}))
        assert str(caught.value).startswith(f"{path.parent}/{said}; ")


def test_text_that_is_no_unicode_becomes_bytes(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "fine"}\n{"a": "\xff"}\n{"a": "\\ud800"}\n{"a": {"b": "\\ud800"}}\n')
    values = [row["a"] for row in rows_of([path], ["a"])]
    assert values[0] == "fine"
    for value in values[1:]:
        assert isinstance(value, str | bytes)
    with pytest.raises(UnicodeDecodeError):
        values[3].decode()
    (tmp_path / "rows.csv").write_bytes(b"a,b\n\xff,x\n")
    assert rows_of([tmp_path / "rows.csv"], ["a", "b"]) == [{"a": b"\xff", "b": "x"}]


def test_tables_hold_text_with_quotes_newlines_and_nothing(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('a,b,c\n"x, ""y""\nz",007,\n"",1,é\n')
    assert rows_of([path], ["c", "a", "b"]) == [{"c": "", "a": 'x, "y"\nz', "b": "007"}, {"c": "é", "a": "", "b": "1"}]
    path.write_text("a,b\n1,2,3\n")
    assert "Row #2: Expected 2 columns, got 3" in error(path, ["a"])
    path.write_text("a,b\n1,2\n")
    assert "no column 'bb'; did you mean 'b'? it has: a, b" in error(path, ["bb"])
    path.write_text("")
    assert "Empty CSV file" in error(path, ["a"])


def test_a_directory_is_read_as_its_first_kind(tmp_path):
    for name in ("b.csv", "a.csv", "notes.json", "README.md"):
        (tmp_path / name).write_text("a\nx\n")
    assert [file.name for file in find_files(tmp_path)] == ["a.csv", "b.csv"]
    (tmp_path / "z.jsonl").write_text("{}\n")
    assert [file.name for file in find_files(tmp_path)] == ["z.jsonl"]
