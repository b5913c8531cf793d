"""A column that is named is used or refused, and a null that is meant stays."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.data.chat import read_conversation
from cogumi.data.encoding import FormatOptions
from cogumi.data.formats import columns_for
from cogumi.data.rows import BadRow, row_dicts
from cogumi.data.sources import batches
from cogumi.methods.examples import prepare_examples
from tests.builders import run_config
from tests.chat_tokenizers import ask, chat_tokenizer, say, turn
from tests.test_data_leaks import prepared, write_lines

CHAT = [ask("q"), say("a")]
LIMIT = {"type": ["integer", "null"], "default": None, "const": None}
SCHEMA = {"name": "find", "parameters": {"properties": {"limit": LIMIT}}}


def conversation_of(row: dict[str, Any]) -> Any:
    options = FormatOptions("sft", "chat")
    return read_conversation({name: row[column] for name, column in columns_for(options, list(row)).items()})


@pytest.mark.parametrize("shape", ["messages", "conversations"])
def test_a_system_column_is_the_system_message(shape: str) -> None:
    told = [turn("system", "Be kind."), *CHAT]
    assert conversation_of({shape: CHAT, "system": "Be kind."}).messages == told
    assert conversation_of({shape: CHAT, "system": None}).messages == CHAT
    assert conversation_of({shape: CHAT, "system": " "}).messages == CHAT
    assert conversation_of({shape: told, "system": "Be kind.\n"}).messages == told
    with pytest.raises(BadRow, match="beside another one"):
        conversation_of({shape: told, "system": "Be brief."})


def test_functions_are_tools() -> None:
    assert conversation_of({"messages": CHAT, "functions": json.dumps([SCHEMA])}).tools == [SCHEMA]
    assert conversation_of({"messages": CHAT, "functions": [SCHEMA], "tools": None}).tools is None
    call = {"name": "find", "arguments": '{"limit": null}'}
    called = conversation_of({"messages": [CHAT[0], turn("assistant", None, function_call=call)]}).messages[1]
    assert called["tool_calls"] == [{"type": "function", "function": {"name": "find", "arguments": {"limit": None}}}]


@pytest.mark.parametrize(
    ("format", "columns"),
    [
        ("chat", {"messages": "m", "instruction": "i"}),
        ("chat", {"messages": "m", "output": "i"}),
        ("fim", {"prefix": "m"}),
    ],
)
def test_a_named_column_that_makes_nothing_is_refused(format: Any, columns: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="would be ignored: rows are made of"):
        columns_for(FormatOptions("sft", format, columns=columns), ["m", "i", "source"])


def test_the_preview_lists_unused_columns_and_shared_questions(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"messages": [ask(f"{n // 2}?"), say(f"{n}", images=[n])], "score": n, "id": n} for n in range(20)]
    file = write_lines(tmp_path / "a.jsonl", [*rows, {"messages": "x"}])
    train = {"chat_template_path": "cogumi:tulu"}
    config = run_config("sft", tiny_model, file, tmp_path / "run", data_section={"format": "chat"}, train=train)
    shown = cogumi.preview(config, examples=1)
    assert f"{file}: columns that are not used: score, id, messages[].images" in str(shown)
    assert "20 rows share their question with another row" in str(shown)
    assert "1 whose messages are neither a list nor JSON, the first is row 21: x" in str(shown)
    told = json.loads(json.dumps(shown.as_dict()))
    assert told["unused_columns"] == {file: ["score", "id", "messages[].images"]}
    assert told["train"]["sharing"] == 20


def test_nulls_of_json_stay_and_those_of_arrow_go(tmp_path: Path) -> None:
    call = {"function": {"name": "find", "arguments": {"limit": None}}}
    row = {"messages": [CHAT[0], turn("assistant", None, tool_calls=[call])], "tools": [SCHEMA]}
    write_lines(tmp_path / "a.jsonl", [row])
    (frame,) = batches([tmp_path / "a.jsonl"], ["messages", "tools"])
    (read,) = map(conversation_of, row_dicts(frame))
    assert read.messages[1]["tool_calls"][0]["function"]["arguments"] == {"limit": None}
    assert read.tools == [SCHEMA]

    other = {"function": {"name": "add", "arguments": {"a": 1, "b": [None, 2]}}}
    rows = [{"messages": [CHAT[0], turn("assistant", None, tool_calls=[one])]} for one in (call, other)]
    pl.DataFrame(rows).write_parquet(tmp_path / "a.parquet")
    (frame,) = batches([tmp_path / "a.parquet"], ["messages"])
    calls = [conversation_of(one).messages[1]["tool_calls"][0]["function"] for one in row_dicts(frame)]
    assert [one["arguments"] for one in calls] == [{}, {"a": 1, "b": [None, 2]}]


def test_rows_that_differ_by_a_null_are_two_examples(tmp_path: Path) -> None:
    calls = [{"function": {"name": "find", "arguments": given}} for given in ({"limit": None}, {}, {"limit": None})]
    rows = [{"messages": [CHAT[0], say("a", tool_calls=[call])]} for call in calls]
    file = write_lines(tmp_path / "a.jsonl", rows)
    assert prepared("sft", [file], tmp_path, eval_rows=0)[0].train.duplicates == 1


def test_text_for_a_model_with_a_chat_template_is_told_once(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two sources and held-out rows; from the cache as well, and not of messages."""
    for name in "ab":
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}", "completion": f" {n}"} for n in range(60)])
    write_lines(tmp_path / "c.jsonl", [{"messages": [ask(f"{n}?"), say("a")]} for n in range(9)])
    train = {"chat_template_path": "cogumi:tulu"}
    for format, names, count in (("prompt_completion", "ab", 1), ("prompt_completion", "ab", 1), ("chat", "c", 0)):
        data = {"format": format, "mix": [{"source": f"{tmp_path}/{name}.jsonl"} for name in names], "eval_rows": 2}
        caplog.clear()
        cogumi.preview(run_config("sft", tiny_model, None, tmp_path, data_section=data, train=train), examples=1)
        assert caplog.text.count(f"{format} has text, which is learned without this model's chat template") == count
        assert caplog.text.count("has text") == count


