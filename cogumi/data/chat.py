"""Conversations of the usual shapes as messages, and the chat templates that render them.

Shapes: OpenAI's `messages` (role, content), ShareGPT's `conversations` (from, value) and Alpaca's `instruction`, `input`,
`output`. `reasoning_content`, `tool_calls`, `tool_call_id` and `name` are kept.

- A message's null fields are absent fields: templates test `'tool_calls' in message`. In tools and in the arguments of a
  call, which may be JSON text as OpenAI's API writes it, a null stays null; `rows.cells_of` removes those of Arrow.
- Parts of text are joined. A row with a picture or a sound, also in a column beside its messages, is dropped.
- Consecutive turns of one role stay: the template decides whether that is a conversation.

Templates write thoughts as `<think>...</think>` before the answer (Qwen3, DeepSeek-R1 and many others) or in gpt-oss's
harmony channels (`analysis` before `final`); `cogumi.data.templates` renders them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cogumi.core.errors import UsageError
from cogumi.data.rows import JSON, MEDIA, BadRow, decode_cell, describe_value

Message = dict[str, Any]
Side = str | list[Message]

OPEN, CLOSE = "<think>", "</think>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    # ShareGPT's names and those of its descendants.
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "chatbot", "chatgpt", "model", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "ipython"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")
"""ShareGPT's roles for an assistant's turn that is the JSON of a call."""
REPR = re.compile(r"\s*(?:(?:array\()?\[\s*)?\{\s*'(?:role|content|from|value)'\s*:")
ReasoningKey = Literal["reasoning_content", "thinking", "reasoning"]
REASONING_KEYS: tuple[ReasoningKey, ...] = get_args(ReasoningKey)
LEARN_KEYS = ("weight", "train", "loss", "loss_mask", "loss_weight", "loss_scale", "train_detail")
"""Keys by which OpenAI, axolotl, ms-swift and others say whether a turn is learned: 0 or false, 1 or true. Parts drop it."""
TEXT_PARTS = (None, "text", "input_text", "output_text")
ANSWER_KEYS = {*LEARN_KEYS, *REASONING_KEYS, "tool_calls", "function_call"}  # read of the assistant's turns alone
MESSAGE_KEYS = {"role", "from", "content", "value", "tool_call_id", "name", *ANSWER_KEYS}


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, and the tools that they may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    prompt_length: int = 0
    """Number of leading messages of which nothing is learned: the prompt, or a greeting, which answers nothing."""


@dataclass(frozen=True)
class Question:
    """The prompt of a rollout, the gold answer, and the tools of the row."""

    prompt: Side
    answer: str | None = None
    tools: list[dict[str, Any]] | None = None


# ------------------------------------------------------------------------------------------------------------- parsing


def _parse_json(text: str, reason: str) -> Any:
    try:
        return JSON.decode(text)
    except (ValueError, RecursionError):
        raise BadRow(reason, text) from None


def _read_list(value: Any, reason: str) -> list[Any]:
    """Return the list in a cell, or in its JSON text."""
    value = decode_cell(value)
    if isinstance(value, str):
        _refuse_repr(value)
        value = _parse_json(value, reason)
    if not isinstance(value, list | tuple):
        raise BadRow(reason)
    return list(value)


def _read_text(row: Mapping[str, Any], name: str) -> str:
    value = decode_cell(row[name])
    if not isinstance(value, str):
        raise BadRow(f"whose `{name}` is no text but {type(value).__name__}", f"{value!r}")
    return value


def read_messages(value: Any) -> list[Message]:
    """Return the messages in a cell: a list of objects, or its JSON text. Raises BadRow."""
    messages = _read_list(value, "whose messages are neither a list nor JSON")
    if not messages:
        raise BadRow("without messages")
    return list(map(_read_message, messages))


def _read_message(raw: Any) -> Message:
    if not isinstance(raw, Mapping):
        raise BadRow("with a message that is no object")
    raw = decode_cell(raw)
    name = raw["role"] if raw.get("role") is not None else raw.get("from")
    content = _one_of(raw, ("content", "value"))
    role = name.strip().lower() if isinstance(name, str) else None
    if role in CALL_ROLES:
        call = _parse_json(content, "with a tool call that is not JSON") if isinstance(content, str) else content
        parsed = list(map(_read_tool_call, call if isinstance(call, list) else [call]))
        return {"role": "assistant", "content": "", "tool_calls": parsed} | _read_weight(raw)
    if role not in ROLES:
        raise BadRow("with a message of no known role", f"role {name!r}")
    # `function_call` is how OpenAI's API wrote one call before `tool_calls`.
    calls = raw.get("tool_calls") or ([raw["function_call"]] if raw.get("function_call") else None)
    calls = calls and _read_list(calls, "with tool calls that are no list")
    if content is None and not calls:
        raise BadRow("with a message that has no content")
    message: Message = {"role": ROLES[role], "content": "" if content is None else _join_parts(content)}
    if message["role"] == "assistant":
        message |= _read_weight(raw)
    if calls:
        message["tool_calls"] = list(map(_read_tool_call, calls))
    texts = {"reasoning_content": _one_of(raw, REASONING_KEYS) or None}
    texts |= {key: raw.get(key) for key in ("name", "tool_call_id")}
    message |= {key: _join_parts(text) for key, text in texts.items() if text is not None}
    if "reasoning_content" in message and message["content"].lstrip().startswith(OPEN):  # servers may write both
        thought, message["content"] = split_thought(message["content"])
        if (thought or "").strip() not in ("", message["reasoning_content"].strip()):
            raise BadRow("with two thoughts, one beside the content and another one in its tags", thought)
    return message


def _one_of(raw: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the value that a message has under any of these names for one thing. Raises BadRow for two values."""
    filled = [raw[key] for key in keys if raw.get(key)]
    if len(filled) > 1 and any(value != filled[0] for value in filled):
        raise BadRow(f"with a message that has two values of {' or '.join(keys)}")
    return filled[0] if filled else raw.get(keys[0], raw.get(keys[-1]))


