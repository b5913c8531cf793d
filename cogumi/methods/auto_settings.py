"""Settings that a run leaves open, chosen for the machine.

`choose` is a function of what the machine has (Machine) and what the model needs (Load). Of vLLM's engine
`cogumi.forecast.vllm_forecast` chooses first. The estimates for a GPU are those
of rl/memory_plan.py and have not been compared with a card here.
"""

import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cogumi.config.presets import CORRECTION, OURS
from cogumi.config.schema import RunConfig
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.core.formatting import format_memory
from cogumi.core.run_directory import DECISIONS, SETTINGS, read_section, write_section
from cogumi.data.packing import count_per_row, rows_per_step
from cogumi.data.rows import Lengths
from cogumi.methods import gspo
from cogumi.methods.examples import longest_example
from cogumi.methods.sft import CLOSE
from cogumi.methods.step_split import batch_of, is_planned
from cogumi.models.adapters import lora_config
from cogumi.models.base import RunBase, meta_model
from cogumi.models.loading import resolve_dtype
from cogumi.models.quantization import count_meta_bytes, place_quantized_weights
from cogumi.patches import unsloth_rl
from cogumi.patches.trl_internals import TOKEN_LOGPS, logged_metrics, observe_rollouts, supported_attention
from cogumi.patches.unsloth_rl import SET_BY_COGUMI
from cogumi.rl.guards import LARGEST_SEQUENCE_EPSILON, clips_sequences
from cogumi.rl.loss_check import read_trl_inputs, sequence_log_ratio
from cogumi.rl.memory_plan import USABLE, ModelShape, free_memory_bytes, samples_beside, step_bytes, total_memory_bytes
from cogumi.rl.watch import PREFIX, watch
from cogumi.stack.probes import flash_attention

log = logging.getLogger("cogumi")
ALLOCATOR, SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments"
ALLOCATORS = ("PYTORCH_ALLOC_CONF", ALLOCATOR)
MARGIN = 0.7  # of what is free beside the weights: what activations may take for layers not to be computed twice
MICRO_BATCH = "train.per_device_train_batch_size"
MIN_TOKENS = 2048  # of a micro-batch that replaces a larger one: with fewer a GPU waits for its kernels to be launched
PADDED_SHARE = 4  # without packing an example is assumed to fill a quarter of the longest one's length
# Of DPO, losses that sort a micro-batch or average over its tokens; and settings by which the batch picks the examples.
UNSPLIT_LOSSES = frozenset({"aot", "aot_unpaired", "sft"})
UNSPLIT_SETTINGS = ("auto_find_batch_size", "dataloader_drop_last", "train_sampling_strategy")
SAVED_TOKENS = 0.2  # share of a step's tokens, padding included, above which packing is chosen
# With these it is not: neftune's noise depends on the length of a row, and smoothing is a mean over a micro-batch.
UNPACKED_SETTINGS = ("padding_free", "eval_packing", "neftune_noise_alpha", "label_smoothing_factor")
ADAPTER_BYTES, MOMENTS, MOMENTS_8BIT = 8, 8, 2  # per trained weight: an adapter's own float32 and gradient; two moments
ATTENTION = "model.attn_implementation"
NOISE, ROUNDING = "ratio_noise", f"{PREFIX}clipped_by_rounding"  # of decisions.json, and of the metrics
ROWS, PADDING = 32, 5  # completions of each process that are scored again; places that they move to the right
WIDTH = 4.0  # of the clip, in deviations of the noise (docs/gspo.md)
NO_FLASH = "flash attention needs bfloat16 and compute capability 8.0"


