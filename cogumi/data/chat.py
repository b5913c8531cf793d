"""Conversations of the usual shapes as messages, and the chat templates that render them.

Shapes: OpenAI's `messages` (role, content), ShareGPT's `conversations` (from, value) and Alpaca's `instruction`, `input`,
`output`. `reasoning_content`, `tool_calls`, `tool_call_id` and `name` are kept.

- A message's null fields are absent fields: templates test `'tool_calls' in message`. In tools and in the arguments of a
  call, which may be JSON text as OpenAI's API writes it, a null stays null; `rows.cells_of` removes those of Arrow.
- Parts of text are joined. A row with a picture or a sound is dropped.
- Consecutive turns of one role stay: the template decides whether that is a conversation.

Templates write thoughts as `<think>...</think>` before the answer (Qwen3, DeepSeek-R1 and many others) or in gpt-oss's
harmony channels (`analysis` before `final`). `{% generation %}` marks, the template's own or those of TRL's training
version, say where the assistant's turns are: the marked text without the generation prompt is learned. Without marks (Llama
3.1's), and where earlier turns have thoughts or other end tokens, turns are rendered as at inference: up to the turn with
the generation prompt, and to its end. A turn that later ones show differently becomes an example of its own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import Any, Literal

from jinja2 import TemplateError

from cogumi.core.errors import UsageError
from cogumi.data.rows import BadRow, decode_cell

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
REPR = re.compile(r"\s*(?:array\()?\[\s*\{\s*'(?:role|content|from|value)'\s*:")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, and the tools that they may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    prompt_length: int = 0
    """Number of leading messages that are the prompt, of which nothing is learned."""


@dataclass(frozen=True)
class Question:
    """The prompt of a rollout, the gold answer, and the tools that count in its length."""

    prompt: Side
    answer: str | None = None
    tools: list[dict[str, Any]] | None = None


# ------------------------------------------------------------------------------------------------------------- parsing


def _parse_json(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
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


def _read_text(value: Any) -> str:
    value = decode_cell(value)
    if not isinstance(value, str):
        raise BadRow("with a field that is no text", f"{value!r}")
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
    name = raw["role"] if raw.get("role") is not None else raw.get("from")
    content = raw["content"] if raw.get("content") is not None else raw.get("value")
    role = name.strip().lower() if isinstance(name, str) else None
    if role in CALL_ROLES:
        call = _parse_json(content, "with a tool call that is not JSON") if isinstance(content, str) else content
        parsed = call if isinstance(call, list) else [call]
        return {"role": "assistant", "content": "", "tool_calls": list(map(_read_tool_call, parsed))}
    if role not in ROLES:
        raise BadRow("with a message of no known role", f"role {name!r}")
    # `function_call` is how OpenAI's API wrote one call before `tool_calls`.
    calls = raw.get("tool_calls") or ([raw["function_call"]] if raw.get("function_call") else None)
    if calls and not isinstance(calls, list | tuple):
        raise BadRow("with tool calls that are no list")
    if content is None and not calls:
        raise BadRow("with a message that has no content")
    message: Message = {"role": ROLES[role], "content": "" if content is None else _join_parts(content)}
    if calls:
        message["tool_calls"] = list(map(_read_tool_call, calls))
    texts = {"reasoning_content": next((raw[key] for key in REASONING_KEYS if raw.get(key)), None)}
    texts |= {key: raw.get(key) for key in ("name", "tool_call_id")}
    return message | {key: _join_parts(text) for key, text in texts.items() if text is not None}


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
        if not isinstance(text, str):
            raise BadRow("with a message that has parts other than text", f"part {part!r}")
        texts.append(text)
    return "".join(texts)


def _read_tool_call(raw: Any) -> dict[str, Any]:
    """Return {"type": "function", "function": {"name", "arguments"}}, with the call's id if it has one."""
    function = raw.get("function") if isinstance(raw, Mapping) else None
    call = function if isinstance(function, Mapping) else raw
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise BadRow("with a tool call that names no function")
    reason = "with tool-call arguments that are no JSON object"
    arguments = {} if call.get("arguments") is None else call["arguments"]
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, reason)
    if not isinstance(arguments, Mapping):
        raise BadRow(reason)
    result: dict[str, Any] = {"type": "function", "function": {"name": call["name"], "arguments": arguments}}
    if isinstance(raw.get("id"), str):
        result["id"] = raw["id"]
    return result


