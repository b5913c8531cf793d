"""What a token costs in training, against published counts, closed forms, and torch's own counter of operations."""

from typing import Any

import peft
import pytest
import torch
from builders import tiny_llama
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cogumi.stack.gpus import find_card
from cogumi.telemetry.throughput import flops_of


def on_meta(kind: str, **config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config))


LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def test_llama_8b_with_a_frozen_base_is_33_gflop_a_token() -> None:
    model = on_meta("llama", **LLAMA_8B).requires_grad_(False)
    work = flops_of(model)
    assert work.weights == 8_030_261_248 - 128256 * 4096 - 65 * 4096  # all but the embedding table and the norms
    assert work.trained == 0
    assert work.model(2048) == 4 * work.weights + 12 * 32 * 4096 * 2048
    assert work.model(2048) / 1e9 == pytest.approx(33.2, abs=0.1)
    card = find_card("NVIDIA H100 80GB HBM3")
    assert card is not None
    assert card.peak is not None
    assert card.peak / work.model(2048) == pytest.approx(29.8e3, rel=5e-3)  # tokens a second at most


def test_full_fine_tuning_is_six_n_and_lora_four_n_and_six_of_its_own() -> None:
    full = flops_of(on_meta("llama", **LLAMA_8B))
    assert full.trained == full.weights
    assert full.model(0) == 6 * full.weights
    lora = flops_of(
        peft.get_peft_model(on_meta("llama", **LLAMA_8B), peft.LoraConfig(r=16, target_modules="all-linear"))
    )
    adapter = 16 * 32 * (2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 14336))  # r (in + out) of q, o; k, v; the MLP
    assert lora.trained == adapter
    assert lora.model(0) == 4 * full.weights + 6 * adapter
    assert lora.hardware(0, recomputed=True) == 6 * full.weights + 8 * adapter
    assert lora.hardware(0, recomputed=False) == lora.model(0)


@pytest.mark.parametrize(
    ("kind", "billions"),
    [  # parameters that a token meets, as their model cards say; without the embedding table, which is not multiplied
        ("gpt_oss", 5.1),  # gpt-oss-120b, the default of the config
        ("mixtral", 12.9 - 32000 * 4096 / 1e9),
        ("deepseek_v3", 37.5 - 129280 * 7168 / 1e9),
    ],
)
def test_of_a_mixture_of_experts_only_those_routed_to_count(kind: str, billions: float) -> None:
    assert flops_of(on_meta(kind)).weights / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_forward_pass_is_what_torch_counts() -> None:
    """Both passes of a real model on real tokens, by torch's FlopCounterMode: matrices, and attention without causality."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["qwen3"](
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=97, attn_implementation="eager",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    work, length = flops_of(model), 24
    assert work.attention == 3 * 128  # heads x head_dim, twice the hidden size here
    ids = torch.randint(0, 97, (2, length))
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    # eager attention computes the rotary tables' outer product too, which is no part of the formula: under 1 %.
    assert forward == pytest.approx(work.forward(length) * ids.numel(), rel=0.01)
    assert forward + counter.get_total_flops() == pytest.approx(work.model(length) * ids.numel(), rel=0.01)


def test_a_frozen_base_spares_the_gradients_of_its_weights() -> None:
    base = tiny_llama(intermediate_size=160, num_hidden_layers=4, num_key_value_heads=4, attn_implementation="eager")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
    model.enable_input_require_grads()
    ids = torch.randint(0, 97, (2, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert counter.get_total_flops() == pytest.approx(flops_of(model).model(24) * ids.numel(), rel=0.02)


def test_a_tied_head_counts_and_layers_without_attention_attend_to_nothing() -> None:
    tied = on_meta("llama", **{**LLAMA_8B, "num_hidden_layers": 1}, tie_word_embeddings=True)
    apart = on_meta("llama", **{**LLAMA_8B, "num_hidden_layers": 1}, tie_word_embeddings=False)
    assert flops_of(tied).weights == flops_of(apart).weights
    assert flops_of(on_meta("falcon_mamba")).attention == 0
    hybrid = on_meta("qwen3_next")
    width = hybrid.config.num_attention_heads * hybrid.config.head_dim
    assert flops_of(hybrid).attention == hybrid.config.num_hidden_layers // 4 * width


def test_four_bit_weights_are_counted_unpacked(tiny_model: Any) -> None:
    from cogumi.models.loading import load_model

    plain, packed = load_model(str(tiny_model)), load_model(str(tiny_model), quantization={"load_in_4bit": True})
    assert flops_of(packed).weights == flops_of(plain).weights
    assert sum(p.numel() for p in packed.parameters()) < sum(p.numel() for p in plain.parameters())


def test_what_cannot_be_counted_is_said() -> None:
    model = on_meta("mixtral", num_hidden_layers=1)
    model.config.num_experts_per_tok = 0
    with pytest.raises(ValueError, match=r"experts is a mixture of experts, and its config does not say"):
        flops_of(model)


@pytest.mark.parametrize(
    ("card", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100-PCIE-40GB", 312), ("NVIDIA A10", 125),
        ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA B200", 2250),
        # Unknown cards, and one without bf16.
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None), ("NVIDIA A10G", None), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA H100", None),
        ("Tesla V100-SXM2-16GB", None), ("A card of 2030", None),
    ],
)  # fmt: skip
def test_the_peak_of_a_card_is_dense_bf16(card: str, tera: float | None) -> None:
    actual = find_card(card)
    peak = None if actual is None else actual.peak
    assert peak == (None if tera is None else tera * 1e12)
