"""Does the step fit the card? What it takes, of what that is made, and how far batch, length and rank could go.

On a card, three things are added to the tensors. `find_target` subtracts CUDA's context from the memory of a named
card. cuBLAS keeps two workspaces, one for the forward thread and one for autograd's (aten/src/ATen/cuda/CUDABlas.cpp,
getChosenWorkspaceSize). Each takes 32 MiB on Hopper and 8.1 MiB elsewhere. Fragments take a share of all but weights,
adapter and optimizer. None of the three has been compared with a card here.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cogumi.config.schema import RunConfig
from cogumi.core.formatting import format_memory
from cogumi.forecast.fake_tensors import StagePeak
from cogumi.forecast.preflight_report import Line
from cogumi.forecast.training_step import ROLLOUT, StepShape, planned_trainer, run_step
from cogumi.methods import gspo
from cogumi.methods.auto_settings import Choice, Machine, dtype_of_weights
from cogumi.models.adapters import lora_config
from cogumi.models.loading import meta_model
from cogumi.stack.gpus import Card, find_card, parse_card

# CUDA's own part of a card, before the first tensor: about 0.5 GiB, kernels being loaded as they are needed.
CONTEXT = 512 * 2**20
PACKAGES = frozenset({"bitsandbytes"})  # of those that decide, what the lane for cards brings (requirements/stable.in)
FRAGMENTS = 0.05  # of activations, logits and gradients
WORKSPACE, HOPPERS_WORKSPACE = 2 * (4096 * 1024 * 2 + 16 * 8 * 1024), 2 * 4096 * 8 * 1024
# From so many tokens on the tiles of logits grow no more, TRL's (trl/kernels/chunked_logprob.py, TOKEN_CHUNK_SIZE) and ours.
FULL_TILE = 4096
MOST_ROWS, LONGEST, HIGHEST_RANK = 2**16, 2**17, 1024  # where looking for the largest ends
STAYING = ("weights", "adapter", "optimizer")
VLLM_SHARE = 0.3  # trl.GRPOConfig's vllm_gpu_memory_utilization
# (work, rank, layers or None for all) -> the peaks of the stages; a number of rows, tokens or ranks -> (work, rank) with it
Measure = Callable[[StepShape, int, int | None], tuple[StagePeak, ...]]
Change = Callable[[int], tuple[StepShape, int]]


@dataclass(frozen=True)
class Target:
    """The machine that a run is planned for.

    card: None where it is not in the table, or there is no GPU. free: bytes that the run may take. named: not this machine.
    """

    machine: Machine
    card: Card | None
    free: int
    named: bool = False

    @property
    def on_card(self) -> bool:
        return self.machine.capability is not None

    def __str__(self) -> str:
        return f"{self.machine.name}, {self.free / 2**30:.1f} GiB free"


def find_target(card: str | None) -> Target:
    """This machine, or a card by name with nothing else on it. Raises UsageError for a card that is not known."""
    if card is None:
        machine = Machine.here()
        return Target(machine, find_card(machine.name), machine.free_bytes)
    known = parse_card(card)
    free = known.bytes - CONTEXT
    return Target(Machine(known.name, known.capability, free, PACKAGES), known, free, named=True)


def weights_dtype(target: Target, wanted: str) -> torch.dtype:
    """What `model.dtype` means there: `auto` is bfloat16 on a card that has it, float32 elsewhere (models/loading.py)."""
    if wanted == "auto":
        return torch.bfloat16 if target.machine.bf16 else torch.float32
    found: torch.dtype = getattr(torch, wanted)
    return found


def autocast_dtype(run: RunConfig, target: Target) -> torch.dtype | None:
    """What the trainer multiplies matrices in: bf16 on a card that has it, unless the config says otherwise."""
    if run.train.get("fp16"):
        return torch.float16
    bf16 = run.train.get("bf16")
    return torch.bfloat16 if (target.machine.bf16 if bf16 is None else bf16) else None


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes. moments: the peak of each stage. workspace: of cuBLAS, 0 without a card. vllm: what it takes beside the step."""

    moments: tuple[StagePeak, ...]
    workspace: int = 0
    vllm: int = 0

    @property
    def peak_moment(self) -> StagePeak:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def breakdown(self) -> dict[str, int]:
        """The fullest moment by kind, largest first."""
        by_kind = self.peak_moment.by_kind
        passing = sum(size for kind, size in by_kind.items() if kind not in STAYING)
        parts = {**by_kind, "vLLM": self.vllm, "cuBLAS workspaces": self.workspace}
        parts["allocator"] = round(FRAGMENTS * passing) if self.workspace else 0
        return dict(sorted(((kind, size) for kind, size in parts.items() if size), key=lambda item: -item[1]))

    @property
    def peak(self) -> int:
        return sum(self.breakdown.values())

    def as_dict(self) -> dict[str, Any]:
        """tensors: what torch.cuda.max_memory_allocated() is to say, but for the workspaces."""
        full = self.peak_moment
        stages = {each.stage: each.total for each in self.moments}
        figures = {"peak": self.peak, "tensors": full.total, "workspace": self.workspace, "breakdown": self.breakdown}
        return figures | {"stage": full.stage, "stages": stages}


