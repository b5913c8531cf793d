"""Tiny models, adapters, run configurations, and the comparison of live and merged models, shared by all tests."""

import gc
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig

from cogumi.core.safetensors_file import read_shard
from cogumi.merge import merge_adapter
from cogumi.merge.completeness import find_faults
from cogumi.merge.logits import LogitCheck, compare_logits, record_logits
from cogumi.models.base import meta_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
INPUT_IDS = torch.arange(2 * 24).reshape(2, 24) * 5 % 256
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def tiny_llama(seed: int = 0, **sizes: Any) -> Any:
    """A random Llama in float32 with SIZES, or `sizes` of its config."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes))


def run_config(
    method: str, model: Path | str, data: Path | str | None, run_dir: Path | str, **sections: Any
) -> dict[str, Any]:
    """The configuration of a run of two steps without a merge; `train=`, `data_section=`, `cogumi=`... add to a section.

    data: its source, None for a mixture.
    """
    config: dict[str, Any] = {
        "model": {"name": str(model)},
        "lora": {"r": 4},
        "data": ({} if data is None else {"source": str(data)}) | sections.pop("data_section", {}),
        "train": {
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": False,
            "logging_steps": 1,
        },
        "cogumi": {"method": method, "run_dir": str(run_dir), "merge": False},
    }
    for section, values in sections.items():
        config[section] = config[section] | values
    return config


def as_gspo(sft: dict[str, Any], **train: Any) -> dict[str, Any]:
    """The SFT configuration's model and data in a run of GSPO of eight documents a step."""
    section = {
        "max_steps": 6, "num_generations": 4, "max_completion_length": 8, "learning_rate": 1e-3,
        "gradient_checkpointing": False,
    }  # fmt: skip
    ours = {"method": "gspo", "docs_per_step": 8, "rewards": ["edit_similarity", "parses"]}
    return {**sft, "train": section | train, "cogumi": sft["cogumi"] | ours}


def save_base(path: Path, config: PreTrainedConfig, **options: Any) -> Path:
    """A bfloat16 base of the class that `architectures` names in the config, or of the one for language modelling."""
    torch.manual_seed(0)
    known = getattr(transformers, (config.architectures or [""])[0], None)
    model = known(config) if known is not None else AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)  # transformers starts them at zero
    model.to(torch.bfloat16).save_pretrained(path, **options)
    return path


def train_adapter(base: Path, path: Path, **lora: Any) -> Path:
    """A real adapter, saved by PEFT, every trainable value moved as training might."""
    return train(load(base), path, **lora)


def train(model: Any, path: Path, **lora: Any) -> Path:
    """The same on a model in memory (a vocabulary that was resized, say)."""
    torch.manual_seed(lora.pop("seed", 1))
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | lora))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                scale = 0.05 if "lora_" in name and "bias" not in name else 0.5
                if "magnitude" in name:
                    parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
                else:
                    parameter.add_(torch.randn_like(parameter) * scale)
    adapted.save_pretrained(str(path))
    return path


