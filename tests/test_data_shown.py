"""Every message is in the text that the model sees, and what is learned of it is what the model writes at inference."""

import json
from itertools import chain
from typing import Any

import pytest
from tokenizers import AddedToken

from cogumi.core.errors import UsageError
from cogumi.data.chat import split_thought
from tests.chat_tokenizers import TEMPLATES, ask, chat_tokenizer, chunk_of, say, texts_of, turn

TURNS = {
    "qwen3": ("<|im_start|>assistant\n", "<think>\n\n</think>\n\n", "<|im_end|>\n"),
    "qwen2_5": ("<|im_start|>assistant\n", "", "<|im_end|>\n"),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "", "<|eot_id|>"),
    "llama3_1": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "", "<|eot_id|>"),
}
"""Header, empty thought and end of a turn."""
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
SYSTEM, DEVELOPER = turn("system", "System words."), turn("developer", "Developer words.")


def tokenizer_of(name: str) -> Any:
    tokenizer = chat_tokenizer(name if name in TURNS or name == "gptoss" else "qwen3")
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    if "deepseek" in name:
        tokenizer.add_special_tokens({"eos_token": "<｜end▁of▁sentence｜>"})
    if name == "glm4moe":
        tokenizer.add_tokens(
            [AddedToken(text, special=True) for text in ("<|user|>", "<|assistant|>", "<|observation|>")]
        )
        tokenizer.eos_token = "<|endoftext|>"
    return tokenizer


