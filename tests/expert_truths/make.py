"""Write adapters of one PEFT and one transformers, with the update that these versions trained: python make.py DIRECTORY

One file a pair of versions holds, for each case, the adapter as save_pretrained wrote it and what merge_and_unload added to
the base, in float32. Run it in an environment of each pair, or with PYTHONPATH on unpacked wheels:
PEFT 0.17.1, 0.18.1, 0.19.0, 0.19.1 and 0.21.2 with transformers 4.57.6, all but the first with 5.17.0, too.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

EXPERTS, RANK, ALPHA = 4, 2, 3
SHAPES = ((8, 12), (8, 4), (8, 8))  # hidden and intermediate size: none square, gate_up square, down square
COMMON = {
    "vocab_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 8,
}
STACKED = ["experts.gate_up_proj", "experts.down_proj"]


def config_of(kind: str, inner: int) -> transformers.PretrainedConfig:
    few = {"num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        own = {"moe_intermediate_size": inner, "intermediate_size": 8, "num_experts": EXPERTS, "head_dim": 4}
        return transformers.Qwen3MoeConfig(**COMMON, **few, **own)
    if kind == "mixtral":
        return transformers.MixtralConfig(
            **COMMON, **few, intermediate_size=inner, num_local_experts=EXPERTS, head_dim=4
        )
    if kind == "olmoe":
        return transformers.OlmoeConfig(**COMMON, **few, intermediate_size=inner, num_experts=EXPERTS)
    if kind == "gpt_oss":
        return transformers.GptOssConfig(
            **COMMON, **few, intermediate_size=inner, num_local_experts=EXPERTS, head_dim=4
        )
    if kind == "llama4_text":
        own = {"intermediate_size_mlp": inner, "interleave_moe_layer_step": 1, "pad_token_id": 0, "head_dim": 4}
        one = {"num_experts_per_tok": 1}
        return transformers.Llama4TextConfig(**COMMON, **one, **own, intermediate_size=inner, num_local_experts=EXPERTS)
    raise ValueError(kind)


def cases() -> dict[str, tuple[str, int, dict]]:
    """Return name -> model type, intermediate size, and what its LoraConfig sets."""
    found = {}
    for hidden, inner in SHAPES:
        for kind in ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "llama4_text"):
            stacked = {"target_modules": ["q_proj"], "target_parameters": STACKED}
            found[f"{kind}-{hidden}-{inner}-stacked"] = kind, inner, stacked
            found[f"{kind}-{hidden}-{inner}-down"] = kind, inner, stacked | {"target_parameters": STACKED[1:]}
    # Modules for each expert are what transformers 4 has; every PEFT treats them alike, so the first and last are enough.
    names = {"qwen3_moe": ["gate_proj", "up_proj", "down_proj"], "mixtral": ["w1", "w2", "w3"]}
    names["olmoe"] = names["qwen3_moe"]
    for kind, targets in names.items() if peft.__version__ in ("0.17.1", "0.21.2") else ():
        whole = {"target_modules": ["q_proj", *targets]}
        found[f"{kind}-8-12-modules"] = kind, 12, whole
        found[f"{kind}-8-12-modules-rslora"] = kind, 12, whole | {"use_rslora": True}
        found[f"{kind}-8-12-modules-layer0"] = kind, 12, whole | {"layers_to_transform": [0]}
        found[f"{kind}-8-12-modules-two"] = kind, 12, {"target_modules": rf".*experts\.[02]\.({'|'.join(targets)})"}
        found[f"{kind}-8-12-modules-ranks"] = (
            kind,
            12,
            whole | {"rank_pattern": {targets[0]: 4}, "alpha_pattern": {targets[0]: 5}},
        )
    return found


def build(kind: str, inner: int, lora: dict, out: Path) -> tuple[dict, dict]:
    """Return an adapter's tensors and the update of each parameter. Raises ValueError where it targets no expert."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, inner)).float()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **lora))
    factors = [parameter for name, parameter in tuned.named_parameters() if "lora_" in name]
    if not any("experts" in name for name, _ in tuned.named_parameters() if "lora_" in name):
        raise ValueError("this transformers has no such modules")
    for factor in factors:
        factor.data.normal_()
    tuned.save_pretrained(out)
    adapter = load_file(out / "adapter_model.safetensors")
    after = tuned.merge_and_unload().state_dict()
    return adapter, {name: after[name] - old for name, old in before.items() if not torch.equal(after[name], old)}


def main(directory: Path) -> None:
    warnings.simplefilter("ignore")
    tensors, configs = {}, {}
    for case, (kind, inner, lora) in cases().items():
        with tempfile.TemporaryDirectory() as out:
            try:
                adapter, delta = build(kind, inner, lora, Path(out))
            except ValueError as error:
                print(case, "left out:", str(error)[:100])
                continue
            tensors |= {f"{case}|adapter|{name}": tensor for name, tensor in adapter.items()}
            tensors |= {f"{case}|delta|{name}": tensor.contiguous() for name, tensor in delta.items()}
            written = json.loads((Path(out) / "adapter_config.json").read_text())
            configs[case] = json.dumps({"adapter": written, "model_type": kind, "intermediate_size": inner})
    path = directory / f"peft-{peft.__version__}-transformers-{transformers.__version__}.safetensors"
    save_file(tensors, path, metadata=configs)
    print(path.name, len(configs), "cases", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