@dataclass(frozen=True)
class Machine:
    """Properties of a machine.

    capability: (8, 0) for an A100, None without a GPU. flash: the flash attention that works. total_bytes: of the GPU,
    in use or not; 0 without one.
    """

    name: str
    capability: tuple[int, int] | None
    free_bytes: int
    bitsandbytes: bool = False
    flash: str | None = None
    why_flash: str = "no flash attention was tried"
    total_bytes: int = 0

    @property
    def bf16(self) -> bool:
        return self.capability is not None and self.capability >= (8, 0)

    @classmethod
    def here(cls, run: RunConfig | None = None) -> "Machine":
        """This machine. With a GPU it initialises CUDA, and where the run's attention is open it tries flash attention."""
        bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None
        if not torch.cuda.is_available():
            return cls("CPU", None, free_memory_bytes(), bitsandbytes)
        capability = torch.cuda.get_device_capability()
        tries = capability >= (8, 0) and (run is None or is_open(run, ATTENTION))
        flash = flash_attention() if tries else (None, NO_FLASH if capability < (8, 0) else cls.why_flash)
        name, free = torch.cuda.get_device_name(), free_memory_bytes()
        return cls(name, capability, free, bitsandbytes, *flash, total_bytes=total_memory_bytes())


@dataclass(frozen=True)
class Load:
    """Requirements of a run. weights: bytes of all weights and their gradients. trained: how many are trained.

    element: bytes of one activation; micro_batch sequences of `length` tokens go through at once. attention: the
    implementations that the model's class has. own_kernels: flash attention that it asks for by name. splits: smaller
    batches for the same step, largest first.
    """

    shape: ModelShape
    weights: int
    trained: int
    element: int
    micro_batch: int
    length: int
    attention: frozenset[str]
    own_kernels: tuple[str, ...] = ()
    splits: tuple[int, ...] = ()

    def with_prompts(self, run: RunConfig, longest: int) -> "Load":
        """Return the load for the longest prompt of gspo, in tokens, which `train.max_length` does not bound."""
        is_gspo = run.cogumi.method == "gspo"
        return replace(self, length=longest + int(run.setting("max_completion_length"))) if is_gspo else self

    def step(self, checkpointing: bool) -> int:
        """Bytes that one micro-batch takes beside weights and optimizer."""
        return step_bytes(self.micro_batch, self.shape, self.length, self.element, checkpointing)

    def room(self, machine: Machine) -> int:
        """Bytes that are free beside weights and optimizer."""
        return max(0, machine.free_bytes - self.weights - MOMENTS * self.trained)


@dataclass(frozen=True)
class Choice:
    """A dotted key of the config, or the name of an environment variable; its value; and why."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value} ({self.reason})"


def choose(run: RunConfig, machine: Machine, load: Load) -> list[Choice]:
    """Return the decisions that the config leaves open, in the order in which they take effect."""
    choices, load = micro_batch(run, machine, load)
    checkpointing = gradient_checkpointing(machine, load)
    if not is_planned(run):  # there the planner cuts the micro-batch to the memory, with TRL's default
        choices.append(checkpointing)
    if machine.capability is not None:  # without a GPU transformers' own choice stays: sdpa, or eager where it has none
        requested = run.train.get("gradient_checkpointing")
        choices.insert(0, attention(machine, load))
        chosen = optimizer(machine, load, checkpointing.value if requested is None else requested)
        if run.cogumi.sharding != "none":  # bitsandbytes' moments in 8 bits are for whole tensors
            why = "shards have 32-bit moments, and each GPU a share of them"
            chosen = Choice("train.optim", "adamw_torch_fused", why)
        choices.append(chosen)
    if machine.bf16 and run.cogumi.method == "gspo":
        choices.append(Choice("train.tf32", False, "TF32 rounds at 1e-3, and GSPO clips ratios at 3e-4"))
    if run.cogumi.method == "gspo":
        choices += choose_correction(run)
    return [choice for choice in choices if is_open(run, choice.key)]


def choose_correction(run: RunConfig) -> list[Choice]:
    """Choose how vLLM's samples are corrected where a rollout serves several steps, all but one with an older sampler."""
    if not run.train.get("use_vllm") or any(key.startswith(CORRECTION) for key in run.train):
        return []
    steps = gspo.step_sizes(run)[2] if is_planned(run) else gspo.rollout_rows(run) / math.prod(batch_of(run))
    reused = steps * run.setting("num_iterations") > 1
    why = "a rollout serves several steps; four steps on, tis keeps 98 % of a sample effective and TRL's mis 56 %"
    return [Choice("cogumi.sampler_correction", "tis", why)] if reused else []


