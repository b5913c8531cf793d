"""Forecast whether a training step fits a card, what takes its memory, and which change makes it fit.

On a card, three things are added to the tensors. `find_target` subtracts CUDA's context from the memory of a named
card. cuBLAS keeps two workspaces, one for the forward thread and one for autograd's (aten/src/ATen/cuda/CUDABlas.cpp,
getChosenWorkspaceSize): 32 MiB each on Hopper, 8.1 MiB elsewhere. Fragments take a share of everything but weights,
adapter and optimizer. None of the three has been compared with a card here.
"""

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cogumi.config.schema import RunConfig
from cogumi.core.formatting import format_memory
from cogumi.data.packing import rows_per_step
from cogumi.forecast.preflight_report import Line
from cogumi.forecast.training_step import LOAD, ROLLOUT, UPDATE, StagePeak, StepShape, planned_trainer, run_step
from cogumi.methods.auto_settings import Choice, Machine, dtype_of_weights
from cogumi.methods.gspo import rollout_rows
from cogumi.methods.step_split import is_planned
from cogumi.models.base import meta_model
from cogumi.models.loading import resolve_dtype
from cogumi.rl.memory_plan import engine_bytes
from cogumi.stack.gpus import Card, find_card, parse_card

# Memory of a card that no tensor can have, measured on an H200 (docs/measured.md): 615 MiB that the driver keeps, and 703 MiB
# of CUDA's context once cuBLAS, attention and bitsandbytes have loaded their kernels.
CONTEXT = (615 + 703) * 2**20
FRAGMENTS = 0.05  # of activations, logits and gradients
WORKSPACE, HOPPER_WORKSPACE = 2 * (4096 * 1024 * 2 + 16 * 8 * 1024), 2 * 4096 * 8 * 1024
PERSISTENT_KINDS = ("weights", "adapter", "optimizer")


@dataclass(frozen=True)
class Target:
    """The machine that a run is planned for.

    card: None where it is not in the table, or there is no GPU. free: bytes that the run may take. named: whether the user
    named the card, so that it is not this machine's.
    """

    machine: Machine
    card: Card | None
    free: int
    named: bool = False

    @property
    def on_card(self) -> bool:
        return self.machine.capability is not None

    @property
    def total(self) -> int:
        """Bytes of the card, in use or not, of which vLLM takes its share; 0 without a card."""
        return self.machine.total_bytes

    def __str__(self) -> str:
        return f"{self.machine.name}, {self.free / 2**30:.1f} GiB free"


def find_target(card: str | None, run: RunConfig | None = None) -> Target:
    """Return this machine, or a card by name with nothing else on it. Raises UsageError for an unknown card."""
    if card is None:
        machine = Machine.here(run)
        return Target(machine, find_card(machine.name), machine.free_bytes)
    known = parse_card(card)
    free = known.bytes - CONTEXT
    # The lane for cards (requirements/stable.in) brings bitsandbytes.
    machine = Machine(known.name, known.capability, free, bitsandbytes=True, total_bytes=known.bytes)
    return Target(machine, known, free, named=True)


def weights_dtype(machine: Machine, name: str) -> torch.dtype:
    """Resolve `model.dtype` there: `auto` is bfloat16 on a card that has it, float32 elsewhere (models/loading.py)."""
    automatic = "bfloat16" if machine.bf16 else "float32"
    return resolve_dtype(automatic if name == "auto" else name)


def autocast_dtype(run: RunConfig, machine: Machine) -> torch.dtype | None:
    """Return the dtype of the trainer's autocast: bf16 on a card that has it, unless the config says otherwise."""
    if run.train.get("fp16"):
        return torch.float16
    bf16 = run.train.get("bf16")
    return torch.bfloat16 if (machine.bf16 if bf16 is None else bf16) else None


