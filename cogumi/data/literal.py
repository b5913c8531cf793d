"""Text of the data that spells control tokens, kept as text through the chat template and the tokenizer.

Neither can tell a `<think>` that a user wrote from one that the template writes. Before rendering, every such spelling in a
message becomes one reserved character; all spellings in the rendered text are then the template's. To tokenize it, the
template's spellings become reserved characters, which a copy of the tokenizer has in the place of its control tokens, and
the spellings of the data are restored: to that copy they are text.

An assistant's content keeps the tags of a thought that it begins with, and of calls (`<tool_call>`) that begin a line.
"""

import json
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from cogumi.data.chat import CLOSE, OPEN, closes_thought, split_thought
from cogumi.data.encoding import Ids, encode, special_texts
from cogumi.data.rows import BadRow

TAGS = (OPEN, CLOSE, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Texts that templates look for in contents, whether or not they are tokens."""
CALL = re.compile(r"^(<tool_call>)(\s*(?:\{.*?\}|<function=.*?)\s*)(</tool_call>)", re.DOTALL | re.MULTILINE)
# Of Unicode's last private-use plane: a spelling of the data, and a control token of the template.
HIDDEN_FIRST, OWN_FIRST = 0x100000, 0x108000
HIDDEN = re.compile("[\U00100000-\U00107fff]")
RESERVED = re.compile("[\U00100000-\U0010ffff]")


@dataclass(frozen=True)
class LiteralText:
    """The control tokens of one tokenizer, and how text that spells them stays text."""

    tokenizer: Any

    @cached_property
    def controls(self) -> dict[str, int]:
        """Control tokens and their ids: special ones, those of the chat template, and those in angle bars."""
        added = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        template = str(self.tokenizer.chat_template or "")
        special = set(special_texts(self.tokenizer))
        return {
            text: number
            for text, number in added.items()
            if text.strip() and (text in special or text in template or text in TAGS or text.startswith(("<|", "<｜")))
        }

    @cached_property
    def spellings(self) -> list[str]:
        """Texts to hide, longest first, as the tokenizer prefers the longest."""
        return sorted({*self.controls, *TAGS}, key=len, reverse=True)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.spellings)))

    @cached_property
    def copy(self) -> tuple[Tokenizer, dict[Any, int]]:
        """The tokenizer with reserved characters for its control tokens, and {its id of an added token: the real id}."""
        backend = self.tokenizer.backend_tokenizer
        bare = json.loads(backend.to_str()) | {"added_tokens": [], "padding": None, "truncation": None}
        copy, ids = Tokenizer.from_str(json.dumps(bare)), {}
        for number, token in sorted(backend.get_added_tokens_decoder().items()):
            is_control = token.content in self.controls
            text = chr(OWN_FIRST + self.spellings.index(token.content)) if is_control else token.content
            copy.add_tokens([AddedToken(**token.__getstate__() | {"content": text})])
            ids[copy.token_to_id(text)] = number
        return copy, ids

    def hide(self, text: str) -> str:
        """Replace every spelling. Raises BadRow for one that this tokenizer cannot read as text."""

        def hide_one(match: re.Match[str]) -> str:
            if match[0] in self.unreadable:
                raise BadRow(f"containing a special token ({match[0]})")
            return chr(HIDDEN_FIRST + self.spellings.index(match[0]))

        return self.pattern.sub(hide_one, RESERVED.sub("\ufffd", text))  # `keep_as_text` drops rows with those

    @cached_property
    def unreadable(self) -> set[str]:
        """Spellings that the copy does not read as text: a vocabulary may have control tokens as words, too."""
        if not self.tokenizer.is_fast:
            return set(self.controls)
        ids = {text: self.copy[0].encode(text, add_special_tokens=False).ids for text in self.controls}
        return {text for text, number in self.controls.items() if number in ids[text]}

    def reveal(self, value: Any) -> Any:
        """Restore hidden spellings in nested values."""
        return map_strings(value, lambda text: HIDDEN.sub(lambda at: self.spellings[ord(at[0]) - HIDDEN_FIRST], text))

    def hide_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        def hide(role: str, key: str, value: Any) -> Any:
            if key == "role":
                return value
            is_answer = key == "content" and role == "assistant" and isinstance(value, str)
            return self._hide_answer(value) if is_answer else map_strings(value, self.hide)

        return [{key: hide(message["role"], key, value) for key, value in message.items()} for message in messages]

    def _hide_answer(self, content: str) -> str:
        """Hide all but the tags of a leading thought and of calls. Raises BadRow for a thought that never closes."""
        before, close, after = content.partition(CLOSE)
        opened = before[: before.index(OPEN) + len(OPEN)] if before.lstrip().startswith(OPEN) else ""
        if opened and not close and (OPEN in self.controls or OPEN in str(self.tokenizer.chat_template)):
            raise BadRow("with a thought that never closes")
        head = ""
        if close and closes_thought(before, after):
            head, content = opened + self.hide(before[len(opened) :]) + CLOSE, after
        elif opened and not close:  # text, unless the run says that there are thoughts
            head, content = opened, content[len(opened) :]
        # Text, tag, call, tag, text, ...
        return head + "".join(part if at % 2 else self.hide(part) for at, part in enumerate(CALL.split(content)))

    def without_tags(self, prompt: str, *answers: str) -> list[str]:
        """Return texts without the tags of calls, and of a thought that begins an answer, or that the prompt opens."""
        prompt_text = prompt.rstrip().removesuffix(OPEN)
        opened = OPEN if prompt_text != prompt.rstrip() else ""
        parts = [split_thought(opened + answer) if OPEN in self.controls else ("", answer) for answer in answers]
        return [prompt_text, *(text for thought, answer in parts for text in (thought or "", CALL.sub(r"\2", answer)))]

    def restore(self, text: str) -> str:
        """Return rendered text as the copy reads it."""

        def mark(match: re.Match[str]) -> str:
            return chr(OWN_FIRST + self.spellings.index(match[0])) if match[0] in self.controls else match[0]

        return str(self.reveal(self.pattern.sub(mark, text)))

    def encoding(self, text: str) -> tuple[Any, Ids]:
        """Tokenize text that `restore` returned: (the copy's encoding, the real ids)."""
        copy, real = self.copy
        encoding = copy.encode(text, add_special_tokens=False)
        return encoding, np.array([real.get(number, number) for number in encoding.ids], np.int32)

    def encode(self, texts: Sequence[str], special_tokens: bool = False) -> list[Ids]:
        """Tokenize rendered texts as `encoding.encode`, with the hidden spellings as text, and one end token at the end."""
        ids, end = encode(self.tokenizer, texts, special_tokens), self.tokenizer.eos_token_id
        if special_tokens:  # some tokenizers end every text by themselves
            ids = [of_text[:-1] if of_text[-2:].tolist() == [end, end] else of_text for of_text in ids]
        for index, text in enumerate(texts if not special_tokens else ()):
            if HIDDEN.search(text):
                ids[index] = self.encoding(self.restore(text))[1]
        return ids


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Change every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def keep_data_as_text(tokenizer: Any) -> None:
    """Have `tokenizer.apply_chat_template` tokenize control tokens that messages spell as text, as a rollout's prompt needs."""
    literal, render = LiteralText(tokenizer), tokenizer.apply_chat_template

    def apply_chat_template(conversation: Any, tools: Any = None, **options: Any) -> Any:
        output = render(conversation, tools=tools, **options)
        if not options.get("tokenize", True) or options.get("return_tensors"):
            return output
        is_batch = bool(conversation) and not isinstance(conversation[0], Mapping)
        lists = output if isinstance(output, MutableMapping) else {"input_ids": output}
        for index, messages in enumerate(conversation if is_batch else [conversation]):
            if not literal.pattern.search(json.dumps([messages, tools], ensure_ascii=False, default=str)):
                continue
            hidden = literal.hide_messages(messages), tools and map_strings(tools, literal.hide)
            text = render(hidden[0], tools=hidden[1], **options | {"tokenize": False})
            ids = literal.encode([text])[0].tolist()
            for key in lists.keys() & {"input_ids", "attention_mask"}:
                value = ids if key == "input_ids" else [1] * len(ids)
                if is_batch:
                    lists[key][index] = value
                else:
                    lists[key] = value
        return output if isinstance(output, MutableMapping) else lists["input_ids"]

    tokenizer.apply_chat_template = apply_chat_template