def is_open(run: RunConfig, key: str) -> bool:
    if key == MICRO_BATCH:  # the step is the user's; how it is cut belongs to checkpointing, also where a size is set
        return run.cogumi.examples_per_step is not None or is_open(run, "train.gradient_checkpointing")
    section, _, name = key.partition(".")
    if key == ATTENTION and unsloth_rl.is_in_place():
        return False  # unsloth drops it, and dispatches each call itself
    if section in ("model", "cogumi"):
        return getattr(getattr(run, section), name) is None
    return run.train.get(name) is None and run.train.get(f"{name}_kwargs") is None  # setting how is to want it


def attention(machine: Machine, load: Load) -> Choice:
    chosen, why = machine.flash, machine.why_flash
    if load.own_kernels:
        chosen, why = None, f"of flash attention this model takes only {', '.join(load.own_kernels)}, which you may set"
    elif "flash" not in load.attention:
        chosen, why = None, "this model's class has no flash attention"
    elif not machine.bf16 or load.element != 2:
        chosen, why = None, NO_FLASH
    if chosen is None and "sdpa" not in load.attention:
        flex = "; flex_attention, which you may set, was not compared with it" if "flex" in load.attention else ""
        chosen, why = "eager", f"{why}; its class has no sdpa{flex}"
    return Choice(ATTENTION, chosen or "sdpa", why)


