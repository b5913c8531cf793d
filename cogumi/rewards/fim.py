"""Rewards for fill-in-the-middle completions, as TRL's GRPO trainer calls them.

Every function takes the batch as equally long lists and returns one float in 0..1 per completion. `middle`, `prefix`
and `suffix` are the columns that `cogumi.data.fim.prompts_for_rl` writes. A completion is a string, or a list of chat
messages of which the last one counts.
"""

import ast
import difflib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from rapidfuzz.distance import Levenshtein

from cogumi.errors import UsageError

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
    return [float(_text(completion) == expected) for completion, expected in pairs]


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
    return [Levenshtein.normalized_similarity(_text(completion), expected) for completion, expected in pairs]


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
        return [float(_is_python(before + _text(completion) + after)) for before, completion, after in triples]


REWARDS: dict[str, Callable[..., list[float]]] = {
    "exact_match": exact_match,
    "edit_similarity": edit_similarity,
    "parses": parses,
}
"""What a YAML may name."""


def fim_rewards(names: Sequence[str]) -> list[Any]:
    """The reward functions of these names, in this order. Raises UsageError for a name that is not in `REWARDS`.

    Typed as Any, because trl's `reward_funcs` is an invariant list of a union that no list of functions matches.
    """
    for name in names:
        if name not in REWARDS:
            near = difflib.get_close_matches(name, REWARDS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"no FIM reward {name!r}; {hint}there are: {', '.join(REWARDS)}")
    return [REWARDS[name] for name in names]


def _text(completion: Completion) -> str:
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
