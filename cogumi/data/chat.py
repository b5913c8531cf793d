"""Conversations of the usual shapes as the messages that chat templates take: a list of `{"role", "content"}`.

The shapes are OpenAI's `messages` (role, content), ShareGPT's `conversations` (from, value) and Alpaca's `instruction`,
`input`, `output`. `reasoning_content`, `tool_calls`, `tool_call_id` and `name` stay where a message has them.

- Null fields are absent fields: columns give every message the keys of all others, and templates ask `'tool_calls' in
  message`. Arguments of a tool call may be JSON text, as OpenAI's API writes them, in which a null stays null.
- Parts of text are joined. A row with a picture or a sound is dropped.
- Two turns of one role in a row stay: whether that is a conversation is the template's to say.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cogumi.data.rows import BadRow, decode_value

Message = dict[str, Any]
Side = str | list[Message]

OPEN, CLOSE = "<think>", "</think>"

ROLES = {
    **{each: each for each in ("system", "developer", "user", "assistant", "tool")},
    # ShareGPT's names and those of its descendants.
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "chatbot", "chatgpt", "model", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "ipython"), "tool"),
}
CALLS = ("function_call", "tool_call")
"""ShareGPT's roles for an assistant's turn that is the JSON of a call."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What a message may call what its author thought before it."""


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools they may call, and where learning begins."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    prompt_length: int = 0
    """Messages before this one are a prompt, of which nothing is learned."""


@dataclass(frozen=True)
class Question:
    """What a model is asked in a rollout, what would be right, and the tools that its length counts."""

    prompt: Side
    answer: str | None = None
    tools: list[dict[str, Any]] | None = None


def read_list(value: Any, reason: str) -> list[Any]:
    """The list in a cell, or in its JSON text. Raises BadRow."""
    value = decode_value(value)
    if isinstance(value, str):
        value = parse_json(value, reason)
    if not isinstance(value, list | tuple):
        raise BadRow(reason)
    return list(value)


def read_messages(value: Any) -> list[Message]:
    """The messages in a cell: a list of objects, or JSON text of one. Raises BadRow."""
    messages = read_list(value, "whose messages are neither a list nor JSON")
    if not messages:
        raise BadRow("without messages")
    return [message_of(each) for each in messages]


def first_of(raw: Mapping[str, Any], *keys: str) -> Any:
    return next((raw[key] for key in keys if raw.get(key) is not None), None)


def message_of(raw: Any) -> Message:
    if not isinstance(raw, Mapping):
        raise BadRow("with a message that is no object")
    name, content = first_of(raw, "role", "from"), first_of(raw, "content", "value")
    lower = name.strip().lower() if isinstance(name, str) else None
    if lower in CALLS:
        call = parse_json(content, "with a tool call that is not JSON") if isinstance(content, str) else content
        called = call if isinstance(call, list) else [call]
        return {"role": "assistant", "content": "", "tool_calls": [tool_call_of(each) for each in called]}
    if lower not in ROLES:
        raise BadRow("with a message of no known role", f"role {name!r}")
    calls = raw.get("tool_calls")
    if calls and not isinstance(calls, list | tuple):
        raise BadRow("with tool calls that are no list")
    if content is None and not calls:
        raise BadRow("with a message that has no content")
    message: Message = {"role": ROLES[lower], "content": "" if content is None else join_parts(content)}
    if calls:
        message["tool_calls"] = [tool_call_of(each) for each in calls]
    texts = {"reasoning_content": next((raw[key] for key in THOUGHTS if raw.get(key)), None)}
    texts |= {key: raw.get(key) for key in ("name", "tool_call_id")}
    return message | {key: join_parts(text) for key, text in texts.items() if text is not None}


