"""The forecast of vLLM's engine against the engine itself, on a CPU: weights, KV cache, and how many sequences fit at once."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from cogumi.forecast.vllm_forecast import cache_layout, engine_weights, own_dtype
from cogumi.models.loading import read_base
from tests.vllm_report import RESULT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="`make test-vllm` installs it")
WIDE_VECTORS = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's cache in fp8 takes a CPU with AVX-512"
)
SMALL: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384}  # fmt: skip
MLA: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 4, "moe_intermediate_size": 128, "n_routed_experts": 8,
                       "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64,
                       "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
                       "topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=64, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SMALL, head_dim=64, tie_word_embeddings=True),
    "mistral": MistralConfig(**SMALL, sliding_window=512),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=64, sliding_window=512),
    "deepseek": DeepseekV3Config(**SMALL | MLA),
}


def ask_engine(directory: Path | str, **settings: Any) -> dict[str, Any]:
    script = Path(__file__).with_name("vllm_report.py")
    done = subprocess.run(
        [sys.executable, script, directory, json.dumps(settings)], capture_output=True, text=True, timeout=400
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix(RESULT))


def compare(directory: Path | str, **settings: Any) -> None:
    """Within 5 % of what the engine reports; settings: those of `LLM`. Blocks are as large on a CPU as it says."""
    said, config = ask_engine(directory, **settings), AutoConfig.from_pretrained(directory)
    dtype = own_dtype(config, None) if "dtype" not in settings else getattr(torch, settings["dtype"])
    assert str(dtype) == said["dtype"]
    element = 1 if settings.get("kv_cache_dtype") == "fp8" else dtype.itemsize
    cache = cache_layout(config, element, said["block"], said["in_flight"])
    forecast = {
        "weights": engine_weights(config, dtype, None),
        "cache": said["blocks"] * cache.block_bytes,
        "at_once": cache.at_once(2**30, said["length"]),  # VLLM_CPU_KVCACHE_SPACE is 1 GiB
    }
    for name, value in forecast.items():
        print(
            f"{name}: {value:,.2f} forecast, {said[name]:,.2f} by the engine ({100 * (value / said[name] - 1):+.3f} %)"
        )
        assert value == pytest.approx(said[name], rel=0.05), name


@pytest.mark.parametrize(
    ("name", "dtype", "settings"),
    [
        ("llama", "float32", {"max_model_len": 2048}),  # auto: 16 bits
        ("llama", "bfloat16", {"max_model_len": 2048, "dtype": "float32"}),
        pytest.param("llama", "bfloat16", {"max_model_len": 2048, "kv_cache_dtype": "fp8"}, marks=WIDE_VECTORS),
        ("qwen3", "bfloat16", {"max_model_len": 2048}),
        ("qwen3-tied", "float32", {"max_model_len": 4096}),
        ("mistral", "bfloat16", {"max_model_len": 16384}),
        ("gemma3", "bfloat16", {"max_model_len": 16384}),  # in 6 groups, of which one sees everything
        ("gemma3", "bfloat16", {"max_model_len": 2048}),  # shorter than what may be on its way
        ("deepseek", "bfloat16", {"max_model_len": 2048}),
    ],
)
def test_weights_and_cache_are_those_of_the_engine(
    name: str, dtype: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[name]).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    compare(tmp_path, **settings)


@pytest.mark.parametrize(("tokens", "starts"), [(174_592, True), (174_593, False)])
def test_an_engine_in_which_one_sequence_does_not_fit_does_not_start(tokens: int, starts: bool, tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL | {"max_position_embeddings": 200_000})
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    cache = cache_layout(config, 2, block=128)
    assert (cache.sequence(tokens) + cache.block_bytes <= 2**30) == starts
    if starts:
        assert ask_engine(tmp_path, max_model_len=tokens)["length"] == tokens
    else:
        with pytest.raises(AssertionError, match="To serve at least one request with the model's max seq len"):
            ask_engine(tmp_path, max_model_len=tokens)


def test_the_small_base_is_forecast_too() -> None:
    compare(read_base("cogumi:small-base").name, max_model_len=256)
