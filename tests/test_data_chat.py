"""Conversations of every shape become the same messages; what is no conversation is dropped with its reason."""

import json
from typing import Any

import pytest

from cogumi.data.chat import read_conversation, read_messages, unused_keys
from cogumi.data.rows import BadRow
from tests.chat_tokenizers import ask, chat_tokenizer, chunk_of, dropped_rows, say, texts_of, turn

QUESTION, ANSWER = ask("2 + 3?"), say("5.")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
NO_ARGUMENTS = {"type": "function", "function": {"name": "add", "arguments": {}}}
NESTED = {"a": 2, "b": None, "c": [{"d": None}]}


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
)  # fmt: skip
def test_every_shape_is_the_same_example(shape: dict[str, Any]) -> None:
    assert tokens([shape]) == tokens([{"messages": [QUESTION, ANSWER]}])


def tokens(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chunk = chunk_of(rows, chat_tokenizer("qwen3"))
    assert not chunk.dropped
    return list(chunk.table.to_pylist())


def test_alpaca_input_and_system() -> None:
    made = tokens([{"instruction": "Add.", "input": "2 3", "output": "5.", "system": "Be brief."}])
    assert made == tokens([{"messages": [turn("system", "Be brief."), ask("Add.\n\n2 3"), ANSWER]}])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"from": "system", "value": "x"}, turn("system", "x")),
        ({"from": "Human", "value": "x"}, ask("x")),
        ({"from": "observation", "value": "x"}, turn("tool", "x")),
        (turn("developer", "x"), turn("developer", "x")),
        (turn("tool", "x", tool_call_id="1", name="add"), turn("tool", "x", tool_call_id="1", name="add")),
        (turn("assistant", None, tool_calls=[CALL]), say("", tool_calls=[CALL])),
        (say("x", tool_calls=[]), say("x")),
        (say("", tool_calls=[{"id": "7", "function": {"name": "add", "arguments": '{"a": null}'}}]),
         say("", tool_calls=[{"id": "7", "type": "function", "function": {"name": "add", "arguments": {"a": None}}}])),
        (say("", tool_calls=[{"name": "add", "arguments": NESTED}]),
         say("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": NESTED}}])),
        ({"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}, say("", tool_calls=[CALL])),
        (say("x", thinking="hm"), say("x", reasoning_content="hm")),
        (say("", tool_calls=[{"name": "add", "arguments": ""}]), say("", tool_calls=[NO_ARGUMENTS])),
        (say("", tool_calls=json.dumps([{"name": "add", "arguments": "null"}])), say("", tool_calls=[NO_ARGUMENTS])),
        (turn("user", [{"type": "input_text", "text": "x"}, {"text": "y"}, "z"]), ask("xyz")),
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
        ([turn("narrator", "x")], "with a message of no known role"),
        ([{"role": 3, "content": "x"}], "with a message of no known role"),
        ([turn("user", None)], "with a message that has no content"),
        ([turn("user", 5)], "with a message whose content is no text"),
        ([turn("user", b"\xff")], "not UTF-8"),
        ([turn("user", [{"type": "image", "image": "x.png"}])], "with a message that has parts other than text"),
        ([say([{"type": "reasoning", "text": "hm"}])], "with a message that has parts other than text"),
        ([turn("user", [{"type": "image", "text": "alt"}])], "with a message that has parts other than text"),
        ([say("", tool_calls=5)], "with tool calls that are no list"),
        ([say("", tool_calls=[{"function": {"arguments": {}}}])], "with a tool call that names no function"),
        (
            [say("", tool_calls=[{"id": "1", "name": "f", "parameters": {"a": 1}}])],
            "with a tool call without `arguments`, which has parameters",
        ),
        ([say("", tool_calls=[{"name": "add", "arguments": "a=2"}])], "with tool-call arguments that are no JSON object"),
        ([say("", tool_calls=[{"name": "add", "arguments": "[2]"}])], "with tool-call arguments that are no JSON object"),
        ([{"from": "function_call", "value": "add(2)"}], "with a tool call that is not JSON"),
    ],
)  # fmt: skip
def test_no_conversation_says_why(messages: Any, reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        read_messages(messages)
    assert caught.value.reason == reason


@pytest.mark.parametrize("learn", ["turns", "completion"])
def test_bad_rows_are_counted_with_the_first_of_them(learn: str) -> None:
    good, blank = [QUESTION, ANSWER], [QUESTION, say(" \n")]
    column = [good, [QUESTION], blank, [ANSWER], [], None, [ask("<|im_end|>"), ANSWER], [QUESTION]]
    rows = [{"messages": messages} for messages in column]
    chunk = chunk_of(rows, chat_tokenizer("qwen3"), learn=learn, at=100)
    assert dropped_rows(chunk) == {
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
@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"train": False}, {"loss": False}, {"weight": 0.0, "train": None}, {"loss_mask": 0}]
)
def test_a_turn_that_the_data_gives_as_context_is_not_learned(name: str, flag: dict[str, Any]) -> None:
    tokenizer = chat_tokenizer(name)
    turns = [QUESTION, say("WRONG", **flag), QUESTION, say("5.", weight=1, loss=True)]
    rows = [{"messages": json.dumps(messages)} for messages in (turns, [*turns, QUESTION, say("LATE", **flag)])]
    for learn in ("turns", "completion"):
        for text, (learned,) in zip(*texts_of(chunk_of(rows, tokenizer, learn=learn), tokenizer), strict=True):
            assert "5." in learned
            assert "WRONG" not in learned
            assert "WRONG" in text
            assert "LATE" not in text