def micro_batch(run: RunConfig, machine: Machine, load: Load) -> tuple[list[Choice], Load]:
    """Choose a smaller micro-batch for the same step if only that fits without gradient checkpointing.

    Of `cogumi.examples_per_step` it is the largest that fits: without checkpointing, or else with it.
    """
    (batch, accumulated), twice = batch_of(run), run.train.get("gradient_checkpointing")
    parts = {n: replace(load, micro_batch=load.micro_batch // batch * n) for n in range(batch, 0, -1) if batch % n == 0}
    tries = [(n, False) for n in load.splits]
    if is_planned := run.cogumi.examples_per_step is not None:
        tries = [(n, False) for n in (batch, *load.splits) if twice is None] + [(n, twice is not False) for n in parts]
    elif machine.capability is None or not is_open(run, MICRO_BATCH) or not gradient_checkpointing(machine, load).value:
        return [], load
    room = int(MARGIN * load.room(machine))
    fitting = [(n, again) for n, again in tries if parts[n].step(again) <= room] or tries[-1:] * is_planned
    if not fitting:
        return [], load
    size, again = fitting[0]
    step = f"the step of {batch} x {accumulated} examples in micro-batches of {size}"
    return [Choice(MICRO_BATCH, size, f"{step}, with{'' if again else 'out'} computing layers twice")], parts[size]


def choose_packing(run: RunConfig, config: Any, lengths: Lengths, examples: int) -> list[Choice]:
    """Choose packing where it saves SAVED_TOKENS, and steps, their examples and the memory stay what they are.

    run: with its other choices made. Neither they nor the forecast depend on packing, which a leak turns off
    (`cogumi.methods.sft.decide_packing`). lengths: of `examples` examples, or of a sample.
    """
    is_trl_sft = run.cogumi.method == "sft" and run.cogumi.backend != "unsloth" and not unsloth_rl.is_in_place()
    is_excluded = any(map(run.train.get, UNPACKED_SETTINGS)) or run.train.get("packing_strategy") not in (None, "bfd")
    if (
        not is_trl_sft
        or is_excluded
        or not (lengths and is_open(run, "train.packing") and is_same_when_split(run, config))
    ):
        return []
    row, (batch, accumulated) = lengths.quantile(1.0), batch_of(run)  # no more rows than examples are no more memory
    per_row, step = count_per_row(lengths, row), batch * accumulated
    rows, micro_batches = rows_per_step(per_row, batch, accumulated)
    packed_step = rows * micro_batches * per_row
    steps, packed_steps = (math.ceil(examples / size / run.cogumi.process_count) for size in (step, packed_step))
    is_close = abs(packed_step - step) <= CLOSE * step and abs(packed_steps - steps) <= CLOSE * steps
    padded, packed = lengths.longest_of(batch), row / per_row  # tokens of an example
    if not is_close or packed >= (1 - SAVED_TOKENS) * padded:
        return []
    why = f"in rows of {row:,} an example takes {packed:,.0f} tokens, and {padded:,.0f} with padding"
    return [Choice("train.packing", True, f"{why}; a step has {packed_step:.1f} examples, and {step} were asked for")]


def is_same_when_split(run: RunConfig, config: Any) -> bool:
    """Return whether other micro-batches give the same optimizer step: its loss is a sum over tokens or pairs.

    It is not with a router's loss or UNSPLIT_LOSSES. Shards are gathered for each micro-batch.
    """
    train, router, losses = run.train, run.train.get("router_aux_loss_coef"), run.train.get("loss_type") or ()
    if router is None:
        router = getattr(config.get_text_config(), "router_aux_loss_coef", 0)
    if run.cogumi.method == "dpo" and UNSPLIT_LOSSES.intersection([losses] if isinstance(losses, str) else losses):
        return False
    return not (router or any(map(train.get, UNSPLIT_SETTINGS)) or run.cogumi.sharding != "none")


def same_step_splits(run: RunConfig, config: Any, length: int) -> tuple[int, ...]:
    """Return the divisors of the batch that give the same optimizer step, MIN_TOKENS at least at a time, largest first."""
    batch, _ = batch_of(run)
    if run.cogumi.method == "gspo" or not is_same_when_split(run, config):
        return ()
    tokens = length * (2 if run.cogumi.method == "dpo" else 1) // (1 if run.train.get("packing") else PADDED_SHARE)
    return tuple(size for size in range(batch - 1, 0, -1) if batch % size == 0 and size * tokens >= MIN_TOKENS)


def gradient_checkpointing(machine: Machine, load: Load) -> Choice:
    """Gradient checkpointing, off where everything fits with a margin: it costs about a third of the time."""
    room = load.room(machine)
    needed = load.step(checkpointing=False)
    activations = f"{load.micro_batch} x {load.length} tokens are estimated at {format_memory(needed)} of activations"
    why = f"{activations}, {format_memory(load.step(True))} with it; {format_memory(room)} are free beside the weights"
    return Choice("train.gradient_checkpointing", needed > int(MARGIN * room), why)


def optimizer(machine: Machine, load: Load, checkpointing: bool) -> Choice:
    """AdamW with moments in 8 bits where those in 32 do not fit; transformers' own (fused) stays where they do."""
    room = max(0, int(USABLE * machine.free_bytes) - load.weights - load.step(checkpointing))
    full_size, small = MOMENTS * load.trained, MOMENTS_8BIT * load.trained
    name = "adamw_torch_fused"
    why = f"AdamW's moments are {format_memory(full_size)}, and {format_memory(room)} are left"
    if full_size > room and machine.bitsandbytes:
        name = "adamw_8bit" if small <= room else "paged_adamw_8bit"
        why += f"; {format_memory(small)} in 8 bits{'' if small <= room else ', paged into main memory'}"
    elif full_size > room:
        why += "; bitsandbytes, whose 8 bits are smaller, is not installed"
    return Choice("train.optim", name, why)


# ------------------------------------------------------------------------------------------------------- on this machine


Decide = Callable[[RunConfig, Machine, Load], list[Choice]]


def apply_choices(run: RunConfig, base: RunBase, decide: Decide = choose) -> RunConfig:
    """Decide what the run left open and log each decision; a resumed run keeps the ones it made.

    decide: what decides. Raises UsageError where a decision and the environment exclude each other.
    """
    place = run.run_dir / DECISIONS
    begun = read_section(place, SETTINGS)
    if begun != {}:  # a list, empty where nothing was left open
        choices = [Choice(entry["key"], entry["value"], "as when the run began") for entry in begun]
        choices = [choice for choice in choices if choice.key == MICRO_BATCH or is_open(run, choice.key)]
    else:
        choices = decide(run, Machine.here(run), load_of(run, base))
        write_section(place, SETTINGS, [asdict(entry) for entry in choices])
    for choice in choices:
        log.info("chosen: %s", choice)
    decided = with_values(run, choices)
    refuse_segments(decided)
    return decided


def with_values(run: RunConfig, choices: list[Choice]) -> RunConfig:
    """Fill in the chosen values; another micro-batch keeps the size of the step."""
    run = run.model_copy(deep=True)
    for choice in choices:
        section, _, name = choice.key.partition(".")
        if choice.key == MICRO_BATCH:
            step = math.prod(batch_of(run))
            size = math.gcd(choice.value, step)  # a run may resume with another number of processes
            if steps := run.train.get("steps_per_generation"):
                run.train["steps_per_generation"] = steps * batch_of(run)[0] // size
            run.train |= {name: size, "gradient_accumulation_steps": step // size}
        elif section in ("model", "cogumi"):
            setattr(getattr(run, section), name, choice.value)
        else:
            run.train[name] = choice.value
    return run


def halve_micro_batch(run: RunConfig, config: Any) -> RunConfig | None:
    """Return the run with half the micro-batch and the same optimizer step, which a resumed run keeps; None if there is none.

    run: with its choices made. config: the base's.
    """
    place, planned = run.run_dir / DECISIONS, read_section(run.run_dir / DECISIONS, gspo.BATCH)
    batch = planned.get("per_device_train_batch_size") or batch_of(run)[0]
    size = next((size for size in range(batch // 2, 0, -1) if batch % size == 0), None)
    is_same = run.cogumi.method != "gspo" or run.train.get("loss_type", "gspo") in (*OURS, "grpo", "dapo")
    if size is None or not is_same or run.train.get("use_vllm") or not is_same_when_split(run, config):
        return None
    reason = f"memory ran out at a step in micro-batches of {batch}"
    goes_on = "%s: the run goes on from its last finished step in micro-batches of %d, the same step to rounding"
    log.warning(goes_on, reason, size)
    if planned:
        parts = {key: planned[key] * (batch // size) for key in ("gradient_accumulation_steps", "steps_per_generation")}
        write_section(place, gspo.BATCH, planned | parts | {"per_device_train_batch_size": size})
        return run
    choice = Choice(MICRO_BATCH, size, reason)
    settings = [entry for entry in read_section(place, SETTINGS) if entry["key"] != MICRO_BATCH]
    write_section(place, SETTINGS, [*settings, asdict(choice)])
    return with_values(run, [choice])


def set_allocator(run: RunConfig) -> list[Choice]:
    """Set, and return, what must be set before CUDA is initialised; nothing where that is too late or the user has set it."""
    if "unsloth" not in sys.modules and not torch.cuda.is_initialized():
        os.environ.pop(os.environ.pop(SET_BY_COGUMI, ""), None)  # the process that started this one had other reasons
    is_set = any(name in os.environ for name in ALLOCATORS)
    # vLLM's sleep mode has a memory pool of its own. Whether the engine will sleep is known later, unless the run says.
    may_sleep = samples_beside(run.train) and run.train.get("vllm_enable_sleep_mode") is not False
    if is_set or may_sleep or not torch.cuda.is_available() or torch.cuda.is_initialized():
        return []
    os.environ[ALLOCATOR], os.environ[SET_BY_COGUMI] = f"{SEGMENTS}:True", ALLOCATOR
    return [Choice(ALLOCATOR, os.environ[ALLOCATOR], "lengths differ from step to step, and fixed blocks fragment")]


def refuse_segments(run: RunConfig) -> None:
    """Raise UsageError for expandable segments in the environment of a run whose engine sleeps.

    Sleep mode allocates in a memory pool, in which they do not work (pytorch issue 147851). vLLM has asserted that
    "Expandable segments are not compatible with memory pool". 0.31 disables them while it allocates there.
    """
    variable = next((name for name in ALLOCATORS if os.environ.get(name)), None)  # the order in which torch reads them
    if variable is None or not samples_beside(run.train) or not run.train.get("vllm_enable_sleep_mode"):
        return
    flags = dict(flag.strip().split(":", 1) for flag in os.environ[variable].split(",") if ":" in flag)
    if flags.get(SEGMENTS, "").strip().lower() in ("true", "1"):
        who, fix = variable, f"take {SEGMENTS} out of {variable}, or set train.vllm_enable_sleep_mode: false"
        if os.environ.get(SET_BY_COGUMI) == variable:
            who, fix = "unsloth or an earlier run", "set it to false, or start a new process with cogumi.backend: trl"
        message = f"{who} sets {SEGMENTS}:True, which the memory pool of vLLM's sleep mode excludes"
        raise RefusedAtSetup(message, key="train.vllm_enable_sleep_mode", fix=fix)


def load_of(run: RunConfig, base: RunBase) -> Load:
    """Estimate the load of a run from the base's config alone."""
    config, model = base.config, meta_model(base.config)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones once
    dpo, element = run.cogumi.method == "dpo", resolve_dtype(dtype_of_weights(run)).itemsize
    if run.cogumi.tuning == "full":  # each with its gradient, and beside them DPO's reference model
        reference = dpo and not run.train.get("precompute_ref_log_probs")
        trained, weights = parameters, parameters * element * (3 if reference else 2)
    else:
        trained = gspo.lora_parameters(model, lora_config(run.lora).r)
        in_dtype = model.to(resolve_dtype(run.model.dtype))
        placed = place_quantized_weights(in_dtype, config, run.model.quantization_config)
        weights = count_meta_bytes(placed) + ADAPTER_BYTES * trained
    if run.cogumi.sharding == "fsdp2":  # what a card gathers for a while is the preflight's to count
        weights, trained = (-(-size // run.cogumi.process_count) for size in (weights, trained))
    at_once, length = batch_of(run)[0] * (2 if dpo else 1), longest_sequence(run)
    splits, shape = same_step_splits(run, config, length), ModelShape.of(config)
    return Load(shape, weights, trained, element, at_once, length, *supported_attention(model), splits=splits)


def longest_sequence(run: RunConfig) -> int:
    """Return the budget of an example in tokens, for gspo with the completion."""
    completion = int(run.setting("max_completion_length")) if run.cogumi.method == "gspo" else 0
    return longest_example(run) + completion


# -------------------------------------------------------------------------------------------------------- every weight


def refuse_adapter_settings(run: RunConfig) -> None:
    """Raise UsageError for settings of an adapter where every weight is trained."""
    if run.model.quantization_config is not None:
        reason, fix = "quantized weights cannot be trained themselves", "drop it, or drop cogumi.tuning: full (QLoRA)"
        raise UsageError(reason, key="model.quantization_config", fix=fix)
    settings = {f"lora.{key}": value for key, value in run.lora.items()}
    settings |= {"model.adapter": run.model.adapter, "cogumi.loraplus_ratio": run.cogumi.loraplus_ratio}
    for key in (key for key, value in settings.items() if value is not None):
        raise UsageError(f"{key} would be ignored: cogumi.tuning: full trains no adapter", fix="drop one of the two")


def dtype_of_weights(run: RunConfig) -> str:
    """Default to float32 where every weight is trained: in bfloat16 an update below 2^-9 of a weight is lost."""
    return "float32" if run.cogumi.tuning == "full" and run.model.dtype == "auto" else run.model.dtype


# ------------------------------------------------------------------------------------- GSPO's clip, from measured noise


def settle_clip(run: RunConfig, trainer: Any) -> None:
    """At the first rollout that serves several steps, measure the noise of its ratios and set an epsilon that is left open."""
    config = trainer.model.config.get_text_config()
    if not clips_sequences(trainer.args) or not hasattr(config, "rope_parameters"):  # padding moves absolute positions
        return
    noise: dict[str, Any] = read_section(run.run_dir / DECISIONS, NOISE)  # of a run that is resumed

    def on_rollout(make: Any, inputs: Any) -> Any:
        rollout = make(inputs)
        if trainer.model.training and "old_per_token_logps" in rollout and (noise or trainer.state.global_step == 0):
            noise.update(noise or set_clip(run, trainer, rollout))
            logged_metrics(trainer, "train")[ROUNDING].append(noise["outside"])
        return rollout

    observe_rollouts(trainer, on_rollout)


@torch.no_grad()
def measure_log_ratios(trainer: Any, rollout: dict[str, Any]) -> Tensor:
    """Log-ratios (n,) of rows of a rollout, over all processes, scored again where other positions round differently."""
    step = -(-len(rollout["prompt_ids"]) // ROWS)
    part = {name: value[::step] for name, value in rollout.items() if isinstance(value, Tensor) and value.dim() > 0}
    inputs = (torch.cat([part[f"prompt_{key}"], part[f"completion_{key}"]], 1) for key in ("ids", "mask"))
    ids, attention = (torch.nn.functional.pad(tensor, (PADDING, 0)) for tensor in inputs)
    length, size = part["completion_ids"].size(1), trainer.args.per_device_train_batch_size
    new = getattr(trainer, TOKEN_LOGPS)(trainer.model, ids, attention, length, batch_size=size)[0]
    return Tensor.double(trainer.accelerator.gather(sequence_log_ratio(read_trl_inputs(trainer, part, new))))


def set_clip(run: RunConfig, trainer: Any, rollout: dict[str, Any]) -> dict[str, Any]:
    """Log the noise, and set an epsilon that follows from it where the config has none. Both are in decisions.json then."""
    log_ratios, low, high = measure_log_ratios(trainer, rollout), trainer.epsilon_low, trainer.epsilon_high
    ratios, sd = log_ratios.exp(), log_ratios.square().mean().sqrt().item()
    if choices := choose_clip(run, sd, low, high):
        log.info("chosen: %s", choices[0])
        low, high = (choice.value for choice in choices)
        trainer.args.epsilon, trainer.args.epsilon_high = trainer.epsilon_low, trainer.epsilon_high = low, high
        if (proof := watch(trainer).proof) is not None:  # made with the preset's
            proof.expected |= {"epsilon_low": low, "epsilon_high": high}
    tokens = rollout["completion_mask"].sum(1).double().mean().item()
    outside = (ratios.clamp(1 - low, 1 + high) != ratios).double().mean().item()
    noise = {"sd": sd, "tokens": tokens, "epsilon": low, "outside": outside}
    part = f"{outside:.0%} of {len(ratios)} completions of {tokens:.0f} tokens"
    advice = "; leave train.epsilon and epsilon_high out, and they follow the noise" if outside > 0.5 else ""
    message = f"noise of the ratios: sd {sd:.2g}; rounding puts {part} outside the clip of {low:g}/{high:g}{advice}"
    log.log(logging.WARNING if advice else logging.INFO, "%s", message)
    if trainer.accelerator.is_main_process:
        place = run.run_dir / DECISIONS
        write_section(place, SETTINGS, [*read_section(place, SETTINGS), *map(asdict, choices)])
        write_section(place, NOISE, noise)
    return noise


def choose_clip(run: RunConfig, sd: float, low: float, high: float) -> list[Choice]:
    """Widen the preset's clip (low, high) to WIDTH deviations of the noise where the config names no epsilon."""
    factor = min(WIDTH * sd / low, LARGEST_SEQUENCE_EPSILON / high)
    if any(run.train.get(key) is not None for key in ("epsilon", "epsilon_high")) or not factor > 1:
        return []
    values = {"train.epsilon": low * factor, "train.epsilon_high": high * factor}
    reason = f"{WIDTH:g} times the noise of the ratios, sd {sd:.2g}, by which {low:g}/{high:g} would clip at random"
    return [Choice(key, float(f"{value:.2g}"), reason) for key, value in values.items()]
