"""Every kind of adapter: merged, reloaded through transformers, and compared with the live, unmerged adapter.

These are the cases in which merges elsewhere are silently wrong. Base weights are bfloat16 and the live model computes
in float32, so that one rounding of the touched weights is all that may separate the two.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import EXPERTS, FUSED, LINEARS, SIZES, all_tensors, distances, save_base, train_adapter
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cogumi.merge import merge_adapter

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, head_dim=16, **EXPERTS),
    # As many rows as columns, twice over: nothing can be told from shapes.
    "qwen3-moe-square": Qwen3MoeConfig(**SIZES, head_dim=16, **(EXPERTS | {"moe_intermediate_size": 32})),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt-oss": GptOssConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": LINEARS}),
    "rslora": ("llama", {"target_modules": LINEARS, "use_rslora": True}),
    "dora": ("llama", {"target_modules": LINEARS, "use_dora": True}),
    "stored-transposed": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "dora-stored-transposed": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True},
    ),
    "patterns": (
        "llama",
        {"target_modules": LINEARS, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {r"layers\.0\.mlp\.up_proj": 40}},
    ),
    "lora-bias": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "lora-bias-and-bias-all": ("qwen2", {"target_modules": ["q_proj"], "lora_bias": True, "bias": "all"}),
    "bias-all": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    "bias-lora-only": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 250]}),
    "tokens-tied": ("qwen3-tied", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 250]}),
    "tokens-two-layers": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5], "lm_head": [7]}},
    ),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding-dora": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "embedding-tied": ("qwen3-tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding-and-head-tied": ("qwen3-tied", {"target_modules": ["embed_tokens", "lm_head"]}),
    "embedding-kept-tied": ("qwen3-tied", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "head": ("llama", {"target_modules": ["lm_head"]}),
    "head-tied": ("qwen3-tied", {"target_modules": ["lm_head", "q_proj"]}),
    "saved-both-tied": ("qwen3-tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved-kept-tied": (
        "qwen3-tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "saved-embedding-tied": ("qwen3-tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "saved-norm-and-head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "saved-experts": ("qwen3-moe", {"target_modules": ["q_proj"], "modules_to_save": ["experts"]}),
    "moe-attention": ("qwen3-moe", {"target_modules": ["q_proj", "o_proj"]}),
    "qwen3-moe": ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
    "qwen3-moe-square": ("qwen3-moe-square", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
    "qwen3-moe-one-of-two": ("qwen3-moe", {"target_modules": [], "target_parameters": FUSED[1:]}),
    "qwen3-moe-router": ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
    "gpt-oss": ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
}
STILL_TIED = {"tokens-tied", "embedding-kept-tied", "saved-kept-tied"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {name: save_base(root / name, config, max_shard_size="60KB") for name, config in FAMILIES.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_is_the_live_adapter_and_rounds_once(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    family, lora = KINDS[kind]
    adapter = train_adapter(bases[family], tmp_path / "adapter", **lora)
    out = tmp_path / "merged"

    merge_adapter(adapter, out, base=bases[family], dtype="float32", progress=False)

    difference, effect = distances(bases[family], adapter, out)
    assert effect > 0.002
    assert difference < 1e-5 * effect + 1e-6  # float32 sums in another order, and nothing else
    tied = json.loads((out / "config.json").read_text()).get("tie_word_embeddings", False)
    assert tied == (kind in STILL_TIED or (family == "gpt2"))
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]

    # In the base's own dtype, every updated value is the nearest bfloat16 to the exact one.
    report = merge_adapter(adapter, tmp_path / "in-its-dtype", base=bases[family], progress=False)
    exact, rounded = all_tensors(out), all_tensors(tmp_path / "in-its-dtype")
    assert exact.keys() == rounded.keys()
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    off = 0
    for name, value in exact.items():
        chosen = value.bfloat16() != rounded[name]
        off += int(chosen.sum())
        # The float32 merge is rounded once already, so it may lie on the other side of a tie, by a float32's error.
        other, ours = (each[chosen].double() for each in (value.bfloat16(), rounded[name]))
        assert ((value[chosen].double() - (other + ours) / 2).abs() <= 1e-3 * (other - ours).abs() + 2e-9).all()
    assert off <= 1e-4 * report.elements + 3
