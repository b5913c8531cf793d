"""Adapters as Tinker, Megatron-Bridge, vLLM-like engines and verl write them merge to the update that is computed by hand."""

import json
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
import transformers
from builders import save_base
from expert_truths.make import config_of
from safetensors.torch import save_file

from cogumi.core.errors import UsageError
from cogumi.merge import merge_adapter

PREFIX, RANK, ALPHA, EXPERTS, HIDDEN = "base_model.model.", 2, 3, 4, 8
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
Tensors = dict[str, torch.Tensor]


def pair(module: str, inputs: int, outputs: int) -> Tensors:
    generator = torch.Generator().manual_seed(len(module))
    a, b = torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
    return {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}


def update(factors: Tensors, module: str) -> torch.Tensor:
    a, b = (factors[f"{PREFIX}{module}.lora_{side}.weight"].double() for side in "AB")
    return b @ a * ALPHA / RANK


def write(path: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    path.mkdir()
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors"
    )
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def check(tmp_path: Path, model: Any, tensors: Tensors, config: dict[str, Any], delta: Tensors) -> None:
    base = save_base(tmp_path / "base", model)
    before = transformers.AutoModelForCausalLM.from_pretrained(base).state_dict()
    merge_adapter(
        write(tmp_path / "adapter", tensors, config), tmp_path / "out", base=base, progress=False, dtype="float32"
    )
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert delta.keys() <= before.keys()
    for name, tensor in before.items():
        assert (after[name].double() - tensor.double() - delta.get(name, torch.zeros(()))).abs().max() < 2e-5, name


def expert_stacks(kind: str, inner: int) -> tuple[Tensors, Tensors]:
    """Return Tinker's factors of every expert, with those next to the hidden size shared, and the updates of the stacks."""
    generator, factors, matrices = torch.Generator().manual_seed(0), {}, {}
    root = f"model.layers.0.{'feed_forward' if kind == 'llama4_text' else 'mlp'}.experts"
    for part, inputs, outputs in (("w1", HIDDEN, inner), ("w3", HIDDEN, inner), ("w2", inner, HIDDEN)):
        a = torch.randn(EXPERTS if part == "w2" else 1, RANK, inputs, generator=generator)
        b = torch.randn(1 if part == "w2" else EXPERTS, outputs, RANK, generator=generator)
        factors |= {f"{PREFIX}{root}.{part}.lora_A.weight": a, f"{PREFIX}{root}.{part}.lora_B.weight": b}
        matrices[part] = b.double() @ a.double() * ALPHA / RANK
    gate, up = matrices["w1"], matrices["w3"]
    gate_up = torch.stack([gate, up], 2).flatten(1, 2) if kind == "gpt_oss" else torch.cat([gate, up], 1)
    stacks = {f"{root}.gate_up_proj": gate_up, f"{root}.down_proj": matrices["w2"]}
    return factors, {
        name: stack.transpose(1, 2) if kind in ("gpt_oss", "llama4_text") else stack for name, stack in stacks.items()
    }


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("inner", [12, 4, 8])
def test_tinkers_experts(kind: str, inner: int, tmp_path: Path) -> None:
    factors, delta = expert_stacks(kind, inner)
    attention = "model.layers.0.attn.q_proj" if kind == "gpt_oss" else "model.layers.0.self_attn.q_proj"
    factors |= pair(attention, HIDDEN, HIDDEN) | pair("model.unembed_tokens", HIDDEN, 16)
    delta["model.layers.0.self_attn.q_proj.weight"] = update(factors, attention)
    delta["lm_head.weight"] = update(factors, "model.unembed_tokens")
    check(tmp_path, config_of(kind, inner), factors, {"r": RANK, "lora_alpha": ALPHA}, delta)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("inner", [12, 4, 8])
def test_megatron_bridges_stacks(kind: str, inner: int, tmp_path: Path) -> None:
    """Its lora_A is every expert's B, transposed, one after the other, and lora_B every A beside the other."""
    generator = torch.Generator().manual_seed(0)
    root = f"model.layers.0.{'feed_forward' if kind == 'llama4_text' else 'mlp'}.experts"
    tensors, delta = {}, {}
    for key, name, inputs, outputs in (
        (f"{root}.base_layer", "gate_up_proj", HIDDEN, 2 * inner),
        (root, "down_proj", inner, HIDDEN),
    ):
        a = torch.randn(EXPERTS, RANK, inputs, generator=generator)
        b = torch.randn(EXPERTS, outputs, RANK, generator=generator)
        tensors[f"{PREFIX}{key}.lora_A.weight"] = torch.cat([one.T for one in b])
        tensors[f"{PREFIX}{key}.lora_B.weight"] = torch.cat([one.T for one in a], dim=1)
        matrix = b.double() @ a.double() * ALPHA / RANK
        delta[f"{root}.{name}"] = matrix.transpose(1, 2) if kind in ("gpt_oss", "llama4_text") else matrix
    config = CONFIG | {"target_modules": [], "target_parameters": [f"{root}.down_proj", f"{root}.gate_up_proj"]}
    check(tmp_path, config_of(kind, inner), tensors, config, delta)


LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES = builders.SIZES | LAYERS | {"hidden_size": HIDDEN}


def test_a_fused_layer_goes_into_the_layers_of_the_base(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn."
    factors = pair(f"{layer}qkv_proj", HIDDEN, 16)
    rows = update(factors, f"{layer}qkv_proj").split([8, 4, 4])
    delta = {f"{layer}{part}_proj.weight": part_rows for part, part_rows in zip("qkv", rows, strict=True)}
    config = CONFIG | {"target_modules": ["qkv_proj"], "runtime_config": {"ephemeral_gpu_offload": False}}  # verl's
    check(tmp_path, transformers.LlamaConfig(**SIZES), factors, config, delta)


def test_layers_go_into_the_fused_one_of_the_base(tmp_path: Path) -> None:
    layer, factors = "model.layers.0.self_attn.", {}
    for part, outputs in (("q", 8), ("k", 4), ("v", 4)):
        factors |= pair(f"{layer}{part}_proj", HIDDEN, outputs)
    delta = {f"{layer}qkv_proj.weight": torch.cat([update(factors, f"{layer}{part}_proj") for part in "qkv"])}
    check(tmp_path, transformers.Phi3Config(**SIZES, pad_token_id=0), factors, CONFIG, delta)


@pytest.mark.parametrize(
    ("module", "inputs", "outputs", "reason"),
    [("q_proj", 9, 8, "in is 9, not 8"), ("q_proj", 8, 9, "out is 9, not 8"), ("qkv_proj", 8, 17, "17 rows")],
)
def test_the_size_that_differs_is_named(module: str, inputs: int, outputs: int, reason: str, tmp_path: Path) -> None:
    name = f"model.layers.0.self_attn.{module}"
    config = CONFIG | {"target_modules": [module]}
    with pytest.raises(UsageError, match=reason):
        check(tmp_path, transformers.LlamaConfig(**SIZES), pair(name, inputs, outputs), config, {})
