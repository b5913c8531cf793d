"""Quantized bases: what `model.quantization_config` means, and which weights bitsandbytes has quantized."""

import functools
from importlib.metadata import version
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from cogumi.core.errors import UsageError
from cogumi.merge.adapter_files import quantization_of

# What QLoRA is (https://arxiv.org/abs/2305.14314, section 3). transformers' own defaults are fp4, quantized once.
QLORA = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def quantization_settings(quantization: dict[str, Any], dtype: torch.dtype) -> BitsAndBytesConfig:
    """transformers' object for `model.quantization_config` over QLoRA's defaults, which compute in `dtype`."""
    defaults = {**QLORA, "bnb_4bit_compute_dtype": dtype} if quantization.get("load_in_4bit") else {}
    return BitsAndBytesConfig(**defaults | quantization)


def refuse_quantized_already(name: str, config: PreTrainedConfig) -> None:
    """Raise UsageError for a base whose weights on disk are quantized: transformers keeps them as they are."""
    found = quantization_of(config)
    if found is not None:
        fix = "drop model.quantization_config to train on that, or set model.name to the full-precision model"
        what = f"{name} is quantized already ({found})"
        raise UsageError(what, key="model.quantization_config", fix=fix)


def quantized_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """bitsandbytes' linear layers by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module).__module__.startswith("bitsandbytes")
    }


def refuse_wrong_layers(model: PreTrainedModel) -> None:
    """Raise UsageError where nothing was quantized, or the LM head was."""
    layers = quantized_layers(model)
    if not layers:
        what = f"{type(model).__name__} has no linear layers that bitsandbytes could quantize (stacked experts are not)"
        raise UsageError(what, key="model.quantization_config", fix="drop it")
    for name, module in layers.items():
        if module is model.get_output_embeddings():
            what = f"it replaces transformers' own list, so {name} would be quantized, which TRL's losses read as it is"
            key = "model.quantization_config.llm_int8_skip_modules"
            raise UsageError(what, key=key, fix=f"add {name} to the list")


def refuse_misread(model: PreTrainedModel) -> None:
    """Raise UsageError for 4-bit weights that bitsandbytes misreads on this CPU."""
    layers = quantized_layers(model) if model.device.type == "cpu" else {}
    misread = [name for name, module in layers.items() if not reads_4bit_rows(module.in_features)]
    if misread:
        leaves = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in misread))
        what = f"bitsandbytes {version('bitsandbytes')} misreads the 4-bit weights of {misread[0]} on this CPU"
        skip = f"model.quantization_config.llm_int8_skip_modules: [lm_head, {leaves}]"
        fix = f"run on a GPU, or set model.name to the full-precision model with {skip}"
        raise UsageError(f"{what} ({len(misread)} layers in all)", key="model", fix=fix)


@functools.cache
def reads_4bit_rows(columns: int) -> bool:
    """Whether bitsandbytes gets back, on this CPU, 4-bit weights of so many columns. 0.50.2 counts whole blocks of 64
    to a row where a CPU has AVX512, and scales the others by a neighbour's. Here each block is one number, which it
    would get back exactly."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = (torch.arange(4 * columns) // 64 + 1.0).view(4, columns)
    return torch.equal(dequantize_4bit(*quantize_4bit(weights, blocksize=64, quant_type="nf4")), weights)


def keep_4bit_unpacked(model: torch.nn.Module) -> int:
    """Keep bitsandbytes from repacking 4-bit weights at the first forward without gradients, on CPUs with AVX512-BF16.
    Repacked, they pass no gradient to what came before the layer. Returns how many layers it changed."""
    repacking = [module for module in model.modules() if getattr(module, "support_avx512bf16_for_cpu", False)]
    for module in repacking:
        vars(module)["support_avx512bf16_for_cpu"] = False
    return len(repacking)
