"""A whole training step (forward, backward, AdamW) of LoRA r16 on random weights of real shapes: SFT and GSPO.

Tokens per second are those the model reads, prompt included. Model FLOP utilisation is
MFU = FLOP of a step / (seconds * peak), where the FLOP of a step are

    tokens * (4 * N_body + 12 * layers * heads * head_dim * T) + scored * 4 * N_head

with T the sequence length, N_body the weights of the layers' matrices, N_head = vocabulary * hidden, and `scored` the
tokens the loss looks at. 4 and not 6: under a frozen base a weight costs 2 FLOP per token forward and 2 for the
gradient to its input, and has no gradient of its own. The attention term is the usual one that does not halve for
causality. The input embedding is a look-up. Left out are LoRA's own products (a few percent) and what gradient
checkpointing computes a second time (+2 * N_body), so that full recomputation caps MFU near two thirds. Peaks are those of
cogumi.stack.gpus.

`trl` is TRL's own loss path with its Triton kernel, `cogumi` is the same with cogumi's head in the kernel's place.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import cogumi_head, first_run, memory_row, peak_memory, release, why_no_trl_kernel
from benchmarks.harness import Budget, Row, attempt, interleave, missing, ratio_row, row, values_row
from benchmarks.models import LLAMA_3_1_8B, QWEN3_0_6B, Shape, build, word_tokenizer
from cogumi.stack.gpus import find_card

# GSPO paper's clip range (arXiv 2507.18071, section 5.1).
EPSILON_LOW, EPSILON_HIGH = 3e-4, 4e-4
# cogumi's head is for machines where TRL's kernel cannot run, so on a GPU the patch changes nothing unless forced.
TRL = "trl, as cogumi leaves it on a GPU"
NEEDS_SECONDS = 75.0
CASE_SECONDS = 30.0


@dataclass(frozen=True)
class Batch:
    """Sequences of prompt + completion, all full length: padding would only be counted as speed it is not."""

    sequences: int
    prompt: int
    completion: int

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


def step_flops(shape: Shape, batch: Batch, scored: int) -> float:
    """FLOP of one step by the formula above; `scored` tokens go through the head."""
    attention = 12 * shape.layers * shape.heads * shape.head_dim * batch.length
    return batch.tokens * (4 * shape.body_weights + attention) + scored * 4 * shape.head_weights


def grpo_trainer(model: Any, device: str, dtype: torch.dtype, batch: Batch) -> Any:
    """A real GRPOTrainer around `model`, for its `_compute_loss`: it never generates, so its data are stubs."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        # With one ratio per sequence "grpo" is GSPO's own average: over tokens, then over sequences.
        args = GRPOConfig(
            output_dir=folder, use_cpu=device == "cpu", bf16=dtype == torch.bfloat16, report_to=[],
            per_device_train_batch_size=batch.sequences, num_generations=batch.sequences,
            max_completion_length=batch.completion, importance_sampling_level="sequence", loss_type="grpo", beta=0.0,
            epsilon=EPSILON_LOW, epsilon_high=EPSILON_HIGH,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": ["2"]})
        trainer = GRPOTrainer(model, lambda **_: [], args, data, processing_class=word_tokenizer(3))
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@contextmanager
def head_patch() -> Iterator[None]:
    """cogumi's head in TRL's place, for the time of one step.

    What `cogumi.patches.fused_head.apply(force=True)` does, without its check of TRL's sources, which costs as much as
    a small step: call `check_upstream()` once before.
    """
    import trl.trainer.utils as upstream

    from cogumi.patches.head_logps import FusedLogProbFunction

    with mock.patch.object(upstream, "_ChunkedLogProbFunction", FusedLogProbFunction):
        yield


def contenders(through_trl: Callable[[], torch.Tensor], device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """TRL's loss with cogumi's head, and as it is where its kernel runs."""
    from cogumi.patches import fused_head

    def patched() -> torch.Tensor:
        with head_patch():
            return through_trl()

    fused_head.check_upstream()
    return {"cogumi": patched} if why_no_trl_kernel(device) else {"cogumi head, forced": patched, TRL: through_trl}


def sft_case(model: Any, shape: Shape, batch: Batch, device: str, dtype: torch.dtype, repeats: int) -> Iterator[Row]:
    """SFT on random tokens, every one of them but the first of a sequence a target."""
    from trl.trainer.utils import add_fused_lm_head

    ids = torch.randint(shape.vocabulary, (batch.sequences, batch.length), device=device)
    # With the outputs SFTTrainer asks for, for its metrics.
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))
    # As SFTTrainer.compute_loss (TRL 1.15), on a model given TRL's fused forward.
    losses = contenders(lambda: model(input_ids=ids, labels=ids, fused_lm_head=True).loss, device)
    flops = step_flops(shape, batch, scored=batch.sequences * (batch.length - 1))
    yield from step_rows(f"SFT {shape.name}", model, losses, batch, flops, device, dtype, repeats)


