"""A tokenizer's chat template: conversations as text, which of it the assistant wrote, and thinking in it.

Two ways of writing thoughts are known: `<think>...</think>` before the answer (Qwen3, DeepSeek-R1 and many after them)
and gpt-oss's harmony channels (`analysis` before `final`).

`{% generation %}` marks say where the assistant's turns lie: the template's own, or those of TRL's training version. The
marked part less the generation prompt is what the model has to produce. A template without marks (Llama 3.1's) is
rendered twice for each turn: up to it with the generation prompt, and to its end. The row is dropped where one of the two
texts is no beginning of the whole conversation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, Literal

from jinja2 import TemplateError

from cogumi.core.errors import UsageError
from cogumi.data.chat import CLOSE, OPEN, Conversation, Message, split_thought
from cogumi.data.rows import BadRow

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
SPAN = re.compile(re.escape(OPEN) + r".*?" + re.escape(CLOSE), re.DOTALL)
# gpt-oss, https://cookbook.openai.com/articles/openai-harmony: a message ends with one of these, or with the text.
FINAL = re.compile(
    re.escape(f"{CHANNEL}final") + r".*?" + re.escape(MESSAGE) + r"(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Thinking:
    """How a chat template writes thoughts, under a run's flag."""

    flag: bool | None
    style: Literal["tags", "harmony", "none"]
    """tags: `<think>`; harmony: gpt-oss's channels; none: this template knows nothing of thoughts."""
    key: Literal["reasoning_content", "thinking", "content", "none"]
    """The key of a message that the template takes a thought from; content: it stands in the content, between tags."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the flag asks of the template: for rendering, and as GRPOConfig's `chat_template_kwargs`."""


def read_thinking(template: str, flag: bool | None) -> Thinking:
    """What `cogumi.thinking` means for this chat template. Raises UsageError for true where it knows no thoughts."""
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
    if "reasoning_effort" in kwargs:  # the least that gpt-oss was trained with is low: it has no off
        kwargs = {} if flag else {"reasoning_effort": "low"}
    return Thinking(flag, style, key, kwargs)  # type: ignore[arg-type]


def adapt_thought(message: dict[str, Any], thinking: Thinking) -> dict[str, Any]:
    """An assistant's message with its thought removed, or under the key from which this template renders it.

    Raises BadRow where the thought never closes, or has no place although nothing says to leave it out.
    """
    if message["role"] != "assistant":
        return message
    thought, content = message.get("reasoning_content"), message["content"]
    if thought is None:
        if thinking.flag is None or (CLOSE not in content and not content.lstrip().startswith(OPEN)):
            return message  # text as any other
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


def visible_text(reply: str, style: str, opened: bool = False) -> str | None:
    """What a reader sees of a model's reply; None where its thinking never closes, so that there is no answer.

    `reply` has the control tokens in it where `style` is harmony. `opened`: the prompt ends inside a thought.
    """
    if style == "harmony":
        finals: list[str] = FINAL.findall(reply)
        return finals[-1] if finals else None
    if not opened and OPEN not in reply and CLOSE not in reply:
        return reply
    text = SPAN.sub("", OPEN + reply if opened else reply)
    if OPEN in text:
        return None
    return text.rpartition(CLOSE)[2].lstrip("\n")


PROBE: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
Spans = list[tuple[int, int]]
"""Character positions in a rendered text, in order."""
# What templates raise by `raise_exception`, and what Python does where a message is not what they expect.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True)
class ChatTemplate:
    """One tokenizer's template with all that it is rendered with."""

    text: str
    text_with_tools: str
    """The variant for conversations with tools; mostly the same."""
    marked: str | None
    """The template with `{% generation %}` marks; None where there is none."""
    thinking: Thinking
    variables: dict[str, Any] = field(repr=False)
    """What every rendering is given: special tokens, the thinking switch, the date."""
    header: str = ""
    """What of the generation prompt the marks take in."""
    prompt_opens_thought: bool = False

    def whole(self, messages: Sequence[Message], tools: Any = None) -> str:
        return self.render(messages, tools)[0]

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> str:
        """The messages and the generation prompt: what the model sees when its turn comes."""
        return self.render(messages, tools, add_generation_prompt=True)[0]

    def turns(self, conversation: Conversation) -> tuple[str, Spans]:
        """The whole conversation as text, and where in it the assistant's turns lie, less those of its prompt."""
        messages, tools, first = conversation.messages, conversation.tools, conversation.prompt_length
        own = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if self.marked is None:
            text = self.whole(messages, tools)
            return text, [self._span(text, messages, tools, at) for at in own if at >= first]
        text, spans = self.render(messages, tools, self.marked, return_assistant_tokens_mask=True)
        spans = [(start + len(self.header) * text.startswith(self.header, start), end) for start, end in spans]
        if first and len(spans) != len(own):
            raise BadRow("whose turns the chat template does not mark one by one")
        return text, [span for at, span in zip(own, spans, strict=True) if at >= first] if first else spans

    def _span(self, text: str, messages: Sequence[Message], tools: Any, at: int) -> tuple[int, int]:
        before = self.prompt(messages[:at], tools)
        to_its_end = text if at == len(messages) - 1 else self.whole(messages[: at + 1], tools)
        if not text.startswith(to_its_end) or not to_its_end.startswith(before):
            rest = "(train.completion_only_loss: true learns the last alone)"
            raise BadRow(f"whose earlier turns the chat template rewrites {rest}")
        return len(before), len(to_its_end)

    def render(
        self, messages: Sequence[Message], tools: Any = None, template: str | None = None, **options: Any
    ) -> tuple[str, Spans]:
        """(text, spans), spans empty without `return_assistant_tokens_mask`. Raises BadRow with the template's words."""
        from transformers.utils.chat_template_utils import render_jinja_template

        shown = [adapt_thought(message, self.thinking) for message in messages]
        chosen = template or (self.text_with_tools if tools else self.text)
        try:
            rendered: Any = render_jinja_template(
                conversations=[shown], tools=tools, chat_template=chosen, **options, **self.variables
            )
        except REFUSALS as error:
            raise BadRow("that the chat template refuses", f"{error}" or type(error).__name__) from error
        texts, spans = rendered
        return texts[0], spans[0] if spans else []


