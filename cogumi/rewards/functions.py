"""Reward functions of the package, and the wrappers that change the arguments of a reward.

Every function takes the batch as equally long lists and returns one float per completion in 0..1 (`overlong` and
`thought_price` 0 or less). A completion is a string, or a list of chat messages of which the last one counts. `middle`,
`prefix` and `suffix` are columns of fill-in-the-middle prompts. With `cogumi.thinking` a function scores the visible part:
a reply whose thinking never closes scores 0 and counts in the metric `unfinished`.
"""

import ast
import functools
import inspect
import math
import re
import unicodedata
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Annotated, Any

from pydantic import Field

from cogumi.core.errors import UsageError, require_extra
from cogumi.data.chat import CHANNEL, CLOSE, MESSAGE, OPEN, text_of, visible_text
from cogumi.data.encoding import special_texts

Completion = str | Sequence[dict[str, Any]]
Reward = Callable[..., Sequence[float | None]]
MAX_SCORE = 3.4e38  # TRL keeps scores as float32


def levenshtein_similarity(first: str, second: str) -> float:
    """Compute 1 - distance / length of the longer text."""
    require_extra("rapidfuzz", "rewards", key="cogumi.rewards")
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.normalized_similarity(first, second)


def exact_match(completions: Sequence[Completion], middle: Sequence[str], **kwargs: Any) -> list[float]:
    """Score 1.0 if the completion is the middle, character for character, else 0.0."""
    return [float(text_of(completion) == gold) for completion, gold in zip(completions, middle, strict=True)]


def edit_similarity(completions: Sequence[Completion], middle: Sequence[str], **kwargs: Any) -> list[float]:
    """Score 1 - Levenshtein(completion, middle) / max(len) over characters; two empty strings score 1.0.

    Insertions, deletions and substitutions cost 1 each.
    """
    pairs = zip(completions, middle, strict=True)
    return [levenshtein_similarity(text_of(completion), gold) for completion, gold in pairs]


def parses(
    completions: Sequence[Completion], prefix: Sequence[str], suffix: Sequence[str], **kwargs: Any
) -> list[float]:
    """Score 1.0 if prefix + completion + suffix is valid Python for the running version, else 0.0.

    Nothing is executed. Only meaningful if the source rows parse on their own (whole functions, dedented).
    """

    def is_python(source: str) -> bool:
        try:
            ast.parse(source)
        # ValueError: null bytes or lone surrogates; RecursionError and MemoryError: nesting deeper than the parser's stack.
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True

    triples = zip(prefix, completions, suffix, strict=True)
    with warnings.catch_warnings(action="ignore"):  # invalid escapes would print once per completion
        return [float(is_python(before + text_of(completion) + after)) for before, completion, after in triples]


# Digits with thousands separators, or without; an exponent; a divisor. GSM8K writes "#### 1,234". A hyphen joins words.
NUMBER = re.compile(r"(?:\B-)?(?:(?<!/)\d+/\d+(?![\d/])|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?i:e[+-]?\d{1,3})?|\.\d+)")
SPELLINGS = ((r"[−–]", "-"), (r"\{,\}", ","), (r"\\[!$]|\$", ""), (r"(?<!\d)\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2"))
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
# Around a number that is a part of something else: 3,5 and 10:30 and 3\sqrt{2} and 5 m2 and 2n+1 and 3 or 5.
BEGINS_VALUE = re.compile(r"=|[.:!?] |\\boxed\{|\b(?:is|are)\b")
PART_BEFORE = re.compile(r"\d|(?:[A-Za-z]|[\^_×·√]\{?|\}\{|(?:\\sqrt|\\pm|log|ln|sin|cos) ?\{?|\S ?[+/-] ?|\S [<>] )\Z")
PART_BEHIND = re.compile(
    r"[inxyz](?![a-z])|\s*(?:[\^π√×½¼¾⅓⅔¹²³⁰-⁹⁺⁻]|\\(?:pi|sqrt|cdot|times|[dt]?frac)|[*+-] ?(?:[a-z]\b|[\\(])|[<>] )"
)


