"""Chat templates: a conversation as the text that the model sees, and the spans of it that are learned.

`{% generation %}` marks, the template's own or those of TRL's training version, say where the assistant's turns are: the
marked text without the generation prompt is learned. Without marks (Llama 3.1's), and where the marked text is not what
inference shows (a later system message may move to the front), turns are rendered as at inference: up to the turn with the
generation prompt, and to its end. A turn that later ones show differently becomes an example of its own.

A developer's message is a system message where the template shows none of that role, and leading system messages are joined
where it does not show several. Any other message of which the rendering loses words drops the row.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import dropwhile, takewhile
from typing import Any

from jinja2 import TemplateError

from cogumi.core.errors import UsageError
from cogumi.data.chat import (
    CLOSE,
    OPEN,
    REASONING_KEYS,
    Conversation,
    Message,
    Thinking,
    adapt_thought,
    is_learned,
    read_thinking,
    split_thought,
)
from cogumi.data.rows import BadRow

# Conversations by which a template is probed.
ANSWER = "An5wer"
QUESTION: Message = {"role": "user", "content": "a"}
TURN: list[Message] = [QUESTION, {"role": "assistant", "content": ANSWER}]
SYSTEM: Message = {"role": "system", "content": ANSWER}
CALL_NAMES = ("probe_1", "probe_2")
CALLS = [
    {"id": f"{name}00", "type": "function", "function": {"name": name, "arguments": {"key": "value"}}}
    for name in CALL_NAMES
]
SCHEMA: dict[str, Any] = {"name": "probe_1", "description": "d", "parameters": {"type": "object", "properties": {}}}
SYSTEM_ROLES = ("system", "developer")
SWITCHES = re.compile(r"/(?:no_think|think|system_override)\b")
"""Words of a message that SmolLM3's and Nemotron's templates act on, and leave out."""
TOOLS = [{"type": "function", "function": SCHEMA}]
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
    """Arguments of every rendering: special tokens, the thinking switch."""
    today: date | None = None
    """The day that a template prints; None for the day of the rendering."""
    header: str = ""
    """The part of the generation prompt that lies inside the marks."""
    prompt_opens_thought: bool = False
    hides_thoughts: bool = False
    """The generation prompt opens a thought, and the template shows none of an answer (DeepSeek-R1's)."""
    marks_earlier_turns: bool = True
    """The marked template shows turns before the last as inference does, and ends them with the same token as the last."""
    ends_in_marks: bool = False
    """The marked template alone ends an answer: what stops it is the header of the next turn (GLM's)."""

    def whole(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Render messages; where the template hides thoughts, the last answer's stands behind the prompt that opens it."""
        if not self.hides_thoughts or messages[-1]["role"] != "assistant":
            is_open = self.ends_in_marks and messages[-1]["role"] == "assistant"
            return self.render(messages, tools, self.marked if is_open else None)[0]
        before = self.prompt(messages[:-1], tools)
        thought, answer = split_thought(self.adapt(messages[-1:])[0]["content"])
        last = messages[-1] | {"content": answer, "reasoning_content": None}
        text = self.render([*messages[:-1], last], tools)[0]
        head, tag, rest = before.rpartition(OPEN)
        if not tag or CLOSE in rest or not text.startswith(head):  # nothing is opened behind a tool's result
            return text
        return f"{before}{thought or ''}\n{CLOSE}\n\n{text.removeprefix(head)}"

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Render the messages and the generation prompt, as the model sees them at its turn."""
        return self.render(messages, tools, add_generation_prompt=True)[0]

    def turns(self, conversation: Conversation) -> list[tuple[str, Spans]]:
        """Render a conversation: (text, spans of the assistant's turns behind the prompt) of each example, mostly of one."""
        messages, tools, first = conversation.messages, conversation.tools, conversation.prompt_length
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [index for index in answers if index >= first and is_learned(messages[index])]
        thoughts = any(self.thought_of(messages[index]) for index in learned)
        late_roles = {message["role"] for message in dropwhile(lambda one: one["role"] in SYSTEM_ROLES, messages)}
        if self.marked is None or thoughts or self.hides_thoughts or not late_roles.isdisjoint(SYSTEM_ROLES):
            return self._turns_as_at_inference(messages, tools, learned)
        if len(answers) > 1 and not self.marks_earlier_turns:
            with suppress(BadRow):  # two answers in a row, the first of which Qwen3 shows in two ways: as marked
                return self._turns_as_at_inference(messages, tools, learned)
        text, spans = self.render(messages, tools, self.marked, return_assistant_tokens_mask=True)
        spans = [(start + len(self.header) * text.startswith(self.header, start), end) for start, end in spans]
        if len(spans) == len(answers):
            spans = [span for index, span in zip(answers, spans, strict=True) if index in learned]
            for index, (start, end) in zip(learned, spans, strict=True):
                self.refuse_lost_words("", text[start:end], [messages[index]])
        elif len(learned) < len(answers):  # turns that are not marked one by one (Phi-3's end of the text is a span)
            return self._turns_as_at_inference(messages, tools, learned)
        else:
            self.refuse_lost_words("", text, [messages[index] for index in learned])
        return [(text, spans)]

    def _turns_as_at_inference(
        self, messages: Sequence[Message], tools: Any, learned: Sequence[int]
    ) -> list[tuple[str, Spans]]:
        """Render each turn behind the generation prompt; it joins the next turn's example if that begins with its text."""
        examples: list[tuple[str, Spans]] = []
        for index in reversed(learned):
            before, through = self.answered(messages[: index + 1], index, tools)
            if not through.startswith(before):
                if index == learned[-1]:
                    hint = " (see cogumi.thinking)" if self.prompt_opens_thought else ""
                    raise BadRow(f"whose prompt the chat template rewrites once it is answered{hint}")
                rest = "(train.completion_only_loss: true learns the last alone)"
                raise BadRow(f"whose earlier turns the chat template rewrites {rest}")
            span = len(before), len(through)
            if examples and examples[-1][0].startswith(through):
                examples[-1][1].insert(0, span)
            else:
                examples.append((through, [span]))
        return examples[::-1]

    def answered(self, messages: Sequence[Message], first: int, tools: Any = None) -> tuple[str, str]:
        """Render (the prompt of the answer that begins at `first`, prompt and answer)."""
        before, through = self.prompt(messages[:first], tools), self.whole(messages, tools)
        if not through.startswith(before):  # gpt-oss shows the thoughts of calls until the final answer is there
            known = [adapt_thought(message, replace(self.thinking, flag=False)) for message in messages[:first]]
            bare, text = self.prompt(known, tools), self.whole([*known, *messages[first:]], tools)
            through = before + text.removeprefix(bare) if text.startswith(bare) else through
        self.refuse_lost_words(before, through, messages[first:])
        return before, through

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
            if at < 0:
                raise BadRow("of whose answer the chat template loses words", answer)
            if thought not in text:
                raise BadRow(
                    "of whose thought the template loses words (cogumi.thinking: false leaves it out)", thought
                )
            at += len(answer.strip())

    def _probe(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Render a conversation that the template may refuse: "" then."""
        try:
            return self._render(messages, tools)[0]
        except BadRow:
            return ""

    @cached_property
    def calls_shown(self) -> int:
        """Calls of one message that the template shows: 0, 1, or 2 if it shows all or refuses several by itself."""
        answer: Message = {"role": "assistant", "content": ""}
        without = self._probe([QUESTION, answer], TOOLS)
        for count in (2, 1):
            if text := self._probe([QUESTION, answer | {"tool_calls": CALLS[:count]}], TOOLS):
                shown = sum(text.count(name) > without.count(name) for name in CALL_NAMES[:count])
                return 2 if shown == count else shown
        return 2

    @cached_property
    def shows_tools(self) -> bool:
        text = self._probe([QUESTION], TOOLS)
        return not text or SCHEMA["name"] in text

    @cached_property
    def shows_names(self) -> bool:
        return SCHEMA["name"] in self._probe([message | {"name": SCHEMA["name"]} for message in TURN])

    @cached_property
    def default_system(self) -> str:
        """The system message that the template writes where a conversation has none; "" if it writes none."""
        before, marker, after = self._probe([SYSTEM, QUESTION]).partition(ANSWER)
        without = self._probe([QUESTION])
        has_place = marker and without.startswith(before) and without.removeprefix(before).endswith(after)
        return without.removeprefix(before).removesuffix(after).strip() if has_place else ""

    @cached_property
    def joins_system(self) -> bool:
        """Tell whether the template writes the system message above the first question, as Gemma's does."""
        joined = self._probe([QUESTION | {"content": f"{ANSWER}\n\n{QUESTION['content']}"}])
        return joined == self._probe([SYSTEM, QUESTION]) != ""

    def shown_parts(self, messages: Sequence[Message]) -> list[Any]:
        """Return role, text, thought and calls of messages: equal where the template renders them alike.

        Most templates strip contents, and none shows the ids of calls. Raises BadRow as a rendering does.
        """
        parts: list[list[Any]] = []
        for adapted in self.adapt(messages):
            role, text = adapted["role"].replace("developer", "system"), adapted["content"].strip()
            if role == "system" and not parts and text in ("", self.default_system):
                continue
            thought = next((adapted[key] for key in REASONING_KEYS if adapted.get(key)), "")
            calls = [call["function"] for call in adapted.get("tool_calls", ())]
            parts.append([role, text, thought.strip(), calls, *(["context"] if "weight" in adapted else [])])
        if self.joins_system and [part[0] for part in parts[:2]] == ["system", "user"]:
            parts[:2] = [["user", f"{parts[0][1]}\n\n{parts[1][1]}", "", []]]
        return parts

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
        adapted = self.adapt(messages)
        text, spans = self._render(adapted, tools, template, **options)
        _refuse_lost_context(text, adapted)
        return text, spans

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as this template takes them: its key of thoughts, its role and number of system messages."""
        adapted = [adapt_thought(message, self.thinking) for message in messages]
        for at, message in enumerate(adapted):
            if message["role"] == "developer" and not self.shows_developer:
                adapted[at] = message | {"role": "system"}
        leading = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, adapted))
        if len(leading) > 1 and not self.shows_systems:
            joined = "\n\n".join(message["content"] for message in leading)
            adapted[: len(leading)] = [leading[0] | {"content": joined}]
        return adapted

    @cached_property
    def shows_developer(self) -> bool:
        return ANSWER in self._probe([SYSTEM | {"role": "developer"}, QUESTION])

    @cached_property
    def shows_systems(self) -> bool:
        return self._probe([SYSTEM, SYSTEM, QUESTION]).count(ANSWER) == 2

    def _render(
        self, messages: Sequence[Message], tools: Any = None, template: str | None = None, **options: Any
    ) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        from cogumi.patches.trl_internals import template_day

        chosen = template or (self.text_with_tools if tools else self.text)
        try:
            with template_day(self.today):
                rendered: Any = render_jinja_template(
                    conversations=[list(messages)], tools=tools, chat_template=chosen, **options, **self.variables
                )
        except REFUSALS as error:
            talk = next((message["role"] for message in messages if message["role"] not in SYSTEM_ROLES), "")
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
    with_tools = tokenizer.get_chat_template(tools=[{}])
    day = None if today is None else date.fromisoformat(today)
    bare = ChatTemplate(text, with_tools, _marked_template(tokenizer, text), resolved, variables, day)
    for key in REASONING_KEYS[::-1] if resolved.style != "harmony" else ():
        if ANSWER in bare._probe([QUESTION, {"role": "assistant", "content": "b", key: ANSWER}]):
            bare = replace(bare, thinking=replace(resolved, key=key))
    try:
        prompt, question = bare.prompt([QUESTION]), bare.whole([QUESTION])
        marked, spans = bare.render(TURN, None, bare.marked, return_assistant_tokens_mask=bare.marked is not None)
    except BadRow as error:
        raise UsageError(f"a question and its answer are a conversation {error.reason}: {error.excerpt}") from error
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
    return replace(
        bare,
        header=header,
        prompt_opens_thought=opens,
        hides_thoughts=opens and OPEN not in bare.whole(TURN).removeprefix(question),
        marks_earlier_turns=_marks_earlier_turns(bare, tokenizer),
        ends_in_marks=(plain := bare.whole(TURN)) != marked and marked.startswith(plain),
    )


def _refuse_lost_context(text: str, messages: Sequence[Message]) -> None:
    """Raise BadRow unless each content stands in the text, of users and answers in order.

    A template may put system messages and tools' results elsewhere, results as JSON, and gpt-oss's the text of a call.
    """
    end = 0
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "assistant":
            content = "" if message.get("tool_calls") else content.rpartition(CLOSE)[2]
        elif role == "tool" and content.strip() not in text:
            content = json.dumps(content, ensure_ascii=False)[1:-1]
        at = 0 if role in ("tool", *SYSTEM_ROLES) else end
        for piece in map(str.strip, SWITCHES.split(content)):
            if (start := text.find(piece, at)) < 0:
                lost = "answer" if role == "assistant" else f"{role} message"
                raise BadRow(f"of whose {lost} the chat template loses words", content)
            at = start + len(piece)
        end = max(at, end) if role in ("user", "assistant") else end


def _marks_earlier_turns(template: ChatTemplate, tokenizer: Any) -> bool:
    """Compare the marked template with the one of inference: Qwen3's puts an empty thought into every earlier turn."""
    if template.marked is None:
        return False
    try:
        text, spans = template.render(TURN * 2, None, template.marked, return_assistant_tokens_mask=True)
        history, shown = (template.render([*TURN, QUESTION], None, one)[0] for one in (template.marked, None))
    except BadRow:
        return True
    turns = [text[start:end] for start, end in spans]
    return history == shown and len({tuple(_controls(turn, tokenizer)[:1]) for turn in turns if ANSWER in turn}) == 1


def ends_of_turn(tokenizer: Any) -> list[str]:
    """Return the control tokens, one upon the other, that the chat template ends an answer with."""
    return _controls(read_template(tokenizer).whole(TURN), tokenizer)


def _controls(text: str, tokenizer: Any) -> list[str]:
    """Return the first added tokens behind the answer of TURN that follow one another."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
    one = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    first = re.search(f"(?:{one})+", text.rpartition(ANSWER)[2]) if tokens else None
    return re.findall(one, first[0]) if first else []


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
