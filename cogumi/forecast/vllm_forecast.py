"""Forecast the size of vLLM's engine, and plan it beside the trainer on one card.

share = (weights + KV cache + working memory + CUDA graphs) / card. vLLM takes `gpu_memory_utilization` of the card's total.
What its weights and a profile run leave of that becomes the KV cache (vllm 0.31, vllm/v1/worker/gpu_worker.py,
determine_available_memory). TRL starts it with `max_num_batched_tokens=4096` and with `max_num_seqs` of a whole rollout
(trl/generation/vllm_generation.py, _init_vllm). Its dtype is the trainer's (patches/vllm_engine.py); a server has its own.
Weights and KV cache follow from the config and are compared with vLLM's engine on a CPU (tests/test_vllm_sizing.py).
Working memory and CUDA graphs are estimates that no card has confirmed here.

Two moments are planned. In the rollout the engine is awake beside the trainer's weights, adapter and optimizer. In a
training step it holds its share, or asleep only its CUDA graphs. It starts once the trainer's weights are loaded, and
refuses where less than its share is free (vllm/v1/worker/utils.py, request_memory).
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from cogumi.config.schema import RunConfig
from cogumi.core.formatting import format_memory
from cogumi.forecast.memory_forecast import MemoryForecast, Target, autocast_dtype, weights_dtype
from cogumi.forecast.preflight_report import Line
from cogumi.methods import gspo
from cogumi.methods.auto_settings import MOMENTS, MOMENTS_8BIT, Choice, Load, Machine, choose, is_open, with_values
from cogumi.methods.sampler import adapter_rank
from cogumi.methods.step_split import is_planned
from cogumi.models.base import meta_model
from cogumi.models.quantization import count_meta_bytes, place_quantized_weights
from cogumi.rl.guards import context_of
from cogumi.rl.memory_plan import GRAPHS, USABLE, ModelShape, engine_bytes, engine_share, samples_beside

SHARE, SLEEP = "train.vllm_gpu_memory_utilization", "train.vllm_enable_sleep_mode"
LENGTH = "train.vllm_max_model_length"
NO_ENGINE = (
    "drop train.use_vllm, and transformers samples with the trainer's own weights; or set train.vllm_mode: server"
)
BLOCK = 16  # tokens of a block of the KV cache on a GPU, to which the longest sequence is rounded up
BATCHED_TOKENS = 4096  # TRL's max_num_batched_tokens
# Two batches are on their way at once with asynchronous scheduling, vLLM's default (config/vllm.py, max_in_flight_tokens).
IN_FLIGHT = 2 * BATCHED_TOKENS
PADDED_ROWS = 64  # vLLM pads the vocabulary to a multiple (vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE)
# float32 copies of a row of logits while it is sampled: logits, log-probabilities, probabilities and noise
# (v1/sample/ops/topk_topp_sampler.py, forward_native with processed_logprobs).
SAMPLED_COPIES = 4
# Model types whose layers keep one compressed row a token (transformers_utils/model_arch_config_convertor.py).
MLA = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "longcat_flash")
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT = ("mamba", "ssm", "linear_conv", "linear_num")  # prefixes of the attributes of layers with a state


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache as vLLM divides it: groups of equally many layers share one pool of blocks.

    block: tokens of a block. block_bytes: bytes of a block for a group's layers together. windows: of each group in tokens,
    None for full attention. in_flight: tokens by which a window may be exceeded.
    """

    block: int
    block_bytes: int
    windows: tuple[int | None, ...]
    in_flight: int = IN_FLIGHT

    @property
    def token_bytes(self) -> float:
        """Bytes of a token while it is in every window."""
        return self.block_bytes * len(self.windows) / self.block

    def blocks(self, length: int) -> int:
        """Return the blocks of one sequence of `length` tokens (v1/kv_cache_interface.py, max_memory_usage_bytes)."""
        count = 0
        for window in self.windows:
            held = length if window is None else min(window - 1 + self.in_flight, length)
            count += math.ceil(held / self.block) + (window is not None)
        return count

    def sequence(self, length: int) -> int:
        return self.blocks(length) * self.block_bytes

    def at_once(self, size: int, length: int) -> float:
        """Return how many sequences of `length` tokens `size` bytes hold: vLLM's "maximum concurrency"."""
        return max(0, size // self.block_bytes) / self.blocks(length)


def cache_layout(config: Any, element: int, block: int = BLOCK, in_flight: int = IN_FLIGHT) -> CacheLayout | None:
    """Return the layout of a model's KV cache; None for layers of several sizes or with a memory of another kind.

    element: bytes of a cached number, 2 in 16 bits and 1 in float8.
    """
    text = config.get_text_config()
    windows = None if getattr(text, "is_heterogeneous", False) else layer_windows(text)
    if windows is None:
        return None
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    row = 2 * heads * head
    if text.model_type in MLA and getattr(text, "kv_lora_rank", None):
        row = text.kv_lora_rank + text.qk_rope_head_dim  # keys and values in one, for all heads
    counts = Counter(windows)
    # v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size: as large as the smallest kind, unless the kinds
    # are nearly as many.
    fewest, most = min(counts.values()), max(counts.values())
    size = most if most < 1.5 * fewest else fewest
    groups = tuple(window for window, count in counts.items() for _ in range(math.ceil(count / size)))
    return CacheLayout(block, size * block * row * element, groups, in_flight)


def layer_windows(text: Any) -> list[int | None] | None:
    """Return the window of each layer with a cache, None where it sees everything; None for kinds not known here."""
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if kinds is None:
        if getattr(text, "num_attention_heads", None) is None or any(name.startswith(RECURRENT) for name in vars(text)):
            return None
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = [SLIDING if slides else FULL] * text.num_hidden_layers
    chunk = getattr(text, "attention_chunk_size", None)
    known = {FULL: None, SLIDING: window, CHUNKED: chunk and chunk + 1}
    if not set(kinds) <= known.keys():
        return None
    with_cache = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    return [known[kind] for kind in kinds[:with_cache]]


def engine_dtype(run: RunConfig, config: Any, machine: Machine) -> torch.dtype:
    """Return the dtype of a run's engine: that of the trainer's matrix products; in a server what `auto` means there."""
    if not samples_beside(run.train):
        return own_dtype(config, machine.capability)
    return autocast_dtype(run, machine) or weights_dtype(machine, run.model.dtype)


def own_dtype(config: Any, capability: tuple[int, int] | None) -> torch.dtype:
    """Return what `auto` means to vLLM: the checkpoint's dtype; 16 bits for float32 (config/model.py, _resolve_auto_dtype)."""
    dtype = config.dtype or config.get_text_config().dtype
    halves = torch.float16 if capability is not None and capability < (8, 0) else torch.bfloat16
    return dtype if dtype == torch.float16 else halves


def engine_weights(config: Any, dtype: torch.dtype, quantization: dict[str, Any] | None) -> int:
    """Return the bytes of the weights with all parts of a multimodal model. quantization: `model.quantization_config`."""
    kind = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    model = meta_model(config, kind).to(dtype)
    embeddings = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    tables = {id(module.weight): module.weight for module in embeddings}
    padding = sum(-table.shape[0] % PADDED_ROWS * table.shape[1] * dtype.itemsize for table in tables.values())
    return count_meta_bytes(place_quantized_weights(model, config, quantization)) + padding


def working_memory(config: Any, element: int, rows: int) -> int:
    """Return the bytes of the profile run at its peak: BATCHED_TOKENS through a layer, or `rows` of logits being sampled.

    Beside hidden states and residual, a layer holds the gate, the up projection and their product. A token of a mixture
    holds these for each of its experts, and each expert's output.
    """
    text, shape = config.get_text_config(), ModelShape.of(config)
    inner = 3 * shape.intermediate_size
    if experts := getattr(text, "num_experts_per_tok", None):
        width = shape.intermediate_size // experts
        inner = experts * (max(2 * width, shape.hidden_size) + width)
    layer = BATCHED_TOKENS * (2 * shape.hidden_size + inner) * element
    sampling = rows * shape.vocabulary * (element + 4 * SAMPLED_COPIES) + BATCHED_TOKENS * shape.hidden_size * element
    return max(layer, sampling)


@dataclass(frozen=True)
class Engine:
    """An engine for a rollout, in bytes. length: tokens of the longest sequence. rows: completions. card: its total."""

    weights: int
    working: int
    cache: CacheLayout
    length: int
    rows: int
    card: int

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.working + GRAPHS

    @property
    def needed(self) -> int:
        """The least with which it starts: one sequence of `length`, and the block that vLLM keeps empty."""
        return self.fixed + self.cache.sequence(self.length) + self.cache.block_bytes

    @property
    def useful(self) -> int:
        """The size with which all completions of a rollout are sampled at once."""
        return self.fixed + self.rows * self.cache.sequence(self.length) + self.cache.block_bytes

    def share_of(self, size: int) -> float:
        """Return the share, rounded up to hundredths, that holds `size` bytes."""
        return math.ceil(100 * size / self.card) / 100

    def size_of(self, share: float) -> int:
        return math.ceil(share * self.card)

    def at_once(self, share: float) -> int:
        """Return how many completions of full length are sampled at once with a share."""
        cache = self.size_of(share) - self.fixed - self.cache.block_bytes
        return min(self.rows, int(self.cache.at_once(cache, self.length)))


def forecast_engine(run: RunConfig, config: Any, length: int, machine: Machine) -> Engine | None:
    """Return the engine of a run for sequences up to `length` tokens; None where the cache's layout is not known."""
    dtype = engine_dtype(run, config, machine)
    cache, rows = cache_layout(config, dtype.itemsize), gspo.rollout_rows(run)
    if cache is None:
        return None
    weights = engine_weights(config, dtype, run.model.quantization_config)
    if run.cogumi.sampler_weights == "adapter":
        weights += gspo.lora_parameters(meta_model(config), adapter_rank(run)) * dtype.itemsize
    return Engine(weights, working_memory(config, dtype.itemsize, rows), cache, length, rows, machine.total_bytes)


@dataclass(frozen=True)
class RolloutPlan:
    """An engine beside a trainer, in bytes. share: of the card. sleeps: in a training step.

    loaded: of the trainer when the engine starts. resident: of the trainer in a rollout, with the optimizer. step: of the
    trainer at its peak in a training step. free: of the card for both.
    """

    engine: Engine
    share: float
    sleeps: bool
    loaded: int
    resident: int
    step: int
    free: int

    @property
    def awake(self) -> int:
        return self.engine.size_of(self.share)

    @property
    def rollout(self) -> int:
        return self.resident + self.awake

    @property
    def cannot_start(self) -> str:
        """The reason why the engine refuses to start; "" where it starts."""
        engine, text = self.engine, f"{SHARE}: {self.share:g} of the card is {format_memory(self.awake)}"
        if engine.weights >= self.awake:
            return f"{text}, and the engine's weights alone need {format_memory(engine.weights)}: it does not start"
        if self.loaded + self.awake > self.free:
            left = format_memory(max(0, self.free - self.loaded))
            return f"{text}, and the trainer, which is loaded first, leaves {left} free: the engine does not start"
        if engine.needed > self.awake:
            cache = format_memory(max(0, self.awake - engine.fixed))
            sequence = format_memory(engine.cache.sequence(engine.length))
            text += f", which leaves {cache} for the KV cache, and one sequence of {engine.length:,} tokens needs {sequence}"
            return f"{text}: the engine does not start"
        return ""

    @property
    def fits(self) -> bool:
        return not self.cannot_start and self.rollout <= self.free

    def shares(self, sleeps: bool) -> range:
        """Return the shares, in hundredths, with which the engine starts and both moments fit; empty where none does."""
        engine, beside = self.engine, self.resident if sleeps else max(self.resident, self.step)
        most = math.floor(100 * (self.free - beside) / engine.card)
        if sleeps and self.step + GRAPHS > self.free:
            most = 0
        return range(math.ceil(100 * engine.needed / engine.card), min(most, 100) + 1)

    @property
    def fix(self) -> str:
        """The change with which the engine starts and both moments fit, the mildest first."""
        for sleeps in dict.fromkeys((self.sleeps, False, True)):
            if shares := self.shares(sleeps):
                best = min(shares[-1], max(shares[0], round(100 * self.engine.share_of(self.engine.useful))))
                mode = f"{SLEEP}: {str(sleeps).lower()} and " if sleeps != self.sleeps else ""
                return f"set {mode}{SHARE}: {best / 100:g}"
        return NO_ENGINE

    def as_dict(self) -> dict[str, Any]:
        engine = self.engine
        sizes = {"weights": engine.weights, "working": engine.working, "graphs": GRAPHS, "engine": self.awake}
        numbers = {"share": self.share, "sleeps": self.sleeps, "at_once": engine.at_once(self.share)}
        numbers |= {"smallest_share": engine.share_of(engine.needed), "useful_share": engine.share_of(engine.useful)}
        certain = engine.weights >= self.awake or self.loaded + self.awake > engine.card
        return sizes | numbers | {"rollout": self.rollout, "free": self.free, "cannot_start": certain}


def describe_rollout(plan: RolloutPlan) -> Line:
    """Return the line on the rollout, in which the engine is awake."""
    engine, cache = plan.engine, plan.engine.cache
    parts = f"weights {format_memory(engine.weights)}, KV cache {format_memory(max(0, plan.awake - engine.fixed))}, "
    parts += f"working memory {format_memory(engine.working)}, CUDA graphs {format_memory(GRAPHS)}"
    text = f"{format_memory(plan.rollout)} of {format_memory(plan.free)} in the rollout: the trainer's "
    text += f"{format_memory(plan.resident)} and {plan.share:g} of the card, {format_memory(plan.awake)} ({parts})"
    text += f"; {engine.at_once(plan.share):,} of {engine.rows:,} completions of {engine.length:,} tokens at once, "
    text += f"{cache.token_bytes / 2**10:,.0f} KiB a token; it starts from {engine.share_of(engine.needed):g}, and "
    most = engine.share_of(engine.useful)
    text += f"from {most:g} on all run at once" if most <= 1 else "for all at once the card is too small"
    text += f"; asleep it keeps about {format_memory(GRAPHS)}" if plan.sleeps else "; beside a step it stays awake"
    if plan.cannot_start:
        return Line("vllm", plan.cannot_start, "red", plan.fix)
    return Line("vllm", text) if plan.fits else Line("vllm", text, "red", plan.fix)


# ---------------------------------------------------------------------------------------------------------- what is chosen


def choose_with_engine(
    run: RunConfig, machine: Machine, load: Load, config: Any, longest: Callable[[], int]
) -> list[Choice]:
    """Choose what the run leaves open of vLLM, and then its other settings for the memory that the engine leaves.

    config: the base's. longest: returns the tokens of the longest prompt.
    """
    if run.cogumi.method != "gspo" or not samples_beside(run.train):
        return choose(run, machine, load)
    choices = [choice for choice in [choose_length(run, config, longest())] if is_open(run, choice.key)]
    run = with_values(run, choices)
    if machine.total_bytes:
        length = int(run.train["vllm_max_model_length"])
        engine = forecast_engine(run, config, length, machine)
        if engine is not None:
            choices += choose_share(run, machine, load, engine)
        run = with_values(run, choices)
        left = machine.free_bytes - engine_bytes(run.train, machine.total_bytes)
        machine, load = replace(machine, free_bytes=max(0, left)), load_beside(run, load, length)
    return choices + choose(run, machine, load)


def choose_length(run: RunConfig, config: Any, longest: int) -> Choice:
    """Choose the longest sequence: vLLM's own is the model's whole context, of which one sequence has to fit."""
    completion, context = int(run.setting("max_completion_length")), context_of(config)
    length = math.ceil((longest + completion) / BLOCK) * BLOCK
    reason = f"the longest prompt has {longest:,} tokens and a completion up to {completion:,}"
    if context is not None:
        length, reason = min(length, context), f"{reason}; vLLM would plan for {context:,}"
    return Choice(LENGTH, length, reason)


def choose_share(run: RunConfig, machine: Machine, load: Load, engine: Engine) -> list[Choice]:
    """Choose the share, and sleep only where the engine and a step do not fit beside each other."""
    plan = estimate_plan(run, machine, load, engine)
    share_is_set = not is_open(run, SHARE)
    shares = {sleeps: plan.shares(sleeps) for sleeps in (False, True)}
    fits = {sleeps: round(100 * plan.share) in fit if share_is_set else bool(fit) for sleeps, fit in shares.items()}
    # Asleep an engine loses the base, of which an adapter that is handed over alone brings nothing back.
    may_sleep = is_open(run, SLEEP) and run.cogumi.sampler_weights == "merged"
    sleeps = fits[True] and not fits[False] if may_sleep else plan.sleeps
    least, most = shares[sleeps].start, shares[sleeps].stop - 1
    best = max(least, min(round(100 * engine.share_of(engine.useful)), most))
    if is_planned(run) and not sleeps and shares[sleeps]:
        # The planner cuts the micro-batch to what is left: it gets at least half of what the KV cache could have.
        best = max(least, min(best, (least + most) // 2))
    share = plan.share if share_is_set else min(best, 95) / 100
    reason = f"weights {format_memory(engine.weights)}, and KV cache for {engine.at_once(share):,} of {engine.rows:,} "
    reason += f"completions of {engine.length:,} tokens at once; it starts from {engine.share_of(engine.needed):g}"
    step, size = format_memory(plan.step), format_memory(engine.size_of(share))
    beside = f"a step is estimated at {step}, the engine takes {size}, and {format_memory(plan.free)} are free"
    choices = [Choice(SHARE, share, reason), Choice(SLEEP, sleeps, beside)]
    return [choice for choice in choices if is_open(run, choice.key)]


def load_beside(run: RunConfig, load: Load, length: int) -> Load:
    """Return the least load of a step: one document where the planner cuts the micro-batch. length: of the longest sequence."""
    cut = is_planned(run) and not run.train.get("per_device_train_batch_size")
    return replace(load, length=length, micro_batch=1 if cut else load.micro_batch)


def estimate_plan(run: RunConfig, machine: Machine, load: Load, engine: Engine) -> RolloutPlan:
    """Return the plan by the estimates of `auto_settings`, before a step has been forecast."""
    per_weight = MOMENTS_8BIT if "8bit" in str(run.train.get("optim") or "") else MOMENTS
    # Of every weight the gradient is counted too, and between two steps there is none.
    loaded = load.weights // 2 if run.cogumi.tuning == "full" else load.weights
    moments = per_weight * load.trained
    load = load_beside(run, load, engine.length)
    step = load.weights + moments + load.step(checkpointing=run.train.get("gradient_checkpointing") is not False)
    share, sleeps = engine_share(run.train), bool(run.train.get("vllm_enable_sleep_mode"))
    return RolloutPlan(engine, share, sleeps, loaded, loaded + moments, step, int(USABLE * machine.free_bytes))


def forecast_rollout(
    run: RunConfig, config: Any, planned: MemoryForecast | Load, target: Target, longest: int
) -> RolloutPlan | None:
    """Return the plan of a run; None where no engine is beside the trainer, or its cache is not known.

    planned: the forecast step, or the estimated load where the step cannot be forecast.
    """
    if not samples_beside(run.train) or not target.on_card:
        return None
    engine = forecast_engine(run, config, longest_sequence(run, config, longest), target.machine)
    if engine is None:
        return None
    if isinstance(planned, Load):
        return estimate_plan(run, target.machine, planned, engine)
    loaded, resident = (size + planned.workspace for size in (planned.loaded, planned.resident))
    share, sleeps = engine_share(run.train), bool(run.train.get("vllm_enable_sleep_mode"))
    return RolloutPlan(engine, share, sleeps, loaded, resident, planned.peak - planned.vllm, target.free)


def describe_sampler(run: RunConfig, config: Any, plan: RolloutPlan | None, target: Target, longest: int) -> list[Line]:
    """Return the line on vLLM, none where it does not sample."""
    if run.cogumi.method != "gspo" or not run.train.get("use_vllm"):
        return []
    if plan is not None:
        return [describe_rollout(plan)]
    if not target.on_card:
        space = "its KV cache is as large as VLLM_CPU_KVCACHE_SPACE says, in GiB"
        return [Line("vllm", f"on a CPU nothing of a card is shared: {space}", "unknown")]
    engine = forecast_engine(run, config, longest_sequence(run, config, longest), target.machine)
    if engine is None:
        text = f"how large the KV cache of {config.model_type} is, is not known here: the share is taken as configured"
        return [Line("vllm", text, "unknown", f"vLLM says at its start what {SHARE} leaves for it")]
    # The server's card is assumed to be of the same kind.
    size = f"{format_memory(engine.needed)}, for all {engine.rows:,} completions at once {format_memory(engine.useful)}"
    text = f"a server of its own takes nothing of this card; of a card like it, it needs at least {size}"
    if engine.needed > engine.card:
        fix = "serve it from a larger card, or from several with --tensor-parallel-size"
        return [Line("vllm", text, "red", fix)]
    share = min(0.9, max(engine.share_of(engine.needed), engine.share_of(engine.useful)))
    options = f"--gpu-memory-utilization {share:g} --max-model-len {engine.length}"
    return [Line("vllm", f"{text}: vllm serve with {options}")]


def longest_sequence(run: RunConfig, config: Any, longest: int) -> int:
    """Return `train.vllm_max_model_length`, or vLLM's own, the model's context; of a server what would be chosen."""
    length = run.train.get("vllm_max_model_length")
    if length is None and samples_beside(run.train):
        length = context_of(config)
    return int(length or choose_length(run, config, longest).value)
