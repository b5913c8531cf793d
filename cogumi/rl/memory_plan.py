"""From documents per optimizer step to TRL's batch settings: exact, and as large a micro-batch as the memory allows.

TRL's words: a *document* is one completion. `per_device_train_batch_size` documents go through the model at once; times
`gradient_accumulation_steps` times the number of devices they make one optimizer step. `steps_per_generation` such
micro-batches make one rollout, which holds whole groups of `num_generations`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from datasets import Dataset, concatenate_datasets

from cogumi.core.errors import UsageError
from cogumi.core.formatting import gib
from cogumi.patches.gspo_loss import defaults

# Of the memory that is free, what a step may take: the allocator's rounding and fragments get the rest.
USABLE = 0.9
# TRL's fused head (trl/kernels/chunked_logprob.py): tokens x vocabulary entries of one tile of logits, in fp32.
HEAD_TILE = (4096, 32768)


@dataclass(frozen=True)
class ModelShape:
    """What the activations of a decoder depend on, in elements and layers."""

    hidden_size: int
    intermediate_size: int
    layers: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Of a transformers config; an MLP whose width it does not name is 4 hidden sizes wide (GPT-2)."""
        text = config.get_text_config()
        hidden = text.hidden_size
        widths = [getattr(text, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim")]
        intermediate = next((width for width in widths if width), 4 * hidden)
        if experts := getattr(text, "num_experts_per_tok", None):
            intermediate = experts * (getattr(text, "moe_intermediate_size", None) or intermediate)
        return cls(hidden, intermediate, text.num_hidden_layers, text.vocab_size)


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is cut up, and why. All counts are whole; nothing is dropped or rounded."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    mini_batches_per_rollout: int
    num_generations: int
    world_size: int
    reason: str
    """Why this micro-batch, with the estimate."""

    @property
    def arguments(self) -> dict[str, int]:
        """Keyword arguments for `trl.GRPOConfig`."""
        return {
            "per_device_train_batch_size": self.per_device_train_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "steps_per_generation": self.gradient_accumulation_steps * self.mini_batches_per_rollout,
            "num_generations": self.num_generations,
        }

    @property
    def documents_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def prompts_per_step(self) -> float:
        """On average: TRL shuffles a rollout's completions, so a step need not hold whole groups."""
        return self.documents_per_step / self.num_generations

    @property
    def prompts_per_rollout(self) -> int:
        return self.documents_per_step * self.mini_batches_per_rollout // self.num_generations

    @property
    def optimizer_steps_per_rollout(self) -> int:
        """With TRL's num_iterations at 1."""
        return self.mini_batches_per_rollout

    def __str__(self) -> str:
        devices = "" if self.world_size == 1 else f" x {self.world_size} devices"
        return (
            f"{self.documents_per_step} documents per step = micro-batches of {self.per_device_train_batch_size} x "
            f"{self.gradient_accumulation_steps} accumulated{devices} ({self.reason}); a rollout is "
            f"{self.prompts_per_rollout} prompts x {self.num_generations} completions, "
            f"{self.optimizer_steps_per_rollout} optimizer steps"
        )


def plan_batch(
    *,
    num_generations: int,
    shape: ModelShape,
    longest_prompt: int,
    max_completion_length: int,
    free_bytes: int,
    documents_per_step: int | None = None,
    prompts_per_step: int | None = None,
    per_device_train_batch_size: int | None = None,
    mini_batches_per_rollout: int = 4,
    world_size: int = 1,
    bytes_per_element: int = 2,
    gradient_checkpointing: bool = False,
    whole_logits: bool = False,
) -> BatchPlan:
    """The largest micro-batch that divides the step exactly and fits into memory, and the accumulation that goes with it.

    One of `documents_per_step` and `prompts_per_step` (x `num_generations`) is needed. `longest_prompt` and
    `max_completion_length` are in tokens. `free_bytes` is what is left for activations on each device once weights,
    gradients and optimizer state are there (12 bytes per trainable parameter under AdamW in fp32). A micro-batch that is
    given is kept, whatever the estimate says; the plan tells both. `mini_batches_per_rollout`: 4 in the GSPO paper
    (arXiv:2507.18071, section 5.1). `step_bytes` explains the estimate and the remaining arguments.

    Raises UsageError, with the nearest numbers that work, where the step cannot be cut up exactly, and with what is
    needed and what is there where not even one document fits.
    """
    if num_generations < 2:
        raise UsageError(f"train.num_generations is {num_generations}", fix="an advantage needs a group of at least 2")
    documents = documents_of(documents_per_step, prompts_per_step, num_generations)
    pinned = per_device_train_batch_size
    refuse_uneven(documents, prompts_per_step, num_generations, mini_batches_per_rollout, world_size, pinned)

    def needed(micro_batch: int) -> int:
        return step_bytes(
            micro_batch, shape, longest_prompt, max_completion_length, bytes_per_element, gradient_checkpointing, whole_logits
        )  # fmt: skip

    budget, per_device = int(USABLE * free_bytes), documents // world_size
    estimate = "estimated {} of {} usable"
    if pinned is not None:
        micro_batch = pinned
        reason = "as set; " + estimate.format(gib(needed(pinned)), gib(budget))
        reason += "" if needed(pinned) <= budget else ": more than there is, by the estimate"
    else:
        divisors = [n for n in range(per_device, 0, -1) if per_device % n == 0]
        fitting = [n for n in divisors if needed(n) <= budget]
        if not fitting:
            raise UsageError(
                f"not even one document fits: {longest_prompt} prompt + {max_completion_length} completion tokens need "
                f"about {gib(needed(1))}, {gib(budget)} of {gib(free_bytes)} free are usable; lower "
                "train.max_completion_length or the prompts' length"
                + ("" if gradient_checkpointing else ", or set train.gradient_checkpointing: true")
            )
        micro_batch = fitting[0]
        reason = estimate.format(gib(needed(micro_batch)), gib(budget))
        if micro_batch < per_device:
            larger = divisors[divisors.index(micro_batch) - 1]
            reason += f", {larger} would need {gib(needed(larger))}"
    return BatchPlan(
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=per_device // micro_batch,
        mini_batches_per_rollout=mini_batches_per_rollout,
        num_generations=num_generations,
        world_size=world_size,
        reason=reason,
    )


def documents_of(documents_per_step: int | None, prompts_per_step: int | None, num_generations: int) -> int:
    """Documents per optimizer step. Raises UsageError where neither number is given, or the two differ."""
    if prompts_per_step is None:
        if documents_per_step is None:
            raise UsageError("a step has no size: set cogumi.docs_per_step, or cogumi.prompts_per_step")
        if documents_per_step < 1:
            raise UsageError(f"cogumi.docs_per_step is {documents_per_step}", fix="at least 1")
        return documents_per_step
    if prompts_per_step < 1:
        raise UsageError(f"cogumi.prompts_per_step is {prompts_per_step}", fix="at least 1")
    product = prompts_per_step * num_generations
    if documents_per_step not in (None, product):
        raise UsageError(
            f"cogumi.docs_per_step is {documents_per_step}, and cogumi.prompts_per_step "
            f"{prompts_per_step} x train.num_generations {num_generations} is {product}",
            fix="drop one of the two",
        )
    return product


def refuse_uneven(
    documents: int,
    prompts_per_step: int | None,
    num_generations: int,
    mini_batches_per_rollout: int,
    world_size: int,
    micro_batch: int | None,
) -> None:
    """Raise UsageError, naming the nearest sizes below and above that work, where a step or rollout has a remainder."""
    if mini_batches_per_rollout < 1 or world_size < 1 or (micro_batch is not None and micro_batch < 1):
        raise UsageError(
            f"mini-batches per rollout {mini_batches_per_rollout}, devices {world_size}, "
            f"train.per_device_train_batch_size {micro_batch}: each must be at least 1"
        )
    at_once = (micro_batch or 1) * world_size
    # Whole groups in a rollout: documents * mini_batches_per_rollout is a multiple of num_generations.
    whole_groups = num_generations // math.gcd(num_generations, mini_batches_per_rollout)
    unit = math.lcm(at_once, whole_groups)
    if documents % unit == 0:
        return
    reasons = []
    if documents % at_once:
        size = f"train.per_device_train_batch_size {micro_batch} x " if micro_batch else ""
        reasons.append(f"{size}{world_size} device{'s' * (world_size > 1)} does not divide it")
    if documents % whole_groups:
        reasons.append(
            f"a rollout of {mini_batches_per_rollout} steps would not hold whole groups of train.num_generations "
            f"{num_generations}"
        )
    why = ", and ".join(reasons)
    if prompts_per_step is None:
        nearest = nearest_multiples(documents, unit)
        raise UsageError(f"cogumi.docs_per_step {documents} cannot be cut up exactly: {why}", fix=f"take {nearest}")
    nearest = nearest_multiples(prompts_per_step, math.lcm(unit, num_generations) // num_generations)
    raise UsageError(
        f"cogumi.prompts_per_step {prompts_per_step} x train.num_generations {num_generations} = "
        f"{documents} documents cannot be cut up exactly: {why}",
        fix=f"take {nearest} prompts",
    )


def nearest_multiples(number: int, unit: int) -> str:
    """ "24 or 32": the multiples of `unit` around a number that is none; only the one above where there is none below."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


# ---------------------------------------------------------------------------------------------------------- memory


def step_bytes(
    documents: int,
    shape: ModelShape,
    prompt_length: int,
    completion_length: int,
    bytes_per_element: int,
    gradient_checkpointing: bool = False,
    whole_logits: bool = False,
) -> int:
    """Bytes by which one micro-batch of `documents` raises memory at its peak, forward and backward: an upper estimate.

    Activations are counted as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4), with h the hidden size, I the
    MLP's, e bytes per element and s = prompt + completion tokens, every document padded to the longest. Per token and
    layer:

    * (16 h + 4 I) e: what autograd keeps. Their 34 h bytes are 16 h elements (I = 4 h, e = 2) and two dropout masks; a
      gated MLP keeps 4 I instead of 2 I, and RMSNorm and rotary embeddings keep copies of their own.
    * (6 h + I) 4 where e < 4: PEFT keeps an adapter's weights in fp32 and each adapted layer a copy of its input.
    * with gradient checkpointing only h e, and one layer in full while it is computed again.

    To this come, once: gradients in flight (2 h + 2 I) e per token, hidden states and their gradient at the head in
    fp32, the attention mask s^2 (1 + e) per document, and the logits: two tiles of TRL's fused head, or with
    `whole_logits` the completion's logits, their fp32 copy and its gradient.

    Left out: weights, weight gradients and optimizer state (in nobody's micro-batch); the scores of eager attention
    (5 a s^2 per layer in the paper: with sdpa or flash attention they are never whole); the KV cache and last logits of
    the rollout, which transformers' `generate` frees before the step and vLLM reserves for itself; a reference model.
    """
    h, inner, e = shape.hidden_size, shape.intermediate_size, bytes_per_element
    length = prompt_length + completion_length
    tokens = documents * length
    layer = (16 * h + 4 * inner) * e + ((6 * h + inner) * 4 if e < 4 else 0)
    kept = shape.layers * h * e + layer if gradient_checkpointing else shape.layers * layer
    in_flight = (2 * h + 2 * inner) * e + 2 * h * 4
    mask = documents * length**2 * (1 + e)
    if whole_logits:
        head = documents * completion_length * shape.vocabulary * (e + 4 + 4)
    else:
        head = 2 * min(tokens, HEAD_TILE[0]) * min(shape.vocabulary, HEAD_TILE[1]) * 4
    return tokens * (kept + in_flight) + mask + head


def free_memory_bytes() -> int:
    """What this process can still allocate: on the current GPU, else in main memory.

    On a GPU what PyTorch holds in its cache without using it counts as free.
    """
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return int(psutil.virtual_memory().available)


# ---------------------------------------------------------------------------------------------------------- data


def whole_rollout(dataset: Dataset, prompts_per_rollout: int) -> tuple[Dataset, str | None]:
    """The data set, repeated where it has fewer prompts than one rollout, and a line that says so.

    TRL 1.15's RepeatSampler drops a rollout that is not whole, so a smaller data set is a run of 0 steps. From one rollout
    on the data set is returned as it is: the sampler draws a new order each pass, so another remainder is left out each
    time (with `shuffle_dataset: false` the same one always).

    Raises UsageError for an empty data set.
    """
    prompts = len(dataset)
    if prompts == 0:
        raise UsageError("the data set has no prompts", fix="nothing can be trained on it")
    if prompts >= prompts_per_rollout:
        return dataset, None
    times = math.ceil(prompts_per_rollout / prompts)
    line = f"{prompts} prompts repeated {times} times: one rollout takes {prompts_per_rollout} prompts"
    return concatenate_datasets([dataset] * times), line


def check_groups(arguments: Mapping[str, Any], world_size: int = 1) -> None:
    """Refuse, before GRPOConfig is built from `arguments`, groups that TRL would refuse and unsloth would change.

    TRL 1.15 raises for both rules below; unsloth's generated config sets per_device_train_batch_size to num_generations
    instead, and trains on another batch than was asked for. Raises UsageError with the nearest valid batch sizes.
    """
    values = defaults(GROUP_KEYS) | {key: value for key, value in arguments.items() if value is not None}
    group, per_device = values["num_generations"], values["per_device_train_batch_size"]
    refuse_small_group(group)
    if per_device < 1:
        raise UsageError(f"train.per_device_train_batch_size is {per_device}", fix="set at least 1")
    if (rollout := values["generation_batch_size"]) is not None:
        unit = math.lcm(group, per_device * world_size)
        if rollout % unit:
            raise UsageError(
                f"train.generation_batch_size {rollout} must hold whole groups of "
                f"train.num_generations {group} and whole micro-batches of {per_device * world_size}",
                fix=f"set {nearest_multiples(rollout, unit)}",
            )
        return
    steps = values["steps_per_generation"] or values["gradient_accumulation_steps"]
    rollout = per_device * world_size * steps
    if rollout % group:
        unit = group // math.gcd(group, world_size * steps)
        devices = f" x {world_size} devices" if world_size > 1 else ""
        raise UsageError(
            f"train.per_device_train_batch_size {per_device}{devices} x {steps} micro-batches a "
            f"rollout = {rollout} completions, which are no whole groups of train.num_generations "
            f"{group}",
            fix=f"set train.per_device_train_batch_size: {nearest_multiples(per_device, unit)}",
        )


def refuse_small_group(group: int) -> None:
    """Raise UsageError for a group in which an advantage is always 0."""
    if group < 2:
        raise UsageError(
            f"train.num_generations is {group}: an advantage is a reward minus its group's mean, "
            "always 0 in a group of one",
            fix="set at least 2",
        )


GROUP_KEYS = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)
