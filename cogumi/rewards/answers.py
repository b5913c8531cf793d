"""Rewards for tasks with a known answer: the column `answer` of the data, whatever the file calls it (`data.columns`)."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rapidfuzz.distance import Levenshtein

from cogumi.rewards.fim import Completion, text_of

# Digits with thousands separators, or without; a fraction; no exponent. GSM8K writes "#### 1,234".
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def final_number(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """1.0 where the last number of the completion (in the last \\boxed{} if there is one) is the last number of `answer`."""
    pairs = zip(completions, answer, strict=True)
    return [
        float((found := last_number(text_of(each))) is not None and found == last_number(str(gold)))
        for each, gold in pairs
    ]


def answer_similarity(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """1 - Levenshtein(completion, answer) / max(len), in 0..1, over characters, without surrounding white space."""
    pairs = zip(completions, answer, strict=True)
    return [Levenshtein.normalized_similarity(text_of(each).strip(), str(gold).strip()) for each, gold in pairs]


def last_number(text: str) -> Decimal | None:
    """The last number in a text, exactly: 1,200 is 1200.0, and 0.1 is not a binary fraction."""
    boxed = BOXED.findall(text)
    numbers = NUMBER.findall(boxed[-1] if boxed else text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None
