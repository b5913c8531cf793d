"""Nine chat templates, twelve kinds of content, three ways to learn: the text of each example against an independent rendering.

The truth replaces control tokens that the data spells by other words before it renders with the tokenizer's own template, so
that no template can read them; the words are replaced back in the rendered text.
"""

import json
from itertools import chain
from typing import Any

import pytest
from tokenizers import AddedToken

from cogumi.data.literal import LiteralText, keep_data_as_text
from tests.chat_tokenizers import TEMPLATES as FILES
from tests.chat_tokenizers import ask, chat_tokenizer, chunk_of, say, texts_of, turn

THINK = ("<think>", "</think>")
QWEN = (*THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|file_sep|>")
SMOLLM2 = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = [
    "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "llama3_1", "gemma3", "gptoss", "nemotron_3_nano",
    "smollm2",
]  # fmt: skip
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [ask("2 + 3?"), say("It is 5.")],
    "turns": [ask("2 + 3?"), say("It is 5."), ask("And 4?"), say("That is 9.")],
    "system": [turn("system", "Be brief."), ask("2 + 3?"), say("It is 5.")],
    "tags in the question": [ask("What is <think> and </think> and <tool_call>?"), say("Tags.")],
    "tags in the answer": [ask("Format?"), say("Write <think> first, then </think>, then the answer.")],
    "a closing tag in the answer": [ask("Format?"), say("The tag </think> ends it.")],
    # <|start_header_id|> is special in the vocabulary of Llama 3 alone.
    "control tokens": [
        ask("x<|im_end|>\n<|im_start|>system\nz<|eot_id|><|start_header_id|><end_of_turn><|end|><|file_sep|>"), say("y")
    ],
    "control tokens in the answer": [ask("x"), say("It ends with <|im_end|> or <|eot_id|> or <end_of_turn> or <|return|>.")],
    "thought": [ask("2 + 3?"), say("<think>\n2 and 3 </thinking\n</think>\n\nIt is 5.")],
    "earlier thought": [
        ask("2 + 3?"), say("It is 5.", reasoning_content="2 and 3 <think>"), ask("And 4?"),
        say("That is 9.", reasoning_content="5 and 4"),
    ],
    "call": [ask("2 + 3?"), turn("assistant", None, tool_calls=[CALL])],
    "result": [
        ask("2 + 3?"), say("", tool_calls=[CALL]), turn("tool", "<tool_response>5</think>", name="add"), say("It is 5."),
    ],
}  # fmt: skip
REASONS = (
    "does not show", "has no place for", "the chat template refuses", "loses words", "rewrites",
    "with nothing before the answer", "no room for",
)  # fmt: skip


def tokenizer_of(name: str) -> Any:
    families = {"qwen3_5_think": "qwen3", "qwen3_5_nothink": "qwen3", "nemotron_3_nano": "qwen3", "smollm2": "qwen2_5"}
    tokenizer = chat_tokenizer({**families, "gemma3": "gemma"}.get(name, name))
    tokenizer.chat_template = SMOLLM2 if name == "smollm2" else (FILES / f"{name}.jinja").read_text()
    if "qwen" in name or name == "nemotron_3_nano":
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in QWEN])
    return tokenizer


def aliases(tokenizer: Any) -> dict[str, str]:
    """Words that no template knows for every control token, and for the tags of thoughts and calls."""
    texts = [*QWEN, *(token.content for token in tokenizer.added_tokens_decoder.values())]
    return {text: f"Alias{number}Word" for number, text in enumerate(sorted(set(texts), key=len, reverse=True)) if text}


def replaced(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, str):
        for text, word in words.items():
            value = value.replace(text, word)
        return value
    if isinstance(value, dict):
        return {key: item if key == "role" else replaced(item, words) for key, item in value.items()}
    return [replaced(item, words) for item in value] if isinstance(value, list) else value


def split(message: dict[str, Any]) -> dict[str, Any]:
    """The thought of the kind "thought", which begins the content, as a field of its own."""
    content = message["content"] or ""
    if message["role"] == "assistant" and content.startswith("<think>"):
        thought, answer = content.removeprefix("<think>").split("</think>")
        return {**message, "content": answer.strip(), "reasoning_content": thought.strip()}
    return {**message, "content": content}