def _read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of the tools in a cell, a list or its JSON text."""
    if value is None or value in ("", b""):
        return None
    reason = "with tools that are no list of JSON schemas"
    tools = _read_list(value, reason)
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow(reason)
    # `or None`: Llama's template mentions tools even for an empty list.
    return list(tools) or None


def _last_turn(messages: Sequence[Message], role: str) -> int:
    for index in reversed(range(len(messages))):
        if messages[index]["role"] == role:
            return index
    raise BadRow(f"without any {role} turn")


def _refuse_empty_answers(messages: Sequence[Message]) -> None:
    """Raise BadRow for an assistant's turn without text and calls: it would teach the model to stop at once."""
    for message in messages:
        if message["role"] == "assistant" and not message["content"].strip() and "tool_calls" not in message:
            raise BadRow("with an empty answer")


def _refuse_empty_prompt(prompt: Side) -> None:
    texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt if "tool_calls" not in turn]
    if not "".join(texts).strip():
        raise BadRow("with an empty prompt")


def _refuse_repr(text: str) -> None:
    if REPR.match(text):
        raise BadRow("of Python's repr of a list, which is not JSON (json.dumps writes that)", text)


def _text_or_messages(value: Any) -> Side:
    """Return the messages in a cell, also in its JSON text; any other text is text."""
    if isinstance(value, list):
        return read_messages(value)
    text = _read_text(value)
    if text.lstrip()[:1] in ("[", "a"):
        _refuse_repr(text)
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(parsed, list) and parsed and all(map(_is_message, parsed)):
            return read_messages(parsed)
    return text


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"content", "value", "tool_calls"} & value.keys():
        return False
    return str(value.get("role") or value.get("from")).strip().lower() in (*ROLES, *CALL_ROLES)


def _as_messages(side: Side, role: str) -> list[Message]:
    return [{"role": role, "content": side}] if isinstance(side, str) else side


def closes_thought(before: str, after: str) -> bool:
    """Tell whether the first `</think>` ends a thought: one that begins the content, or an unopened one on its own line."""
    if before.lstrip().startswith(OPEN):
        return True
    starts_line = not before.strip() or before.rstrip(" ").endswith("\n")
    return OPEN not in before and starts_line and after.lstrip(" ")[:1] in ("", "\n")


def split_thought(content: str) -> tuple[str | None, str]:
    """Split content that starts with a thought into (thought, answer); (None, content) if tags elsewhere are text.

    A content may close a thought that it does not open, on a line by itself: DeepSeek-R1's prompt has opened it. Raises
    BadRow for a thought that never closes.
    """
    before, close, answer = content.partition(CLOSE)
    if before.lstrip().startswith(OPEN) and not close:
        raise BadRow("with a thought that never closes")
    if not close or not closes_thought(before, answer):
        return None, content
    return before.strip().removeprefix(OPEN).strip("\n"), answer.lstrip("\n")


def is_missing_reasoning(messages: Sequence[Message]) -> bool:
    """Tell whether the last answer has no thought, or a blank one. Raises BadRow for a thought that never closes."""
    answer = messages[_last_turn(messages, "assistant")]
    thought = answer.get("reasoning_content") or split_thought(answer["content"])[0]
    return not (thought or "").strip()


# ---------------------------------------------------------------------------------------------------------------- rows


