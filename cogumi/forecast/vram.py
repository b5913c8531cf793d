"""Does the step fit the card? The forecast of it, what it is made of, and how far batch, length and rank could go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cogumi.config.schema import RunConfig
from cogumi.core.formatting import gib
from cogumi.forecast.allocation_tracker import Moment
from cogumi.forecast.memory_forecast import (
    HIGHEST_RANK,
    HOPPERS_WORKSPACE,
    LONGEST,
    MOST_ROWS,
    WORKSPACE,
    Largest,
    MemoryForecast,
    Steps,
)
from cogumi.forecast.meta_trainer import planned_trainer
from cogumi.forecast.preflight_report import Line
from cogumi.forecast.target import Target, dtype_of
from cogumi.forecast.training_step import ROLLOUT, Work, run_step
from cogumi.methods import auto_settings, gspo
from cogumi.methods.auto_settings import Choice
from cogumi.models.adapters import lora_config
from cogumi.models.loading import meta_model

VLLM_SHARE = 0.3  # trl.GRPOConfig's vllm_gpu_memory_utilization
BATCH = "train.per_device_train_batch_size"


@dataclass(frozen=True)
class OfTheStep:
    """The forecast of a run's step on a target, and how it was made."""

    forecast: MemoryForecast
    work: Work
    largest: Largest
    free: int

    @property
    def fits(self) -> bool:
        return self.forecast.peak <= self.free

    def as_dict(self) -> dict[str, Any]:
        return {**self.forecast.as_dict(), "free": self.free, "work": vars(self.work), "largest": vars(self.largest)}


def step_on(run: RunConfig, config: Any, work: Work, target: Target) -> OfTheStep:
    """Run the step of a run on fake tensors. `run` has its choices made; config: the base's."""
    whole = run.cogumi.tuning == "full"
    dtype = dtype_of(target, auto_settings.dtype_of_weights(run) if whole else run.model.dtype)
    autocast = autocast_of(run, target)
    rank = 0 if whole else lora_config(run.lora).r

    trainers: dict[tuple[int, int | None], Any] = {}

    def measure(work: Work, rank: int, layers: int | None) -> tuple[Moment, ...]:
        if (rank, layers) not in trainers:
            changed = run.model_copy(deep=True)
            if rank:
                changed.lora["r"] = rank
            trainers[rank, layers] = planned_trainer(changed, config, dtype, run.model.attn_implementation, layers)
        return run_step(trainers[rank, layers], work, autocast, target.on_card)

    text = config.get_text_config()
    period = None if whole and work.micro_batches == 1 else period_of(config)
    steps = Steps(measure, text.num_hidden_layers, period)
    forecast = MemoryForecast(steps.moments(work, rank), workspace_of(target), vllm_of(run, target))
    return OfTheStep(forecast, work, steps.largest(forecast, work, rank, target.free), target.free)


def period_of(config: Any) -> int | None:
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


def autocast_of(run: RunConfig, target: Target) -> torch.dtype | None:
    """What the trainer multiplies matrices in: bf16 on a card that has it, unless the config says otherwise."""
    if run.train.get("fp16"):
        return torch.float16
    bf16 = run.train.get("bf16")
    return torch.bfloat16 if (target.machine.bf16 if bf16 is None else bf16) else None


def workspace_of(target: Target) -> int:
    if not target.on_card:
        return 0
    return HOPPERS_WORKSPACE if target.machine.capability == (9, 0) else WORKSPACE


def vllm_of(run: RunConfig, target: Target) -> int:
    """What vLLM holds beside the step where it shares the card: its share of the whole card, nothing while it sleeps."""
    train = run.train
    if (
        not train.get("use_vllm")
        or train.get("vllm_mode", "colocate") != "colocate"
        or train.get("vllm_enable_sleep_mode")
    ):
        return 0
    card = target.card.bytes if target.card is not None else target.free
    return round(float(train.get("vllm_gpu_memory_utilization") or VLLM_SHARE) * card)


