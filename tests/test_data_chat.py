"""Conversations of every shape become the same messages; what is no conversation is dropped with its reason."""

import json
from typing import Any

import pytest

from cogumi.data.chat import read_messages, unused_keys
from cogumi.data.encoding import FormatOptions
from cogumi.data.rows import BadRow
from tests.chat_tokenizers import chat_tokenizer, chunk_of, learned_texts

QUESTION = {"role": "user", "content": "2 + 3?"}
ANSWER = {"role": "assistant", "content": "5."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize(
    "shape",
    [
        {"messages": [QUESTION, ANSWER]},
        {"messages": json.dumps([QUESTION, ANSWER])},
        {"messages": json.dumps([QUESTION, ANSWER]).encode()},
        {"messages": [QUESTION | {"tool_calls": None, "name": None}, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 3?"}]},
                      {"role": "assistant", "content": [{"type": "text", "text": "5."}]}]},
        {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5."}]},
        {"conversations": [QUESTION, ANSWER]},
        {"instruction": "2 + 3?", "output": "5."},
        {"instruction": "2 + 3?", "input": "", "output": "5."},
        {"instruction": "2 + 3?", "input": None, "output": "5.", "system": ""},
    ],
    ids=["messages", "json", "bytes", "nulls", "parts", "sharegpt", "sharegpt-roles", "alpaca", "alpaca-empty", "alpaca-null"],
)  # fmt: skip
def test_every_shape_is_the_same_example(shape: dict[str, Any]) -> None:
    assert tokens([shape]) == tokens([{"messages": [QUESTION, ANSWER]}])


def tokens(rows: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    chunk = chunk_of(rows, chat_tokenizer("qwen3"), FormatOptions("sft", "chat", **options))
    assert not chunk.dropped
    return list(chunk.table.to_pylist())


def test_alpaca_input_and_system() -> None:
    made = tokens([{"instruction": "Add.", "input": "2 3", "output": "5.", "system": "Be brief."}])
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add.\n\n2 3"}
    assert made == tokens([{"messages": [system, question, ANSWER]}])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"from": "system", "value": "x"}, {"role": "system", "content": "x"}),
        ({"from": "Human", "value": "x"}, {"role": "user", "content": "x"}),
        ({"from": "observation", "value": "x"}, {"role": "tool", "content": "x"}),
        ({"role": "developer", "content": "x"}, {"role": "developer", "content": "x"}),
        ({"role": "tool", "content": "x", "tool_call_id": "1", "name": "add"},
         {"role": "tool", "content": "x", "tool_call_id": "1", "name": "add"}),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]},
         {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        ({"role": "assistant", "content": "x", "tool_calls": []}, {"role": "assistant", "content": "x"}),
        ({"role": "assistant", "content": "",
          "tool_calls": [{"id": "7", "function": {"name": "add", "arguments": '{"a": null}'}}]},
         {"role": "assistant", "content": "",
          "tool_calls": [{"id": "7", "type": "function", "function": {"name": "add", "arguments": {"a": None}}}]}),
        ({"role": "assistant", "content": "",
          "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": None, "c": [{"d": None}]}}]},
         {"role": "assistant", "content": "",
          "tool_calls": [{"type": "function", "function": {
              "name": "add", "arguments": {"a": 2, "b": None, "c": [{"d": None}]}}}]}),
        ({"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
         {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        ({"role": "assistant", "content": "x", "thinking": "hm"},
         {"role": "assistant", "content": "x", "reasoning_content": "hm"}),
    ],
)  # fmt: skip
def test_one_message(raw: dict[str, Any], message: dict[str, Any]) -> None:
    assert read_messages([raw]) == [message]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "null"),
        (b"\xff\xfe", "not UTF-8"),
        ("hello", "whose messages are neither a list nor JSON"),
        ('"hello"', "whose messages are neither a list nor JSON"),
        ([], "without messages"),
        ([None], "with a message that is no object"),
        ([{"content": "x"}], "with a message of no known role"),
        ([{"role": "narrator", "content": "x"}], "with a message of no known role"),
        ([{"role": 3, "content": "x"}], "with a message of no known role"),
        ([{"role": "user", "content": None}], "with a message that has no content"),
        ([{"role": "user", "content": 5}], "with a message whose content is no text"),
        ([{"role": "user", "content": b"\xff"}], "not UTF-8"),
        ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], "with a message that has parts other than text"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "with tool calls that are no list"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}],
         "with a tool call that names no function"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "a=2"}]}],
         "with tool-call arguments that are no JSON object"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "[2]"}]}],
         "with tool-call arguments that are no JSON object"),
        ([{"from": "function_call", "value": "add(2)"}], "with a tool call that is not JSON"),
    ],
)  # fmt: skip
def test_no_conversation_says_why(messages: Any, reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        read_messages(messages)
    assert caught.value.reason == reason


@pytest.mark.parametrize("learn", ["turns", "completion"])
def test_bad_rows_are_counted_with_the_first_of_them(learn: str) -> None:
    good = [QUESTION, ANSWER]
    blank, special = {"role": "assistant", "content": " \n"}, {"role": "user", "content": "<|im_end|>"}
    column = [good, [QUESTION], [QUESTION, blank], [ANSWER], [], None, [special, ANSWER], [QUESTION]]
    options = FormatOptions("sft", "chat", learn=learn)  # type: ignore[arg-type]
    chunk = chunk_of([{"messages": messages} for messages in column], chat_tokenizer("qwen3"), options, 100)
    assert {reason: (each.count, each.row) for reason, each in chunk.dropped.items()} == {
        "without any assistant turn": (2, 101),
        "with an empty answer": (1, 102),
        "with nothing before the answer": (1, 103),
        "without messages": (1, 104),
        "null": (1, 105),
    }
    assert "2 + 3?" in chunk.dropped["without any assistant turn"].excerpt
    assert len(chunk.dropped["without any assistant turn"].excerpt) <= 80
    assert len(chunk.table) == 2


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"loss": False}, {"weight": 0.0, "train": None}])
def test_a_turn_that_the_data_gives_as_context_is_not_learned(name: str, flag: dict[str, Any]) -> None:
    tokenizer = chat_tokenizer(name)
    turns = [QUESTION, {"role": "assistant", "content": "WRONG"} | flag, QUESTION, ANSWER | {"weight": 1, "loss": True}]
    last = [*turns, QUESTION, {"role": "assistant", "content": "LATE"} | flag]
    for learn in ("turns", "completion"):
        options = FormatOptions("sft", "chat", learn=learn)  # type: ignore[arg-type]
        chunk = chunk_of([{"messages": json.dumps(messages)} for messages in (turns, last)], tokenizer, options)
        for row in chunk.table.to_pylist():
            (learned,) = learned_texts(tokenizer, row["input_ids"], row["completion_mask"])
            assert "5." in learned
            assert "WRONG" not in learned
            assert "WRONG" in tokenizer.decode(row["input_ids"])
            assert "LATE" not in tokenizer.decode(row["input_ids"])