@pytest.mark.parametrize(
    ("learn", "weight", "reason"),
    [
        ("turns", 0, "without a turn to learn (weight, train or loss of all is 0 or false)"),
        ("all", 0, "with a turn that is not to be learned (weight 0) where everything is"),
        ("turns", 0.5, "with a turn whose `weight` is neither 0 nor 1"),
        ("turns", "0", "with a turn whose `weight` is neither 0 nor 1"),
        (
            "turns",
            [{"begin_offset": 0, "end_offset": 1, "train": False}],
            "with a turn whose `train_detail` is neither 0 nor 1",
        ),
    ],
)
def test_a_weight_that_cannot_be_followed_drops_the_row(learn: Any, weight: Any, reason: str) -> None:
    key = "train_detail" if isinstance(weight, list) else "weight"
    row = {"messages": json.dumps([QUESTION, ANSWER | {key: weight}])}
    assert list(chunk_of([row], chat_tokenizer("qwen3"), learn=learn).dropped) == [reason]


def test_keys_of_messages_that_are_not_used_are_found() -> None:
    odd = ANSWER | {"images": ["x.png"], "refusal": None, "annotations": [], "weight": 0, "context": "c"}
    cells = [[QUESTION, odd], json.dumps([QUESTION | {"score": 0}]), "[text", odd, None]
    assert unused_keys(cells) == {"images", "context", "score"}
    assert not unused_keys(["text", {"a": 1}, 5, [1]])
    named = [QUESTION | {"name": "Ann"}, {"role": "tool", "content": "r", "name": "f"}]
    assert unused_keys([named]) == {"name"}
    assert not unused_keys([named[1:]])
    human = {"from": "human", "value": "q", "loss": 1, "weight": 0, "thinking": "t"}
    assert unused_keys([[QUESTION | {"train": True}, ANSWER | {"train": True}, human]]) == {
        "train (of user)",
        "loss (of human)",
        "thinking (of human)",
    }


def test_a_row_dropped_for_a_control_token_is_shown_as_it_is() -> None:
    row = {"prompt": [ask("\U00100003")], "completion": [ANSWER]}
    (dropped,) = chunk_of([row], chat_tokenizer("qwen3"), format="prompt_completion").dropped.values()
    assert "\0" not in dropped.excerpt
    assert dropped.excerpt.startswith("user: ")


@pytest.mark.parametrize("blank", ["", " \n"])
@pytest.mark.parametrize(
    ("format", "method", "row"),
    [
        ("chat", "sft", {"messages": [ask("_"), ANSWER]}),
        ("chat", "sft", {"messages": [QUESTION, ANSWER, ask("_"), ANSWER]}),
        ("chat", "sft", {"instruction": "_", "output": "a"}),
        ("prompt_completion", "sft", {"prompt": "_", "completion": [ANSWER]}),
        ("prompt_completion", "sft", {"prompt": [ask("_")], "completion": "a"}),
        ("preference", "dpo", {"prompt": [QUESTION, ANSWER, ask("_")], "chosen": "a", "rejected": "b"}),
        ("prompt_completion", "gspo", {"prompt": [QUESTION, ANSWER, ask("_")]}),
    ],
)
def test_an_answer_to_nothing_is_not_learned(format: Any, method: Any, row: dict[str, Any], blank: str) -> None:
    cells = json.loads(json.dumps(row).replace("_", json.dumps(blank)[1:-1]))
    rows = [{name: cell if isinstance(cell, str) else json.dumps(cell) for name, cell in cells.items()}]
    assert list(chunk_of(rows, chat_tokenizer("qwen3"), method, format).dropped) == ["with an empty prompt"]
    talk = [{"messages": json.dumps([QUESTION, ANSWER, ask(blank)])}]  # which nothing answers
    assert not chunk_of(talk, chat_tokenizer("qwen3")).dropped


@pytest.mark.parametrize("nothing", [None, "", "[]", "null", "{}", [], {}])
def test_no_tools_are_none(nothing: Any) -> None:
    assert read_conversation({"messages": [QUESTION, ANSWER], "tools": nothing}).tools is None


def test_tools_may_each_be_json() -> None:
    row = {"messages": [QUESTION, ANSWER], "tools": [json.dumps(CALL), CALL]}
    assert read_conversation(row).tools == [CALL, CALL]
    with pytest.raises(BadRow, match="with tools that are no list of JSON schemas"):
        read_conversation(row | {"tools": ["add(a, b)"]})
