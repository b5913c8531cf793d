"""Thinking as one flag of a run: what it asks of a chat template, what it makes of a message, what of a reply is visible.

Two ways of writing thoughts are known: `<think>...</think>` before the answer (Qwen3, DeepSeek-R1 and many after them)
and gpt-oss's harmony channels (`analysis` before `final`). `cogumi.thinking: true` renders, samples and grades with
thoughts, false without; null leaves everything as the template and the data have it.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from cogumi.data.rows import BadRow
from cogumi.errors import UsageError

OPEN, CLOSE = "<think>", "</think>"
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
    """What `cogumi.thinking` means for this chat template.

    Raises UsageError for true where the template knows nothing of thoughts.
    """
    if CHANNEL in template:
        style, key = "harmony", "thinking"
    elif CLOSE in template:
        style, key = "tags", "reasoning_content" if "reasoning_content" in template else "content"
    else:
        style, key = "none", "none"
    switch = re.search(r"\b(enable_thinking|reasoning_effort|thinking(?= is defined))\b", template)
    if flag and style == "none" and switch is None:
        raise UsageError(
            "true, but this model's chat template knows no thinking",
            key="cogumi.thinking",
            fix="drop the key, or start from a model whose template has it",
        )
    kwargs: dict[str, Any] = {}
    if flag is not None and switch is not None:
        if switch[1] != "reasoning_effort":
            kwargs = {switch[1]: flag}
        elif not flag:
            kwargs = {"reasoning_effort": "low"}  # the least that gpt-oss was trained with: it has no off
    return Thinking(flag, style, key, kwargs)  # type: ignore[arg-type]


def as_the_template_takes_it(message: dict[str, Any], thinking: Thinking) -> dict[str, Any]:
    """An assistant's message with its thought removed, or under the key from which this template renders it.

    Raises BadRow where the thought never closes, or cannot be shown although nothing says to leave it out.
    """
    if message["role"] != "assistant":
        return message
    thought, content = message.get("reasoning_content"), message["content"]
    if thought is None and CLOSE not in content and not content.lstrip().startswith(OPEN):
        return message
    if thinking.flag is None and thought is None:
        return message  # text as any other
    if thought is None:
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


def visible(reply: str, style: str, opened: bool = False) -> str | None:
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
