"""Checks the training data before the first step: its batches, and whether completions belong to their prompts.

A completion should share more words with its own prompt than with other examples' prompts. Counting words needs no
model, so it separates a weak model from shuffled rows. `measure_pairs` is the only check that runs the model.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cogumi.data.packing import padding_mask
from cogumi.health.flags import AnswerOverlap, BatchStatistics, PairLosses, WordOverlap, students_t
from cogumi.models.completion import end_ids
from cogumi.patches.trl_internals import logged_metrics, prepared_inputs
from cogumi.telemetry.recorder import preserve_rng_and_mode

OTHERS = 16  # prompts of other examples that each completion is held against
EXAMPLES = 256
DOCUMENTS = 512  # whose words are compared: packed rows hold several each
PAIRS = 32
IGNORED = -100

Tokens = Sequence[int]


def shared_words(documents: Sequence[tuple[Tokens, Tokens]]) -> WordOverlap | None:
    """Of (prompt, completion) token ids, and of a piece of each prompt and the rest of it, which do belong together.
    None for fewer than twice OTHERS examples."""
    if len(documents) < 2 * OTHERS:
        return None
    prompts, completions = [set(prompt) for prompt, _ in documents], [set(rest) for _, rest in documents]
    pieces, others = zip(*(middle_and_rest(prompt, len(rest)) for prompt, rest in documents), strict=True)
    # The share of the pieces' tokens that completions use too: a few labels or digits use next to none of them.
    words = set[int]().union(*pieces)
    alike = len(words & set[int]().union(*completions)) / len(words) if words else 0.0
    t, t_within = students_t(gains(prompts, completions)), students_t(gains(others, pieces))
    return WordOverlap(t, t_within, alike)


def shared_by_answers(documents: Sequence[tuple[Tokens, Tokens, Tokens]]) -> AnswerOverlap | None:
    """Of (prompt, chosen answer, rejected answer) token ids. None for fewer than twice OTHERS pairs."""
    if len(documents) < 2 * OTHERS:
        return None
    prompts, chosen, rejected = ([set(each) for each in column] for column in zip(*documents, strict=True))
    right, wrong = (gains(prompts, each, [chosen, rejected]) for each in (chosen, rejected))
    return AnswerOverlap(
        pairs=len(documents),
        t=students_t([a - b for a, b in zip(right, wrong, strict=True)]),
        t_either=students_t([a + b for a, b in zip(right, wrong, strict=True)]),
        together=statistics.correlation(right, wrong) if len(set(right)) > 1 and len(set(wrong)) > 1 else 1.0,
    )


def middle_and_rest(prompt: Tokens, length: int) -> tuple[set[int], set[int]]:
    """As many tokens as the completion has, but at most half, from the middle of a prompt; and the tokens around them."""
    length = min(length, len(prompt) // 2)
    at = (len(prompt) - length) // 2
    return set(prompt[at : at + length]), {*prompt[:at], *prompt[at + length :]}


def gains(
    prompts: Sequence[set[int]], answers: Sequence[set[int]], beside: Sequence[Sequence[set[int]]] = ()
) -> list[float]:
    """For each example: what the answer shares with its own prompt, less what it shares with the next OTHERS on average.

    A shared token counts log(n / examples that hold it), its inverse document frequency (Sparck Jones 1972,
    doi:10.1108/eb026526). What every example holds, as a chat template's words, counts nothing. beside: all answers.
    """
    n = len(prompts)
    holds = Counter(
        token for parts in zip(prompts, *(beside or [answers]), strict=True) for token in set[int]().union(*parts)
    )
    weight = {token: math.log(n / count) for token, count in holds.items()}

    def share(i: int, j: int) -> float:
        return sum(weight[token] for token in prompts[i] & answers[j])

    return [share(j, j) - statistics.fmean(share((j + k) % n, j) for k in range(1, OTHERS + 1)) for j in range(n)]


def examine_batches(trainer: Any, method: str) -> BatchStatistics:
    """What the collator of an SFT or DPO trainer makes of examples spread over the data, and whether texts belong together."""
    dataset = trainer.train_dataset
    examples = [dataset[i] for i in spread(len(dataset), EXAMPLES)]
    with torch.random.fork_rng(devices=[]):  # a collator may draw, and the training is to be the one without this look
        batch = trainer.data_collator(examples)
    if "labels" in batch:
        labels = batch["labels"].cpu()
    else:  # preference pairs: the ids that the completion mask leaves
        labels = torch.where(batch["completion_mask"].cpu().bool(), batch["input_ids"].cpu(), IGNORED)
    ends = end_ids(trainer.model, trainer.processing_class)
    packed = "attention_mask" not in batch
    inside = ~padding_mask(batch["position_ids"].cpu()) if packed else batch["attention_mask"].cpu().bool()
    learned = labels != IGNORED
    return BatchStatistics(
        examples=len(examples),
        masked=0 if packed else int((~learned.any(-1)).sum()),
        learned=int(learned.sum()),
        pads_learned=int((learned & ~inside).sum()),
        ends=int(torch.isin(labels[learned], torch.tensor(sorted(ends), dtype=labels.dtype)).sum()) if ends else 0,
        pad_is_end=getattr(trainer.processing_class, "pad_token_id", None) in ends,
        entropy=entropy_of(labels[learned]),
        pairs=measure_pairs(trainer) if method == "sft" and learned.any() else None,
        words=shared_words_of(trainer) if method == "sft" and learned.any() else None,
        answers=shared_words_of_answers(trainer) if method == "dpo" else None,
    )


def spread(length: int, wanted: int) -> list[int]:
    """At most `wanted` indices, evenly over all: the first rows of a file are often alike."""
    return sorted({int(i) for i in np.linspace(0, length - 1, min(length, wanted))})


def entropy_of(tokens: Tensor) -> float:
    """Entropy of the tokens' frequencies in nats, with Miller and Madow's correction for a finite sample (1955)."""
    if not len(tokens):
        return 0.0
    counts = torch.unique(tokens, return_counts=True)[1].double()
    shares = counts / counts.sum()
    return float(-(shares * shares.log()).sum()) + (len(counts) - 1) / (2 * len(tokens))


def prompts_and_completions(trainer: Any, examples: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, rest, labels of the rest) of each document of some examples; the rest begins with the first learned token."""
    dataset, found = trainer.train_dataset, []
    for example in (dataset[i] for i in spread(len(dataset), examples)):
        start = 0
        for length in example.get("seq_lengths") or [len(example["input_ids"])]:  # of packed rows, several
            ids = list(example["input_ids"][start : start + length])
            labels = list(example.get("labels", example["input_ids"])[start : start + length])
            start += length
            at = next((i for i, label in enumerate(labels) if label != IGNORED), 0)
            if at > 1:  # without a prompt there is nothing to belong to
                found.append((ids[:at], ids[at:], labels[at:]))
    return found


