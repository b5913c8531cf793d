"""The price of a rollout by transformers: bytes and kernels against arithmetic by hand and against torch's profiler."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.integrations import sdpa_attention

from cogumi.config.schema import RunConfig, load_config
from cogumi.forecast.run_forecast import KERNEL_SECONDS, rollout_seconds
from cogumi.forecast.training_step import StepShape, count_decoding, planned_trainer
from cogumi.patches.trl_internals import cache_name
from cogumi.rl.patching import patch

SIZES: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
                         "num_hidden_layers": 4, "vocab_size": 8192}  # fmt: skip
LLAMA = LlamaConfig(intermediate_size=4096, **SIZES)
WORK = StepShape("gspo", 8, 64, 4096, rollout=64)
LORA = {"r": 8, "target_modules": "all-linear"}
ALL_BYTES, ALL_KERNELS = 1.0, 1e30  # bandwidths with which nothing but bytes, or kernels, counts


@pytest.fixture(scope="module", autouse=True)
def gspo_is_known() -> None:
    patch(graph_break="off", backend="trl")


def planned(lora: dict[str, Any] | None = None, attention: str = "sdpa", load_in_4bit: bool = False) -> RunConfig:
    model = {"name": "x", "attn_implementation": attention}
    if load_in_4bit:
        model["quantization_config"] = {"load_in_4bit": True}
    return load_config(
        {
            "model": model,
            "lora": lora or {"r": 1, "target_modules": ["q_proj"]},
            "data": {"source": "cogumi:stdlib"},
            "train": {"loss_type": "gspo", "max_steps": 1},
            "cogumi": {"method": "gspo", "rewards": ["parses"]},
        }
    )


def seconds(config: Any, work: StepShape, bandwidth: float, **settings: Any) -> float:
    return rollout_seconds(planned(**settings), config, torch.bfloat16, work, bandwidth)


def test_a_llama_moves_its_weights_and_its_growing_cache() -> None:
    """bf16. A layer: q and o 1024 x 1024, k and v 1024 x 256, three matrices of 1024 x 4096. The head: 1024 x 8192.

    A cached token of a row: 2 x 256 elements in each of 4 layers. `cat` reads and writes it, and attention reads it: three
    times its bytes. Until transformers 5.23 `repeat_kv` reads it and writes it four times (16 heads, 4 of keys), and
    attention reads those: 11 times.
    """
    weights = 2 * (4 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096) + 1024 * 8192)
    assert weights == 138_412_032
    cached = 2 * 4 * 2 * 256 * 64  # of all 64 rows
    assert cached == 262_144
    lengths = sum(64 + n for n in range(1, 4097))
    times = 3 if hasattr(sdpa_attention, "pack_gqa") else 11
    assert seconds(LLAMA, WORK, ALL_BYTES) == pytest.approx(4096 * weights + times * cached * lengths, rel=0.05)
    # Flash attention takes 4 heads of keys. Before, they are gathered without padding: read and written once more.
    flash = seconds(LLAMA, replace(WORK, padded=False), ALL_BYTES)
    assert flash == pytest.approx(4096 * weights + 5 * cached * lengths, rel=0.05)


def test_a_mixture_in_4_bits_dequantizes_all_experts_for_each_token() -> None:
    """One row, and 8 experts of 3 x 512 x 512 elements in each of 4 layers: read in 4 bits with their scales, written and
    read in bf16. A scale is a byte for each 64 elements, and is itself dequantized to 4 bytes and read again."""
    config = GptOssConfig(
        hidden_size=512, intermediate_size=512, num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, head_dim=16, vocab_size=512, layer_types=["full_attention"] * 4,
    )  # fmt: skip
    experts = 4 * 8 * 3 * 512 * 512
    assert experts == 25_165_824
    moved = experts * (0.5 + 2 + 2 + (1 + 4 + 4) / 64)
    work = replace(WORK, prompt=4, completion=2, rollout=1)
    actual = seconds(config, work, ALL_BYTES, attention="eager", load_in_4bit=True)
    assert actual == pytest.approx(2 * moved, rel=0.06)


def test_a_linear_layer_in_4_bits_is_dequantized_for_more_than_16_rows() -> None:
    """One layer's weights, 2 bytes an element written and read; the rest of 16 and 17 rows differs by one row."""
    config = LlamaConfig(intermediate_size=4096, **SIZES | {"num_hidden_layers": 1})
    work = replace(WORK, prompt=1, completion=1)
    few, more = (seconds(config, replace(work, rollout=n), ALL_BYTES, load_in_4bit=True) for n in (16, 17))
    assert more - few == pytest.approx(4 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096), rel=0.02)