def last_number(text: str, alone: bool = False) -> Fraction | None:
    """Return the last number in a text exactly (0.1 is no binary fraction). alone: None if it is a part, as 5 is of 3,5."""
    for written, meant in SPELLINGS:
        text = re.sub(written, meant, text)
    text = (BOXED.findall(text) or [text])[-1]
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    start, end = numbers[-1].span()
    line = re.split(r"[#\n]", text[:start])[-1]
    has_several = len(re.findall(r"[a-z] ?=", line)) > 1  # x = 3, y = 5
    if alone and (has_several or PART_BEFORE.search(BEGINS_VALUE.split(line)[-1]) or PART_BEHIND.match(text, end)):
        return None
    try:
        return Fraction(text[start:end].replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _plain(text: str) -> str:  # composed Unicode, one kind of line break, stripped
    return unicodedata.normalize("NFC", text).replace("\r\n", "\n").strip()


def spellings_of(gold: Any) -> list[str]:
    """Return how a gold answer may be written (5.0 as 5, of a column with a gap; True as true), [] if there is none."""
    if isinstance(gold, Mapping | list | tuple):
        kind = f"an object with {', '.join(map(str, gold))}" if isinstance(gold, Mapping) else f"a list of {len(gold)}"
        message, fix = f"`answer` is {kind}, and rewards compare text", "make a column `answer` of text or numbers"
        raise UsageError(message, key="data.columns", fix=fix)
    if isinstance(gold, str) and re.fullmatch(r"[+-]?\d*\.?\d+(?i:e)[+-]?\d{1,3}", gold.strip()):  # of a CSV file
        return [f"{Decimal(gold.strip()):f}", gold.strip()]
    is_decimal = isinstance(gold, float | Decimal)  # not as 1e-05, which math-verify reads as e - 5
    text = "" if gold is None or gold != gold else _plain(f"{Decimal(str(gold)):f}" if is_decimal else str(gold))
    other = str(int(gold)) if isinstance(gold, float) and gold.is_integer() else text.lower()
    return [text, *([other] if isinstance(gold, bool | float) else [])] if text else []


def final_number(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""Score 1.0 if the last number (of the last \boxed{}, if any) is the one that ends `answer` (none ends 3,5), else 0.0."""
    golds = (last_number("".join(spellings_of(gold)[:1]), alone=True) for gold in answer)
    numbers = zip(map(last_number, map(text_of, completions)), golds, strict=True)
    return [float(number is not None and number == gold) for number, gold in numbers]


def answer_similarity(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """Score 1 - Levenshtein(completion, answer) / max(len) over characters, without surrounding white space.

    A row without an answer scores 0.
    """
    pairs = ((_plain(text_of(text)), spellings_of(gold)) for text, gold in zip(completions, answer, strict=True))
    return [max((levenshtein_similarity(text, gold) for gold in golds), default=0.0) for text, golds in pairs]


def exact_answer(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """Score 1.0 if the completion is the answer, without surrounding white space, else 0.0."""
    return [float(_plain(text_of(text)) in spellings_of(gold)) for text, gold in zip(completions, answer, strict=True)]


def format_match(
    completions: Sequence[Completion],
    replies: Sequence[str] | None = None,
    pattern: re.Pattern[str] | None = None,
    **kwargs: Any,
) -> list[float]:
    """Score 1.0 if the whole reply, with its thought, matches `pattern`, else 0.0. A dot also matches a line break.

    Without a pattern the reply has to be one `<think>...</think>` and text: `trl.rewards.think_format_reward`.
    """
    texts = [text_of(completion) for completion in completions] if replies is None else replies
    if pattern is None:
        from trl.rewards import think_format_reward

        return think_format_reward([[{"role": "assistant", "content": text}] for text in texts])
    dotall = re.compile(pattern.pattern, pattern.flags | re.DOTALL)
    return [float(dotall.fullmatch(text.strip()) is not None) for text in texts]


LENGTH_PER_BUFFER = 5  # arXiv:2503.14476, section 4.1: 4,096 of 20,480 tokens


def overlong(
    completion_ids: Sequence[Sequence[int]],
    max_completion_length: int,
    buffer: Annotated[int | None, Field(ge=1)] = None,
    **kwargs: Any,
) -> list[float]:
    """Apply DAPO's soft overlong punishment, `trl.rewards.get_soft_overlong_punishment` (arXiv:2503.14476, eq. 13).

    With L = `max_completion_length` (in a run that of `train:`) and B = `buffer` (default L / 5): 0 for |y| <= L - B tokens,
    ((L - B) - |y|) / B for L - B < |y| <= L, and -1 for L < |y|.
    """
    from trl.rewards import get_soft_overlong_punishment

    buffer = buffer or max(1, max_completion_length // LENGTH_PER_BUFFER)
    if buffer > max_completion_length:
        message = f"overlong: buffer {buffer} is more than max_completion_length {max_completion_length}"
        raise UsageError(message, key="cogumi.rewards", fix="lower it")
    return get_soft_overlong_punishment(max_completion_length, buffer)(completion_ids=completion_ids)


def thought_price(
    thought_tokens: Sequence[int], price: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.001, **kwargs: Any
) -> list[float]:
    """Score -`price` per token of thought, 0 without one. A thought that never closes costs all its tokens.

    The marks of a thought cost nothing. The range is -`price` * `train.max_completion_length` to 0.
    """
    return [-price * tokens if tokens else 0.0 for tokens in thought_tokens]


# ------------------------------------------------------------------------------------------------------------ wrappers


def parameters_of(reward: Reward) -> Mapping[str, inspect.Parameter]:
    """Return the named parameters of a reward, without *args and **kwargs."""
    parameters = inspect.signature(reward).parameters.items()
    return {name: value for name, value in parameters if value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD)}


def read_scores(reward: Any, answer: Any, count: int) -> list[float | None]:
    """Return one float, NaN or None for each completion from what a reward returned. Raises UsageError for all else."""
    is_list = isinstance(answer, Iterable) and not isinstance(answer, str | bytes | Mapping | Set)
    is_list = is_list and getattr(answer, "ndim", 1) > 0
    values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in answer] if is_list else []
    other = [value for value in values if not isinstance(value, Real | Decimal | None)]
    problem = "" if len(values) == count else f"{len(values)} rewards for {count} completions"
    if not is_list:
        problem = f"{type(answer).__name__}, and a reward returns a list"
    elif other:
        problem = f"{type(other[0]).__name__} {other[0]!r:.40} in its list, and a score is a number"
    if problem:
        message = f"{getattr(reward, '__name__', type(reward).__name__)} returned {' '.join(problem.split())}"
        raise UsageError(message, key="cogumi.rewards", fix="return one number for each completion")
    numbers = [float(value) if isinstance(value, Decimal) else value for value in values]
    return [value if value is None else float(value) if abs(value) <= MAX_SCORE else math.nan for value in numbers]


def with_columns(
    reward: Reward,
    change: Callable[[dict[str, Any]], Mapping[str, Any]],
    read: Callable[[Any, Mapping[str, Any]], Any] = lambda scores, _: scores,
) -> Reward:
    """Wrap a reward, keeping its name, so that `change` maps its keyword arguments, and `read` what it returns for them."""
    if inspect.iscoroutinefunction(reward):

        @functools.wraps(reward)
        async def awaited(**columns: Any) -> Any:
            changed = change(columns)
            return read(await reward(**changed), changed)

        return awaited  # type: ignore[return-value]

    @functools.wraps(reward)
    def scored(**columns: Any) -> Any:
        changed = change(columns)
        return read(reward(**changed), changed)

    return scored


def on_visible(reward: Reward, tokenizer: Any, style: str, prompt_opens_thought: bool = False) -> Reward:
    """Wrap a reward, keeping its name, so that it gets the visible part of every completion.

    `style` is that of `cogumi.data.chat.Thinking`; `prompt_opens_thought`: prompts end inside a thought. Text is read from
    `completion_ids`: a completion's own text has lost the control tokens. An asynchronous function is a TypeError.
    """
    if inspect.iscoroutinefunction(reward):
        raise TypeError(f"{reward.__name__} is asynchronous; rewards are wrapped as plain functions")

    def with_text(completion: Completion, text: str) -> Completion:
        if isinstance(completion, str):
            return text
        return [*completion[:-1], {**completion[-1], "content": text}] if completion else completion

    @functools.wraps(reward)
    def on_visible_part(
        prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any
    ) -> list[float | None]:
        replies = replies_of(completions, columns.get("completion_ids"), tokenizer, style)
        answers = [visible_text(reply, style, prompt_opens_thought) for reply in replies]
        visible = [with_text(old, answer or "") for old, answer in zip(completions, answers, strict=True)]
        scores = read_scores(reward, reward(prompts=prompts, completions=visible, **columns), len(answers))
        if log_metric := columns.get("log_metric"):
            log_metric("unfinished", answers.count(None) / max(len(answers), 1))
        return [0.0 if answer is None else score for score, answer in zip(scores, answers, strict=True)]

    return on_visible_part


def replies_of(
    completions: Sequence[Completion], ids: Sequence[Sequence[int]] | None, tokenizer: Any, style: str
) -> list[str]:
    """Return the model's texts with the marks of thinking; of several messages (tool calls between) the last one."""
    if ids is None or any(not isinstance(completion, str) and len(completion) != 1 for completion in completions):
        return [text_of(completion) for completion in completions]
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=False)
    for control in special_texts(tokenizer) if style != "harmony" else ():
        if control not in (OPEN, CLOSE):
            texts = [text.replace(control, "") for text in texts]
    return texts


# ------------------------------------------------------------------------------------------------------------ thoughts


THOUGHT_COLUMNS = ("thought_tokens", "replies")
"""Arguments that a run computes for rewards that name them: tokens of each thought, and whole replies with the thought."""
ANALYSIS = re.compile(
    re.escape(f"{CHANNEL}analysis") + r".*?" + re.escape(MESSAGE) + r"(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|\Z)",
    re.DOTALL,
)
TAGGED = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)


