"""Do completions belong to their prompts, asked of their words alone: do they share rarer ones with their own prompt
than with those of other examples. It needs no model, so that it tells a weak model from shuffled rows."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from cogumi.training.flags import Answers, Words

OTHERS = 16  # prompts of other examples that each completion is held against

Tokens = Sequence[int]


def shared_words(documents: Sequence[tuple[Tokens, Tokens]]) -> Words | None:
    """Of (prompt, completion) token ids, in the order of the data. None for fewer than twice OTHERS examples.

    The same is asked of a piece of each prompt and the rest of it, which do belong together: where these share words and
    the completions are written in the same ones, but completions and prompts share none, the rows are in another order.
    """
    if len(documents) < 2 * OTHERS:
        return None
    prompts, completions = [set(prompt) for prompt, _ in documents], [set(rest) for _, rest in documents]
    pieces, others = zip(*(piece_and_rest(prompt, len(rest)) for prompt, rest in documents), strict=True)
    return Words(
        examples=len(documents),
        t=nearer_to_its_own(prompts, completions),
        t_within=nearer_to_its_own(others, pieces),
        alike=alike(completions, pieces),
    )


def shared_by_answers(documents: Sequence[tuple[Tokens, Tokens, Tokens]]) -> Answers | None:
    """Of (prompt, chosen answer, rejected answer) token ids. None for fewer than twice OTHERS pairs.

    Where only one answer of a pair is about its prompt, what the two share with it does not rise and fall together; where
    both are, it does.
    """
    if len(documents) < 2 * OTHERS:
        return None
    prompts, chosen, rejected = ([set(each) for each in column] for column in zip(*documents, strict=True))
    weight = weights([*zip(prompts, chosen, rejected, strict=True)])
    right, wrong = gains(prompts, chosen, weight), gains(prompts, rejected, weight)
    vary = len(set(right)) > 1 and len(set(wrong)) > 1
    return Answers(
        pairs=len(documents),
        t=students_t([a - b for a, b in zip(right, wrong, strict=True)]),
        t_either=students_t([a + b for a, b in zip(right, wrong, strict=True)]),
        together=statistics.correlation(right, wrong) if vary else 1.0,
    )


def piece_and_rest(prompt: Tokens, length: int) -> tuple[set[int], set[int]]:
    """As many tokens as the completion has, but at most half, from the middle of a prompt; and the tokens around them."""
    length = min(length, len(prompt) // 2)
    at = (len(prompt) - length) // 2
    return set(prompt[at : at + length]), {*prompt[:at], *prompt[at + length :]}


def nearer_to_its_own(prompts: Sequence[set[int]], completions: Sequence[set[int]]) -> float:
    """Student's t of what completions share with their own prompt beyond what they share with others'."""
    return students_t(gains(prompts, completions, weights([*zip(prompts, completions, strict=True)])))


def weights(examples: Sequence[tuple[set[int], ...]]) -> dict[int, float]:
    """What a shared token counts: log(n / examples that hold it), its inverse document frequency (Sparck Jones 1972,
    doi:10.1108/eb026526). What every example holds, as a chat template's words, counts nothing."""
    holds = Counter(token for parts in examples for token in set[int]().union(*parts))
    return {token: math.log(len(examples) / count) for token, count in holds.items()}


def gains(prompts: Sequence[set[int]], answers: Sequence[set[int]], weight: dict[int, float]) -> list[float]:
    """For each example: what the answer shares with its own prompt, less what it shares with the next OTHERS on average."""
    n = len(prompts)

    def share(i: int, j: int) -> float:
        return sum(weight[token] for token in prompts[i] & answers[j])

    return [share(j, j) - statistics.fmean(share((j + k) % n, j) for k in range(1, OTHERS + 1)) for j in range(n)]


def students_t(values: Sequence[float]) -> float:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) / error if error > 0 else 0.0


def alike(completions: Sequence[set[int]], pieces: Sequence[set[int]]) -> float:
    """The share of the pieces' distinct tokens that completions use too: a few labels or digits use next to none of them."""
    words = set[int]().union(*pieces)
    return len(words & set[int]().union(*completions)) / len(words) if words else 0.0
