"""An optimizer step of GSPO with cogumi beside the same step of stock TRL: seconds, peak memory, what the metrics take.

`cogumi` is `GRPOConfig(loss_type="gspo")` after `cogumi.patch()`, so the trainer is watched: metrics every step, the loss
compared with the formula at the first. `stock` is TRL's trainer with the same loss spelled out by hand. Both start from
the same weights and train on the same rollout, which is sampled once and played back: sampling takes most of a real
step and would hide everything else. Without a GPU both sides have cogumi's LM head.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

import cogumi
from benchmarks.harness import OwnTime, Row, interleave, ratio_row, row, values_row
from benchmarks.models import QWEN3_0_6B, SMALL, Shape, build, word_tokenizer
from cogumi.forecast import training_step
from cogumi.rl import loss_check
from cogumi.rl.watch import watch

STEPS = 2  # optimizer steps of one rollout, and of one measurement
MICRO_BATCHES = 2  # of a step, summed by the metrics
BY_NAME = {"loss_type": "gspo"}
BY_HAND = {
    "loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0, "epsilon": 3e-4, "epsilon_high": 4e-4,
}  # fmt: skip


class Batch(NamedTuple):
    """Sequences of prompt + completion, all full length: padding would only be counted as speed it is not."""

    sequences: int
    prompt: int
    completion: int


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward that differs inside a group and costs nothing."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]


def make_trainer(
    loss: dict[str, Any],
    rollout: list[dict[str, Any]],
    shape: Shape,
    batch: Batch,
    device: str,
    dtype: torch.dtype,
    folder: str,
    steps: int = STEPS,
) -> Any:
    """A GRPOTrainer on random weights, always from the same seed; `steps` optimizer steps per `.train()`.

    It trains LoRA r16, puts the first rollout that it samples into `rollout` if that is empty, and trains on that one.
    """

    class PlayingBack(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            if not rollout:
                rollout.append(super()._generate_and_score_completions(inputs))
            torch.manual_seed(0)  # TRL shuffles it next: alike in every trainer
            return dict(rollout[0])

    model = build(shape, device, dtype)
    model.gradient_checkpointing_disable()  # it would make the step longer, and every share of it smaller
    args = trl.GRPOConfig(
        output_dir=folder, use_cpu=device == "cpu", bf16=dtype == torch.bfloat16, gradient_checkpointing=False,
        per_device_train_batch_size=batch.sequences // MICRO_BATCHES, gradient_accumulation_steps=MICRO_BATCHES,
        steps_per_generation=STEPS * MICRO_BATCHES, num_generations=batch.sequences,
        max_completion_length=batch.completion, max_steps=steps, learning_rate=1e-6, lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=device != "cpu",
        **loss,
    )  # fmt: skip
    numbers = torch.randint(2, shape.vocabulary, (STEPS, batch.prompt), generator=torch.Generator().manual_seed(0))
    prompts = [" ".join(map(str, line)) for line in numbers.tolist()]
    data, words = Dataset.from_dict({"prompt": prompts}), word_tokenizer(shape.vocabulary)
    trainer = PlayingBack(model, even_tokens, args, data, processing_class=words)
    trainer.remove_callback(PrinterCallback)
    return trainer


def both_trainers(shape: Shape, batch: Batch, device: str, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """{"cogumi", "stock"}, untrained, with one rollout between them."""
    rollout: list[dict[str, Any]] = []
    make = partial(make_trainer, rollout=rollout, shape=shape, batch=batch, device=device, dtype=dtype)
    # The sampler is a third trainer, so that neither of the two has a step behind it.
    make(BY_HAND, folder=str(folder / "sampler"), steps=1).train()
    gc.collect()
    torch.cuda.empty_cache()  # which does nothing without a GPU
    stock = make(BY_HAND, folder=str(folder / "stock"))  # before the patch, so that nothing of it is in there
    cogumi.patch()
    return {"cogumi": make(BY_NAME, folder=str(folder / "cogumi")), "stock": stock}


class Clock(TrainerCallback):
    """Times `.train()` from the start of its first step; setting up and loading are left out."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.start, self.end = trainer, 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.start = now()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end = now()

    def seconds(self) -> float:
        """Train, and return the seconds per step."""
        self.trainer.add_callback(self)
        self.trainer.train()
        self.trainer.remove_callback(self)
        return (self.end - self.start) / STEPS


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def metrics_shares(trainer: Any, repeats: int) -> list[float]:
    """The share of a step that the Watch of this trainer takes, its callbacks included, per measurement.

    Left out is what it does around a rollout: it reads three attributes and sets one.
    On a GPU each boundary waits for the card, so that kernels are counted where they were launched: an upper bound.
    """
    own, watching, clock, shares = OwnTime(now), watch(trainer), Clock(trainer), []
    trainer.compute_loss = own.ours(watching.compute_watched_loss)
    watching.compute_loss = own.theirs(watching.compute_loss)
    own.wrap(watching, "on_pre_optimizer_step", "on_step_end", "on_log")
    # The one part of the Watch that runs inside of TRL's loss.
    with mock.patch.object(loss_check, "read_trl_inputs", own.ours(loss_check.read_trl_inputs)):
        for _ in range(repeats):
            own.wall = 0.0
            step = clock.seconds()
            shares.append(own.wall / STEPS / step)
    return shares