def reads_thoughts(reward: Reward) -> bool:
    """Tell whether a reward takes one of THOUGHT_COLUMNS, and so scores replies without a visible part."""
    return not parameters_of(reward).keys().isdisjoint(THOUGHT_COLUMNS)


def with_thoughts(reward: Reward, tokenizer: Any, style: str, prompt_opens_thought: bool = False) -> Reward:
    """Wrap a reward, keeping its name, so that it gets those of THOUGHT_COLUMNS that it takes.

    style, prompt_opens_thought: as in `on_visible`. Without `completion_ids` a completion's text is tokenized.
    """
    names = parameters_of(reward).keys() & set(THOUGHT_COLUMNS)

    def add_thoughts(columns: dict[str, Any]) -> dict[str, Any]:
        """Add each completion with its thought (replies), and the length of the thought, as far as the reward takes them."""
        completions, ids = columns["completions"], columns.get("completion_ids")
        # Text is not rendered by the chat template, which is what opens thoughts.
        is_open = [prompt_opens_thought and not isinstance(completion, str) for completion in completions]
        added: dict[str, list[Any]] = {}
        if "replies" in names:
            replies = replies_of(completions, ids, tokenizer, style)
            added["replies"] = [OPEN + reply if open_ else reply for reply, open_ in zip(replies, is_open, strict=True)]
        if "thought_tokens" in names:
            if ids is None:
                texts = map(text_of, completions)
                ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            pairs = zip(ids, is_open, strict=True)
            added["thought_tokens"] = [count_thought_tokens(row, tokenizer, style, open_) for row, open_ in pairs]
        return columns | added

    return with_columns(reward, add_thoughts)