def _read_weight(raw: Mapping[str, Any]) -> Message:
    """Return {"weight": 0} for a turn that is context only, else {}. Raises BadRow for another weight than 0 and 1."""
    weights = {key: raw[key] for key in LEARN_KEYS if raw.get(key) is not None}
    for key, weight in weights.items():
        if isinstance(weight, str) or weight not in (0, 1):
            raise BadRow(f"with a turn whose `{key}` is neither 0 nor 1", f"{key} {weight!r}")
    return {} if all(weights.values()) else {"weight": 0}


def unused_keys(cells: Iterable[Any]) -> set[str]:
    """Return the keys of these cells' messages of which nothing is made; also a speaker's `name`, which few templates show."""
    keys: set[str] = set()
    for cell in cells:
        messages = cell
        if isinstance(cell, str) and cell.lstrip().startswith("["):
            with suppress(ValueError, RecursionError):
                messages = json.loads(cell)
        for message in messages if isinstance(messages, list) else [messages]:
            if isinstance(message, Mapping) and MESSAGE_KEYS & message.keys():
                keys |= {key for key in message.keys() - MESSAGE_KEYS if message[key] not in (None, "", [], {})}
                role = str(message.get("role") or message.get("from")).strip().lower()
                is_read = ROLES.get(role, "assistant") == "assistant"
                keys |= {"name"} if message.get("name") and ROLES.get(role) != "tool" else set()
                keys |= {f"{key} (of {role})" for key in ANSWER_KEYS if message.get(key) and not is_read}
    return keys