def peak_bytes(trainer: Any, device: str) -> int:
    """What `.train()` allocates at its peak beyond what is there before: activations, gradients, new optimizer state."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with mock.patch.object(training_step, "BLOCK", 1), training_step.StorageCounter() as counter:  # to the byte
        for tensor in held(trainer):
            counter.count(tensor)
        before = counter.total
        trainer.train()
    return max(moment.total for moment in counter.moments.values()) - before


def held(trainer: Any) -> Iterator[Tensor]:
    """The tensors a trainer holds between two trainings: weights, buffers, optimizer state."""
    yield from trainer.model.parameters()
    yield from trainer.model.buffers()
    for state in trainer.optimizer.state.values() if trainer.optimizer else ():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def trained_weights(trainer: Any) -> Tensor:
    trained = (parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
    return torch.nn.utils.parameters_to_vector(trained).detach()


def step_rows(shape: Shape, batch: Batch, device: str, dtype: torch.dtype, repeats: int) -> Iterator[Row]:
    """Peak memory of the first steps, times, shares, peak memory of later steps, and whether both learned the same."""
    with tempfile.TemporaryDirectory() as folder:
        trainers = both_trainers(shape, batch, device, dtype, Path(folder))
        case = f"{shape.name}, {batch.sequences} x {batch.prompt}+{batch.completion} tokens"
        first = {name: peak_bytes(trainer, device) for name, trainer in trainers.items()}  # also the warm-up
        times = interleave({name: Clock(trainer).seconds for name, trainer in trainers.items()}, repeats, warmup=0)
        for name, seconds in times.items():
            yield values_row("gspo_step", case, f"step, {name}", seconds, "s")
        yield ratio_row("gspo_step", case, "step, cogumi / stock TRL", times, "cogumi", "stock", target="<= 1.02")

        later = {name: peak_bytes(trainer, device) for name, trainer in trainers.items()}
        yield row("gspo_step", case, "peak memory of a step, stock", later["stock"] / 2**20, "MiB")
        for steps, peaks, target in (("a step", later, "<= 1.0"), ("the first steps, proof included", first, "")):
            metric, note = (
                f"peak memory of {steps}, cogumi / stock TRL",
                f"{peaks['cogumi'] - peaks['stock']:+,d} bytes",
            )
            # To 0.01 %: what the metrics keep between two micro-batches is bytes, and the note has them.
            value = round(peaks["cogumi"] / peaks["stock"], 4)
            yield row("gspo_step", case, metric, value, "ratio", target=target, note=note)
        apart = (trained_weights(trainers["cogumi"]) - trained_weights(trainers["stock"])).abs().max().item()
        # A GPU may add up in another order each time.
        target = "<= 0" if device == "cpu" else ""
        yield row("gspo_step", case, "weights after training, max |cogumi - stock TRL|", apart, target=target)

        percent = [100 * share for share in metrics_shares(trainers["cogumi"], max(2, repeats // 3))]
        yield values_row("gspo_step", case, "metrics, share of a step", percent, "%", target="<= 1")


def run(quick: bool = False, device: str | None = None) -> Iterator[Row]:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    shape, batch = (QWEN3_0_6B, Batch(8, 512, 512)) if on_gpu else (SMALL, Batch(8, 32, 128))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    yield from step_rows(shape, batch, device, dtype, repeats=6 if quick else 30)