def count_thought_tokens(ids: Sequence[int], tokenizer: Any, style: str, prompt_opens_thought: bool = False) -> int:
    """Count the tokens of a completion that lie in its thoughts, whole or in part, without marks."""
    ids = list(ids)

    @functools.cache
    def characters(tokens: int) -> int:
        # An incomplete character is not counted.
        return len(tokenizer.decode(ids[:tokens], skip_special_tokens=False).rstrip("\ufffd"))

    def tokens_to(position: int) -> int:
        """Return how many tokens it takes to reach a position in the text."""
        return bisect_left(range(len(ids)), position, key=characters)

    total = 0
    for start, end in thought_spans(tokenizer.decode(ids, skip_special_tokens=False), style, prompt_opens_thought):
        before = tokens_to(start)
        total += tokens_to(end) - (before if characters(before) == start else before - 1)
    return total


def thought_spans(text: str, style: str, prompt_opens_thought: bool = False) -> list[tuple[int, int]]:
    """Return the character positions of a reply's thoughts; one that never closes extends to the end."""
    if style == "harmony":
        return [match.span(1) for match in ANALYSIS.finditer(text)]
    shift = 0
    is_closed_first = CLOSE in text and OPEN not in text.partition(CLOSE)[0]
    if prompt_opens_thought or is_closed_first:  # the opening mark is in the prompt, or was left out
        text, shift = OPEN + text, len(OPEN)
    spans = [match.span(1) for match in TAGGED.finditer(text)]
    return [(start - shift, end - shift) for start, end in spans]
