"""Tokens that a training has worked through, tokens per second, and MFU.

Tokens are those of the batches that the loss is computed on, prompts and completions, each time that they are: a step that
was made again after a kill counts again, as do its seconds.
"""

import functools
import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cogumi.data.packing import padding_of
from cogumi.training.flops import Work, peak_flops, work_of
from cogumi.training.meter import Meter

log = logging.getLogger("cogumi")
ROLLOUT = "rollout"


@dataclass
class Counts:
    """Sums over the batches of a training."""

    tokens: float = 0.0
    """Without padding."""
    padded_tokens: float = 0.0
    """With it."""
    squared: float = 0.0
    """Of the lengths of the documents: over `tokens` it is the mean length among which a token attends."""
    completions: float = 0.0
    step_seconds: float = 0.0
    """Of the steps, rollouts and reading data in them; not what lies between them: saving, logging, evaluation."""
    rollout_seconds: float = 0.0

    def since(self, before: "Counts") -> "Counts":
        return Counts(**{key: value - getattr(before, key) for key, value in asdict(self).items()})


class Throughput:
    """Counts what one trainer's loss is computed on, by looking at the batches that its `compute_loss` is given.

    Sums stay on the device until `read`, which waits for it: call it where the trainer has just waited for a loss.
    """

    def __init__(self, trainer: Any, meter: Meter) -> None:
        self.meter = meter
        self.total = Counts(**meter.counts)
        self.last = Counts(**meter.counts)
        self.on_device: Tensor | None = None
        self.recomputes = bool(trainer.args.gradient_checkpointing)
        self.work, self.peak, self.no_mfu = costs_of(trainer.model)
        self.count_tokens(trainer)
        if hasattr(trainer, "_generate_and_score_completions"):  # TRL 1.15's GRPOTrainer, and unsloth's
            self.time_rollouts(trainer)

    def count_tokens(self, trainer: Any) -> None:
        compute_loss = trainer.compute_loss

        @functools.wraps(compute_loss)
        def counting(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if model.training:
                self.add(inputs)
            return compute_loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = counting

    def time_rollouts(self, trainer: Any) -> None:
        """A rollout ends in texts and rewards, on the host: its seconds are the clock's."""
        generate = trainer._generate_and_score_completions

        @functools.wraps(generate)
        def timed(inputs: Any) -> Any:
            if not trainer.model.training:  # of an evaluation
                return generate(inputs)
            before = self.meter.seconds().get(ROLLOUT, 0.0)
            with self.meter.inside(ROLLOUT):
                batch = generate(inputs)
            self.total.rollout_seconds += self.meter.seconds()[ROLLOUT] - before
            self.total.completions += len(batch["completion_ids"])
            return batch

        trainer._generate_and_score_completions = timed

    def add(self, inputs: dict[str, Any]) -> None:
        lengths_squared, tokens, padded = documents_of(inputs)
        self.total.padded_tokens += padded
        sums = torch.stack([tokens, lengths_squared])
        self.on_device = sums if self.on_device is None else self.on_device + sums

    def read(self) -> None:
        """Take what is on the device into the totals, and leave them where the heartbeat finds them."""
        if self.on_device is not None:
            tokens, squared = self.on_device.tolist()
            self.total.tokens += tokens
            self.total.squared += squared
            self.on_device = None
        self.meter.counts = asdict(self.total)

    def window(self) -> Counts:
        """What was done since this was last asked."""
        self.read()
        done = self.total.since(self.last)
        self.last = Counts(**asdict(self.total))
        return done

    def tokens_per_second(self, done: Counts) -> float | None:
        """Tokens without padding, over steps and the rollouts in them."""
        return done.tokens / done.step_seconds if done.tokens and done.step_seconds > 0 else None

    def mfu(self, done: Counts) -> float | None:
        """The share of the card's peak, of the seconds of steps without their rollouts (which no formula here counts)."""
        return (
            self.share_of_peak(done, self.work.model(done.squared / done.tokens)) if self.work and done.tokens else None
        )

    def hfu(self, done: Counts) -> float | None:
        """The same of the work done, what gradient checkpointing repeats with it."""
        if not self.work or not done.tokens:
            return None
        return self.share_of_peak(done, self.work.hardware(done.squared / done.tokens, self.recomputes))

    def share_of_peak(self, done: Counts, flop_per_token: float) -> float | None:
        seconds = done.step_seconds - done.rollout_seconds
        return done.tokens * flop_per_token / seconds / self.peak if self.peak and seconds > 0 else None


def costs_of(model: Any) -> tuple[Work | None, float | None, str | None]:
    """(what a token costs, the card's peak in FLOP/s, why there is no MFU)."""
    try:
        work = work_of(model)
    except ValueError as error:
        return None, None, f"{error}"
    if not torch.cuda.is_available():
        return work, None, "no GPU"
    card = torch.cuda.get_device_name()
    peak = peak_flops(card)
    return work, peak, None if peak else f"the peak of {card} is not in cogumi's table (cogumi/training/flops.py)"


def documents_of(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """(sum of the squared lengths of the documents, tokens, tokens with padding) of a batch, the first two on its device.

    inputs: of TRL's trainers: prompt and completion apart (GRPO), rows with an attention mask (SFT, DPO), or rows without
    mask whose positions start anew with each document (packing): there the sum over positions p of 2 p + 1 is n^2, and
    rows beside each other are padded.
    """
    if "completion_ids" in inputs:
        lengths = inputs["prompt_mask"].sum(-1) + inputs["completion_mask"].sum(-1)
        padded = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        return lengths.square().sum(), lengths.sum(), padded
    ids: Tensor = inputs["input_ids"]
    if inputs.get("attention_mask") is not None:
        lengths = inputs["attention_mask"].sum(-1)
        return lengths.square().sum(), lengths.sum(), ids.numel()
    if inputs.get("position_ids") is not None:
        positions: Tensor = inputs["position_ids"]
        padding = padding_of(positions).sum()
        return (2 * positions + 1).sum() - padding, ids.numel() - padding, ids.numel()
    tokens = torch.tensor(ids.numel(), device=ids.device)
    return tokens * ids.shape[-1], tokens, ids.numel()