def shared_words_of(trainer: Any) -> WordOverlap | None:
    pieces = prompts_and_completions(trainer, EXAMPLES)
    some = ((pieces[i][0], pieces[i][2]) for i in spread(len(pieces), DOCUMENTS))
    return shared_words([(prompt, [each for each in labels if each != IGNORED]) for prompt, labels in some])


def shared_words_of_answers(trainer: Any) -> AnswerOverlap | None:
    """The same of a preference trainer's chosen and rejected answers; None where its rows are no tokens."""
    dataset = trainer.train_dataset
    examples = [dataset[i] for i in spread(len(dataset), DOCUMENTS)]
    if not {"prompt_ids", "chosen_ids", "rejected_ids"} <= examples[0].keys():
        return None
    return shared_by_answers([(each["prompt_ids"], each["chosen_ids"], each["rejected_ids"]) for each in examples])


def measure_pairs(trainer: Any) -> PairLosses | None:
    """The loss of completions after their own prompts and after the next example's, by the trainer's own loss, in some
    2 * PAIRS forward passes. None where the data has no prompts, or only one."""
    pieces = prompts_and_completions(trainer, PAIRS)[:PAIRS]
    if len(pieces) < PAIRS // 2 or len({tuple(prompt) for prompt, _, _ in pieces}) < len(pieces) // 2:
        return None
    others = [*pieces[1:], pieces[0]]
    with preserve_rng_and_mode(trainer.model):
        trainer.model.eval()
        own = [loss_of(trainer, prompt, rest, labels) for prompt, rest, labels in pieces]
        other = [loss_of(trainer, others[i][0], rest, labels) for i, (_, rest, labels) in enumerate(pieces)]
    logged_metrics(trainer, "eval").clear()  # between two evaluations there are none
    gains = [b - a for a, b in zip(own, other, strict=True)]
    if not all(map(math.isfinite, gains)):
        return None  # the flag for finite numbers will say so
    return PairLosses(statistics.fmean(own), statistics.fmean(other), students_t(gains), trainer.state.global_step)


def loss_of(trainer: Any, prompt: list[int], rest: list[int], labels: list[int]) -> float:
    ids = prompt + rest
    example = {"input_ids": ids, "labels": [IGNORED] * len(prompt) + labels, "seq_lengths": [len(ids)]}
    with torch.no_grad(), trainer.compute_loss_context_manager():
        inputs = prepared_inputs(trainer, trainer.data_collator([example]))
        return float(trainer.compute_loss(trainer.model, inputs))