def _join_parts(content: Any) -> str:
    """Return a message's content as text; parts of text are joined without a separator."""
    content = decode_cell(content)
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise BadRow("with a message whose content is no text", f"content {content!r}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str) or (isinstance(part, Mapping) and part.get("type") not in TEXT_PARTS):
            raise BadRow("with a message that has parts other than text", f"part {part!r}")
        texts.append(text)
    return "".join(texts)


def _read_tool_call(raw: Any) -> dict[str, Any]:
    """Return {"type": "function", "function": {"name", "arguments"}}, with the call's id if it has one."""
    function = raw.get("function") if isinstance(raw, Mapping) else None
    call = function if isinstance(function, Mapping) else raw
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise BadRow("with a tool call that names no function")
    if "arguments" not in call and (others := call.keys() - {"name", "id", "type", "index"}):
        raise BadRow(f"with a tool call without `arguments`, which has {', '.join(sorted(others))}")
    reason = "with tool-call arguments that are no JSON object"
    arguments = call.get("arguments") or {}
    arguments = decode_cell(_parse_json(arguments, reason) or {} if isinstance(arguments, str) else arguments)
    if not isinstance(arguments, Mapping):
        raise BadRow(reason)
    result: dict[str, Any] = {"type": "function", "function": {"name": call["name"], "arguments": arguments}}
    if isinstance(raw.get("id"), str):
        result["id"] = raw["id"]
    return result


def _read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of the tools in a cell, a list or its JSON text."""
    if value is None or value in ("", b"", "null", "{}", {}):
        return None
    reason = "with tools that are no list of JSON schemas"
    tools = [_parse_json(tool, reason) if isinstance(tool, str) else tool for tool in _read_list(value, reason)]
    if not all(isinstance(tool, Mapping) and isinstance(tool.get("function", {}), Mapping) for tool in tools):
        raise BadRow(reason)
    # `or None`: Llama's template mentions tools even for an empty list.
    return list(tools) or None


def _last_turn(messages: Sequence[Message], role: str) -> int:
    roles = [message["role"] for message in messages]
    if role not in roles:
        raise BadRow(f"without any {role} turn")
    return len(roles) - 1 - roles[::-1].index(role)


def is_learned(message: Message) -> bool:
    """Tell whether a message is an assistant's turn that the data does not give as context only."""
    return message["role"] == "assistant" and "weight" not in message


def _refuse_context_turns(messages: Sequence[Message], place: str) -> None:
    if any("weight" in message for message in messages):
        raise BadRow(f"with a turn that is not to be learned (weight 0) {place}")


def _refuse_empty_answers(messages: Sequence[Message]) -> None:
    """Raise BadRow for an assistant's turn without text and calls, its thought apart: it would teach to answer nothing."""
    for message in filter(is_learned, messages):
        before, close, after = message["content"].partition(CLOSE)
        answer = after if close and closes_thought(before, after) else message["content"]
        if not answer.strip() and "tool_calls" not in message:
            raise BadRow("with an empty answer")


def _refuse_empty_prompt(prompt: Side) -> None:
    texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt if turn["role"] == "user"]
    if not all(map(str.strip, texts)):
        raise BadRow("with an empty prompt")


def _refuse_repr(text: str) -> None:
    if REPR.match(text):
        raise BadRow("of Python's repr of messages, which is not JSON (json.dumps writes that)", text)


def _text_or_messages(row: Mapping[str, Any], name: str, prompt: Side | None = None) -> Side:
    """Return the messages in a cell, also in its JSON text, or its only message; any other text is text.

    JSON that answers a prompt of text is text, unless it is a list that begins with the assistant's turn or repeats the prompt.
    """
    value = decode_cell(row[name])
    if isinstance(value, list) or _is_message(value):
        return read_messages(value if isinstance(value, list) else [value])
    text = _read_text(row, name)
    if not text.lstrip().startswith(("[", "{", "array(")):
        return text
    _refuse_repr(text)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_list = isinstance(parsed, list)
    if not parsed or not all(map(_is_message, parsed if is_list else [parsed])):
        return text
    side = read_messages(text if is_list else f"[{text}]")
    if not isinstance(prompt, str):
        return side
    is_answer = side[0]["role"] == "assistant" or _holds(side[:-1], prompt)
    return side if is_list and is_answer else text


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"content", "value", "tool_calls"} & value.keys():
        return False
    return str(value.get("role") or value.get("from")).strip().lower() in (*ROLES, *CALL_ROLES)


def _as_messages(side: Side, role: str) -> list[Message]:
    return [{"role": role, "content": side}] if isinstance(side, str) else side


def closes_thought(before: str, after: str) -> bool:
    """Tell whether the first `</think>` ends a thought: one that begins the content, or an unopened one that ends its line.

    A space before it says that a text talks about the tag.
    """
    if before.lstrip().startswith(OPEN):
        return True
    is_glued = before.rstrip(" ")[-1:] in ("", "\n") or not before.endswith(" ")
    return OPEN not in before and is_glued and after.lstrip(" ")[:1] in ("", "\n")


def split_thought(content: str) -> tuple[str | None, str]:
    """Split content that starts with a thought into (thought, answer); (None, content) if tags elsewhere are text.

    A content may close a thought that it does not open, at the end of a line: DeepSeek-R1's prompt has opened it. Raises
    BadRow for a thought that never closes.
    """
    before, close, answer = content.partition(CLOSE)
    if before.lstrip().startswith(OPEN) and not close:
        raise BadRow("with a thought that never closes")
    if not close or not closes_thought(before, answer):
        return None, content
    return before.strip().removeprefix(OPEN).strip("\n"), answer.lstrip("\n")