def gspo_case(model: Any, shape: Shape, batch: Batch, device: str, dtype: torch.dtype, repeats: int) -> Iterator[Row]:
    """GSPO on one group of given completions: the trainer's share of an RL step, without the sampler's."""
    prompt = torch.randint(shape.vocabulary, (1, batch.prompt), device=device).repeat(batch.sequences, 1)
    completion = torch.randint(shape.vocabulary, (batch.sequences, batch.completion), device=device)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": torch.linspace(-1, 1, batch.sequences, device=device),
    }
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        base, ids = model.get_base_model(), torch.cat([prompt, completion], dim=1)
        hidden = base.get_decoder()(input_ids=ids).last_hidden_state[:, batch.prompt - 1 : -1]
        logps = cogumi_head(hidden.flatten(0, 1), base.get_output_embeddings().weight, completion.flatten())
        inputs["old_per_token_logps"] = logps.view(completion.shape)
    trainer = grpo_trainer(model, device, dtype, batch)
    losses = contenders(partial(trainer._compute_loss, model, inputs), device)
    flops = step_flops(shape, batch, scored=batch.sequences * batch.completion)
    yield from step_rows(f"GSPO {shape.name}", model, losses, batch, flops, device, dtype, repeats)


def step_rows(
    case: str,
    model: Any,
    losses: dict[str, Callable[[], torch.Tensor]],
    batch: Batch,
    flops: float,
    device: str,
    dtype: torch.dtype,
    repeats: int,
) -> Iterator[Row]:
    """Steps of each loss in turn on the same model. They train it as they go, which changes no step's cost."""
    case = f"{case}, {batch.sequences} x {batch.prompt}+{batch.completion} tokens"
    if TRL not in losses:
        yield missing("gpu_steps", f"{case}: trl", why_no_trl_kernel(device) or "")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5, fused=device.startswith("cuda"))

    def step(loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
        # As the trainers do it: bf16 products, LoRA's own weights kept in fp32.
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    work: dict[str, Callable[[], torch.Tensor]] = {}
    start = time.perf_counter()
    for name, loss_of in losses.items():
        once = partial(step, loss_of)
        if problem := first_run("gpu_steps", f"{case}: {name}", once):
            optimizer.zero_grad(set_to_none=True)  # a backward pass cut short leaves gradients behind
            yield problem
        else:
            work[name] = once

    # On a slow card fewer repetitions rather than a case that never ends.
    first = time.perf_counter() - start
    times = interleave(work, max(2, min(repeats, int(CASE_SECONDS / first))))
    name_of_card = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    card = find_card(name_of_card)
    for name, measured in work.items():
        here, seconds = f"{case}: {name}", statistics.median(times[name])
        yield values_row("gpu_steps", here, "step", times[name], "s")
        yield values_row("gpu_steps", here, "throughput", [batch.tokens / each for each in times[name]], "token/s")
        if card is None or card.peak is None:
            yield row(
                "gpu_steps", here, "MFU", None, note=f"missing: the peak bf16 rate of {name_of_card!r} is unknown"
            )
        else:
            note = f"{flops / 1e12:.1f} TFLOP a step, peak {card.peak / 1e12:.0f} TFLOP/s"
            yield row("gpu_steps", here, "MFU", 100 * flops / seconds / card.peak, "%", note=note)
        release()
        loss, memory = peak_memory(device, measured)
        yield memory_row("gpu_steps", here, "peak memory", memory)
        # A step that computes nonsense has no speed worth knowing.
        yield row("gpu_steps", here, "loss", loss.item(), ok=math.isfinite(loss.item()))
    ours = next(iter(losses))
    for peer in (name for name in work if ours in work and name != ours):
        yield ratio_row("gpu_steps", case, f"time, {ours} / {peer}", times, ours, peer)


def run(quick: bool = False, device: str = "cuda", budget: Budget | None = None) -> Iterator[Row]:
    dtype, repeats = torch.bfloat16, 3 if quick else 7
    batches = {QWEN3_0_6B: Batch(8, 512, 1536), LLAMA_3_1_8B: Batch(4, 512, 1536)}
    for shape in [QWEN3_0_6B] if quick else batches:
        work = partial(shape_cases, shape, batches[shape], device, dtype, repeats, budget)
        yield from attempt("gpu_steps", shape.name, work, budget, NEEDS_SECONDS)
        release()


def shape_cases(
    shape: Shape, batch: Batch, device: str, dtype: torch.dtype, repeats: int, budget: Budget | None
) -> Iterator[Row]:
    """Both steps of one model, built once."""
    built: list[Any] = []
    if problem := first_run(
        "gpu_steps", f"{shape.name}: building it", lambda: built.append(build(shape, device, dtype))
    ):
        yield problem
        return
    for name, case in (("SFT", sft_case), ("GSPO", gspo_case)):
        work = partial(case, built[0], shape, batch, device, dtype, repeats)
        yield from attempt("gpu_steps", f"{name} {shape.name}", work, budget, NEEDS_SECONDS / 2)
        release()