def _row_messages(row: dict[str, Any]) -> list[Message]:
    """Return the messages of a chat row of any shape; Alpaca's input is put below the instruction.

    Raises BadRow also for a column `system` beside another system message.
    """
    if "instruction" not in row:
        messages = read_messages(row["messages"] if "messages" in row else row["conversations"])
    else:
        question = _read_text(row["instruction"])
        if row.get("input") is not None and (extra := _read_text(row["input"])).strip():
            question = f"{question}\n\n{extra}"
        answer = {"role": "assistant", "content": _read_text(row["output"])}
        messages = [{"role": "user", "content": question}, answer]
    if row.get("system") is not None and (system := _read_text(row["system"])).strip():
        if messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": system}, *messages]
        if messages[0]["content"].strip() != system.strip():
            raise BadRow("with a system message beside another one in `system`", system)
    return messages


def read_conversation(row: dict[str, Any], learn: str = "turns") -> Conversation:
    """Return a chat row's conversation with at least one answer; it ends with the last one unless all is learned."""
    messages = _row_messages(row)
    last = _last_turn(messages, "assistant")
    if learn != "all":
        messages = messages[: last + 1]
    prompt_length = last if learn == "completion" else 0
    if last == 0:
        raise BadRow("with nothing before the answer")
    _refuse_empty_answers(messages[prompt_length:])
    return Conversation(messages, _read_tools(row.get("tools")), prompt_length)


def read_completion(row: dict[str, Any]) -> Conversation | tuple[str, str]:
    """Return (prompt, completion) if both are text, else one conversation that starts with the prompt's messages."""
    prompt, completion = _text_or_messages(row["prompt"]), _text_or_messages(row["completion"])
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise BadRow("with an empty answer")
        return prompt, completion
    questions, answers = _as_messages(prompt, "user"), _as_messages(completion, "assistant")
    _last_turn(answers, "assistant")
    _refuse_empty_answers(answers)
    return Conversation(questions + answers, _read_tools(row.get("tools")), len(questions))


def read_pair(row: dict[str, Any]) -> dict[str, Any]:
    """Return {"prompt", "chosen", "rejected", "tools"}, the first three all text or all messages. Raises BadRow."""
    chosen, rejected = _text_or_messages(row["chosen"]), _text_or_messages(row["rejected"])
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("whose chosen and rejected are of two kinds")
    if chosen == rejected:
        raise BadRow("whose chosen and rejected are the same")
    prompt: Side | None = _text_or_messages(row["prompt"]) if row.get("prompt") is not None else None
    if isinstance(chosen, str) and isinstance(prompt, list):
        chosen, rejected = _as_messages(chosen, "assistant"), _as_messages(rejected, "assistant")
    elif isinstance(chosen, list) and isinstance(prompt, str):
        # Both sides often repeat the prompt; the text is then the first question of the conversation.
        prompt = _as_messages(prompt, "user") if chosen[0]["role"] == "assistant" else None
    if prompt is None:
        length = _implicit_prompt(chosen, rejected)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    if not prompt:
        raise BadRow("without a prompt")
    for side in (chosen, rejected):
        if isinstance(side, str):
            if not side.strip():
                raise BadRow("with an empty answer")
            continue
        if not side or side[-1]["role"] != "assistant":
            raise BadRow("with a side that does not end with the assistant")
        if any(message["role"] == "user" for message in side):  # its question would be learned with the answers
            raise BadRow("with a question inside a side")
        _refuse_empty_answers(side)
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
    length = _last_turn(messages, "user") + 1
    if messages[-1]["role"] == "tool":
        length = len(messages)
    _refuse_empty_prompt(messages[:length])
    answers = [message["content"] for message in messages[length:] if message["role"] == "assistant"]
    return Question(
        messages[:length], split_thought(answers[-1])[1] if answers else None, _read_tools(row.get("tools"))
    )


