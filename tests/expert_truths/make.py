"""Write adapters of one PEFT and one transformers, with the update that these versions trained: python make.py DIRECTORY

One file a pair of versions holds, for each case, the adapter as save_pretrained wrote it and what merge_and_unload added to
the base, in float32. Run it in an environment of each pair, or with PYTHONPATH on unpacked wheels:
PEFT 0.17.1, 0.18.1, 0.19.0, 0.19.1 and 0.21.2 with transformers 4.57.6, all but the first with 5.17.0, too.

`python make.py DIRECTORY WHEEL` takes the update from an unpacked wheel of unsloth_zoo instead: from its own forward of experts,
which runs without a GPU (2026.4.5, 2026.6.1, 2026.9.5 and 2026.10.9 with PEFT 0.18.1 and 0.21.2 and transformers 5.17.0).
"""

import importlib
import json
import sys
import tempfile
import types
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


def use_unsloth(wheel: Path) -> types.ModuleType:
    """Import the experts' code of unsloth_zoo without the package's own start, which demands a GPU."""
    for name in ("unsloth_zoo", "unsloth_zoo.temporary_patches"):
        package = types.ModuleType(name)
        package.__path__ = [str(wheel.joinpath(*name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module("unsloth_zoo.temporary_patches.moe_utils")


def build_with_unsloth(kind: str, inner: int, lora: dict, out: Path, moe: types.ModuleType) -> tuple[dict, dict]:
    """As build, for an adapter that unsloth's forward reads. Raises RuntimeError where its forward has another update."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, inner)).float()
    experts = model.model.layers[0].mlp.experts
    patches = importlib.import_module(
        f"unsloth_zoo.temporary_patches.{'mixtral' if kind == 'mixtral' else 'qwen3'}_moe"
    )
    extractor = patches._make_mixtral_moe_lora_extractor if kind == "mixtral" else patches._make_qwen_moe_lora_extractor
    type(experts)._unsloth_lora_extractor_fn = staticmethod(extractor())
    type(experts).forward = moe.forward_native_moe_loop
    moe.patch_param_wrapper_for_moe()
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[], **lora))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    tuned.save_pretrained(out)
    written = json.loads((out / "adapter_config.json").read_text())
    written["auto_mapping"] = {"unsloth_fixed": True}
    if hasattr(moe, "moe_lora_b_layout"):  # saves since 2026.9.6 record it
        written["lora_B_layout"] = moe.moe_lora_b_layout()
    (out / "adapter_config.json").write_text(json.dumps(written))
    delta = {}
    for _, module in tuned.named_modules():
        if getattr(module, "parameter_name", None) in ("gate_up_proj", "down_proj"):
            first, second, scaling = moe._extract_lora_from_wrapper(module)[:3]
            update = (first @ second * scaling).detach().transpose(1, 2)
            delta[f"model.layers.0.mlp.experts.{module.parameter_name}"] = update.contiguous()
    x, rows = torch.randn(EXPERTS, 8), torch.arange(EXPERTS)[:, None]
    with torch.no_grad():
        trained = tuned.get_base_model().model.layers[0].mlp.experts(x, rows, torch.ones(EXPERTS, 1))
        for name, update in delta.items():
            experts.get_parameter(name.rpartition(".")[2]).add_(update)
        if not torch.allclose(trained, experts(x, rows, torch.ones(EXPERTS, 1)), rtol=1e-4, atol=1e-4):
            raise RuntimeError("unsloth's forward is not base + update")
    return load_file(out / "adapter_model.safetensors"), delta


def main(directory: Path, wheel: Path | None = None) -> None:
    warnings.simplefilter("ignore")
    moe = use_unsloth(wheel) if wheel else None
    tensors, configs = {}, {}
    for case, (kind, inner, lora) in cases().items():
        if moe and (kind not in ("qwen3_moe", "mixtral") or "target_parameters" not in lora):
            continue
        with tempfile.TemporaryDirectory() as out:
            try:
                if moe:
                    parameters = {"target_parameters": lora["target_parameters"]}
                    adapter, delta = build_with_unsloth(kind, inner, parameters, Path(out), moe)
                else:
                    adapter, delta = build(kind, inner, lora, Path(out))
            except (ValueError, ModuleNotFoundError, RuntimeError) as error:
                print(case, "left out:", str(error)[:100])
                continue
            tensors |= {f"{case}|adapter|{name}": tensor for name, tensor in adapter.items()}
            tensors |= {f"{case}|delta|{name}": tensor.contiguous() for name, tensor in delta.items()}
            written = json.loads((Path(out) / "adapter_config.json").read_text())
            configs[case] = json.dumps({"adapter": written, "model_type": kind, "intermediate_size": inner})
    engine = f"unsloth-{wheel.name.rpartition('-')[2]}-" if wheel else ""
    path = directory / f"{engine}peft-{peft.__version__}-transformers-{transformers.__version__}.safetensors"
    save_file(tensors, path, metadata=configs)
    print(path.name, len(configs), "cases", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
