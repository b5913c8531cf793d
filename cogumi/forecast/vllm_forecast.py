"""How large vLLM's engine is, and which share of a card it needs.

share = (weights + KV cache + working memory + CUDA graphs) / card. vLLM takes `gpu_memory_utilization` of the card's total.
What its weights and a profile run leave of that becomes the KV cache (vllm 0.31, vllm/v1/worker/gpu_worker.py,
determine_available_memory). TRL starts it with `max_num_batched_tokens=4096` and with `max_num_seqs` of a whole rollout
(trl/generation/vllm_generation.py, _init_vllm). Its dtype is the trainer's (patches/vllm_engine.py); a server's is vLLM's own
choice. Weights and KV cache follow from the config and are compared with vLLM's engine on a CPU
(tests/test_vllm_sizing.py). Working memory and CUDA graphs are estimates that no card has confirmed here.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from cogumi.config.presets import OURS
from cogumi.config.schema import RunConfig
from cogumi.methods import gspo
from cogumi.methods.sampler import adapter_rank
from cogumi.methods.step_split import is_planned
from cogumi.models.loading import meta_model, resolve_dtype
from cogumi.models.quantization import count_meta_bytes, place_quantized_weights
from cogumi.rl.memory_plan import GRAPHS, ModelShape, samples_beside

BLOCK = 16  # tokens of a block of the KV cache on a GPU
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
RECURRENT = ("mamba", "ssm", "linear_conv", "linear_num")  # how attributes of layers with a state begin


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache as vLLM cuts it up: groups of as many layers each share one pool of blocks.

    block: its tokens. block_bytes: of a group's layers together. windows: of each group in tokens, None where it sees
    everything. in_flight: tokens by which a window may be exceeded.
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
        """Blocks of one sequence of so many tokens (v1/kv_cache_interface.py, max_memory_usage_bytes)."""
        count = 0
        for window in self.windows:
            held = length if window is None else min(window - 1 + self.in_flight, length)
            count += math.ceil(held / self.block) + (window is not None)
        return count

    def sequence(self, length: int) -> int:
        return self.blocks(length) * self.block_bytes

    def at_once(self, size: int, length: int) -> float:
        """How many sequences of so many tokens a cache of `size` bytes holds: vLLM's "maximum concurrency"."""
        return max(0, size // self.block_bytes) / self.blocks(length)


def cache_layout(config: Any, element: int, block: int = BLOCK, in_flight: int = IN_FLIGHT) -> CacheLayout | None:
    """The KV cache of a model. element: bytes of a cached number, 2 in 16 bits and 1 in float8. None for layers with
    another memory than keys and values, or of several sizes, which are not counted here."""
    text = config.get_text_config()
    kinds = None if getattr(text, "is_heterogeneous", False) else layer_windows(text)
    if kinds is None:
        return None
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    row = 2 * heads * head
    if text.model_type in MLA and getattr(text, "kv_lora_rank", None):
        row = text.kv_lora_rank + text.qk_rope_head_dim  # keys and values in one, for all heads
    layers = Counter(kinds)
    # v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size: as large as the smallest kind, unless the kinds
    # are nearly as many.
    fewest, most = min(layers.values()), max(layers.values())
    size = most if most < 1.5 * fewest else fewest
    windows = tuple(window for window, count in layers.items() for _ in range(math.ceil(count / size)))
    return CacheLayout(block, size * block * row * element, windows, in_flight)


def layer_windows(text: Any) -> list[int | None] | None:
    """The window of each layer that has a cache, None where it sees everything; None for kinds that are not known here."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        if getattr(text, "num_attention_heads", None) is None or any(name.startswith(RECURRENT) for name in vars(text)):
            return None
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = [SLIDING if slides else FULL] * text.num_hidden_layers
    chunk = getattr(text, "attention_chunk_size", None)
    known = {FULL: None, SLIDING: window, CHUNKED: chunk and chunk + 1}
    if not set(kinds) <= known.keys():
        return None
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    return [known[kind] for kind in kinds[:own]]


def engine_dtype(run: RunConfig, config: Any, capability: tuple[int, int] | None) -> torch.dtype:
    """What the engine of a run computes in: in this process what the trainer multiplies matrices in, as `auto` in a server."""
    if not samples_beside(run.train):
        return own_dtype(config, capability)
    halves = capability is not None and capability >= (8, 0)
    if run.train.get("fp16"):
        return torch.float16
    if halves and run.train.get("bf16") is not False:
        return torch.bfloat16
    auto = "bfloat16" if halves else "float32"
    dtype: torch.dtype = resolve_dtype(auto if run.model.dtype == "auto" else run.model.dtype)
    return dtype


def own_dtype(config: Any, capability: tuple[int, int] | None) -> torch.dtype:
    """What `auto` means to vLLM: the checkpoint's dtype; 16 bits for float32 (config/model.py, _resolve_auto_dtype)."""
    dtype: Any = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    halves = torch.float16 if capability is not None and capability < (8, 0) else torch.bfloat16
    return dtype if dtype == torch.float16 else halves


def engine_weights(config: Any, dtype: torch.dtype, quantization: dict[str, Any] | None) -> int:
    """Bytes of the weights, those of a multimodal model's other parts included. quantization: `model.quantization_config`."""
    kind = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    model = meta_model(config, kind).to(dtype)
    tables = {
        id(each.weight): each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each
    }
    padding = sum(-table.shape[0] % PADDED_ROWS * table.shape[1] * dtype.itemsize for table in tables.values())
    return count_meta_bytes(place_quantized_weights(model, config, quantization)) + padding


def working_memory(config: Any, element: int, rows: int) -> int:
    """Bytes of the profile run at its peak: BATCHED_TOKENS through a layer, or `rows` of logits being sampled.

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
    """An engine for a rollout, in bytes. length: tokens of the longest sequence. rows: completions of a rollout. card: of all."""

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
        """With which it starts: one sequence of `length` has to fit, beside the block that vLLM keeps empty."""
        return self.fixed + self.cache.sequence(self.length) + self.cache.block_bytes

    @property
    def useful(self) -> int:
        """With which all completions of a rollout are sampled at once."""
        return self.fixed + self.rows * self.cache.sequence(self.length) + self.cache.block_bytes

    def share_of(self, size: int) -> float:
        """The share, in hundredths, that holds so many bytes."""
        return math.ceil(100 * size / self.card) / 100

    def size_of(self, share: float) -> int:
        return math.ceil(share * self.card)

    def at_once(self, share: float) -> int:
        """How many completions of full length are sampled at once with a share."""
        cache = self.size_of(share) - self.fixed - self.cache.block_bytes
        return min(self.rows, int(self.cache.at_once(cache, self.length)))


def forecast_engine(
    run: RunConfig, config: Any, length: int, capability: tuple[int, int] | None, card: int
) -> Engine | None:
    """The engine of a run with the longest sequence of `length` tokens; None where the cache is not known."""
    dtype = engine_dtype(run, config, capability)
    cache, rows = cache_layout(config, dtype.itemsize), rollout_rows(run)
    if cache is None:
        return None
    weights = engine_weights(config, dtype, run.model.quantization_config)
    if run.cogumi.sampler_weights == "adapter":
        weights += gspo.lora_parameters(meta_model(config), adapter_rank(run)) * dtype.itemsize
    return Engine(weights, working_memory(config, dtype.itemsize, rows), cache, length, rows, card)


def rollout_rows(run: RunConfig) -> int:
    """Completions of a rollout, of which each of several processes has a part, and which TRL gives vLLM as `max_num_seqs`."""
    if is_planned(run):
        _, documents, mini_batches, _ = gspo.step_sizes(run)
        return documents * mini_batches
    if given := run.train.get("generation_batch_size"):
        return int(given) // run.cogumi.process_count
    steps = run.train.get("steps_per_generation")
    if steps is None:
        steps = gspo.setting(run, "gradient_accumulation_steps")
        steps *= gspo.STEPS_PER_ROLLOUT if run.train.get("loss_type", "gspo") in OURS else 1
    return int(gspo.setting(run, "per_device_train_batch_size") * steps)