@dataclass(frozen=True)
class Largest:
    """How far each can go alone, with the others as they are; None where not even the smallest fits."""

    rows: int | None
    length: int | None
    rank: int | None


class Steps:
    """The peaks of steps of one run, each from two models of a few layers.

    A stage's peak grows by a fixed amount per repeated layer, per row and per rank. It grows with the length as a
    polynomial of degree two, because of masks and the scores of eager attention. period: after how many layers their
    shapes repeat; None measures the whole model. In full fine-tuning with one micro-batch a step gradients appear while
    activations are freed, so the stage of the peak depends on the depth.
    """

    def __init__(self, measure: Measure, layers: int, period: int | None) -> None:
        self.measure, self.layers = measure, layers
        self.few = (period, 2 * period) if period is not None and 2 * period < layers else ()
        self.known: dict[tuple[StepShape, int], tuple[StagePeak, ...]] = {}

    def moments(self, work: StepShape, rank: int) -> tuple[StagePeak, ...]:
        if (work, rank) in self.known:
            return self.known[work, rank]
        if self.few:
            less, more = (self.measure(work, rank, layers) for layers in self.few)
            share = (self.layers - self.few[0]) / (self.few[1] - self.few[0])
            found = tuple(weighted_moment(pair, [1 - share, share]) for pair in zip(less, more, strict=True))
        else:
            found = self.measure(work, rank, None)
        self.known[work, rank] = found
        return found

    def largest(self, forecast: MemoryForecast, work: StepShape, rank: int, room: int) -> Largest:
        """Rows up to MOST_ROWS, tokens in steps of 64 up to LONGEST, ranks of powers of two up to HIGHEST_RANK."""

        def peak_from(values: Sequence[int], changed: Change) -> Callable[[int], int]:
            """The peak as a function of a number, from the stages at a few of its values (Lagrange)."""
            points = [self.moments(*changed(value)) for value in values]

            def peak(number: int) -> int:
                weights = [math.prod((number - b) / (a - b) for b in values if b != a) for a in values]
                stages = [weighted_moment(moments, weights) for moments in zip(*points, strict=True)]
                return replace(forecast, moments=tuple(stages)).peak

            return peak

        def most(now: int, full: int, degree: int, candidates: Sequence[int], changed: Change) -> int | None:
            """full: from where on the peak is one polynomial. What does not fit there is looked for from `now` up to it."""
            peak = peak_from([full * (1 + step) for step in range(degree + 1)], changed)
            if peak(full) > room and full >= now + degree:
                peak = peak_from([now + (full - now) * step // degree for step in range(degree + 1)], changed)
            fitting = bisect.bisect_right(candidates, room, key=peak)
            return candidates[fitting - 1] if fitting else None

        rows, length = work.rows, work.length
        times = max(1, -(-FULL_TILE // (rows * length)))
        ranks = [2**n for n in range(HIGHEST_RANK.bit_length())]
        return Largest(
            most(rows, times * rows, 1, range(1, MOST_ROWS + 1), lambda n: (replace(work, rows=n), rank)),
            most(length, times * length, 2, range(64, LONGEST + 1, 64), lambda n: (with_length(work, n), rank)),
            most(rank, rank, 1, ranks, lambda n: (work, n)) if rank else None,
        )


def weighted_moment(moments: Sequence[StagePeak], weights: Sequence[float]) -> StagePeak:
    kinds = {kind for moment in moments for kind in moment.by_kind}
    by_kind = {k: round(sum(w * m.by_kind.get(k, 0) for m, w in zip(moments, weights, strict=True))) for k in kinds}
    return StagePeak(moments[0].stage, sum(by_kind.values()), by_kind)


def with_length(work: StepShape, length: int) -> StepShape:
    """The same work with examples of this many tokens; of a rollout the completions grow, as far as there are any."""
    if not work.completion:
        return replace(work, prompt=length)
    return replace(work, completion=max(1, length - work.prompt), prompt=min(work.prompt, length - 1))


@dataclass(frozen=True)
class StepForecast:
    """The forecast of a run's step on a target, and how it was made."""

    forecast: MemoryForecast
    work: StepShape
    largest: Largest
    free: int

    @property
    def fits(self) -> bool:
        return self.forecast.peak <= self.free

    def as_dict(self) -> dict[str, Any]:
        return {**self.forecast.as_dict(), "free": self.free, "work": vars(self.work), "largest": vars(self.largest)}


def forecast_step(run: RunConfig, config: Any, work: StepShape, target: Target) -> StepForecast:
    """Run the step of a run on fake tensors. `run` has its choices made; config: the base's."""
    whole = run.cogumi.tuning == "full"
    dtype = weights_dtype(target, dtype_of_weights(run) if whole else run.model.dtype)
    autocast = autocast_dtype(run, target)
    rank = 0 if whole else lora_config(run.lora).r
    trainers: dict[tuple[int, int | None], Any] = {}

    def measure(work: StepShape, rank: int, layers: int | None) -> tuple[StagePeak, ...]:
        if (rank, layers) not in trainers:
            changed = run.model_copy(deep=True)
            if rank:
                changed.lora["r"] = rank
            trainers[rank, layers] = planned_trainer(changed, config, dtype, run.model.attn_implementation, layers)
        return run_step(trainers[rank, layers], work, autocast, target.on_card)

    workspace = 0
    if target.on_card:
        workspace = HOPPERS_WORKSPACE if target.machine.capability == (9, 0) else WORKSPACE
    period = None if whole and work.micro_batches == 1 else layer_period(config)
    steps = Steps(measure, config.get_text_config().num_hidden_layers, period)
    forecast = MemoryForecast(steps.moments(work, rank), workspace, vllm_bytes(run, target))
    return StepForecast(forecast, work, steps.largest(forecast, work, rank, target.free), target.free)


def layer_period(config: Any) -> int | None:
    """After how many layers their kinds and shapes repeat; None where they do not."""
    text = config.get_text_config()
    count = text.num_hidden_layers
    stacks = (module for module in meta_model(config).modules() if isinstance(module, torch.nn.ModuleList))
    layers = next((stack for stack in stacks if len(stack) == count), None)
    if layers is None:
        return None
    shapes = [tuple((name, tuple(each.shape)) for name, each in layer.named_parameters()) for layer in layers]
    kinds = list(zip(getattr(text, "layer_types", None) or [""] * count, shapes, strict=True))
    return next((n for n in range(1, count // 2 + 1) if all(kinds[i] == kinds[i % n] for i in range(count))), None)


def vllm_bytes(run: RunConfig, target: Target) -> int:
    """What vLLM holds beside the step where it shares the card: its share of the whole card, nothing while it sleeps."""
    train = run.train
    shares = train.get("use_vllm") and train.get("vllm_mode", "colocate") == "colocate"
    if not shares or train.get("vllm_enable_sleep_mode"):
        return 0
    card = target.card.bytes if target.card is not None else target.free
    return round(float(train.get("vllm_gpu_memory_utilization") or VLLM_SHARE) * card)


def planned_work(run: RunConfig, longest: int, packed_rows: int | None = None) -> StepShape:
    """What goes through at once. longest: tokens of the longest example, or of gspo's longest prompt."""
    train, method = run.train, run.cogumi.method
    rows = int(train.get("per_device_train_batch_size") or 8)
    steps = int(train.get("gradient_accumulation_steps") or 1)
    attention = run.model.attn_implementation or ""
    flash = attention.startswith("flash") or "/" in attention
    if method != "gspo":
        packed = packed_rows is not None
        # Padding is masked; flash attention cuts it out before it computes.
        padded = not flash and rows > 1
        return StepShape(method, packed_rows or rows, longest, packed=packed, one_sequence=packed and flash, padded=padded,
                    micro_batches=steps)  # fmt: skip
    completion, rollout = int(train.get("max_completion_length") or 256), 0
    if not train.get("use_vllm"):  # TRL's generation batch
        rollout = int(train.get("generation_batch_size") or rows * int(train.get("steps_per_generation") or steps))
    return StepShape(method, rows, longest, completion, rollout, padded=not flash, micro_batches=steps)


def describe_memory(step: StepForecast, run: RunConfig, chosen: Sequence[Choice] = ()) -> Line:
    """The line on memory, with what would make it fit. chosen: what the run left open, and the machine decides."""
    forecast, work, largest = step.forecast, step.work, step.largest
    made_of = ", ".join(f"{kind} {format_memory(size)}" for kind, size in forecast.breakdown.items())
    at_once = work.rollout if forecast.peak_moment.stage == ROLLOUT else work.rows
    said = (
        f"{format_memory(forecast.peak)} of {format_memory(step.free)} at the peak, in "
        f"{forecast.peak_moment.stage} with {at_once} x {work.length} tokens: {made_of}"
    )
    if chosen:
        said += "; with " + ", ".join(f"{each.key}: {each.value}" for each in chosen) + ", which the run chooses"
    if not step.fits:
        return Line("memory", said, "red", suggest_fix(step, run))
    alone = {"{:,} rows": largest.rows, "{:,} tokens": largest.length, "rank {:,}": largest.rank}
    further = ", or ".join(words.format(number) for words, number in alone.items() if number)
    return Line("memory", f"{said}; alone, up to {further} would fit")


def suggest_fix(step: StepForecast, run: RunConfig) -> str:
    """The change that makes a step fit, the mildest first: layers computed twice, a smaller micro-batch, 4 bits."""
    work, largest = step.work, step.largest
    documents = work.rows * work.micro_batches
    if run.train.get("gradient_checkpointing") is False:  # TRL's default is on
        return "set train.gradient_checkpointing: true; layers are computed twice instead of kept"
    if step.forecast.peak_moment.stage == ROLLOUT and work.rollout > documents:
        return f"set {smaller_rollout(run, work, documents)}; fewer completions are sampled at once"
    if largest.rows:
        return f"set {split_step(run, work, largest.rows)}; the same step in smaller pieces"
    if run.cogumi.tuning == "full":
        return "set cogumi.tuning: lora; LoRA instead of every weight"
    if run.model.quantization_config is None:
        quantized = 'model.quantization_config: {"load_in_4bit": true}'
        return f"set {quantized} and {split_step(run, work, 1)}; QLoRA"
    if largest.length:
        key = "train.max_completion_length" if work.completion else "train.max_length"
        length = largest.length - (work.prompt if work.completion else 0)
        return f"set {key}: {length}; longer examples are dropped, and counted"
    return "take a card with more memory, or a smaller model"


def smaller_rollout(run: RunConfig, work: StepShape, documents: int) -> str:
    """Half of a rollout's completions, in whole steps, under the key that says how many they are."""
    steps = max(1, work.rollout // documents // 2)
    if gspo.is_planned(run) or run.train.get("generation_batch_size"):
        return f"train.generation_batch_size: {steps * documents}"
    return f"train.steps_per_generation: {steps * work.micro_batches}"


def split_step(run: RunConfig, work: StepShape, most: int) -> str:
    """The same step in micro-batches of at most so many; what GSPO's planner decides by itself is left to it."""
    documents = work.rows * work.micro_batches
    rows = max(n for n in range(1, min(most, documents) + 1) if documents % n == 0)
    smaller = f"train.per_device_train_batch_size: {rows}"
    if gspo.is_planned(run):
        return smaller
    return f"{smaller} and train.gradient_accumulation_steps: {documents // rows}"