def line_of(step: OfTheStep, run: RunConfig, chosen: Sequence[Choice] = ()) -> Line:
    """The line on memory, with what would make it fit. chosen: what the run left open, and the machine decides."""
    forecast, work = step.forecast, step.work
    made_of = ", ".join(f"{kind} {gib(size)}" for kind, size in forecast.breakdown.items())
    at_once = work.rollout if forecast.fullest.stage == ROLLOUT else work.rows
    said = (
        f"{gib(forecast.peak)} of {gib(step.free)} at its fullest, in {forecast.fullest.stage} with {at_once} x "
        f"{work.length} tokens: {made_of}"
    )
    if chosen:
        said += "; with " + ", ".join(f"{each.key}: {each.value}" for each in chosen) + ", which the run chooses"
    if step.fits:
        return Line("memory", f"{said}; {further(step)}")
    fix, changes = smaller(step, run)
    return Line("memory", said, "red", fix, changes)


def further(step: OfTheStep) -> str:
    """How far batch, length and rank could go alone."""
    largest = step.largest
    found = (
        (largest.rows, MOST_ROWS, "{} rows"),
        (largest.length, LONGEST, "{} tokens"),
        (largest.rank, HIGHEST_RANK, "rank {}"),
    )
    said = [words.format(f"{n:,}") + " and more" * (n == most) for n, most, words in found if n]
    return f"alone, up to {', or '.join(said)} would fit"


def smaller(step: OfTheStep, run: RunConfig) -> tuple[str, dict[str, Any]]:
    """The change that makes a step fit, the mildest first: layers computed twice, a smaller micro-batch, 4 bits."""
    train, work, largest = run.train, step.work, step.largest
    if train.get("gradient_checkpointing") is False:  # TRL's default is on
        change = {"train.gradient_checkpointing": True}
        return "set train.gradient_checkpointing: true, which computes layers twice instead of keeping them", change
    documents = work.rows * work.micro_batches
    if step.forecast.fullest.stage == ROLLOUT and work.rollout > documents:
        key, number = fewer_at_once(run, work, documents)
        said = f"set {key}: {number}; fewer completions are sampled at once, and trained on in fewer steps"
        return said, {key: number}
    if largest.rows:
        changes = split(run, work, largest.rows)
        said = " and ".join(f"{key}: {value}" for key, value in changes.items())
        return f"set {said}, the same step in smaller pieces", changes
    if run.cogumi.tuning == "full":
        return "drop cogumi.tuning: full, to train LoRA", {"cogumi.tuning": "lora"}
    if run.model.quantization_config is None:
        return "set model.quantization_config: {load_in_4bit: true} (QLoRA)", {
            "model.quantization_config": {"load_in_4bit": True},
            **split(run, work, 1),
        }
    if largest.length:
        key = "train.max_length" if not work.completion else "train.max_completion_length"
        length = largest.length - (work.prompt if work.completion else 0)
        return f"set {key}: {length}; longer examples are dropped, and counted", {key: length}
    return "take a card with more memory, or a smaller model", {}


def fewer_at_once(run: RunConfig, work: Work, documents: int) -> tuple[str, int]:
    """Half of a rollout's completions, in whole steps, under the key that says how many they are."""
    steps = max(1, work.rollout // documents // 2)
    if gspo.is_planned(run) or run.train.get("generation_batch_size"):
        return "train.generation_batch_size", steps * documents
    return "train.steps_per_generation", steps * work.micro_batches


def split(run: RunConfig, work: Work, most: int) -> dict[str, Any]:
    """The same step in micro-batches of at most so many; what GSPO's planner decides by itself is left to it."""
    documents = work.rows * work.micro_batches
    rows = max(n for n in range(1, min(most, documents) + 1) if documents % n == 0)
    return {BATCH: rows} | ({} if gspo.is_planned(run) else {"train.gradient_accumulation_steps": documents // rows})


def planned_work(run: RunConfig, longest: int, packed_rows: int | None = None) -> Work:
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
        return Work(method, packed_rows or rows, longest, packed=packed, one_sequence=packed and flash, padded=padded,
                    micro_batches=steps)  # fmt: skip
    completion = int(train.get("max_completion_length") or 256)
    rollout = 0 if train.get("use_vllm") else rollout_of(train, rows, steps)
    return Work(method, rows, longest, completion, rollout, padded=not flash, micro_batches=steps)


def rollout_of(train: dict[str, Any], rows: int, steps: int) -> int:
    """Documents that are sampled at once: TRL's generation batch."""
    if train.get("generation_batch_size"):
        return int(train["generation_batch_size"])
    return rows * int(train.get("steps_per_generation") or steps)
