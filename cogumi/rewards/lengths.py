"""Rewards for the length of a completion and of the thought in it, in tokens; all of them are 0 or less.

A thought is what stands between `<think>` and `</think>`, or in gpt-oss's channel `analysis` (`cogumi.data.chat_templates`).
"""

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any

from pydantic import Field

from cogumi.core.errors import UsageError
from cogumi.data.chat import CLOSE, OPEN, text_of
from cogumi.data.chat_templates import CHANNEL, MESSAGE
from cogumi.rewards.functions import Completion, Reward, parameters_of, replies_of, with_columns

THOUGHT_COLUMNS = ("thought_tokens", "replies")
"""What a run gives a reward that names it: the tokens of each completion's thought, and its whole text with the thought."""
ANALYSIS = re.compile(
    re.escape(f"{CHANNEL}analysis") + r".*?" + re.escape(MESSAGE) + r"(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|\Z)",
    re.DOTALL,
)
TAGGED = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)
SHARE_OF_BUFFER = 5  # arXiv:2503.14476, section 4.1: 4,096 of 20,480 tokens


def overlong(
    completion_ids: Sequence[Sequence[int]],
    max_completion_length: int,
    buffer: Annotated[int | None, Field(ge=1)] = None,
    **kwargs: Any,
) -> list[float]:
    """DAPO's soft overlong punishment, in -1..0, by `trl.rewards.get_soft_overlong_punishment` (arXiv:2503.14476, eq. 13).

    L is `max_completion_length`, in a run that of `train:`. B is `buffer`, by default a fifth of L. It is 0
    for |y| <= L - B tokens. It is ((L - B) - |y|) / B for L - B < |y| <= L, and -1 for L < |y|.
    """
    from trl.rewards import get_soft_overlong_punishment

    buffer = buffer or max(1, max_completion_length // SHARE_OF_BUFFER)
    if buffer > max_completion_length:
        what = f"overlong: buffer {buffer} is more than max_completion_length {max_completion_length}"
        raise UsageError(what, key="cogumi.rewards", fix="lower it")
    scores: list[float] = get_soft_overlong_punishment(max_completion_length, buffer)(completion_ids=completion_ids)
    return scores


def thought_price(
    thought_tokens: Sequence[int], price: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.001, **kwargs: Any
) -> list[float]:
    """-`price` for each token of thought, 0 without one. A thought that never closes costs all its tokens.

    The marks of a thought cost nothing. The range is -`price` * `train.max_completion_length` to 0.
    """
    return [-price * tokens if tokens else 0.0 for tokens in thought_tokens]


def reads_thoughts(reward: Reward) -> bool:
    """Whether a reward takes the tokens of thought or the whole reply, and so scores replies that have no visible part."""
    return not parameters_of(reward).keys().isdisjoint(THOUGHT_COLUMNS)


def with_thoughts(reward: Reward, tokenizer: Any, style: str, opened: bool = False) -> Reward:
    """The same reward function, under its name, given those of THOUGHT_COLUMNS that it takes.

    style, opened: as `on_visible` has them. Where there are no `completion_ids` a completion's text is tokenized.
    """
    wanted = parameters_of(reward).keys() & set(THOUGHT_COLUMNS)

    def add_thoughts(columns: dict[str, Any]) -> dict[str, Any]:
        completions, ids = columns["completions"], columns.get("completion_ids")
        return columns | thoughts_of(completions, ids, tokenizer, style, opened, wanted)

    return with_columns(reward, add_thoughts)


def thoughts_of(
    completions: Sequence[Completion],
    ids: Sequence[Sequence[int]] | None,
    tokenizer: Any,
    style: str,
    opened: bool,
    wanted: Collection[str],
) -> dict[str, list[Any]]:
    """Those of THOUGHT_COLUMNS that are wanted. A reply begins with the mark that its prompt ended in."""
    # Text is not rendered by the chat template, which is what opens thoughts.
    opens = [opened and not isinstance(each, str) for each in completions]
    found: dict[str, list[Any]] = {}
    if "replies" in wanted:
        replies = replies_of(completions, ids, tokenizer, style)
        found["replies"] = [OPEN + reply if open_ else reply for reply, open_ in zip(replies, opens, strict=True)]
    if "thought_tokens" in wanted:
        if ids is None:
            ids = [tokenizer(text_of(each), add_special_tokens=False)["input_ids"] for each in completions]
        pairs = zip(ids, opens, strict=True)
        found["thought_tokens"] = [count_thought_tokens(each, tokenizer, style, open_) for each, open_ in pairs]
    return found


def count_thought_tokens(ids: Sequence[int], tokenizer: Any, style: str, opened: bool = False) -> int:
    """The tokens of a completion that lie in its thoughts, whole or in part, marks left out."""
    ids = list(ids)

    @functools.cache
    def characters(tokens: int) -> int:
        # A character of which a part of the bytes is there is none yet.
        return len(tokenizer.decode(ids[:tokens], skip_special_tokens=False).rstrip("\ufffd"))

    text = tokenizer.decode(ids, skip_special_tokens=False)
    spans = thought_spans(text, style, opened)
    return sum(token_at(characters, len(ids), end) - first_token(characters, len(ids), start) for start, end in spans)


def token_at(characters: Callable[[int], int], most: int, position: int) -> int:
    """How many tokens it takes to reach a position in the text."""
    return bisect_left(range(most), position, key=characters)


def first_token(characters: Callable[[int], int], most: int, position: int) -> int:
    """How many tokens end at a position or before it."""
    reached = token_at(characters, most, position)
    return reached if characters(reached) == position else reached - 1


def thought_spans(text: str, style: str, opened: bool = False) -> list[tuple[int, int]]:
    """Where in a reply its thoughts lie, as character positions; to the end of the text where one never closes."""
    if style == "harmony":
        return [found.span(1) for found in ANALYSIS.finditer(text)]
    shift = 0
    closed_first = CLOSE in text and OPEN not in text.partition(CLOSE)[0]
    if opened or closed_first:  # the mark that opens it is in the prompt, or was left out
        text, shift = OPEN + text, len(OPEN)
    spans = [found.span(1) for found in TAGGED.finditer(text)]
    return [(start - shift, end - shift) for start, end in spans]
