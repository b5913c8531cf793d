"""Reading rows: the right ones, and for each wrong input one line that names the file and the fix."""

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from golden import Golden

from cogumi.core.errors import UsageError
from cogumi.data import sources
from cogumi.data.fim import FimConfig
from cogumi.data.source_files import find_files
from cogumi.data.sources import batches, column_names
from cogumi.models.small_base import train_tokenizer
from tests.fim_examples import tokenize_for_sft


def read_rows(path: Path | str, columns: list[str]) -> pl.DataFrame:
    return pl.concat(batches(find_files(path), columns), how="vertical_relaxed")


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


def refused(path: Path | str, columns: list[str]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_rows(path, columns)
    assert "\n" not in str(caught.value)
    return caught.value


def test_missing_file_names_the_nearest(shard):
    near = refused(shard.with_name("row.parquet"), ["source"])
    assert (near.place, "rows.parquet" in near.message) == (str(shard.with_name("row.parquet")), True)
    assert str(Path.cwd()) in refused(shard.parent / "zzz" / "q.parquet", ["source"]).message


def test_directory_or_pattern_without_data(tmp_path, golden: Golden):
    for place in (tmp_path, f"{tmp_path}/*.parquet"):
        with golden.raises("data", place=str(place)):
            read_rows(place, ["source"])


def test_not_parquet_and_damaged_parquet(tmp_path, shard):
    whole, path = shard.read_bytes(), tmp_path / "bad.parquet"
    torn = whole[:4] + b"\xff" * 60 + whole[64:]  # the footer is sound: found when the rows are read
    for content in (b"hello " * 100, b"", whole[: len(whole) // 2], torn):
        path.write_bytes(content)
        error = refused(path, ["source"])
        assert (error.place, "a damaged one" in error.message) == (str(path), True)


def test_a_missing_column_names_the_nearest(shard):
    error = refused(shard, ["sources"])
    assert (error.place, error.fix) == (str(shard), "did you mean 'source'? it has: source, stars, text")


def test_bytes_that_are_not_utf8_become_counted_drops(tmp_path):
    path = tmp_path / "raw.parquet"
    good = b"def f(x):\n    return x\n"
    pl.DataFrame({"source": [good, b"\xff\xfe" + good, None]}).write_parquet(path)
    data = tokenize_for_sft(read_rows(path, ["source"]), train_tokenizer([good.decode()]), FimConfig())
    assert data.dropped == {"null": 1, "not UTF-8": 1}


def rows_of(file: Path, columns: list[str]) -> list[dict[str, object]]:
    return [row for frame in batches([file], columns) for row in frame.iter_rows(named=True)]


def test_batches_are_the_file_in_order_however_small(tmp_path, monkeypatch):
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
    for name, content in (("a.jsonl", b'{"a": "x"}\n'), ("b.csv", b"a,b\nx,1\n"), ("c.tsv", b"a\tb\nx\t1\n")):
        with pa.output_stream(str(tmp_path / (name + suffix)), compression="detect") as file:
            file.write(content)
        assert rows_of(tmp_path / (name + suffix), ["a"]) == [{"a": "x"}]


def test_json_lines_keep_what_each_line_has(tmp_path):
    """A frame's types would give every message the keys of all others, and every argument of a tool."""
    rows = [
        {"messages": [{"role": "user", "content": "hi"}], "n": 1},
        {"messages": [{"role": "tool", "content": [{"type": "text"}], "tool_calls": [{"a": {"x": 1}}]}], "n": 2.5},
        {"messages": None, "n": None},
        {"messages": "text", "n": "3"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert rows_of(tmp_path / "a.jsonl", ["messages", "n"]) == rows


def test_a_damaged_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    damaged = {
        '\ufeff{"a": "x"}\n\n{"a": "y"}\n{"a": \n{"a": "z"}\n': ":4", '{"a": "x"}\n{"a": \n': ":2", "": "",
        "[" * 100_000: ":1", '{"a": 1}\n' + '{"a": ' * 100_000: ":2",
    }  # fmt: skip
    for text, line in damaged.items():
        path.write_text(text)
        assert refused(path, ["a"]).place == f"{path}{line}"


def test_a_line_that_is_nested_too_deep_is_named_by_its_number(tmp_path):
    path, shallow = tmp_path / "rows.jsonl", '{"a": "x", "b": "' + "[" * 999 + '"}\n'
    for depth in (255, 256, 900):
        path.write_text(shallow + '{"a": ' + "[" * depth + "]" * depth + "}\n")
        if depth == 255:
            assert len(rows_of(path, ["a"])) == 2
        else:
            error = refused(path, ["a"])
            assert (error.place, "256 deep" in error.message) == (f"{path}:2", True)


def test_text_that_is_no_unicode_becomes_bytes(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "fine"}\n{"a": "\xff"}\n{"a": "\\ud800"}\n{"a": {"b": "\\ud800"}}\n')
    values = [row["a"] for row in rows_of(path, ["a"])]
    assert values[0] == "fine"
    for value in values[1:]:
        assert isinstance(value, str | bytes)
    with pytest.raises(UnicodeDecodeError):
        values[3].decode()
    (tmp_path / "rows.csv").write_bytes(b"a,b\n\xff,x\n")
    assert rows_of(tmp_path / "rows.csv", ["a", "b"]) == [{"a": b"\xff", "b": "x"}]


def test_tables_hold_text_with_quotes_newlines_and_nothing(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('a,b,c\n"x, ""y""\nz",007,\n"",1,é\n')
    assert rows_of(path, ["c", "a", "b"]) == [{"c": "", "a": 'x, "y"\nz', "b": "007"}, {"c": "é", "a": "", "b": "1"}]
    path.write_text("a,b\n1,2,3\n")
    assert refused(path, ["a"]).place == f"{path}:2"
    path.write_text("a,b\n1,2\n")
    assert refused(path, ["bb"]).fix == "did you mean 'b'? it has: a, b"
    path.write_text("")
    assert refused(path, ["a"]).place == str(path)


def test_a_directory_is_read_as_its_first_kind(tmp_path):
    for name in ("b.csv", "a.csv", "notes.json", "README.md"):
        (tmp_path / name).write_text("a\nx\n")
    assert [file.name for file in find_files(tmp_path)] == ["a.csv", "b.csv"]
    (tmp_path / "z.jsonl").write_text("{}\n")
    assert [file.name for file in find_files(tmp_path)] == ["z.jsonl"]
