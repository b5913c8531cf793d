"""Turn documents per optimizer step into TRL's batch settings: exact, with as large a micro-batch as the memory allows.

A *document* is one completion. `per_device_train_batch_size` documents go through the model at once; times
`gradient_accumulation_steps` they are one optimizer step. `steps_per_generation` such micro-batches are one rollout.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from datasets import Dataset, concatenate_datasets

from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_memory
from cogumi.patches.gspo_loss import trl_defaults

# Share of the free memory that a step may take: the allocator's rounding and fragments get the rest.
USABLE = 0.9
# TRL's fused head (trl/kernels/chunked_logprob.py): tokens x vocabulary entries of one tile of logits, in fp32.
HEAD_TILE = (4096, 32768)
VLLM_SHARE = 0.3  # trl.GRPOConfig's vllm_gpu_memory_utilization
# vLLM's CUDA graphs and kernels, which stay while the engine sleeps: an allowance that no card has confirmed here.
GRAPHS = 2**30


@dataclass(frozen=True)
class ModelShape:
    """The sizes that a decoder's activations depend on, in elements and layers."""

    hidden_size: int
    intermediate_size: int
    layers: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Read a transformers config; an MLP whose width it does not name is 4 hidden sizes wide (GPT-2)."""
        text = config.get_text_config()
        hidden = text.hidden_size
        widths = [getattr(text, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim")]
        intermediate = next((width for width in widths if width), 4 * hidden)
        if experts := getattr(text, "num_experts_per_tok", None):
            intermediate = experts * (getattr(text, "moe_intermediate_size", None) or intermediate)
        return cls(hidden, intermediate, text.num_hidden_layers, text.vocab_size)


def plan_batch(
    documents: int,
    *,
    num_generations: int,
    shape: ModelShape,
    longest_prompt: int,
    max_completion_length: int,
    free_bytes: int,
    per_device_train_batch_size: int | None,
    mini_batches_per_rollout: int,
    bytes_per_element: int,
    gradient_checkpointing: bool,
) -> tuple[dict[str, int], str]:
    """Return the largest micro-batch that divides the step exactly and fits, as GRPOConfig arguments, and a line with why.

    documents: of an optimizer step, which `refuse_uneven` lets through. Lengths are in tokens. free_bytes: left for
    activations beside weights, gradients and optimizer state. A micro-batch that is set stays. Raises UsageError where
    none fits.
    """
    free_bytes = max(0, free_bytes)  # negative where weights and optimizer alone do not fit
    usable, length = int(USABLE * free_bytes), longest_prompt + max_completion_length
    sizes = (n for n in range(documents, 0, -1) if documents % n == 0)
    need = {n: step_bytes(n, shape, length, bytes_per_element, gradient_checkpointing) for n in sizes}
    micro_batch = per_device_train_batch_size or next((n for n in need if need[n] <= usable), None)
    if micro_batch is None:
        raise UsageError(
            f"not even one document fits: {longest_prompt} prompt + {max_completion_length} completion tokens need "
            f"about {format_memory(need[1])}, {format_memory(usable)} of {format_memory(free_bytes)} free are usable",
            fix="lower train.max_completion_length, or set train.gradient_checkpointing: true",
        )
    reason = f"estimated {format_memory(need[micro_batch])} of {format_memory(usable)} usable"
    if need[micro_batch] > usable:
        reason += ": more than there is, by the estimate"
    accumulation = documents // micro_batch
    prompts = documents * mini_batches_per_rollout // num_generations
    line = (
        f"{documents} documents per step = micro-batches of {micro_batch} x {accumulation} accumulated ({reason}); "
        f"a rollout is {prompts} prompts x {num_generations} completions, {mini_batches_per_rollout} optimizer steps"
    )
    return {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * mini_batches_per_rollout,
        "num_generations": num_generations,
    }, line


def count_documents(documents_per_step: int | None, prompts_per_step: int | None, num_generations: int) -> int:
    """Return the documents per optimizer step, set by one or both numbers. Raises UsageError where the two differ."""
    documents = prompts_per_step * num_generations if prompts_per_step else documents_per_step
    assert documents is not None
    if documents_per_step not in (None, documents):
        product = f"cogumi.prompts_per_step {prompts_per_step} x train.num_generations {num_generations} is {documents}"
        raise UsageError(f"cogumi.docs_per_step is {documents_per_step}, and {product}", fix="drop one of the two")
    return documents


def refuse_uneven(
    documents: int,
    prompts_per_step: int | None,
    num_generations: int,
    mini_batches_per_rollout: int,
    micro_batch: int | None,
) -> None:
    """Raise UsageError, naming the nearest sizes below and above that work, where a step or rollout has a remainder."""
    # Whole groups in a rollout: documents * mini_batches_per_rollout is a multiple of num_generations.
    whole_groups = num_generations // math.gcd(num_generations, mini_batches_per_rollout)
    unit = math.lcm(micro_batch or 1, whole_groups)
    if documents % unit == 0:
        return
    reason = f"a rollout of {mini_batches_per_rollout} steps holds no whole groups of train.num_generations {num_generations}"
    if micro_batch and documents % micro_batch:
        reason = f"train.per_device_train_batch_size {micro_batch} does not divide it"
    setting, sizes = f"cogumi.docs_per_step {documents}", nearest_multiples(documents, unit)
    if prompts_per_step is not None:
        setting = f"cogumi.prompts_per_step {prompts_per_step} x train.num_generations {num_generations}"
        sizes = nearest_multiples(prompts_per_step, math.lcm(unit, num_generations) // num_generations) + " prompts"
    raise UsageError(f"{setting} cannot be cut up exactly: {reason}", fix=f"take {sizes}")


def nearest_multiples(number: int, unit: int) -> str:
    """Return "24 or 32": the multiples of `unit` around a number that is none; without 0."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def step_bytes(
    documents: int, shape: ModelShape, length: int, bytes_per_element: int, gradient_checkpointing: bool
) -> int:
    """Estimate, as an upper bound, by how many bytes one micro-batch of `documents` raises memory at its peak.

    Activations are counted as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4). h is the hidden size, I the
    MLP's, e the bytes per element and s the length to which every document is padded, in tokens. Per token and layer:

    * (16 h + 4 I) e: what autograd keeps, for a gated MLP, RMSNorm and rotary embeddings; with LoRA on every linear layer
      under autocast it keeps about 0.8 times that. Without autocast PEFT's fp32 copies take more than e = 2 counts.
    * with gradient checkpointing only h e, and one layer in full while it is computed again.

    These count once: gradients in flight, the attention mask, and at the head hidden states in fp32 and two tiles of
    logits; without a GPU nine, as torch's operators make one each, and a buffer of full width. Weights, their gradients,
    optimizer state, the scores of eager attention, the rollout's KV cache and a reference model are left out. The
    forecast on fake tensors (`cogumi.forecast`) counts all of them.
    """
    h, inner, e = shape.hidden_size, shape.intermediate_size, bytes_per_element
    tokens = documents * length
    layer = (16 * h + 4 * inner) * e
    saved = shape.layers * h * e + layer if gradient_checkpointing else shape.layers * layer
    in_flight = (2 * h + 2 * inner) * e + 2 * h * 4  # the last: at the head
    mask = documents * length**2 * (1 + e)
    rows = min(tokens, HEAD_TILE[0])
    tile = rows * min(shape.vocabulary, HEAD_TILE[1]) * 4
    head = 2 * tile if torch.cuda.is_available() else 9 * tile + rows * HEAD_TILE[1] * e
    return tokens * (saved + in_flight) + mask + head