def test_a_rollout_takes_longer_for_more() -> None:
    config = LlamaConfig(intermediate_size=4096, **SIZES | {"num_hidden_layers": 2})
    base = seconds(config, WORK, 1e12)
    assert seconds(config, replace(WORK, completion=8192), 1e12) > 2 * base
    assert seconds(config, replace(WORK, rollout=512), 1e12) > base
    assert seconds(config, WORK, 1e12, lora=LORA) > base
    assert seconds(config, WORK, 1e11) > base > seconds(config, WORK, ALL_KERNELS)


# ---------------------------------------------------------------------------- the profiler as an independent witness

# Operators of PyTorch that compute nothing: they make views, allocate, or ask for properties.
IDLE = re.compile(
    "as_strided|empty.*|_?(unsafe_)?view|to|resolve_.*|result_type|resize_|set_|t|transpose|unsqueeze|squeeze|expand.*|"
    "slice|select|permute|detach|reshape|flatten|contiguous|split|chunk|narrow|unbind|item|alias|lift_fresh|type_as"
)


def computing(event: Any) -> int:
    """The innermost operators below a profiler's event that compute something."""
    below = sum(map(computing, event.cpu_children))
    is_operator = event.name.startswith("aten::") and not IDLE.fullmatch(event.name[6:])
    return below or int(is_operator)


def profiled(config: Any) -> int:
    """Kernels of one decoding step of a real model, by torch's profiler."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).eval()
    prompt, mask = torch.arange(24).reshape(4, 6), torch.ones(4, 7, dtype=torch.long)
    mask[0, 0] = 0
    with torch.no_grad():
        cache = {cache_name(model.get_base_model()): DynamicCache(config=config)}
        model(prompt, attention_mask=mask[:, :6], **cache)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(prompt[:, :1], attention_mask=mask, **cache)
    return sum(computing(event) for event in profile.events() if event.cpu_parent is None)


@pytest.mark.parametrize(
    ("kind", "own", "least"),
    [
        (LlamaConfig, {"intermediate_size": 64}, 0.95),
        pytest.param(Qwen3Config, {"intermediate_size": 64}, 0.95, marks=pytest.mark.slow("a third shape")),
        # A CPU multiplies the groups of `_grouped_mm` one by one.
        (Qwen3MoeConfig, {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}, 0.75),
    ],
)
def test_the_kernels_of_a_layer_are_those_that_the_profiler_sees(kind: Any, own: dict[str, int], least: float) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}
    one, two = (kind(num_hidden_layers=layers, **sizes, **own) for layers in (1, 2))

    def counted(config: Any) -> int:
        trainer = planned_trainer(planned(LORA), config, torch.bfloat16)
        return count_decoding(trainer, StepShape("gspo", 4, 6, 2, rollout=4))[0].by_kind["kernels"]

    layer, seen = counted(two) - counted(one), profiled(two) - profiled(one)
    print(
        f"{kind.__name__}: {layer} kernels of a layer forecast, {seen} seen, {layer / seen:.2f}"
    )  # of docs/preflight.md
    assert least <= layer / seen <= 1.02
    work = replace(WORK, completion=16)
    by_kernels = seconds(two, work, ALL_KERNELS, lora=LORA)
    assert by_kernels == pytest.approx(16 * KERNEL_SECONDS * counted(two))