def is_missing_reasoning(row: Any) -> bool:
    """Tell whether a row is a conversation whose last answer has no thought, or a blank one."""
    if not isinstance(row, Conversation):
        return False
    answer = row.messages[_last_turn(row.messages, "assistant")]
    thought = answer.get("reasoning_content") or split_thought(answer["content"])[0]
    return not (thought or "").strip()


# ---------------------------------------------------------------------------------------------------------------- rows


def _read_history(value: Any) -> list[Message]:
    """Return the earlier turns of an Alpaca row, pairs of a question and its answer."""
    reason = "whose `history` is no list of pairs of a question and its answer"
    pairs = _read_list(value, reason) if value else []
    if not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in pairs):
        raise BadRow(reason, f"{value!r}")
    return [{"role": role, "content": pair[at]} for pair in pairs for at, role in enumerate(("user", "assistant"))]


def _row_messages(row: dict[str, Any]) -> list[Message]:
    """Return the messages of a chat row of any shape; Alpaca's input is put below the instruction."""
    if "instruction" not in row:
        messages = read_messages(row["messages"] if "messages" in row else row["conversations"])
    else:
        texts = [_read_text(row, "instruction"), *([] if row.get("input") is None else [_read_text(row, "input")])]
        question = "\n\n".join(filter(str.strip, texts))
        messages = _read_history(row.get("history"))
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": _read_text(row, "output")}]
    return _with_system(row, messages)


def _with_system(row: Mapping[str, Any], prompt: Any) -> Any:
    """Return the prompt with the row's system message. Raises BadRow for columns that cannot be shown with the prompt."""
    if media := next((name for name in MEDIA if row.get(name) not in (None, "", b"", [], {})), None):
        raise BadRow(f"with `{media}`, which are not read: the text alone would be learned")
    if isinstance(prompt, str) and _read_tools(row.get("tools")):
        raise BadRow("with `tools`, for which a prompt of text has no place: write it as messages", prompt)
    if row.get("system") is None or not (system := _read_text(row, "system")).strip():
        return prompt
    if isinstance(prompt, str):
        raise BadRow("with `system`, for which a prompt of text has no place: write it as messages", system)
    if prompt[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *prompt]
    if prompt[0]["content"].strip() != system.strip():
        raise BadRow("with a system message beside another one in `system`", system)
    return prompt


def read_conversation(row: dict[str, Any], learn: str = "turns") -> Conversation:
    """Return a chat row's conversation with at least one answer; it ends with the last one unless all is learned."""
    messages = _row_messages(row)
    last = _last_turn(messages, "assistant")
    if learn == "all":
        _refuse_context_turns(messages, "where everything is")
    else:
        last = next((at for at in range(last, -1, -1) if is_learned(messages[at])), -1)
        if last < 0:
            raise BadRow("without a turn to learn (weight, train or loss of all is 0 or false)")
        messages = messages[: last + 1]
    if last == 0:
        raise BadRow("with nothing before the answer")
    _refuse_empty_prompt(messages)
    request_turns = (index for index, message in enumerate(messages[:last]) if message["role"] in ("user", "tool"))
    prompt_length = {"completion": last, "all": 0}.get(learn, next(request_turns, 1))
    _refuse_empty_answers(messages[prompt_length:])
    return Conversation(messages, _read_tools(row.get("tools")), prompt_length)


def read_completion(row: dict[str, Any], repeats: bool = False) -> Conversation | tuple[str, str]:
    """Return (prompt, completion) if both are text, else one conversation that starts with the prompt's messages."""
    prompt = _text_or_messages(row, "prompt")
    completion = _text_or_messages(row, "completion", prompt)
    if isinstance(prompt, str) and isinstance(completion, str):
        completion = completion.removeprefix(prompt) if repeats else completion
        if not completion.strip():
            raise BadRow("with an empty answer")
        return _with_system(row, prompt), completion
    questions = _as_messages(prompt, "user")
    (answers,) = _without_prompt(questions, _as_messages(completion, "assistant"))
    if answers and questions[-1]["role"] == "user" and answers[0]["role"] in ("system", "developer", "user"):
        raise BadRow(f"whose completion begins with a {answers[0]['role']} turn that is not the prompt's")
    _refuse_empty_prompt(questions)
    questions = _with_system(row, questions)
    _last_turn(answers, "assistant")
    _refuse_empty_answers(answers)
    _refuse_context_turns(answers, "in a completion")
    return Conversation(questions + answers, _read_tools(row.get("tools")), len(questions))