def free_memory_bytes() -> int:
    """Return what this process can still allocate: on the current GPU with PyTorch's unused cache, else in main memory."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return int(psutil.virtual_memory().available)


def total_memory_bytes() -> int:
    """Return the memory of the current GPU, in use or not, as vLLM counts its share; 0 without one."""
    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else 0


def samples_beside(train: Mapping[str, Any]) -> bool:
    """Return whether vLLM's engine shares the card with the training."""
    return bool(train.get("use_vllm")) and train.get("vllm_mode", "colocate") == "colocate"


def engine_share(train: Mapping[str, Any]) -> float:
    """Return the share of the card that vLLM takes: the config's, or TRL's."""
    share = train.get("vllm_gpu_memory_utilization")
    return float(VLLM_SHARE if share is None else share)


def engine_bytes(train: Mapping[str, Any], card: int) -> int:
    """Return what vLLM holds of a card of so many bytes beside a training step. train: the section of a config.

    Asleep it keeps its CUDA graphs: TRL's level 2 discards weights and KV cache.
    """
    if not samples_beside(train):
        return 0
    return min(GRAPHS, card) if train.get("vllm_enable_sleep_mode") else math.ceil(engine_share(train) * card)


def repeat_to_rollout(dataset: Dataset, prompts_per_rollout: int) -> tuple[Dataset, str | None]:
    """Return the data set, repeated where it has fewer prompts than one rollout, and a line that says so."""
    prompts = len(dataset)
    if prompts >= prompts_per_rollout:
        return dataset, None
    times = math.ceil(prompts_per_rollout / prompts)
    line = f"{prompts} prompts repeated {times} times: one rollout takes {prompts_per_rollout} prompts"
    return concatenate_datasets([dataset] * times), line


def check_groups(arguments: Mapping[str, Any]) -> None:
    """Refuse, before GRPOConfig is built from `arguments`, groups that TRL would refuse and unsloth would change.

    Unsloth's generated config sets per_device_train_batch_size to num_generations instead, and trains on another batch
    than was asked for. Raises UsageError with the nearest valid batch sizes.
    """
    micro = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    defaults = trl_defaults((*micro, "num_generations", "generation_batch_size"))
    values = defaults | {key: value for key, value in arguments.items() if value is not None}
    group, per_device = values["num_generations"], values["per_device_train_batch_size"]
    refuse_small_group(group)
    key, size, unit = "generation_batch_size", values["generation_batch_size"], math.lcm(group, per_device)
    steps, counted = 1, ""
    if size is None:
        steps = values["steps_per_generation"] or values["gradient_accumulation_steps"]
        key, size, unit = "per_device_train_batch_size", per_device, group // math.gcd(group, steps)
        counted = f" x {steps} micro-batches a rollout = {size * steps} completions"
    if size % unit:
        divisor = (
            f"groups of train.num_generations {group}" if size * steps % group else f"micro-batches of {per_device}"
        )
        fix = f"set train.{key}: {nearest_multiples(size, unit)}"
        raise UsageError(f"train.{key} {size}{counted}, which are no whole {divisor}", fix=fix)


def refuse_small_group(group: int) -> None:
    """Raise UsageError for a group in which an advantage, a reward minus its group's mean, is always 0."""
    if group < 2:
        raise UsageError(f"train.num_generations is {group}: every advantage would be 0", fix="set at least 2")