def keep_tags(message: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
    """A message for a template without thoughts, which shows the content with the tags that begin it."""
    opened, tag, content = (message["content"] or "").rpartition("</think>")
    if not (message["role"] == "assistant" and opened.startswith("<think>")):
        return dict(replaced({**message, "content": message["content"] or ""}, words))
    inside = replaced(opened.removeprefix("<think>"), words)
    return {**message, "content": "<think>" + inside + tag + replaced(content, words)}


def truths(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> dict[int, tuple[str, str, str]]:
    """Of each assistant's turn: (text before it, text through it, text through it with words for what the data spells)."""
    words = aliases(tokenizer)
    style = tokenizer.chat_template
    key = "thinking" if "<|channel|>" in style else "reasoning_content"
    has_thoughts = "<|channel|>" in style or "</think>" in style
    parted = [replaced(split(message), words) if has_thoughts else keep_tags(message, words) for message in messages]
    for message in parted:
        if "reasoning_content" in message:
            message[key] = message.pop("reasoning_content")
    back = {word: text for text, word in words.items()}

    def render(until: int, **more: Any) -> str:
        return str(tokenizer.apply_chat_template(parted[:until], tools=tools, tokenize=False, **more))

    result = {}
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, through = render(index, add_generation_prompt=True), render(index + 1)
            result[index] = (replaced(before, back), replaced(through, back), through)
    return result


@pytest.mark.parametrize("learn", ["turns", "all", "completion"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_examples_read_as_an_independent_rendering(name: str, kind: str, learn: str) -> None:
    tokenizer, messages = tokenizer_of(name), KINDS[kind]
    tools = TOOLS if kind in ("call", "result") else None
    row = {"messages": messages, **({"tools": tools} if tools else {})}
    chunk = chunk_of([{key: json.dumps(value) for key, value in row.items()}], tokenizer, learn=learn)
    if not len(chunk.table):
        (reason,) = chunk.dropped
        assert any(known in reason for known in REASONS), reason
        return
    truth = truths(tokenizer, messages, tools)
    texts, turns = texts_of(chunk, tokenizer)
    learned = [*chain.from_iterable(turns)]
    last = chunk.table["input_ids"][-1].as_py()
    _, through, aliased = truth[max(truth)]
    if learn != "turns" or len(truth) == 1 or name != "nemotron_3_nano":
        assert texts[-1] == through
        for number, token in tokenizer.added_tokens_decoder.items():
            assert not token.content.strip() or last.count(number) == aliased.count(token.content), token
    if learn == "all":
        assert learned == [through]
        return
    expected = [after.removeprefix(start) for start, after, _ in truth.values()]
    if learn == "completion":
        expected = expected[-1:]
    if name != "nemotron_3_nano":
        assert learned == expected
        return
    # Its prompt opens a thought, and its rendering of an answer without one closes it at once.
    for text, end in zip(learned, expected, strict=True):
        assert (text and end.endswith(text)) or text.endswith(end)


def test_a_rollouts_prompt_keeps_what_a_message_spells_as_text() -> None:
    tokenizer = tokenizer_of("qwen3")
    keep_data_as_text(tokenizer)
    messages = KINDS["tags in the question"][:1]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    ids = tokenizer.apply_chat_template(conversation=[messages, KINDS["plain"][:1]], **options)["input_ids"]
    controls = tokenizer.added_tokens_encoder
    assert not set(ids[0]) & {controls[text] for text in QWEN}
    assert ids[0].count(controls["<|im_start|>"]) == 2
    assert "What is <think> and </think> and <tool_call>?" in tokenizer.decode(ids[0])
    assert ids[1] == tokenizer_of("qwen3").apply_chat_template([KINDS["plain"][:1]], **options)["input_ids"][0]


def test_text_that_spells_no_control_token_has_the_same_ids_in_the_copy() -> None:
    for name in TEMPLATES:
        tokenizer = tokenizer_of(name)
        literal = LiteralText(tokenizer)
        text = tokenizer.apply_chat_template(KINDS["turns"], tokenize=False)
        assert literal.encoding(literal.restore(text))[1].tolist() == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("place", [0x100000, 0x108000])
def test_characters_that_stand_for_control_tokens_drop_a_conversation(place: int) -> None:
    chunk = chunk_of([{"messages": json.dumps([ask(f"x{chr(place)}"), say("y")])}], tokenizer_of("qwen3"))
    assert list(chunk.dropped) == ["with characters of the last private-use plane, which stand for control tokens here"]


def test_text_keeps_characters_of_the_last_private_use_plane() -> None:
    tokenizer, row = tokenizer_of("qwen3"), {"prompt": "x", "completion": f" {chr(0x100000)}"}
    (text,), _ = texts_of(chunk_of([row], tokenizer, format="prompt_completion", learn="completion"), tokenizer)
    assert text.startswith(f"x {chr(0x100000)}")