@dataclass(frozen=True)
class MemoryForecast:
    """A step on a target, in bytes.

    moments: the peak of each stage. workspace: of cuBLAS, 0 without a card. vllm: what its engine takes beside the step.
    rows, length: the largest with which alone a step fits that does not fit as it is; length is that of completions, for
    gspo. None where none does.
    """

    moments: tuple[StagePeak, ...]
    work: StepShape
    free: int
    workspace: int = 0
    vllm: int = 0
    rows: int | None = None
    length: int | None = None

    @property
    def peak_moment(self) -> StagePeak:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def loaded(self) -> int:
        """The trainer's weights and adapter, before anything is computed with them."""
        return next(moment.total for moment in self.moments if moment.stage == LOAD)

    @property
    def resident(self) -> int:
        """What the trainer holds between two steps."""
        update = next(moment for moment in self.moments if moment.stage == UPDATE)
        return sum(update.by_kind.get(kind, 0) for kind in PERSISTENT_KINDS)

    @property
    def breakdown(self) -> dict[str, int]:
        """The fullest moment by kind, largest first."""
        by_kind = self.peak_moment.by_kind
        temporary = sum(size for kind, size in by_kind.items() if kind not in PERSISTENT_KINDS)
        parts = {**by_kind, "vLLM": self.vllm, "cuBLAS workspaces": self.workspace}
        parts["allocator"] = round(FRAGMENTS * temporary) if self.workspace else 0
        return dict(sorted(((kind, size) for kind, size in parts.items() if size), key=lambda item: -item[1]))

    @property
    def peak(self) -> int:
        return sum(self.breakdown.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.free

    def as_dict(self) -> dict[str, Any]:
        """Return the figures. `tensors` is what torch.cuda.max_memory_allocated() is to say, but for the workspaces."""
        fullest = self.peak_moment
        return {
            "peak": self.peak,
            "tensors": fullest.total,
            "workspace": self.workspace,
            "breakdown": self.breakdown,
            "stage": fullest.stage,
            "stages": {moment.stage: moment.total for moment in self.moments},
            "vllm": self.vllm,
            "free": self.free,
            "work": vars(self.work),
        }


def forecast_step(run: RunConfig, config: Any, work: StepShape, target: Target) -> MemoryForecast:
    """Run the step of a run on fake tensors. `run` has its choices made; config: the base's."""
    train_all = run.cogumi.tuning == "full"
    dtype = weights_dtype(target.machine, dtype_of_weights(run))
    autocast = autocast_dtype(run, target.machine)
    period = None if train_all and work.micro_batches == 1 else layer_period(config)
    workspace = 0
    if target.on_card:
        workspace = HOPPER_WORKSPACE if target.machine.capability == (9, 0) else WORKSPACE

    @functools.cache
    def trainer_of(layers: int | None) -> Any:
        return planned_trainer(run, config, dtype, layers)

    def forecast(work: StepShape) -> MemoryForecast:
        moments = peaks_of_depth(
            lambda layers: run_step(trainer_of(layers), work, autocast, target.on_card),
            config.get_text_config().num_hidden_layers,
            period,
        )
        return MemoryForecast(moments, work, target.free, workspace, engine_bytes(run.train, target.total))

    def largest(candidates: Sequence[int], shape_with: Callable[[int], StepShape]) -> int | None:
        fitting = bisect.bisect_right(candidates, target.free, key=lambda number: forecast(shape_with(number)).peak)
        return candidates[fitting - 1] if fitting else None

    step = forecast(work)
    if step.fits:
        return step
    documents = work.rows * work.micro_batches
    sizes = [rows for rows in range(1, work.rows) if documents % rows == 0]
    rows = largest(sizes, lambda n: replace(work, rows=n, micro_batches=documents // n))
    if rows is not None:
        return replace(step, rows=rows)
    if work.completion:
        length = largest(range(64, work.completion, 64), lambda n: replace(work, completion=n))
    else:
        length = largest(range(64, work.prompt, 64), lambda n: replace(work, prompt=n))
    return replace(step, length=length)


def peaks_of_depth(
    measure: Callable[[int | None], tuple[StagePeak, ...]], layers: int, period: int | None
) -> tuple[StagePeak, ...]:
    """Return the peaks of a step, extrapolated from two models of a few layers.

    A stage's peak grows by a fixed amount per repeated layer. In full fine-tuning with one micro-batch a step it does not:
    gradients appear while activations are freed, so the stage of the peak depends on the depth.

    measure: returns the peaks for a number of layers, None for all. period: after how many layers their shapes repeat; None
    measures the whole model.
    """
    if period is None or 2 * period >= layers:
        return measure(None)
    share = (layers - period) / period
    peaks = []
    for less, more in zip(measure(period), measure(2 * period), strict=True):
        kinds = {*less.by_kind, *more.by_kind}
        by_kind = {k: round((1 - share) * less.by_kind.get(k, 0) + share * more.by_kind.get(k, 0)) for k in kinds}
        peaks.append(StagePeak(less.stage, sum(by_kind.values()), by_kind))
    return tuple(peaks)


def layer_period(config: Any) -> int | None:
    """Return after how many layers their kinds and shapes repeat; None where they do not."""
    text = config.get_text_config()
    count = text.num_hidden_layers
    stacks = (stack for stack in meta_model(config).get_decoder().modules() if isinstance(stack, torch.nn.ModuleList))
    layers = next((stack for stack in stacks if len(stack) == count), None)
    if layers is None:
        return None
    shapes = [tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters()) for layer in layers]
    kinds = list(zip(getattr(text, "layer_types", None) or [""] * count, shapes, strict=True))
    return next((n for n in range(1, count // 2 + 1) if all(kinds[i] == kinds[i % n] for i in range(count))), None)


def planned_work(run: RunConfig, longest: int, examples_per_row: float | None = None) -> StepShape:
    """Return the shape of a micro-batch. longest: tokens of an example, or of gspo's prompt."""
    train, method = run.train, run.cogumi.method
    rows = run.setting("per_device_train_batch_size")
    steps = run.setting("gradient_accumulation_steps")
    attention = run.model.attn_implementation or ""
    flash = attention.startswith("flash") or "/" in attention
    if method == "gspo":
        completion = run.setting("max_completion_length")
        rollout = 0 if train.get("use_vllm") else rollout_rows(run)
        return StepShape(method, rows, longest, completion, rollout, padded=not flash, micro_batches=steps)
    packed = examples_per_row is not None
    rows, steps = rows_per_step(examples_per_row or 1, rows, steps)
    # Padding is masked; flash attention cuts it out before it computes.
    padded = not flash and rows > 1
    one_sequence = packed and flash
    return StepShape(
        method, rows, longest, packed=packed, one_sequence=one_sequence, padded=padded, micro_batches=steps
    )


def describe_memory(step: MemoryForecast, run: RunConfig, choices: Sequence[Choice] = (), engine_fix: str = "") -> Line:
    """Return the line on memory, with what would make it fit.

    run: with the keys of the YAML. choices: what it left open and the machine decides. engine_fix: the change where the step
    fits alone, and not beside vLLM.
    """
    work, stage = step.work, step.peak_moment.stage
    parts = ", ".join(f"{kind} {format_memory(size)}" for kind, size in step.breakdown.items())
    sequences = work.rollout if stage == ROLLOUT else work.rows
    text = f"{format_memory(step.peak)} of {format_memory(step.free)} at the peak, in "
    text += f"{stage} with {sequences} x {work.length} tokens: {parts}"
    if choices:
        text += "; with " + ", ".join(f"{choice.key}: {choice.value}" for choice in choices) + ", which the run chooses"
    if step.fits:
        return Line("memory", text)
    fits_without_engine = step.peak - step.vllm <= step.free
    return Line("memory", text, "red", engine_fix if engine_fix and fits_without_engine else suggest_fix(step, run))


def suggest_fix(step: MemoryForecast, run: RunConfig) -> str:
    """Return the change that makes a step fit, the mildest first: layers computed twice, a smaller micro-batch, 4 bits."""
    work = step.work
    documents = work.rows * work.micro_batches
    if run.train.get("gradient_checkpointing") is False:  # TRL's default is on
        return "set train.gradient_checkpointing: true; layers are computed twice instead of kept"
    if step.peak_moment.stage == ROLLOUT and work.rollout > documents:
        return f"set {smaller_rollout(run, work, documents)}; fewer completions are sampled at once"
    if step.rows:
        return f"set {smaller_micro_batch(run, documents, step.rows)}; the same step in smaller pieces"
    if run.cogumi.tuning == "full":
        return "set cogumi.tuning: lora; LoRA instead of every weight"
    if run.model.quantization_config is None:
        quantized = 'model.quantization_config: {"load_in_4bit": true}'
        return f"set {quantized} and {smaller_micro_batch(run, documents, 1)}; QLoRA"
    if step.length:
        key = "train.max_completion_length" if work.completion else "train.max_length"
        return f"set {key}: {step.length}; longer examples are dropped, and counted"
    return "take a card with more memory, or a smaller model"


def smaller_rollout(run: RunConfig, work: StepShape, documents: int) -> str:
    """Return half of a rollout's completions, in whole steps, under the key that says how many they are."""
    steps = max(1, work.rollout // documents // 2)
    by_size = f"train.generation_batch_size: {steps * documents * run.cogumi.process_count}"
    if is_planned(run) or run.train.get("generation_batch_size"):
        return by_size
    if run.cogumi.process_count > 1:  # the other key counts micro-batches, of which a process has others than the YAML
        return f"{by_size} in the place of train.steps_per_generation"
    return f"train.steps_per_generation: {steps * work.micro_batches}"


def smaller_micro_batch(run: RunConfig, documents: int, rows: int) -> str:
    """Return the same step in micro-batches of so many rows; GSPO's planner decides the accumulation by itself."""
    smaller = f"train.per_device_train_batch_size: {rows}"
    if is_planned(run) or run.cogumi.examples_per_step is not None:
        return smaller
    accumulated = run.cogumi.process_count * documents // rows  # the YAML's step is that of all processes
    return f"{smaller} and train.gradient_accumulation_steps: {accumulated}"
