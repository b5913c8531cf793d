"""The reward functions that come with the package.

Every function takes the batch as equally long lists and returns one float per completion, here in 0..1. (Those of
`lengths` are 0 or less.) A completion is a string, or a list of chat messages of which the last one counts. `middle`,
`prefix` and `suffix` are the columns of fill-in-the-middle prompts. With `cogumi.thinking` a function scores the visible part:
a reply whose thinking never closes scores 0 and counts in the metric `unfinished`.
"""

import ast
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from cogumi.core.errors import require_extra
from cogumi.data.chat import CLOSE, OPEN, text_of
from cogumi.data.chat_templates import visible_text
from cogumi.data.encoding import special_texts

Completion = str | Sequence[dict[str, Any]]


def exact_match(completions: Sequence[Completion], middle: Sequence[str], **kwargs: Any) -> list[float]:
    """1.0 where the completion is the middle, character for character, else 0.0."""
    return [float(text_of(each) == expected) for each, expected in zip(completions, middle, strict=True)]


def levenshtein_similarity(first: str, second: str) -> float:
    """Compute 1 - distance / length of the longer text."""
    require_extra("rapidfuzz", "rewards", key="cogumi.rewards")
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.normalized_similarity(first, second)


def edit_similarity(completions: Sequence[Completion], middle: Sequence[str], **kwargs: Any) -> list[float]:
    """1 - Levenshtein(completion, middle) / max(len), in 0..1, over characters; two empty strings score 1.0.

    Insertions, deletions and substitutions cost 1 each.
    """
    pairs = zip(completions, middle, strict=True)
    return [levenshtein_similarity(text_of(each), expected) for each, expected in pairs]


def parses(
    completions: Sequence[Completion], prefix: Sequence[str], suffix: Sequence[str], **kwargs: Any
) -> list[float]:
    """1.0 where prefix + completion + suffix is valid Python for the running version, else 0.0.

    Nothing is executed. Only meaningful where the source rows parse on their own (whole functions, dedented).
    """
    triples = zip(prefix, completions, suffix, strict=True)
    return [float(is_python(before + text_of(each) + after)) for before, each, after in triples]


def is_python(source: str) -> bool:
    with warnings.catch_warnings():  # a completion's invalid escapes would print once per sample otherwise
        warnings.simplefilter("ignore")
        try:
            ast.parse(source)
        # ValueError: null bytes or lone surrogates; RecursionError and MemoryError: nesting deeper than the parser's stack.
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


# Digits with thousands separators, or without; a fraction; no exponent. GSM8K writes "#### 1,234".
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def final_number(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """1.0 where the last number of the completion (in the last \\boxed{} if there is one) is the last number of `answer`."""
    pairs = [
        (last_number(text_of(each)), last_number(str(gold))) for each, gold in zip(completions, answer, strict=True)
    ]
    return [float(number is not None and number == gold) for number, gold in pairs]


def answer_similarity(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """1 - Levenshtein(completion, answer) / max(len), in 0..1, over characters, without surrounding white space."""
    pairs = zip(completions, answer, strict=True)
    return [levenshtein_similarity(text_of(each).strip(), str(gold).strip()) for each, gold in pairs]


def exact_answer(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """1.0 where the completion is the answer, without surrounding white space, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [float(text_of(each).strip() == str(gold).strip()) for each, gold in pairs]


def format_match(
    completions: Sequence[Completion],
    replies: Sequence[str] | None = None,
    pattern: re.Pattern[str] | None = None,
    **kwargs: Any,
) -> list[float]:
    """1.0 where the whole reply, with its thought, matches `pattern`, else 0.0. A dot matches a line break, too.

    Without a pattern the reply has to be one `<think>...</think>` and text: `trl.rewards.think_format_reward`.
    """
    said = [text_of(each) for each in completions] if replies is None else replies
    if pattern is None:
        from trl.rewards import think_format_reward

        scores: list[float] = think_format_reward([[{"role": "assistant", "content": each}] for each in said])
        return scores
    whole = re.compile(pattern.pattern, pattern.flags | re.DOTALL)
    return [float(whole.fullmatch(each.strip()) is not None) for each in said]


def last_number(text: str) -> Decimal | None:
    """The last number in a text, exactly: 1,200 is 1200.0, and 0.1 is not a binary fraction."""
    boxed = BOXED.findall(text)
    numbers = NUMBER.findall(boxed[-1] if boxed else text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


Reward = Callable[..., Sequence[float | None]]


def parameters_of(reward: Reward) -> Mapping[str, inspect.Parameter]:
    """What a reward names in its signature, without *args and **kwargs."""
    parameters = inspect.signature(reward).parameters
    return {name: each for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def with_columns(reward: Reward, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Reward:
    """The same reward function, under its name, given what `change` makes of its keyword arguments."""
    if inspect.iscoroutinefunction(reward):

        @functools.wraps(reward)
        async def awaited(**columns: Any) -> Any:
            return await reward(**change(columns))

        return awaited  # type: ignore[return-value]

    @functools.wraps(reward)
    def scored(**columns: Any) -> Any:
        return reward(**change(columns))

    return scored


def on_visible(reward: Reward, tokenizer: Any, style: str, opened: bool = False) -> Reward:
    """The same reward function, under its name, given the visible part of every completion.

    `style` is that of `chat_templates.Thinking`; `opened`: prompts end inside a thought. Text is read from
    `completion_ids`, as a completion's own text has lost the control tokens. An asynchronous function is a TypeError.
    """
    if inspect.iscoroutinefunction(reward):
        raise TypeError(f"{reward.__name__} is asynchronous; rewards are wrapped as plain functions")

    @functools.wraps(reward)
    def on_visible_part(
        prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any
    ) -> list[float | None]:
        replies = replies_of(completions, columns.get("completion_ids"), tokenizer, style)
        answers = [visible_text(reply, style, opened) for reply in replies]
        shown = [_with_text(old, answer or "") for old, answer in zip(completions, answers, strict=True)]
        scores = reward(prompts=prompts, completions=shown, **columns)
        if log_metric := columns.get("log_metric"):
            log_metric("unfinished", answers.count(None) / max(len(answers), 1))
        return [0.0 if answer is None else score for score, answer in zip(scores, answers, strict=True)]

    return on_visible_part


def replies_of(
    completions: Sequence[Completion], ids: Sequence[Sequence[int]] | None, tokenizer: Any, style: str
) -> list[str]:
    """What the model wrote, with the marks of its thinking. Of several messages (calls of tools between) the last one."""
    if ids is None or any(not isinstance(each, str) and len(each) != 1 for each in completions):
        return [text_of(each) for each in completions]
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=False)
    for control in special_texts(tokenizer) if style != "harmony" else ():
        if control not in (OPEN, CLOSE):
            texts = [text.replace(control, "") for text in texts]
    return texts


def _with_text(completion: Completion, text: str) -> Completion:
    if isinstance(completion, str):
        return text
    return [*completion[:-1], {**completion[-1], "content": text}] if completion else completion
