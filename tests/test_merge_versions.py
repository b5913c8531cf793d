"""Adapters of earlier versions of PEFT and transformers merge to what those computed, or are refused.

The truth is by hand: W + scaling * B @ A in float64, with the scaling of the version that trained. What PEFT 0.13 and 0.17 did is
quoted beside each case.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    INPUT_IDS,
    SIZES,
    add_tensors,
    all_tensors,
    check_merge,
    closed_form,
    edit_config,
    edit_tensors,
    load,
    save_base,
    train,
    train_adapter,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BioGptConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    T5Config,
    Zamba2Config,
)

from cogumi.core.errors import UsageError
from cogumi.merge import merge_adapter

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 1,
    "topk_group": 1, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}  # fmt: skip
MIXTURES: dict[str, PreTrainedConfig] = {
    "qwen2-moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=48),
    "qwen3-moe-with-a-dense-layer": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, mlp_only_layers=[0]),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "deepseek-v3": DeepseekV3Config(**SIZES | LATENT),
}
ALPHAS = {"gate": 32, r"layers\.1\.self_attn\.o_proj": 5}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("bases") / "llama", LlamaConfig(**SIZES, tie_word_embeddings=False))


def write(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
    (path / "adapter_config.json").write_text(json.dumps(plain | config))
    return path


@pytest.mark.parametrize("with_experts", [True, False])
@pytest.mark.parametrize("kind", MIXTURES)
def test_linear_layers_of_transformers_4_in_a_mixture(kind: str, with_experts: bool, tmp_path: Path) -> None:
    """Router, dense layers, shared experts and single experts were linear layers, of which dropout and alpha were set."""
    base = save_base(tmp_path / "base", MIXTURES[kind])
    before = all_tensors(base)
    factors, updates = {}, {}
    torch.manual_seed(1)
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        is_router = kind != "deepseek-v3" or not module.endswith(".gate")  # that one was no layer there either
        if weight.ndim == 2 and ".layers." in name and is_router and (with_experts or ".experts." not in name):
            a, b = torch.randn(4, weight.shape[1]) * 0.1, torch.randn(weight.shape[0], 4) * 0.1
            factors |= {f"base_model.model.{module}.lora_{side}.weight": t for side, t in {"A": a, "B": b}.items()}
            alpha = next((ALPHAS[key] for key in ALPHAS if re.fullmatch(rf".*\.{key}", module)), 8)
            updates[name] = alpha / 4 * b.double() @ a.double()
    targets = sorted({name.split(".")[-2] for name in updates})
    adapter = write(tmp_path / "adapter", factors, target_modules=targets, lora_dropout=0.05, alpha_pattern=ALPHAS)
    verify = "elements" if with_experts else "logits"
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", verify=verify, progress=False)
    after = all_tensors(tmp_path / "out")
    for name, weight in before.items():
        expected = weight.double() + updates.get(name, torch.zeros(()))
        assert (after[name].double() - expected).abs().max() < 1e-6, name


PATTERNS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "one-key-hides-the-other": ({"q_proj": 7}, {"layers.0.self_attn.q_proj": 50, "v_proj": 3}),
    "one-key": ({"q_proj": 7}, {"q_proj": 50}),
    "alpha-alone": ({}, {"q_proj": 50}),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_patterns_of_peft_up_to_0_13(case: str, llama: Path, tmp_path: Path) -> None:
    """lora/model.py of 0.13.2 looks rank and alpha up by one key, the first of both patterns that matches."""
    ranks, alphas = PATTERNS[case]
    adapter = train_adapter(llama, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], rank_pattern=ranks)
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"alpha_pattern": alphas}
    later = ("peft_version", "lora_bias", "eva_config", "exclude_modules", "corda_config", "target_parameters")
    kept = {key: value for key, value in config.items() if key not in (*later, "trainable_token_indices")}
    (adapter / "adapter_config.json").write_text(json.dumps(kept))
    merge_adapter(adapter, tmp_path / "out", base=llama, dtype="float32", verify="logits", progress=False)
    before, after = all_tensors(llama), all_tensors(tmp_path / "out")
    factors = load_file(adapter / "adapter_model.safetensors")
    modules = [key[len("base_model.model.") : -len(".lora_A.weight")] for key in factors if "lora_A" in key]
    assert len(modules) == 4
    for module in modules:
        a, b = (factors[f"base_model.model.{module}.lora_{side}.weight"].double() for side in "AB")
        key = next(filter(lambda key: re.match(rf".*\.{key}$", module), [*ranks, *alphas]), module)
        expected = before[f"{module}.weight"].double() + alphas.get(key, 8) / ranks.get(key, 4) * b @ a
        assert (after[f"{module}.weight"].double() - expected).abs().max() < 1e-6, module


def test_patterns_that_are_null(llama: Path, tmp_path: Path) -> None:
    adapter = train_adapter(llama, tmp_path / "adapter", target_modules=["q_proj"])
    merge_adapter(adapter, tmp_path / "expected", progress=False)
    edit_config(adapter, rank_pattern=None, alpha_pattern=None)
    merge_adapter(adapter, tmp_path / "out", progress=False)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_a_pattern_of_layers_without_layers_has_no_effect(llama: Path, tmp_path: Path) -> None:
    """PEFT up to 0.13 saved such adapters, and today's refuses them."""
    adapter = train_adapter(llama, tmp_path / "adapter", target_modules=["q_proj"])
    edit_config(adapter, layers_pattern="layers", layers_to_transform=None)
    merge_adapter(adapter, tmp_path / "out", base=llama, dtype="float32", verify="logits", progress=False)
    after = all_tensors(tmp_path / "out")
    for name, weight in closed_form(llama, adapter).items():
        assert (after[name].double() - weight).abs().max() < 1e-6, name


