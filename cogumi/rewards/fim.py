"""Rewards for fill-in-the-middle completions, as TRL's GRPO trainer calls them.

Every function takes the batch as equally long lists and returns one float in 0..1 per completion. `middle`, `prefix`
and `suffix` are the columns that `cogumi.data.fim.prompts_for_rl` writes. A completion is a string, or a list of chat
messages of which the last one counts.
"""

import ast
import warnings
from collections.abc import Sequence
from typing import Any

from rapidfuzz.distance import Levenshtein

Completion = str | Sequence[dict[str, Any]]


def exact_match(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    middle: Sequence[str],
    prefix: Sequence[str],
    suffix: Sequence[str],
    **kwargs: Any,
) -> list[float]:
    """1.0 where the completion is the middle, character for character, else 0.0."""
    pairs = zip(completions, middle, strict=True)
    return [float(text_of(completion) == expected) for completion, expected in pairs]


def edit_similarity(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    middle: Sequence[str],
    prefix: Sequence[str],
    suffix: Sequence[str],
    **kwargs: Any,
) -> list[float]:
    """1 - Levenshtein(completion, middle) / max(len), in 0..1, over characters; two empty strings score 1.0.

    Insertions, deletions and substitutions cost 1 each (rapidfuzz.distance.Levenshtein.normalized_similarity). Not
    rapidfuzz's Indel ratio, where a substitution costs 2 over the sum of both lengths, so that unlike texts of unlike
    lengths still score well.
    """
    pairs = zip(completions, middle, strict=True)
    return [Levenshtein.normalized_similarity(text_of(completion), expected) for completion, expected in pairs]


def parses(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    middle: Sequence[str],
    prefix: Sequence[str],
    suffix: Sequence[str],
    **kwargs: Any,
) -> list[float]:
    """1.0 where prefix + completion + suffix is valid Python for the running version, else 0.0.

    Nothing is executed. Only meaningful where the source rows parse on their own (whole functions, dedented).
    """
    with warnings.catch_warnings():  # a completion's invalid escapes would print once per sample otherwise
        warnings.simplefilter("ignore")
        triples = zip(prefix, completions, suffix, strict=True)
        return [float(_is_python(before + text_of(completion) + after)) for before, completion, after in triples]


def text_of(completion: Completion) -> str:
    """The completion's text; a chat message's content may be None (a bare tool call), which is no text."""
    if isinstance(completion, str):
        return completion
    return (completion[-1].get("content") or "") if completion else ""


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    # ValueError: null bytes or lone surrogates; RecursionError and MemoryError: nesting deeper than the parser's stack.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