def logits(model: Any, input_ids: torch.Tensor = INPUT_IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=input_ids, use_cache=False).logits.double()


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a directory, of the class that its config names."""
    kind = getattr(transformers, AutoConfig.from_pretrained(path).architectures[0])
    return kind.from_pretrained(path, dtype=dtype)


def rms(values: torch.Tensor) -> float:
    return values.square().mean().sqrt().item()


def distances(base: Path, adapter: Path, merged: Path) -> tuple[float, float]:
    """rms of (merged - live), and of (live - base), in logits."""
    live = logits(PeftModel.from_pretrained(load(base), str(adapter)))
    return rms(logits(load(merged)) - live), rms(live - logits(load(base)))


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    collected: dict[str, torch.Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        collected |= load_file(shard)
    return collected


def check_merge(base: Path, adapter: Path, out: Path) -> Any:
    """Merge, reload, and compare with the live adapter; the loading info must be clean and the index true."""
    report = merge_adapter(adapter, out, base=base, dtype="float32", progress=False)
    difference, effect = distances(base, adapter, out)
    check_close(difference, effect)
    check_loads(out)
    return report


def check_close(difference: float, effect: float) -> None:
    assert effect > 0.002
    assert difference < 1e-5 * effect + 1e-6  # float32 sums in another order, and nothing else


def check_loads(out: Path) -> None:
    kind = getattr(transformers, json.loads((out / "config.json").read_text())["architectures"][0])
    _, info = kind.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert (out / "model.safetensors.index.json").is_file() != (out / "model.safetensors").is_file()
    if (out / "model.safetensors.index.json").is_file():
        index = json.loads((out / "model.safetensors.index.json").read_text())
        collected = {}
        for shard in out.glob("*.safetensors"):
            with safe_open(shard, framework="pt") as file:
                collected |= dict.fromkeys(file.keys(), shard.name)
        assert index["weight_map"] == collected
        size = sum(tensor.numel() * tensor.itemsize for tensor in all_tensors(out).values())
        assert index["metadata"]["total_size"] == size


def closed_form(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """W + scaling * B @ A in float64, by the stored tensor's own name."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    expected = {name: weight.double() for name, weight in all_tensors(base).items()}
    for key, a in factors.items():
        if ".lora_A." in key:
            module = key.removeprefix("base_model.model.").partition(".lora_A")[0]
            b = factors[key.replace("lora_A", "lora_B")]
            alpha = next(
                (v for end, v in config["alpha_pattern"].items() if module.endswith(end)), config["lora_alpha"]
            )
            scaling = alpha / (len(a) ** 0.5 if config["use_rslora"] else len(a))
            expected[f"{module}.weight"] += scaling * b.double() @ a.double()
    return expected


def reported_faults(path: Path) -> set[str]:
    """What transformers itself fills with random numbers when it loads a directory. What is tied to another missing
    parameter is not counted: its tensor would be the other's."""
    kind = getattr(transformers, AutoConfig.from_pretrained(path).architectures[0])
    model, info = kind.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True)
    missing = set(info["missing_keys"]) | {name for name, *_ in info["mismatched_keys"]}
    return missing - {name for name, source in model.all_tied_weights_keys.items() if source in missing}


def found_faults(path: Path) -> set[str]:
    config = AutoConfig.from_pretrained(path)
    stored = {span.name: (span.shape, span.dtype) for span in read_shard(path / "model.safetensors").spans}
    return {
        fault.parameter
        for fault in find_faults(meta_model(config, getattr(transformers, config.architectures[0])), stored)
    }


def changed(base: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a base in one file, with other tensors."""
    shutil.copytree(base, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def without_tensor(base: Path, copy: Path, name: str) -> Path:
    return changed(base, copy, lambda tensors: tensors.pop(name))


def check_logits(live: Any, merged: Any, input_ids: torch.Tensor, stored: torch.dtype | None = None) -> LogitCheck:
    """Compare a merged model with the live, unmerged PEFT model. stored: the dtype that its weights were rounded to."""
    return compare_logits(record_logits(live, input_ids), merged, stored or merged.dtype)


def edit_config(directory: Path, **entries: Any) -> Path:
    """Change entries of an adapter's configuration, or of a model's."""
    file = directory / "adapter_config.json"
    file = file if file.is_file() else directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return directory


def edit_tensors(directory: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Path:
    """Change the tensors of an adapter or a model; those for which `change` returns None are left out."""
    for file in directory.glob("*.safetensors"):
        changed = {name: change(name, tensor) for name, tensor in load_file(file).items()}
        tensors = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
        save_file(tensors, file, {"format": "pt"})
    return directory


def add_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Add tensors to the file of an adapter or a model, or replace them."""
    (file,) = directory.glob("*.safetensors")
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    return directory


def manifest_of(merged: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((merged / "cogumi-merge.json").read_text())
    return manifest


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def save_distinct(path: Path, config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random base in shards whose norms are not all ones, which any two models would share."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    model.to(dtype).save_pretrained(path, max_shard_size="100KB")
    return path


def save_quantized(full: Path, path: Path, settings: BitsAndBytesConfig, **options: Any) -> Path:
    AutoModelForCausalLM.from_pretrained(full, quantization_config=settings, **options).save_pretrained(path)
    return path


def save_llama(path: Path, tokenizer_of: Path, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Path:
    """A random Llama of these sizes, with the tokenizer of another directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_of)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **special, **sizes)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def peak_growth(step: Callable[[], None]) -> int:
    """Bytes by which PyTorch's CPU allocations rose at their highest during `step`, as its own allocator reports them."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(sizes))