def made(name: str, row: dict[str, Any], method: str = "sft", format: str = "chat", **options: Any) -> Any:
    """(texts of the examples, learned texts of all, reasons of dropped rows) of one row."""
    tokenizer = tokenizer_of(name)
    cells = {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
    chunk = chunk_of([cells], tokenizer, method, format, **options)
    rows = chunk.table.to_pylist()
    if method == "dpo":
        return [tuple(map(tokenizer.decode, example.values())) for example in rows], [], list(chunk.dropped)
    if method == "gspo":
        return [example["prompt"] for example in rows], [], list(chunk.dropped)
    whole, learned = texts_of(chunk, tokenizer)
    return whole, [*chain.from_iterable(learned)], list(chunk.dropped)


@pytest.mark.parametrize("name", TURNS)
def test_only_the_assistants_turns_of_a_completion_are_learned(name: str) -> None:
    _, empty, end = TURNS[name]
    row = {"prompt": [ask("a"), say("earlier"), ask("b")], "completion": [say("one"), ask("c"), say("two")]}
    _, learned, _ = made(name, row, format="prompt_completion", learn="completion")
    answers = [f"{empty}one{end}", f"{empty}two{end}"]
    assert learned == answers
    chat = {"messages": row["prompt"] + row["completion"]}
    assert made(name, chat)[1][1:] == answers


def test_the_result_of_a_tool_in_a_completion_is_not_learned() -> None:
    completion = [say("", tool_calls=[CALL]), turn("tool", "RESULT"), say("done")]
    _, learned, _ = made("qwen3", {"prompt": [ask("a")], "completion": completion}, format="prompt_completion")
    assert ["<tool_call>" in text for text in learned] == [True, False]
    assert all("RESULT" not in text and text.startswith("<think>\n\n</think>") for text in learned)


@pytest.mark.parametrize("learn", ["turns", "completion"])
@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("begun", ["It is", "It is ", "<It is"])
def test_the_beginning_of_an_answer_in_the_prompt_is_context(name: str, begun: str, learn: str) -> None:
    header, empty, end = TURNS[name]
    row = {"prompt": [ask("a"), say(begun)], "completion": [say(" five.")]}
    (text,), learned, _ = made(name, row, format="prompt_completion", learn=learn)
    assert learned == [f" five.{end}"]
    assert text.endswith(f"{header}{empty}{begun} five.{end}")


@pytest.mark.parametrize("name", TURNS)
def test_the_beginning_of_both_answers_of_a_pair_is_their_prompt(name: str) -> None:
    header, empty, end = TURNS[name]
    row = {"prompt": [ask("a"), say("It is")], "chosen": [say(" good")], "rejected": [say(" bad")]}
    ((prompt, chosen, rejected),), _, _ = made(name, row, "dpo", "preference")
    assert prompt.endswith(f"{header}{empty}It is")
    assert (chosen, rejected) == (f" good{end}", f" bad{end}")
    row = {"chosen": [ask("a"), say("It is"), say("good")], "rejected": [ask("a"), say("It is"), say("bad")]}
    ((_, chosen, _),), _, _ = made(name, row, "dpo", "preference")
    assert chosen.endswith(f"good{end}")
    assert "It is good" not in chosen  # turns of their own in a conversation


@pytest.mark.parametrize("name", [*TURNS, "qwen3_instruct_2507", "gptoss", "phi3", "glm4moe", "deepseek_r1_distill",
                                  "deepseekv3", "gemma3", "qwen3_5_think", "nemotron_3_nano"])  # fmt: skip
@pytest.mark.parametrize("system", [[DEVELOPER], [SYSTEM, DEVELOPER], [SYSTEM, SYSTEM | {"content": "More of it."}]])
def test_every_instruction_is_shown(name: str, system: list[Any]) -> None:
    rows = {
        ("sft", "chat"): {"messages": [*system, ask("q"), say("a")]},
        ("sft", "prompt_completion"): {"prompt": [*system, ask("q")], "completion": [say("a")]},
        ("dpo", "preference"): {"prompt": [*system, ask("q")], "chosen": [say("a")], "rejected": [say("b")]},
    }
    for (method, format), row in rows.items():
        (text,), _, _ = made(name, row, method, format)
        assert all(message["content"] in str(text) for message in system)
    (prompt,), _, _ = made(name, {"prompt": [*system, ask("q")]}, "gspo", "prompt_completion")
    shown = tokenizer_of(name).apply_chat_template(json.loads(prompt), tokenize=False)  # as the trainer renders it
    assert all(message["content"] in shown for message in system)


@pytest.mark.parametrize("name", ["gptoss", "deepseek_r1_distill"])
def test_an_instruction_that_the_template_drops_drops_the_row(name: str) -> None:
    messages = [SYSTEM, ask("q"), say("a"), SYSTEM | {"content": "Later."}, ask("r"), say("b")]
    for learn in ("turns", "completion", "all"):
        assert made(name, {"messages": messages}, learn=learn)[2] == [
            "of whose system message the chat template loses words"
        ]
    assert made(name, {"messages": messages}, "gspo", "chat")[2]


@pytest.mark.parametrize("name", ["gptoss", "llama3_1", "qwen3", "glm4moe", "nemotron_3_nano"])
def test_a_result_that_the_template_writes_as_json_is_shown(name: str) -> None:
    result = {"role": "tool", "name": "f", "content": ' {"a": "b\\n"}\n "naïve"'}
    messages = [ask("  /think /no_think q "), say("", tool_calls=[CALL]), result, say("a")]
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    assert made(name, {"messages": messages, "tools": [{"type": "function", "function": function}]})[2] == []


@pytest.mark.parametrize("learn", ["turns", "completion"])
@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3"])
def test_answers_stand_behind_the_thought_that_the_prompt_opens(name: str, learn: str) -> None:
    tokenizer = tokenizer_of(name)
    prompt = tokenizer.apply_chat_template([ask("q")], tokenize=False, add_generation_prompt=True)
    thoughts = dict.fromkeys(("<think>TH</think>a", "TH\n</think>\na", "TH</think>\n\na"), "TH")
    for content, thought in (thoughts | {"a": "", "<a>": ""}).items():
        (text,), learned, _ = made(name, {"messages": [ask("q"), say(content)]}, learn=learn)
        assert text.startswith(prompt)
        closing = f"{thought}\n</think>\n\n" if prompt.endswith("<think>\n") else ""
        assert learned == [f"{closing}{content.rpartition('</think>')[2].strip()}{tokenizer.eos_token}"]
    texts, learned, _ = made(name, {"messages": [ask("q"), say("a", reasoning_content="T1"), ask("r"), say("b")]})
    assert len(texts) == len(learned) == (2 if prompt.endswith("<think>\n") else 1)


def test_a_pair_stands_behind_the_thought_that_the_prompt_opens() -> None:
    row = {"prompt": [ask("q")], "chosen": [say("<think>T</think>a")], "rejected": [say("b")]}
    ((prompt, chosen, rejected),), _, _ = made("deepseek_r1_distill", row, "dpo", "preference")
    assert prompt.endswith("<｜Assistant｜><think>\n")
    assert (chosen, rejected) == ("T\n</think>\n\na<｜end▁of▁sentence｜>", "\n</think>\n\nb<｜end▁of▁sentence｜>")


@pytest.mark.parametrize("learn", ["turns", "completion"])
def test_a_thought_before_a_call_is_learned_of_gpt_oss(learn: str) -> None:
    result = turn("tool", "r")
    messages = [ask("q"), say("", reasoning_content="T1", tool_calls=[CALL]), result, say("a", reasoning_content="T2")]
    (text,), learned, _ = made("gptoss", {"messages": messages}, learn=learn)
    call = (
        "<|channel|>analysis<|message|>T1<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        '<|message|>{"x": 1}<|call|>'
    )
    final = "<|channel|>analysis<|message|>T2<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>"
    assert learned == ([call, final] if learn == "turns" else [final])
    before = tokenizer_of("gptoss").apply_chat_template(
        [ask("q"), say("", thinking="T1", tool_calls=[CALL]), result], tokenize=False, add_generation_prompt=True
    )
    assert text == before + final


def test_every_turn_of_glm_ends_with_the_header_that_stops_it() -> None:
    thought = "\n<think>T</think>\na<|user|>"
    messages = [
        ask("q"),
        say("a", reasoning_content="T"),
        ask("r"),
        say("", tool_calls=[CALL]),
        turn("tool", "R"),
        say("b"),
    ]
    texts, learned, _ = made("glm4moe", {"messages": messages})
    call = "\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
    assert learned == [thought, f"\n<think></think>{call}", "\n<think></think>\nb<|user|>"]
    shown = tokenizer_of("glm4moe").apply_chat_template(messages, tokenize=False)
    assert texts[-1] == f"{shown}<|user|>"
    assert made("glm4moe", {"messages": messages[:2]}, learn="completion")[1] == [thought]
    row = {"prompt": [ask("q")], "chosen": [say("<think>T</think>a")], "rejected": [say("b")]}
    ((_, *sides),) = made("glm4moe", row, "dpo", "preference")[0]
    assert sides == [thought, "\n<think></think>\nb<|user|>"]


@pytest.mark.parametrize("key", ["reasoning_content", "content"])
@pytest.mark.parametrize(("name", "own_key"), [("gemma4_v5", "reasoning"), ("lfm2_2_5", "thinking")])
def test_a_thought_stands_where_the_template_reads_it(name: str, own_key: str, key: str) -> None:
    answer = say("a", reasoning_content="T") if key != "content" else say("<think>\nT\n</think>\n\na")
    truth = tokenizer_of(name).apply_chat_template([ask("q"), say("a", **{own_key: "T"})], tokenize=False)
    assert made(name, {"messages": [ask("q"), answer]})[0] == [truth]
    assert "T" in truth


def test_rewards_of_thoughts_that_are_not_read_are_refused() -> None:
    with pytest.raises(UsageError, match="marks thoughts in its own way") as refused:
        made("gemma4_v5", {"messages": [ask("q")]}, "gspo", thinking=True)
    assert refused.value.key == "cogumi.thinking"


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ({"prompt": "a <think> b", "completion": "c"}, "<think>"),
        ({"prompt": "a", "completion": "b <think> c"}, "<think>"),
        ({"prompt": "a", "completion": "<think>b</think>c</think>"}, "</think>"),
        ({"prompt": "a", "completion": "b <tool_call> c"}, "<tool_call>"),
        ({"prompt": "a", "completion": "<think>b</think>c"}, None),
        ({"prompt": "a <think>\n", "completion": "b\n</think>\n\nc"}, None),
        ({"prompt": "a", "completion": '<tool_call>\n{"name": "f"}\n</tool_call>'}, None),
    ],
)
def test_text_that_spells_a_token_of_the_template_is_dropped(row: dict[str, str], token: str | None) -> None:
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")])
    chunk = chunk_of([row], tokenizer, format="prompt_completion", learn="completion")
    assert list(chunk.dropped) == ([f"containing a special token ({token})"] if token else [])


def test_code_that_spells_a_token_of_the_template_is_dropped() -> None:
    rows = [{"source": "x = 1 # a <think> b\n" * 9}, {"source": "x = 1\n" * 9}]
    assert list(chunk_of(rows, chat_tokenizer("qwen3"), format="fim").dropped) == [
        "containing a special token (<think>)"
    ]


def test_a_thought_ends_with_its_tag_unless_a_text_talks_about_it() -> None:
    for content in ("T\n</think>\n\na", "T</think>\n\na", "T</think>\na", "<think>T</think>a"):
        assert split_thought(content) == ("T", "a")
    for content in ("The tag </think> ends it.", "It is </think>\n\nthen a", "`</think>`\n"):
        assert split_thought(content) == (None, content)