def join_parts(content: Any) -> str:
    """A message's content as text; parts of text are joined as they are."""
    content = decode_value(content)
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise BadRow("with a message whose content is no text", f"content {content!r}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise BadRow("with a message that has parts other than text", f"part {part!r}")
        texts.append(text)
    return "".join(texts)


def tool_call_of(raw: Any) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "arguments"}}, with its id where it has one."""
    function = raw.get("function") if isinstance(raw, Mapping) else None
    called = function if isinstance(function, Mapping) else raw
    if not isinstance(called, Mapping) or not isinstance(called.get("name"), str):
        raise BadRow("with a tool call that names no function")
    arguments, reason = called.get("arguments"), "with tool-call arguments that are no JSON object"
    if isinstance(arguments, str):
        arguments = parse_json(arguments, reason)
    else:
        arguments = without_nulls({} if arguments is None else arguments)
    if not isinstance(arguments, Mapping):
        raise BadRow(reason)
    call: dict[str, Any] = {"type": "function", "function": {"name": called["name"], "arguments": arguments}}
    if isinstance(raw.get("id"), str):
        call["id"] = raw["id"]
    return call


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """The JSON schemas of the tools a conversation may call; a list, or JSON text of one."""
    if value is None or value in ("", b""):
        return None
    reason = "with tools that are no list of JSON schemas"
    tools = read_list(value, reason)
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow(reason)
    # `or None`: Llama's template writes about tools even for an empty list.
    return [without_nulls(tool) for tool in tools] or None


def alpaca_messages(instruction: Any, extra: Any, output: Any, system: Any = None) -> list[Message]:
    """One turn of instruction, with its input below it where there is one, and the output as the answer."""
    question = read_text(instruction)
    if extra is not None and (more := read_text(extra)).strip():
        question = f"{question}\n\n{more}"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": read_text(output)}]
    if system is not None and (rule := read_text(system)).strip():
        messages.insert(0, {"role": "system", "content": rule})
    return messages


def read_text(value: Any) -> str:
    """A cell that must hold text."""
    value = decode_value(value)
    if not isinstance(value, str):
        raise BadRow("with a field that is no text", f"{value!r}")
    return value


def last_turn(messages: Sequence[Message], role: str) -> int:
    """The index of the last message of this role. Raises BadRow where there is none."""
    for at in reversed(range(len(messages))):
        if messages[at]["role"] == role:
            return at
    raise BadRow(f"without any {role} turn")


def refuse_empty_answers(messages: Sequence[Message], first: int = 0) -> None:
    """BadRow for an assistant's turn that says and calls nothing: it would teach to stop at once."""
    for message in messages[first:]:
        if message["role"] == "assistant" and not message["content"].strip() and "tool_calls" not in message:
            raise BadRow("with an empty answer")


def split_thought(content: str) -> tuple[str | None, str]:
    """(thought, answer) of a content that opens with a thought; (None, content) where tags stand elsewhere, as text.

    A content may close a thought that it does not open: the prompt of DeepSeek-R1 has opened it. Raises BadRow where
    the thought never closes.
    """
    before, closed, answer = content.partition(CLOSE)
    opens = before.lstrip().startswith(OPEN)
    if opens and not closed:
        raise BadRow("with a thought that never closes")
    if not closed or (not opens and OPEN in before):
        return None, content
    return before.strip().removeprefix(OPEN).strip("\n"), answer.lstrip("\n")


def lacks_thought(messages: Sequence[Message]) -> bool:
    """Whether the last answer has no thought, or one of white space. Raises BadRow where a thought never closes."""
    answer = messages[last_turn(messages, "assistant")]
    thought = answer.get("reasoning_content") or split_thought(answer["content"])[0]
    return not (thought or "").strip()


def parse_json(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(reason, text) from None


def without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(inner) for inner in value]
    return value


# ---------------------------------------------------------------------------------------------------------------- rows


def row_messages(row: dict[str, Any]) -> list[Message]:
    """The messages of a chat row of any shape."""
    if "instruction" in row:
        return alpaca_messages(row["instruction"], row.get("input"), row["output"], row.get("system"))
    return read_messages(row["messages"] if "messages" in row else row["conversations"])


def read_conversation(row: dict[str, Any], learn: str = "turns") -> Conversation:
    """A chat row's conversation, with at least one answer. Unless all is learned, it ends with the last answer."""
    messages = row_messages(row)
    last = last_turn(messages, "assistant")
    if learn != "all":
        messages = messages[: last + 1]
    prompt_length = last if learn == "completion" else 0
    if last == 0:
        raise BadRow("with nothing before the answer")
    refuse_empty_answers(messages, prompt_length)
    return Conversation(messages, read_tools(row.get("tools")), prompt_length)


def read_completion(row: dict[str, Any]) -> Conversation | tuple[str, str]:
    """(prompt, completion) where both are text; else one conversation, the prompt's messages first."""
    prompt, completion = text_or_messages(row["prompt"]), text_or_messages(row["completion"])
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise BadRow("with an empty answer")
        return prompt, completion
    asked, answered = as_messages(prompt, "user"), as_messages(completion, "assistant")
    last_turn(answered, "assistant")
    refuse_empty_answers(answered)
    return Conversation(asked + answered, read_tools(row.get("tools")), len(asked))