def test_the_preview_of_a_sample_names_no_unused_columns(tiny_model: Path, tmp_path: Path) -> None:
    train, data = {"chat_template_path": "cogumi:tulu"}, {"format": "chat", "max_rows": 20}
    config = run_config("sft", tiny_model, "cogumi:stdlib-chat", tmp_path / "run", data_section=data, train=train)
    assert "not used" not in str(cogumi.preview(config, examples=1))


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "p", "completion": "c"}, "label"),
        ({"messages": CHAT}, "label"),
        ({"messages": CHAT}, "kto_tag"),
        ({"instruction": "i", "output": "o"}, "kto_tag"),
    ],
)
def test_answers_marked_as_bad_are_not_learned(tmp_path: Path, row: dict[str, Any], column: str) -> None:
    format: Any = "prompt_completion" if "prompt" in row else "chat"

    def examples(values: list[Any], suffix: str = "jsonl", source: str = "", method: Any = "sft", **more: Any) -> int:
        rows = [row | {column: value} for value in values]
        file = tmp_path / f"a.{suffix}"
        if suffix == "jsonl":
            write_lines(file, rows)
        elif suffix == "parquet":
            pl.DataFrame(rows).write_parquet(file)
        else:
            pl.DataFrame(rows).write_csv(file)
        data = {"format": format, "eval_rows": 0, **more}
        ours = {"rewards": ["exact_answer"]} if method == "gspo" else {}
        config = run_config(method, tmp_path, source or file, tmp_path / "run", data_section=data, cogumi=ours)
        return len(prepare_examples(load_config(config), chat_tokenizer("qwen3")).train.dataset)

    for suffix in ("jsonl", "parquet", *(["csv"] if "messages" not in row else [])):
        with pytest.raises(UsageError, match=f"answers whose column '{column}' is false are bad ones"):
            examples([True, None, False], suffix)
        assert examples([True, True, None], suffix) == 3
    write_lines(tmp_path / "b.jsonl", [row])  # a file without the column
    assert examples([True], "jsonl", source=f"{tmp_path}/*.jsonl") == 2
    assert examples([1, 0, 2]) == 3  # classes
    with pytest.raises(UsageError, match=f"answers whose column '{column}' is false are bad ones"):
        examples([True, False], method="gspo")
    assert examples([True, False], method="gspo", columns={"answer": column}) == 2  # a reward takes the mark itself
    assert examples(["positive", "negative"]) == 2


@pytest.mark.parametrize(("mark", "shown"), [(0, "0"), (False, "false"), (0.0, "0.0")])
def test_rows_that_are_not_to_be_learned_are_refused(tmp_path: Path, mark: Any, shown: str) -> None:
    def shares(*weights: Any) -> int:
        file = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT, "weight": weight} for weight in weights])
        data = {"format": "chat", "eval_rows": 0}
        config = run_config("sft", tmp_path, file, tmp_path / "run", data_section=data)
        return len(prepare_examples(load_config(config), chat_tokenizer("qwen3")).train.dataset)

    with pytest.raises(UsageError, match=f"answers whose column 'weight' is {shown} are bad ones .* or left out"):
        shares(1, None, mark)
    assert shares(1, 0.5, mark) == 3  # of a mixture


def test_names_that_no_template_shows_are_listed(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"messages": [CHAT[0] | {"name": "Ann"}, CHAT[1]]}])
    config = load_config(run_config("sft", tmp_path, file, tmp_path / "run", data_section={"format": "chat"}))
    tokenizer = chat_tokenizer("qwen3")
    assert prepare_examples(config, tokenizer).unused == {file: ["messages[].name"]}
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.role +", "message.role + message.get('name', '') +"
    )
    assert not prepare_examples(config, tokenizer).unused


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": 5, "output": "o"}, "whose `instruction` is no text but int"),
        ({"instruction": "i", "output": float("nan")}, "whose `output` is no text but float"),
        ({"instruction": "i", "input": {"0": "x"}, "output": "o"}, "whose `input` is no text but dict"),
        ({"messages": CHAT, "system": 1}, "whose `system` is no text but int"),
    ],
)
def test_a_field_that_is_no_text_is_named(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        conversation_of(row)
    assert caught.value.reason == reason