def _without_prompt(prompt: Sequence[Message], *sides: list[Message]) -> Sequence[list[Message]]:
    """Return the answers of sides that all repeat the prompt, else the sides."""
    is_repeated = all(_stripped(side[: len(prompt)]) == _stripped(prompt) for side in sides)
    return [side[len(prompt) :] for side in sides] if is_repeated else sides


def _stripped(messages: Sequence[Message]) -> list[Message]:
    return [message | {"content": message["content"].strip()} for message in messages]


def _holds(side: Sequence[Message], prompt: Side) -> bool:
    """Tell whether a conversation contains the text of a prompt, or its messages one after the other."""
    if isinstance(prompt, str):
        return " ".join(prompt.split()) in " ".join(" ".join(turn["content"] for turn in side).split())
    turns, prompt_turns = _stripped(side), _stripped(prompt)
    return any(turns[at : at + len(prompt_turns)] == prompt_turns for at in range(len(turns)))


def read_document(row: dict[str, Any]) -> str:
    """Return the text of a row that is learned as a whole. Raises BadRow."""
    text = _read_text(row, "text")
    if not text.strip():
        raise BadRow("empty")
    return text


def read_pair(row: dict[str, Any], repeats: bool = False) -> dict[str, Any]:
    """Return {"prompt", "chosen", "rejected", "tools"}, the first three all text or all messages. Raises BadRow."""
    prompt: Side | None = _text_or_messages(row, "prompt") if row.get("prompt") is not None else None
    chosen, rejected = (_text_or_messages(row, name, prompt) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("whose chosen and rejected are of two kinds")
    if chosen == rejected:
        raise BadRow("whose chosen and rejected are the same")
    if isinstance(chosen, str) and isinstance(prompt, list):
        chosen, rejected = _as_messages(chosen, "assistant"), _as_messages(rejected, "assistant")
    elif isinstance(chosen, list) and prompt is not None:
        if chosen[0]["role"] in ("system", "developer", "user"):
            # Both sides often repeat the prompt, also with a system message or earlier turns before it.
            if not _holds(chosen, prompt):
                raise BadRow("whose `prompt` is not in the conversation in `chosen`", describe_value(prompt))
            prompt = None
        else:
            prompt = _as_messages(prompt, "user")
    elif repeats and isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    if prompt is None:
        length = _implicit_prompt(chosen, rejected)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    if not prompt:
        if isinstance(chosen, list) and chosen[0]["role"] != "assistant":
            raise BadRow("whose chosen and rejected begin with different turns")
        column = "" if row.get("prompt") is not None else " (data.columns.prompt names its column)"
        raise BadRow(f"without a prompt{column}")
    _refuse_empty_prompt(prompt)
    prompt = _with_system(row, prompt)
    for side in (chosen, rejected):
        if isinstance(side, str):
            if not side.strip():
                raise BadRow("with an empty answer")
            continue
        if not side or side[-1]["role"] != "assistant":
            raise BadRow("with a side that does not end with the assistant")
        if others := [role for message in side if (role := message["role"]) != "assistant"]:  # it would be learned, too
            raise BadRow(f"with a {others[0]}'s turn among the answers of chosen or rejected")
        _refuse_empty_answers(side)
        _refuse_context_turns(side, "in chosen or rejected")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": _read_tools(row.get("tools"))}


def _implicit_prompt(chosen: Side, rejected: Side) -> int:
    """Return the length of the common start: turns, or characters without a space before the first difference.

    As trl 1.15's extract_prompt (data_utils.py). If one side starts with the other one, a turn is left to it.
    """
    shorter = min(len(chosen), len(rejected))
    length = next((index for index in range(shorter) if chosen[index] != rejected[index]), shorter)
    if isinstance(chosen, str):
        return length - 1 if length and chosen[length - 1] == " " else length
    while length and (length == shorter or chosen[length]["role"] != "assistant"):
        length -= 1
    return length


def read_question(row: dict[str, Any]) -> Question:
    """Return the messages up to the last user turn, and the assistant's answer to it.

    A conversation that ends with a tool's result is the prompt as a whole: it is the assistant's turn.
    """
    messages = _row_messages(row)
    last = _last_turn(messages, "user")
    length = len(messages) if messages[-1]["role"] == "tool" else last + 1
    _refuse_empty_prompt(messages[:length])
    answers = [message["content"] for message in filter(is_learned, messages[length:])]
    answer = split_thought(answers[-1])[1] if answers else None
    return Question(messages[:length], answer, _read_tools(row.get("tools")))


def read_prompt(row: dict[str, Any], repeats: bool = False) -> Question:
    """Return the prompt, text or messages, with the text of the completion or of its last message."""
    prompt = _text_or_messages(row, "prompt")
    completion = None if row.get("completion") is None else _text_or_messages(row, "completion", prompt)
    if repeats and isinstance(prompt, str) and isinstance(completion, str):
        completion = completion.removeprefix(prompt)
    answer = None if completion is None else split_thought(text_of(completion))[1]
    _refuse_empty_prompt(prompt)
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":  # begun, or the gold answer itself
        raise BadRow("whose prompt ends with the assistant's turn, which a rollout would not continue")
    return Question(_with_system(row, prompt), answer, _read_tools(row.get("tools")))


# ------------------------------------------------------------------------------------------------------------ thoughts


SPAN = re.compile(re.escape(OPEN) + r".*?" + re.escape(CLOSE), re.DOTALL)
# gpt-oss, https://cookbook.openai.com/articles/openai-harmony: a message ends with one of these, or with the text.
FINAL = re.compile(
    re.escape(f"{CHANNEL}final") + r".*?" + re.escape(MESSAGE) + r"(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Thinking:
    """Style in which a chat template writes thoughts, under a run's flag."""

    flag: bool | None
    style: Literal["tags", "harmony", "none"]
    """tags: `<think>`; harmony: gpt-oss's channels; none: the template has no thoughts."""
    key: ReasoningKey | Literal["content", "none"]
    """The key of a message that the template reads a thought from; content: inside the content, between tags."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the template for the flag, also GRPOConfig's `chat_template_kwargs`."""


def read_thinking(template: str, flag: bool | None) -> Thinking:
    """Resolve `cogumi.thinking` for a chat template. Raises UsageError for true if the template knows no thoughts."""
    if CHANNEL in template:
        style, key = "harmony", "thinking"
    elif CLOSE in template:
        style, key = "tags", "reasoning_content" if "reasoning_content" in template else "content"
    else:
        style, key = "none", "none"
    switch = re.search(r"\b(enable_thinking|reasoning_effort|thinking(?= is defined))\b", template)
    if flag and style == "none" and switch is None:
        fix = "drop the key, or start from a model whose template has it"
        raise UsageError("true, but this model's chat template knows no thinking", key="cogumi.thinking", fix=fix)
    kwargs: dict[str, Any] = {switch[1]: flag} if flag is not None and switch is not None else {}
    if "reasoning_effort" in kwargs:  # gpt-oss has no off; low is the least that it was trained with
        kwargs = {} if flag else {"reasoning_effort": "low"}
    return Thinking(flag, style, key, kwargs)  # type: ignore[arg-type]


def adapt_thought(message: dict[str, Any], thinking: Thinking) -> dict[str, Any]:
    """Remove an assistant message's thought, or move it to the key from which this template renders it.

    Raises BadRow for a thought that never closes, or that has no place although nothing says to leave it out.
    """
    if message["role"] != "assistant":
        return message
    thought, content = message.get("reasoning_content"), message["content"]
    if thought is None:
        has_place = thinking.key in REASONING_KEYS  # the template would split by other rules
        is_left = thinking.flag is None and not has_place
        if is_left or (CLOSE not in content and not content.lstrip().startswith(OPEN)):
            return message
        thought, content = split_thought(content)
        if thought is None or (thinking.flag and thinking.key == "content"):
            return message  # tags elsewhere are text; or the template reads them itself
    rest = {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": content}
    if thinking.flag is False:
        return rest
    if thinking.key == "none":
        raise BadRow("with a thought that the chat template has no place for (cogumi.thinking: false leaves it out)")
    if thinking.key == "content":
        return rest | {"content": f"{OPEN}\n{thought}\n{CLOSE}\n\n{content}"}
    return rest | {thinking.key: thought}


def visible_text(reply: str, style: str, prompt_opens_thought: bool = False) -> str | None:
    """Return the part of a reply that a reader sees, or None if its thinking never closes.

    The reply has its control tokens if `style` is harmony. prompt_opens_thought: the prompt ends inside
    a thought.
    """
    if style == "harmony":
        finals: list[str] = FINAL.findall(reply)
        return finals[-1] if finals else None
    if not prompt_opens_thought and OPEN not in reply and CLOSE not in reply:
        return reply
    text = SPAN.sub("", OPEN + reply if prompt_opens_thought else reply)
    if OPEN in text:
        return None
    return text.rpartition(CLOSE)[2].lstrip("\n")


# ------------------------------------------------------------------------------------------------------------- as text


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
