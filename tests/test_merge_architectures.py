"""The architectures of transformers, one after the other: a tiny random base, a real adapter on all of its linear layers
and stacks of experts, the merge, and transformers' model of it against the live adapter in float32.

None is refused, and none is silently wrong.
"""

from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import (
    SIZES,
    check_close,
    check_loads,
    check_merge,
    found_faults,
    load,
    logits,
    reported_faults,
    rms,
    save_base,
    train,
    without_tensor,
)
from peft import PeftModel
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSIFIERS

from cogumi.merge import merge_adapter

# Under the names that families of before 2022 have.
OLDER = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "d_model": 64, "n_layers": 2, "n_heads": 4,
    "max_seq_len": 128, "rotary_dim": 8, "ffn_dim": 96, "word_embed_proj_dim": 64, "num_layers": 2, "num_heads": 4,
}  # fmt: skip
EXPERTS = builders.EXPERTS | {"num_local_experts": 4, "shared_expert_intermediate_size": 48}
HEADS = {"head_dim": 16}
LATENT = {  # DeepSeek's attention
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
MAMBA = {"state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": HEADS | EXPERTS,
    "apertus": {},
    "arcee": {},
    "bamba": MAMBA,
    "biogpt": {},
    "bloom": OLDER,
    "codegen": OLDER,
    "cohere": {},
    "cohere2": TYPES,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": HEADS | EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5": HEADS,
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "exaone4": TYPES,
    "falcon": {"num_kv_heads": 2},
    "falcon_mamba": MAMBA,
    "gemma": HEADS,
    "gemma2": HEADS | TYPES,
    "gemma3_text": HEADS | TYPES,
    "gemma3n_text": HEADS
    | TYPES
    | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8}
    | {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16},
    "gemma4_text": HEADS
    | TYPES
    | {"global_head_dim": 16, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16},
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": HEADS | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "gpt2": OLDER,
    "gpt_bigcode": OLDER,
    "gpt_neo": OLDER | {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gpt_oss": HEADS | EXPERTS | TYPES,
    "gptj": OLDER,
    "granite": {},
    "granitemoe": EXPERTS,
    "granitemoehybrid": EXPERTS | MAMBA | {"shared_intermediate_size": 48},
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS | EXPERTS,
    "jamba": EXPERTS
    | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"expert_layer_period": 2, "expert_layer_offset": 1},
    "jetmoe": EXPERTS | {"num_key_value_heads": 2, "kv_channels": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "llama": {},
    "llama4_text": HEADS | EXPERTS | {"moe_layers": [1], "intermediate_size_mlp": 96},
    "mamba": MAMBA,
    "mamba2": MAMBA | {"head_dim": 32, "num_heads": 4, "n_groups": 1},
    "minimax_m2": HEADS | EXPERTS,
    "ministral": HEADS | TYPES,
    "mistral": {},
    "mixtral": EXPERTS,
    "mpt": OLDER,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": TYPES,
    "olmoe": EXPERTS,
    "opt": OLDER,
    "persimmon": {},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "phimoe": EXPERTS,
    "qwen2": {},
    "qwen2_moe": EXPERTS,
    "qwen3": HEADS,
    "qwen3_5_moe_text": HEADS | EXPERTS | DELTA,
    "qwen3_5_text": HEADS | DELTA,
    "qwen3_moe": HEADS | EXPERTS,
    "qwen3_next": HEADS | EXPERTS | DELTA,
    "recurrent_gemma": HEADS
    | {"lru_width": 64, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 64},
    "sarvam_moe": HEADS | EXPERTS,
    "seed_oss": HEADS,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "xglm": OLDER | {"attention_heads": 4},
    "zamba2": MAMBA | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
}
ARCHITECTURES = {kind: given for kind, given in ARCHITECTURES.items() if kind in CONFIG_MAPPING}  # 5.17 has fewer
# What is adapted where all-linear does not do: PEFT refuses Mamba's out_proj; the live model of Jamba passes by what is
# put on dt_proj; routers give more than their product.
TARGETS: dict[str, list[str]] = {
    "falcon_mamba": ["in_proj", "x_proj"],
    "gemma4_text": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "jamba": ["q_proj", "v_proj", "in_proj", "down_proj"],
    "llama4_text": ["q_proj", "v_proj", "o_proj"],
    "mamba": ["in_proj", "x_proj"],
    "mamba2": ["in_proj"],
    "phimoe": ["q_proj", "v_proj", "o_proj"],
}


def stacks_of(base: Path) -> list[str]:
    """The stacks of experts in a model, as target_parameters names them."""
    stacks = [name for name, each in load(base).named_parameters() if each.dim() == 3 and ".experts." in name]
    return sorted({".".join(name.split(".")[-3:]) for name in stacks})


def tiny_base(kind: str, path: Path) -> Path:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    options = SIZES | tokens | ARCHITECTURES[kind]
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options)).num_parameters() < 3e6
    return save_base(path, CONFIG_MAPPING[kind](**options))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architecture(kind: str, tmp_path: Path) -> None:
    base = tiny_base(kind, tmp_path / "base")
    lora = {"target_modules": TARGETS.get(kind, "all-linear"), "target_parameters": stacks_of(base) or None}
    adapter = train(load(base), tmp_path / "adapter", **lora)
    check_merge(base, adapter, tmp_path / "out")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_missing_tensor_of_any_architecture_is_found(kind: str, tmp_path: Path) -> None:
    """As transformers reports it, of the first, the last, and two tensors between; it raises for stacks that do not fit."""
    base = tiny_base(kind, tmp_path / "base")
    assert found_faults(base) == set()
    names = sorted(load_file(base / "model.safetensors"))
    for number in {0, len(names) // 3, 2 * len(names) // 3, len(names) - 1}:
        damaged = without_tensor(base, tmp_path / f"{number}", names[number])
        try:
            expected = reported_faults(damaged)
        except RuntimeError:
            assert found_faults(damaged), names[number]
        else:
            assert found_faults(damaged) == expected != set(), names[number]


def test_an_adapter_whose_names_peft_changes_as_it_loads(tmp_path: Path) -> None:
    """Laguna's shared experts then have their random start (PEFT 0.21), so the truth is the model that was trained."""
    options = HEADS | EXPERTS | TYPES | {"num_attention_heads_per_layer": [4, 4]}
    base, adapter = save_base(tmp_path / "base", CONFIG_MAPPING["laguna"](**SIZES | options)), tmp_path / "adapter"
    live = load(base)
    train(live, adapter, target_modules=["shared_experts.up_proj"])
    report = merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", verify="logits", progress=False)
    assert report.logits is not None
    check_close(rms(logits(load(tmp_path / "out")) - logits(live)), rms(logits(live) - logits(load(base))))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if CONFIG_MAPPING[kind] in CLASSIFIERS])
def test_classifier_of_an_architecture(kind: str, tmp_path: Path) -> None:
    base = tiny_base(kind, tmp_path / "base")

    def classifier() -> Any:
        torch.manual_seed(7)
        return CLASSIFIERS[CONFIG_MAPPING[kind]].from_pretrained(base, num_labels=3, dtype=torch.float32)

    targets = TARGETS.get(kind, "all-linear")
    adapter = train(classifier(), tmp_path / "adapter", target_modules=targets, task_type="SEQ_CLS")
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", progress=False)
    live = logits(PeftModel.from_pretrained(classifier(), str(adapter)))
    assert live.shape[-1] == 3
    check_close(rms(logits(load(tmp_path / "out")) - live), rms(live - logits(classifier())))
    check_loads(tmp_path / "out")


def test_there_are_as_many_as_are_promised() -> None:
    assert len(ARCHITECTURES) >= 48