def read_template(tokenizer: Any, thinking: bool | None = None, today: str | None = None) -> ChatTemplate:
    """A tokenizer's chat template under the run's thinking flag.

    `today` (2025-12-31) is what templates that print the date are told; None is the clock's. Raises UsageError: no
    template, one that does not render, a flag it cannot follow.
    """
    if tokenizer.chat_template is None:
        of_sft = "for cogumi.method: sft set train.chat_template_path (cogumi:tulu, a .jinja file or another model)"
        of_others = "for dpo and gspo start from a model that has one, such as the merged model of that SFT run"
        what = "this model's tokenizer has no chat template, and only text needs none"
        raise UsageError(what, key="data.format", fix=f"{of_sft}; {of_others}")
    text = tokenizer.get_chat_template()
    known = read_thinking(text, thinking)
    variables = dict(tokenizer.special_tokens_map) | known.template_kwargs
    if today is not None:
        variables["strftime_now"] = date.fromisoformat(today).strftime
    with_tools = tokenizer.get_chat_template(tools=[{}])
    bare = ChatTemplate(text, with_tools, _marked(tokenizer, text), known, variables)
    try:
        prompt = bare.prompt(PROBE[:1])
        asked = bare.whole(PROBE[:1])
        marked, spans = bare.render(PROBE, None, bare.marked, return_assistant_tokens_mask=bare.marked is not None)
    except BadRow as error:
        raise UsageError(f"the chat template refuses a question and its answer: {error.excerpt}") from error
    differs = (at for at, (one, other) in enumerate(zip(prompt, asked, strict=False)) if one != other)
    generation_prompt = prompt[next(differs, len(asked)) :]
    opens = OPEN in generation_prompt and CLOSE not in generation_prompt.rpartition(OPEN)[2]
    if opens and thinking is False:
        what = "false, but this model's chat template opens a thought in every prompt and has no switch for it"
        raise UsageError(what, key="cogumi.thinking", fix="drop the key, or start from a model that can answer without")
    header = _overlap(marked, spans[0][0], generation_prompt) if spans else ""
    return replace(bare, header=header, prompt_opens_thought=opens)


def prints_date(tokenizer: Any) -> bool:
    """Whether what this template renders depends on the day (gpt-oss's does)."""
    return bool(tokenizer.chat_template) and "strftime_now" in tokenizer.get_chat_template()


def _marked(tokenizer: Any, text: str) -> str | None:
    """The template itself where it has marks, else TRL's training version of it; None where neither will do."""
    from trl.chat_template_utils import (
        get_training_chat_template,
        has_generation_markers,
        is_chat_template_stop_token_trained,
    )

    try:
        marked = text if has_generation_markers(text) else get_training_chat_template(tokenizer) or text
        # Some mark a turn without the token that ends it; a model trained on that never learns to stop.
        return marked if is_chat_template_stop_token_trained(tokenizer, marked) else None
    # ValueError: TRL has no training version of this one. The others: TRL tries it on a call of a tool first.
    except REFUSALS:
        return None


def _overlap(text: str, start: int, generation_prompt: str) -> str:
    """The end of the generation prompt that stands at `start`, if its beginning stands right before it."""
    for before in range(min(len(generation_prompt), start), -1, -1):
        if text.startswith(generation_prompt, start - before):
            return generation_prompt[before:]
    return ""