def read_prompt(row: dict[str, Any]) -> Question:
    """Return the prompt, text or messages, with the text of the completion or of its last message."""
    completion = None if row.get("completion") is None else _text_or_messages(row["completion"])
    answer = completion[-1]["content"] if isinstance(completion, list) else completion
    answer = None if answer is None else split_thought(answer)[1]
    prompt = _text_or_messages(row["prompt"])
    _refuse_empty_prompt(prompt)
    return Question(prompt, answer, None if isinstance(prompt, str) else _read_tools(row.get("tools")))


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
    key: Literal["reasoning_content", "thinking", "content", "none"]
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
        has_place = thinking.key in ("reasoning_content", "thinking")  # the template would split by other rules
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


# ----------------------------------------------------------------------------------------------------------- templates


PROBE: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ANSWER = "An5wer"
TURN: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
CALL_NAMES = ("probe_1", "probe_2")
CALLS = [
    {"id": f"{name}00", "type": "function", "function": {"name": name, "arguments": {"key": "value"}}}
    for name in CALL_NAMES
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "probe_1", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]
Spans = list[tuple[int, int]]
"""Character positions in a rendered text, in order."""
# Raised by a template's `raise_exception`, and by Python for a message that a template does not expect.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True)
class ChatTemplate:
    """One tokenizer's template and all arguments of a rendering."""

    text: str
    text_with_tools: str
    """The variant for conversations with tools; mostly the same."""
    marked: str | None
    """The template with `{% generation %}` marks, if there is one."""
    thinking: Thinking
    variables: dict[str, Any] = field(repr=False)
    """Arguments of every rendering: special tokens, the thinking switch, the date."""
    header: str = ""
    """The part of the generation prompt that lies inside the marks."""
    prompt_opens_thought: bool = False
    ends_differ: bool = False
    """The marked template ends earlier turns with another token than the last one (gpt-oss's)."""

    def whole(self, messages: Sequence[Message], tools: Any = None) -> str:
        return self.render(messages, tools)[0]

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Render the messages and the generation prompt, as the model sees them at its turn."""
        return self.render(messages, tools, add_generation_prompt=True)[0]

    def turns(self, conversation: Conversation) -> list[tuple[str, Spans]]:
        """Render a conversation: (text, spans of the assistant's turns behind the prompt) of each example, mostly of one."""
        messages, tools, first = conversation.messages, conversation.tools, conversation.prompt_length
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [index for index in answers if index >= first]
        thoughts = any(self.thought_of(messages[index]) for index in learned)
        if self.marked is None or thoughts or (self.ends_differ and len(learned) > 1):
            return self._turns_as_at_inference(messages, tools, learned)
        text, spans = self.render(messages, tools, self.marked, return_assistant_tokens_mask=True)
        spans = [(start + len(self.header) * text.startswith(self.header, start), end) for start, end in spans]
        if len(spans) == len(answers):
            spans = [span for index, span in zip(answers, spans, strict=True) if index >= first]
            for index, (start, end) in zip(learned, spans, strict=True):
                self.refuse_lost_words("", text[start:end], [messages[index]])
        elif first:
            raise BadRow("whose turns the chat template does not mark one by one")
        else:
            self.refuse_lost_words("", text, [messages[index] for index in learned])
        return [(text, spans)]

    def _turns_as_at_inference(
        self, messages: Sequence[Message], tools: Any, learned: Sequence[int]
    ) -> list[tuple[str, Spans]]:
        """Render each turn behind the generation prompt; it joins the next turn's example if that begins with its text."""
        examples: list[tuple[str, Spans]] = []
        for index in reversed(learned):
            if not index:  # a greeting: nothing asks for it
                continue
            before, through = self.prompt(messages[:index], tools), self.whole(messages[: index + 1], tools)
            self.refuse_lost_words(before, through, [messages[index]])
            if not through.startswith(before):
                rest = "(train.completion_only_loss: true learns the last alone)"
                raise BadRow(f"whose earlier turns the chat template rewrites {rest}")
            span = len(before), len(through)
            if examples and examples[-1][0].startswith(through):
                examples[-1][1].insert(0, span)
            else:
                examples.append((through, [span]))
        return examples[::-1]

    def thought_of(self, message: Message) -> str:
        """Return the thought that the template renders with a message; "" if there is none."""
        adapted = adapt_thought(message, self.thinking)
        inline = split_thought(adapted["content"])[0] if self.thinking.style == "tags" else None
        return (adapted.get(self.thinking.key) if self.thinking.key != "content" else None) or inline or ""

    def refuse_lost_words(self, prompt: str, text: str, messages: Sequence[Message]) -> None:
        """Raise BadRow unless the assistant's contents stand behind the prompt in order, of one message its thought as well."""
        answers = [message for message in messages if message["role"] == "assistant"]
        if not text.startswith(prompt) and answers and self.thought_of(answers[0]):
            raise BadRow("with a thought that the generation prompt has no room for (see cogumi.thinking)")
        text, at = text.removeprefix(prompt), 0
        for message in answers:
            content = adapt_thought(message, self.thinking)["content"]
            answer = split_thought(content)[1] if self.thinking.style == "tags" else content
            at = text.find(answer.strip(), at)
            thought = self.thought_of(message).strip() if len(answers) == 1 else ""
            if at < 0 or thought not in text:
                raise BadRow("of whose answer the chat template loses words", answer)
            at += len(answer.strip())

    @cached_property
    def calls_shown(self) -> int:
        """Calls of one message that the template shows: 0, 1, or 2 if it shows all or refuses several by itself."""
        for calls in (CALLS, CALLS[:1]):
            try:
                text, _ = self._render([PROBE[0], {"role": "assistant", "content": "", "tool_calls": calls}], TOOLS)
            except BadRow:
                continue
            without, _ = self._render([PROBE[0], {"role": "assistant", "content": ""}], TOOLS)
            names = CALL_NAMES[: len(calls)]
            shown = sum(text.count(name) > without.count(name) for name in names)
            return 2 if shown == len(calls) else shown
        return 2

    @cached_property
    def shows_tools(self) -> bool:
        try:
            return "probe_1" in self._render(PROBE[:1], TOOLS)[0]
        except BadRow:
            return True

    def render(
        self, messages: Sequence[Message], tools: Any = None, template: str | None = None, **options: Any
    ) -> tuple[str, Spans]:
        """Render (text, spans); spans need `return_assistant_tokens_mask`. Raises BadRow with the template's message.

        Raises BadRow also for tools and calls that the template does not show: the model would be taught to answer nothing.
        """
        calls = max((len(message.get("tool_calls") or ()) for message in messages), default=0)
        if calls and min(calls, 2) > self.calls_shown:
            some = "" if self.calls_shown == 0 else "all "
            raise BadRow(f"of whose tool calls the chat template does not show {some or 'any'}".rstrip())
        if tools and not self.shows_tools:
            raise BadRow("with tools that the chat template does not show")
        return self._render(messages, tools, template, **options)

    def _render(
        self, messages: Sequence[Message], tools: Any = None, template: str | None = None, **options: Any
    ) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        adapted = [adapt_thought(message, self.thinking) for message in messages]
        chosen = template or (self.text_with_tools if tools else self.text)
        try:
            rendered: Any = render_jinja_template(
                conversations=[adapted], tools=tools, chat_template=chosen, **options, **self.variables
            )
        except REFUSALS as error:
            talk = next((message["role"] for message in messages if message["role"] not in ("system", "developer")), "")
            start = "that begins with the assistant's turn, which" if talk == "assistant" else "that"
            raise BadRow(f"{start} the chat template refuses", f"{error}" or type(error).__name__) from error
        texts, spans = rendered
        return texts[0], spans[0] if spans else []


def read_template(tokenizer: Any, thinking: bool | None = None, today: str | None = None) -> ChatTemplate:
    """Read a tokenizer's chat template under the run's thinking flag; `today` (2025-12-31) is the date that it prints.

    Raises UsageError for no template, one that does not render, or a flag that it cannot follow.
    """
    if tokenizer.chat_template is None:
        sft_fix = "for cogumi.method: sft set train.chat_template_path (cogumi:tulu, a .jinja file or another model)"
        other_fix = "for dpo and gspo start from a model that has one, such as the merged model of that SFT run"
        message = "this model's tokenizer has no chat template, and only text needs none"
        raise UsageError(message, key="data.format", fix=f"{sft_fix}; {other_fix}")
    text = tokenizer.get_chat_template()
    resolved = read_thinking(text, thinking)
    variables = dict(tokenizer.special_tokens_map) | resolved.template_kwargs
    if today is not None:
        variables["strftime_now"] = date.fromisoformat(today).strftime
    with_tools = tokenizer.get_chat_template(tools=[{}])
    bare = ChatTemplate(text, with_tools, _marked_template(tokenizer, text), resolved, variables)
    try:
        prompt = bare.prompt(PROBE[:1])
        question = bare.whole(PROBE[:1])
        marked, spans = bare.render(PROBE, None, bare.marked, return_assistant_tokens_mask=bare.marked is not None)
    except BadRow as error:
        raise UsageError(f"the chat template refuses a question and its answer: {error.excerpt}") from error
    differences = (index for index, (one, other) in enumerate(zip(prompt, question, strict=False)) if one != other)
    generation_prompt = prompt[next(differences, len(question)) :]
    opens = OPEN in generation_prompt and CLOSE not in generation_prompt.rpartition(OPEN)[2]
    if opens and thinking is False:
        message = "false, but this model's chat template opens a thought in every prompt and has no switch for it"
        raise UsageError(
            message, key="cogumi.thinking", fix="drop the key, or start from a model that can answer without"
        )
    header, start = "", spans[0][0] if spans else 0
    for before in range(min(len(generation_prompt), start), -1, -1) if spans else ():
        if marked.startswith(generation_prompt, start - before):  # it begins right before the marks
            header = generation_prompt[before:]
            break
    return replace(bare, header=header, prompt_opens_thought=opens, ends_differ=_ends_differ(bare, tokenizer))


def _ends_differ(template: ChatTemplate, tokenizer: Any) -> bool:
    if template.marked is None:
        return False
    try:
        text, spans = template.render(TURN * 2, None, template.marked, return_assistant_tokens_mask=True)
    except BadRow:
        return False
    turns = [text[start:end] for start, end in spans]
    return len({_first_control(turn, tokenizer) for turn in turns if ANSWER in turn}) > 1


def end_of_turn(tokenizer: Any) -> str:
    """Return the first control token that the chat template writes behind an answer; "" if there is none, or no rendering."""
    try:
        return _first_control(read_template(tokenizer).whole(TURN), tokenizer)
    except (UsageError, BadRow):
        return ""


def _first_control(text: str, tokenizer: Any) -> str:
    """Return the first added token behind the answer of TURN."""
    after = text.rpartition(ANSWER)[2]
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
    places = [(after.index(token), -len(token), token) for token in tokens if token in after]
    return min(places, default=(0, 0, ""))[2]


def prints_date(tokenizer: Any) -> bool:
    """Tell whether a rendering depends on the day (gpt-oss's does)."""
    return bool(tokenizer.chat_template) and "strftime_now" in tokenizer.get_chat_template()


def _marked_template(tokenizer: Any, text: str) -> str | None:
    """Return the template itself if it has marks, else TRL's training version of it, or None if neither is usable."""
    from trl.chat_template_utils import (
        get_training_chat_template,
        has_generation_markers,
        is_chat_template_stop_token_trained,
    )

    try:
        marked = text if has_generation_markers(text) else get_training_chat_template(tokenizer) or text
        # Some mark a turn without the token that ends it; a model trained on that never learns to stop.
        return marked if is_chat_template_stop_token_trained(tokenizer, marked) else None
    # ValueError: TRL has no training version of this template. The others: TRL tries it on a tool call first.
    except REFUSALS:
        return None


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
