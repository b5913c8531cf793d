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
from cogumi.stack.ranks import Ranks
from cogumi.telemetry.recorder import preserve_rng_and_mode

OTHER_PROMPTS = 16  # that each completion is compared with
MAX_EXAMPLES, MAX_DOCUMENTS = 256, 512  # a packed row holds several documents
MAX_PAIRS, MIN_PAIRS = 32, 16  # of a prompt and its completion
CLEAR_PAIRS, CLEAR_T = 8, 4.0  # so many pairs suffice if they are told apart by this t
PAIR_COST_SHARE = 0.05  # of the training's computing
PASSES_PER_EXAMPLE = 3  # of training, counted in forward passes: backward costs two
ALONE = 2  # times what it costs in a batch of eight is a row's pass by itself (SmolLM2-135M on two cores: 2.1)
IGNORED = -100

Tokens = Sequence[int]


def shared_words(documents: Sequence[tuple[Tokens, Tokens]]) -> WordOverlap | None:
    """Compare the words of (prompt, completion) token ids; None for fewer than 2 * OTHER_PROMPTS examples.

    The middle of each prompt and the tokens around it serve as a pair that does belong together.
    """
    if len(documents) < 2 * OTHER_PROMPTS:
        return None
    prompts, completions = [set(prompt) for prompt, _ in documents], [set(completion) for _, completion in documents]
    pieces, around = [], []
    for prompt, completion in documents:
        length = min(len(completion), len(prompt) // 2)
        at = (len(prompt) - length) // 2
        pieces.append(set(prompt[at : at + length]))
        around.append({*prompt[:at], *prompt[at + length :]})
    # The share of the pieces' tokens that completions use too: a few labels or digits use next to none of them.
    words = set[int]().union(*pieces)
    alike = len(words & set[int]().union(*completions)) / len(words) if words else 0.0
    return WordOverlap(students_t(gains(prompts, completions)), students_t(gains(around, pieces)), alike)


def shared_by_answers(documents: Sequence[tuple[Tokens, Tokens, Tokens]]) -> AnswerOverlap | None:
    """Compare the words of (prompt, chosen, rejected) token ids; None for fewer than 2 * OTHER_PROMPTS pairs."""
    if len(documents) < 2 * OTHER_PROMPTS:
        return None
    prompts, chosen, rejected = ([set(ids) for ids in column] for column in zip(*documents, strict=True))
    right, wrong = (gains(prompts, answers, [chosen, rejected]) for answers in (chosen, rejected))
    varies = len(set(right)) > 1 and len(set(wrong)) > 1
    return AnswerOverlap(
        pairs=len(documents),
        t=students_t([a - b for a, b in zip(right, wrong, strict=True)]),
        t_either=students_t([a + b for a, b in zip(right, wrong, strict=True)]),
        correlation=statistics.correlation(right, wrong) if varies else 1.0,
    )


def gains(
    prompts: Sequence[set[int]], answers: Sequence[set[int]], beside: Sequence[Sequence[set[int]]] = ()
) -> list[float]:
    """Return what each answer shares with its own prompt, less its mean over the next OTHER_PROMPTS prompts.

    A shared token counts log(n / examples that hold it), its inverse document frequency (Sparck Jones 1972,
    doi:10.1108/eb026526), so what every example holds, as a chat template's words, counts nothing.

    beside: all columns of answers, if there are several.
    """
    n = len(prompts)
    columns = beside or [answers]
    counts = Counter(token for parts in zip(prompts, *columns, strict=True) for token in set[int]().union(*parts))
    weight = {token: math.log(n / count) for token, count in counts.items()}

    def shared(i: int, j: int) -> float:
        return sum(weight[token] for token in prompts[i] & answers[j])

    others = range(1, OTHER_PROMPTS + 1)
    return [shared(j, j) - statistics.fmean(shared((j + k) % n, j) for k in others) for j in range(n)]


def examine_batches(trainer: Any, method: str, ranks: Ranks) -> BatchStatistics:
    """Examine what the collator of an SFT or DPO trainer makes of examples spread over the data."""
    dataset = trainer.train_dataset
    examples = [dataset[i] for i in spread(len(dataset), MAX_EXAMPLES)]
    with torch.random.fork_rng(devices=[]):  # a collator may draw, and the training must not change
        batch = trainer.data_collator(examples)
    if "labels" in batch:
        labels = batch["labels"].cpu()
    else:  # preference pairs: the ids that the completion mask leaves
        labels = torch.where(batch["completion_mask"].cpu().bool(), batch["input_ids"].cpu(), IGNORED)
    ends = end_ids(trainer.model, trainer.processing_class)
    packed = "attention_mask" not in batch
    inside = ~padding_mask(batch["position_ids"].cpu()) if packed else batch["attention_mask"].cpu().bool()
    learned = labels != IGNORED
    has_pairs = method == "sft" and bool(learned.any())
    return BatchStatistics(
        examples=len(examples),
        masked=0 if packed else int((~learned.any(-1)).sum()),
        learned=int(learned.sum()),
        pads_learned=int((learned & ~inside).sum()),
        ends=int(torch.isin(labels[learned], torch.tensor(sorted(ends), dtype=labels.dtype)).sum()) if ends else 0,
        pad_is_end=getattr(trainer.processing_class, "pad_token_id", None) in ends,
        entropy=entropy_of(labels[learned]),
        pairs=measure_pairs(trainer, ranks) if has_pairs else None,
        words=compare_words(trainer) if has_pairs else None,
        answers=compare_answers(trainer) if method == "dpo" else None,
    )


def spread(length: int, count: int) -> list[int]:
    """Return at most `count` indices, evenly over all: the first rows of a file are often alike."""
    return sorted({int(i) for i in np.linspace(0, length - 1, min(length, count))})


def entropy_of(tokens: Tensor) -> float:
    """Return the entropy of the tokens' frequencies in nats, with Miller and Madow's correction (1955)."""
    if not len(tokens):
        return 0.0
    counts = torch.unique(tokens, return_counts=True)[1].double()
    shares = counts / counts.sum()
    return float(-(shares * shares.log()).sum()) + (len(counts) - 1) / (2 * len(tokens))


def prompts_and_completions(trainer: Any, examples: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Return (prompt, rest, labels of the rest) of documents; the rest begins with the first learned token."""
    dataset, documents = trainer.train_dataset, []
    for example in (dataset[i] for i in spread(len(dataset), examples)):
        start = 0
        for length in example.get("seq_lengths") or [len(example["input_ids"])]:  # a packed row holds several
            ids = list(example["input_ids"][start : start + length])
            labels = list(example.get("labels", example["input_ids"])[start : start + length])
            start += length
            at = next((i for i, label in enumerate(labels) if label != IGNORED), 0)
            if at > 1:  # without a prompt there is nothing to belong to
                documents.append((ids[:at], ids[at:], labels[at:]))
    return documents


def compare_words(trainer: Any) -> WordOverlap | None:
    documents = prompts_and_completions(trainer, MAX_EXAMPLES)
    chosen = (documents[i] for i in spread(len(documents), MAX_DOCUMENTS))
    return shared_words([(prompt, [label for label in labels if label != IGNORED]) for prompt, _, labels in chosen])


def compare_answers(trainer: Any) -> AnswerOverlap | None:
    """Compare the words of a preference trainer's answers; None if its rows are not tokenized."""
    dataset, keys = trainer.train_dataset, ("prompt_ids", "chosen_ids", "rejected_ids")
    examples = [dataset[i] for i in spread(len(dataset), MAX_DOCUMENTS)]
    if not set(keys) <= examples[0].keys():
        return None
    return shared_by_answers([(example[keys[0]], example[keys[1]], example[keys[2]]) for example in examples])


def measure_pairs(trainer: Any, ranks: Ranks) -> PairLosses | None:
    """Measure the loss of completions after their own prompts and after the next example's.

    Stops as soon as the pairs are clearly told apart. None if the data has no prompts, or only one, and if the training is
    too short to pay for enough pairs.
    """
    documents = prompts_and_completions(trainer, MAX_PAIRS)[:MAX_PAIRS]
    distinct = len({tuple(prompt) for prompt, _, _ in documents})
    paid_passes = PAIR_COST_SHARE * PASSES_PER_EXAMPLE * count_planned_examples(trainer)
    affordable = int(paid_passes / (2 * ALONE))  # two passes a pair
    if len(documents) < MIN_PAIRS or distinct < len(documents) // 2 or affordable < CLEAR_PAIRS:
        return None
    own_losses, differences, t = [], [], 0.0
    with preserve_rng_and_mode(trainer.model):
        trainer.model.eval()
        for i, (prompt, rest, labels) in enumerate(documents[:affordable]):
            own_losses.append(loss_of(trainer, prompt, rest, labels))
            other_prompt = documents[(i + 1) % len(documents)][0]
            differences.append(loss_of(trainer, other_prompt, rest, labels) - own_losses[-1])
            is_finite = math.isfinite(differences[-1])
            if is_finite and i + 1 >= CLEAR_PAIRS:
                t = students_t(differences)
            if ranks.tell(t >= CLEAR_T or not is_finite):  # processes compute each loss together
                break
    logged_metrics(trainer, "eval").clear()  # between two evaluations there are none
    if not is_finite or (len(differences) < MIN_PAIRS and t < CLEAR_T):
        return None  # the flag for finite numbers reports those that are not
    own_mean = statistics.fmean(own_losses)
    return PairLosses(own_mean, own_mean + statistics.fmean(differences), t, trainer.state.global_step)


def count_planned_examples(trainer: Any) -> float:
    """Return how many examples the training will see in all."""
    args = trainer.args
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    examples = getattr(trainer, "examples_per_step", rows)
    if args.max_steps <= 0:
        return args.num_train_epochs * len(trainer.train_dataset) / args.world_size * examples / rows
    return args.max_steps * examples


def loss_of(trainer: Any, prompt: list[int], rest: list[int], labels: list[int]) -> float:
    ids = prompt + rest
    example = {"input_ids": ids, "labels": [IGNORED] * len(prompt) + labels, "seq_lengths": [len(ids)]}
    with torch.no_grad(), trainer.compute_loss_context_manager():
        inputs = prepared_inputs(trainer, trainer.data_collator([example]))
        return float(trainer.compute_loss(trainer.model, inputs))