def read_pair(row: dict[str, Any]) -> dict[str, Any]:
    """{"prompt", "chosen", "rejected"}, all text or all messages, and "tools". Raises BadRow."""
    chosen, rejected = text_or_messages(row["chosen"]), text_or_messages(row["rejected"])
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("whose chosen and rejected are of two kinds")
    if chosen == rejected:
        raise BadRow("whose chosen and rejected are the same")
    prompt: Side | None = text_or_messages(row["prompt"]) if row.get("prompt") is not None else None
    if isinstance(chosen, str) and isinstance(prompt, list):
        chosen, rejected = as_messages(chosen, "assistant"), as_messages(rejected, "assistant")
    elif isinstance(chosen, list) and isinstance(prompt, str):
        # Both sides often repeat the prompt; the text is then the first question of the conversation.
        opens = chosen[0]["role"] != "assistant"
        prompt = None if opens else as_messages(prompt, "user")
    if prompt is None:
        length = implicit_prompt(chosen, rejected)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    if not prompt:
        raise BadRow("without a prompt")
    for side in (chosen, rejected):
        if isinstance(side, str) and not side.strip():
            raise BadRow("with an empty answer")
        if not isinstance(side, str):
            if not side or side[-1]["role"] != "assistant":
                raise BadRow("with a side that does not end with the assistant")
            if any(message["role"] == "user" for message in side):  # its question would be learned with the answers
                raise BadRow("with a question inside a side")
            refuse_empty_answers(side)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": read_tools(row.get("tools"))}


def implicit_prompt(chosen: Side, rejected: Side) -> int:
    """The length of what both begin with: turns, or characters less a space before the first that differs.

    (trl 1.15, data_utils.py, extract_prompt.) Where one side is the beginning of the other, the prompt leaves it one turn.
    """
    shorter = min(len(chosen), len(rejected))
    length = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    if isinstance(chosen, str):
        return length - 1 if length and chosen[length - 1] == " " else length
    while length and (length == shorter or chosen[length]["role"] != "assistant"):
        length -= 1
    return length


def text_or_messages(value: Any) -> Side:
    return read_messages(value) if isinstance(value, list) else read_text(value)


def as_messages(side: Side, role: str) -> list[Message]:
    return [{"role": role, "content": side}] if isinstance(side, str) else side


def read_question(row: dict[str, Any]) -> Question:
    """The messages up to the last turn of the user, and what the assistant says after it.

    A conversation that ends with what a tool returned is asked as a whole: it is the assistant's turn.
    """
    messages = row_messages(row)
    asked = last_turn(messages, "user") + 1
    if messages[-1]["role"] == "tool":
        asked = len(messages)
    refuse_empty_prompt(messages[:asked])
    answers = [each["content"] for each in messages[asked:] if each["role"] == "assistant"]
    return Question(messages[:asked], split_thought(answers[-1])[1] if answers else None, read_tools(row.get("tools")))


def read_prompt(row: dict[str, Any]) -> Question:
    """The prompt, text or messages, and the completion's text or its last message's."""
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(completion, list):
        completion = read_messages(completion)[-1]["content"]
    answer = None if completion is None else split_thought(read_text(completion))[1]
    asked = text_or_messages(prompt)
    refuse_empty_prompt(asked)
    return Question(asked, answer, None if isinstance(asked, str) else read_tools(row.get("tools")))


def refuse_empty_prompt(prompt: Side) -> None:
    """BadRow for a prompt in which there is nothing but white space."""
    said = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt if "tool_calls" not in each]
    if not "".join(said).strip():
        raise BadRow("with an empty prompt")


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a completion's text, of messages that of the last one; "" for a message without content (a bare tool call)."""
    if isinstance(completion, str):
        return completion
    return (completion[-1].get("content") or "") if completion else ""


def transcript_of(messages: str | Sequence[Mapping[str, Any]]) -> str:
    """Return text as it is, and messages as `role: content`, a line each, with their calls as `name({"argument": 1})`."""
    if isinstance(messages, str):
        return messages
    lines = []
    for message in messages:
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        called = [f"{call.get('name')}({json.dumps(call.get('arguments', {}), default=str)})" for call in calls]
        words = filter(None, [str(message.get("content") or ""), *called])
        lines.append(f"{message['role']}: {' '.join(words)}")
    return "\n".join(lines)