@pytest.mark.parametrize(
    ("learn", "weight", "reason"),
    [
        ("turns", 0, "without a turn to learn (weight, train or loss of all is 0 or false)"),
        ("all", 0, "with a turn that is not to be learned (weight 0) where everything is"),
        ("turns", 0.5, "with a turn whose `weight` is neither 0 nor 1"),
        ("turns", "0", "with a turn whose `weight` is neither 0 nor 1"),
    ],
)
def test_a_weight_that_cannot_be_followed_drops_the_row(learn: Any, weight: Any, reason: str) -> None:
    row = {"messages": json.dumps([QUESTION, ANSWER | {"weight": weight}])}
    chunk = chunk_of([row], chat_tokenizer("qwen3"), FormatOptions("sft", "chat", learn=learn))
    assert list(chunk.dropped) == [reason]


def test_keys_of_messages_that_are_not_used_are_found() -> None:
    odd = ANSWER | {"images": ["x.png"], "refusal": None, "annotations": [], "weight": 0, "context": "c"}
    assert unused_keys([[QUESTION, odd], json.dumps([QUESTION | {"score": 0}]), "[text", odd, None]) == {
        "images",
        "context",
        "score",
    }
    assert not unused_keys(["text", {"a": 1}, 5, [1]])


def test_a_row_dropped_for_a_control_token_is_shown_as_it_is() -> None:
    prompt = [QUESTION | {"content": "\U00100003"}]
    chunk = chunk_of(
        [{"prompt": prompt, "completion": [ANSWER]}], chat_tokenizer("qwen3"), FormatOptions("sft", "prompt_completion")
    )
    (dropped,) = chunk.dropped.values()
    assert "\0" not in dropped.excerpt
    assert dropped.excerpt.startswith("user: ")
