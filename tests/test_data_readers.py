"""One reader for a cell and for a file: JSON text is what it spells, in every column and layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from cogumi.core.errors import UsageError
from cogumi.data import sources
from cogumi.data.chat import read_completion, read_pair, read_prompt
from cogumi.data.rows import BadRow
from cogumi.data.sources import batches, column_names
from tests.chat_tokenizers import ask, say
from tests.test_data_leaks import prepared

ROWS = [{"a": "x", "b": [1, None]}, {"a": "é] , {", "b": {"c": None}}, {"a": None, "b": 2**70}]


def rows_of(path: Path, columns: list[str]) -> list[dict[str, Any]]:
    return [row for frame in batches([path], columns) for row in frame.iter_rows(named=True)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
@pytest.mark.parametrize(
    "text",
    [
        "\n".join(map(json.dumps, ROWS)),
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n",
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
        " \n" + json.dumps(ROWS[:1]) + "\n" + json.dumps(ROWS[1:], indent=4) + "\n",
    ],
)
def test_every_layout_of_json_is_read(tmp_path: Path, text: str, encoding: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(text.encode(encoding))
    assert rows_of(path, ["a", "b"]) == ROWS
    assert column_names([path]) == ["a", "b"]


def test_an_array_of_any_length_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BUFFER_BYTES", 64)
    monkeypatch.setattr(sources, "BATCH_BYTES", 1000)
    rows = [{"a": "]},{[" * (n % 50)} for n in range(500)]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    assert rows_of(tmp_path / "rows.json", ["a"]) == rows
    assert len(list(batches([tmp_path / "rows.json"], ["a"]))) > 10


def test_a_broken_array_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    broken = {'[\n{"a": 1},\n{"a": \n': 4, '[{"a": 1},\n {"a": x}]': 2, '{\n"a": 1,\n': 3, "[" * 10**5: 1}
    for text, line in broken.items():
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            rows_of(path, ["a"])
        assert caught.value.place == f"{path}:{line}"


def test_a_table_in_utf16_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("a,b\né,1\n".encode("utf-16"))
    assert rows_of(tmp_path / "rows.csv", ["b", "a"]) == [{"b": "1", "a": "é"}]


def test_json_that_is_no_object_is_a_counted_bad_row(tmp_path: Path) -> None:
    rows = [json.dumps({"messages": [ask(f"{n}?"), say("x")]}) for n in range(4)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:2], "[1]", "5", '"text"', "null", *rows[2:]]))
    train = prepared("sft", [str(tmp_path / "a.jsonl")], tmp_path, eval_rows=0)[0].train
    assert len(train.dataset) == 4
    dropped = train.dropped["of JSON that is no object"]
    assert (dropped.count, dropped.row, dropped.excerpt) == (4, 3, "[1]")
    with pytest.raises(UsageError, match="4 bad rows"):
        prepared("sft", [str(tmp_path / "a.jsonl")], tmp_path, eval_rows=0, bad_rows="fail")


@pytest.mark.parametrize(
    "bad",
    [
        '{"messages": [], "messages": %s}',
        '{"messages": %s, "id": 1, "id": null}',
        '{"messages": [{"role": "user", "content": "q", "content": "r"}]}',
        json.dumps({"messages": '[{"role": "user", "role": "system", "content": "q"}]'}),
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '
        '{"a": 1, "a": 2}}]}]}',
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_two_values_of_one_key_are_a_counted_bad_row(tmp_path: Path, bad: str, name: str) -> None:
    messages = json.dumps([ask("q"), say("x")])
    # Which of two equal ones is meant does not matter, nor what another column has.
    same = f'{{"id": 1, "id": 1, "other": {{"a": 1, "a": 2}}, "messages": {messages}}}'
    lines = [same, bad.replace("%s", messages), same]
    (tmp_path / name).write_text("\n".join(lines) if name == "a.jsonl" else f"[{', '.join(lines)}]")
    train = prepared("sft", [str(tmp_path / name)], tmp_path, eval_rows=0)[0].train
    assert len(train.dataset) == 2
    (dropped,) = [train.dropped["with two values of one key in a JSON object"]]
    assert (dropped.count, dropped.row) == (1, 2)


QUESTION, ANSWER, OTHER = [ask("q")], [say("a")], [say("b")]


def test_json_text_of_messages_is_messages_in_every_column() -> None:
    pair = {"prompt": QUESTION, "chosen": ANSWER, "rejected": OTHER}
    texts = {name: json.dumps(side, indent=1) for name, side in pair.items()}
    assert read_pair(texts) == read_pair(pair)
    assert read_pair(texts | {"prompt": "q"}) == read_pair(pair)
    sharegpt = json.dumps([{"from": "human", "value": "q"}]).encode()
    assert read_pair(texts | {"prompt": sharegpt}) == read_pair(pair)
    completion = {"prompt": QUESTION, "completion": ANSWER}
    assert read_completion({name: json.dumps(side) for name, side in completion.items()}) == read_completion(completion)
    assert read_prompt({name: json.dumps(side) for name, side in completion.items()}) == read_prompt(completion)


@pytest.mark.parametrize(
    "text", ["[1, 2]", '[{"name": "x", "role": "admin"}]', '[{"role": "king", "content": "x"}]', "[x", "[]", "array([1])"]
)  # fmt: skip
def test_other_json_is_text(text: str) -> None:
    assert read_completion({"prompt": "q", "completion": text}) == ("q", text)


@pytest.mark.parametrize(
    "written", [OTHER[0], [ask("r")], [ask("r"), *ANSWER], [{"from": "human", "value": "r"}, {"from": "gpt", "value": "a"}]]
)  # fmt: skip
def test_an_answer_that_is_json_of_messages_is_text(written: Any) -> None:
    text = json.dumps(written)
    row = {"prompt": "Write a chat.", "completion": text, "chosen": text, "rejected": "No."}
    assert read_completion(row) == ("Write a chat.", text)
    assert read_prompt(row).answer == text
    assert (read_pair(row)["chosen"], read_pair(row)["rejected"]) == (text, "No.")
    repeated = json.dumps([ask("Write a chat."), *ANSWER])
    assert len(read_completion({"prompt": "Write a chat.", "completion": repeated}).messages) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        str(QUESTION),
        str(QUESTION[0]),
        str(QUESTION + ANSWER).replace("}, ", "}\n "),
        f"array({QUESTION}, dtype=object)",
    ],
)
@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
def test_a_repr_is_named_as_that(text: str, column: str) -> None:
    with pytest.raises(BadRow, match="Python's repr of messages"):
        read_pair({"prompt": "q", "chosen": "a", "rejected": "b", column: text})