GEMMAS: dict[str, tuple[PreTrainedConfig, float]] = {
    # Its embedding multiplies by 8, and lora/layer.py of 0.17.1 added the update behind it.
    "gemma3": (Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=16), 8.0),
    # In transformers 4 the model did, with the update.
    "gemma2": (Gemma2Config(**SIZES, head_dim=16, sliding_window=16), 1.0),
}


@pytest.mark.parametrize("kind", GEMMAS)
def test_a_scaled_embedding_of_peft_up_to_0_17(kind: str, tmp_path: Path) -> None:
    config, scale = GEMMAS[kind]
    base = save_base(tmp_path / "base", config)
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])
    edit_config(adapter, peft_version=None)
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", verify="logits", progress=False)
    name, factors = "model.embed_tokens", load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{name}.lora_embedding_{side}"].double() for side in "AB")
    expected = all_tensors(base)[f"{name}.weight"].double() + 2 * (b @ a).T / scale
    assert (all_tensors(tmp_path / "out")[f"{name}.weight"].double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"target_modules": ["q_proj"], "trainable_token_indices": [3]}])
def test_a_scaled_embedding_that_no_weights_compute_is_refused(lora: dict[str, Any], tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", GEMMAS["gemma3"][0])
    adapter = train_adapter(base, tmp_path / "adapter", **{"target_modules": ["embed_tokens"]} | lora)
    check_merge(base, adapter, tmp_path / "today")
    edit_config(adapter, peft_version=None)
    with pytest.raises(UsageError, match="without the embedding's scale of 8"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)


def test_a_scale_that_moved_between_versions_of_transformers_is_refused(tmp_path: Path) -> None:
    """BioGPT scaled in the model, then in its embedding, where PEFT up to 0.17 added the update unscaled."""
    base = save_base(tmp_path / "base", BioGptConfig(**SIZES))
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens", "fc1", "fc2"])
    check_merge(base, adapter, tmp_path / "today")
    edit_config(adapter, peft_version=None)
    with pytest.raises(UsageError, match="with the embedding's scale of 8 or without"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    edit_tensors(adapter, lambda name, tensor: None if "embed_tokens" in name else tensor)
    edit_config(adapter, target_modules=["fc1", "fc2"])
    check_merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("tokens", [[5, 258], [5, -1]])
def test_tokens_that_the_base_does_not_have_are_refused(tokens: list[int], llama: Path, tmp_path: Path) -> None:
    """As of a vocabulary that was resized in training, and saved with save_embedding_layers=False."""
    lora = {"target_modules": ["q_proj"], "trainable_token_indices": [5, 250]}
    adapter = edit_config(train_adapter(llama, tmp_path / "adapter", **lora), trainable_token_indices=tokens)
    with pytest.raises(
        UsageError, match=f"trainable_token_indices has {tokens[1]}, and model.embed_tokens has 256 rows"
    ):
        merge_adapter(adapter, tmp_path / "out", base=llama, progress=False)


def test_a_label_head_that_nobody_has_is_refused(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(llama, num_labels=3, dtype=torch.float32)
    adapter = train(model, tmp_path / "adapter", task_type="SEQ_CLS", target_modules=["q_proj"])
    edit_tensors(adapter, lambda name, tensor: None if "score" in name else tensor)
    with pytest.raises(UsageError, match=r"neither it nor base .* has the head for labels"):
        merge_adapter(adapter, tmp_path / "out", base=llama, progress=False)
    edit_config(adapter, task_type="CAUSAL_LM")  # as the message advises
    merge_adapter(adapter, tmp_path / "out", base=llama, progress=False)


def test_auto_counts_what_rounding_takes_of_a_module_trained_whole(llama: Path, tmp_path: Path) -> None:
    adapter = train_adapter(llama, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["lm_head"])
    torch.manual_seed(2)
    head = all_tensors(llama)["lm_head.weight"].float()
    trained = head + torch.randn_like(head) * 3e-5

    def small(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return trained if "lm_head" in name else tensor * 1e-6 if "lora_B" in name else tensor

    edit_tensors(adapter, small)
    report = merge_adapter(adapter, tmp_path / "out", base=llama, dtype="auto", progress=False)
    assert report.dtype == "float32"
    assert torch.equal(all_tensors(tmp_path / "out")["lm_head.weight"], trained)
    rounded = merge_adapter(adapter, tmp_path / "kept", base=llama, progress=False)
    delta, kept = (trained - head).double(), (trained.bfloat16().float() - head).double()
    assert rounded.delta_retained == pytest.approx(float((kept * delta).sum() / delta.square().sum()), abs=0.001)


def test_layers_with_one_weight_that_an_adapter_changes_apart(tmp_path: Path) -> None:
    """Zamba 2 ties its attention layers to the first of them, and PEFT adapts each for itself."""
    sizes = {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 32, "mamba_ngroups": 1, "num_mem_blocks": 1}
    types = ["mamba", "hybrid", "mamba", "hybrid", "hybrid"]
    config = Zamba2Config(**SIZES | {"num_hidden_layers": 5}, **sizes, layers_block_type=types)
    base = save_base(tmp_path / "base", config)
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "gate_up_proj"], lora_alpha=99)
    check_merge(base, adapter, tmp_path / "out")
    assert load(tmp_path / "out").config.tie_word_embeddings


@pytest.mark.parametrize("pattern", [{}, {r"layers\.1\..*input_linear\.weight": 5}])
@pytest.mark.parametrize("peft", [None, "0.19.1"])
def test_stacks_that_were_modules_of_their_own(peft: str | None, pattern: dict[str, int], tmp_path: Path) -> None:
    """GraniteMoe's and Aria's until transformers 5. Their names and patterns are those of then, their axis is PEFT's."""
    base = save_base(tmp_path / "base", GraniteMoeConfig(**SIZES, num_local_experts=4))
    before, factors, updates = all_tensors(base), {}, {}
    torch.manual_seed(1)
    for name, weight in before.items():
        if weight.ndim == 3:
            alpha, (first, last) = (5 if pattern and ".1." in name and "input" in name else 8), weight.shape[1:]
            inputs, outputs = (first, last) if peft is None else (last, first)
            a, b = torch.randn(4 * 2, inputs) * 0.1, torch.randn(outputs, 2 * 4) * 0.1
            key = f"base_model.model.{name.removesuffix('.weight')}.lora"
            factors |= {f"{key}_A.weight": a, f"{key}_B.weight": b}
            delta = torch.einsum("ore,eri->eoi", b.double().view(-1, 2, 4), a.double().view(4, 2, -1)) * alpha / 2
            updates[name] = delta.transpose(1, 2) if peft is None else delta
    stacks = ["input_linear.weight", "output_linear.weight"]
    config: dict[str, Any] = {"target_parameters": stacks, "alpha_pattern": pattern, "peft_version": peft}
    adapter = write(tmp_path / "adapter", factors, r=2, target_modules=[], **config)
    report = merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", verify="logits", progress=False)
    assert "experts read as axis" in report.readings[0]
    after = all_tensors(tmp_path / "out")
    assert len(updates) == 4
    for name, weight in before.items():
        expected = weight.double() + updates.get(name, torch.zeros(()))
        assert (after[name].double() - expected).abs().max() < 1e-6, name


def test_layers_of_t5_as_peft_up_to_0_18_counted_them(tmp_path: Path) -> None:
    """Its `layers_to_transform` took the last number of `block.1.layer.0`, so 0 was the attention of every block."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
    base = save_base(tmp_path / "base", T5Config(**sizes, architectures=["T5ForConditionalGeneration"]))
    adapter = train(
        load(base), tmp_path / "adapter", task_type="SEQ_2_SEQ_LM", target_modules=r".*layer\.0\.SelfAttention\.q"
    )
    merge_adapter(adapter, tmp_path / "expected", base=base, progress=False)
    edit_config(adapter, target_modules=["q"], layers_to_transform=[0], peft_version=None)
    merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    after, expected = all_tensors(tmp_path / "out"), all_tensors(tmp_path / "expected")
    assert all(torch.equal(after[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("lora", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q", "shared"]}])
def test_a_head_of_t5_that_is_stored_apart(lora: dict[str, Any], tmp_path: Path) -> None:
    """flan-T5's: transformers 5 calls it tied in every config, and keeps the stored one."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 256}
    base = save_base(tmp_path / "base", T5Config(**sizes, architectures=["T5ForConditionalGeneration"]))
    head = torch.randn(256, 64).bfloat16()
    add_tensors(edit_config(base, tie_word_embeddings=False), {"lm_head.weight": head})
    live = load(base)
    adapter = train(live, tmp_path / "adapter", **{"target_modules": ["q"], "task_type": "SEQ_2_SEQ_LM"} | lora)
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", progress=False)
    tokens = {"input_ids": INPUT_IDS, "decoder_input_ids": INPUT_IDS}
    with torch.inference_mode():
        merged, trained = (model.eval()(**tokens).logits for model in (load(tmp_path / "out"), live))
    assert (merged - trained).abs().max() < 1e-4 * trained.abs().max()
