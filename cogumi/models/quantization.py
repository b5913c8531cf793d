"""Quantized bases: what `model.quantization_config` means, and which weights bitsandbytes has quantized."""

import functools
import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from math import ceil
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_memory, one_line, pip_command
from cogumi.models.quantized_bases import full_precision_names, quantization_of
from cogumi.patches import expert_quantizer, parametrized_lora
from cogumi.patches.torch_internals import storage_key
from cogumi.patches.trl_internals import float32_modules, place_quantized_layers

# What QLoRA is (https://arxiv.org/abs/2305.14314, section 3). transformers' own defaults are fp4, quantized once.
QLORA = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
FOUR_BIT = 0.55  # bytes of a weight in 4 bits with its scales, about


def quantization_settings(quantization: dict[str, Any], dtype: torch.dtype) -> BitsAndBytesConfig:
    """Transformers' object for `model.quantization_config` over QLoRA's defaults, which compute in `dtype`."""
    defaults = {**QLORA, "bnb_4bit_compute_dtype": dtype} if quantization.get("load_in_4bit") else {}
    return BitsAndBytesConfig(**defaults | quantization)


def refuse_quantized_already(name: str, config: PreTrainedConfig) -> None:
    """Raise UsageError for a base whose weights on disk are quantized: transformers keeps them as they are."""
    quantization = quantization_of(config)
    if quantization is not None:
        fix = "drop model.quantization_config to train on that, or set model.name to the full-precision model"
        message = f"{name} is quantized already ({quantization})"
        raise UsageError(message, key="model.quantization_config", fix=fix)


def refuse_untrainable(name: str, config: PreTrainedConfig, tuning: str) -> None:
    """Raise UsageError for a base that is quantized on disk in a way in which this machine cannot train it.

    tuning: `cogumi.tuning`. Of what transformers dequantizes when it loads, 16-bit weights are trained.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return
    full = next(iter(full_precision_names(name, quantization.method)), "the full-precision model")
    fix = f"set model.name to {full}, with model.quantization_config: {{load_in_4bit: true}} where it is too large"
    try:
        quantizer: Any = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        quantizer.validate_environment(device_map={"": "cuda:0" if torch.cuda.is_available() else "cpu"})
        trainable = quantizer.is_trainable or getattr(quantizer.quantization_config, "dequantize", False)
    except (ImportError, RuntimeError, ValueError) as error:
        message = f"{name} is quantized ({quantization}), which cannot be loaded here: {one_line(error)}"
        raise UsageError(message, key="model.name", fix=fix) from error
    if not trainable:
        message = f"{name} is quantized ({quantization}), which transformers {version('transformers')} does not train"
        raise UsageError(message, key="model.name", fix=fix)
    if tuning == "full":
        message = f"{name} is quantized ({quantization}), and quantized weights cannot be trained themselves"
        raise UsageError(message, key="model.name", fix="drop cogumi.tuning: full, or name the full-precision model")


def quantization_entries(config: PreTrainedConfig) -> dict[str, Any]:
    settings: Any = config.quantization_config
    return settings if isinstance(settings, dict) else settings.to_dict()


def quantized_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module).__module__.startswith("bitsandbytes")
    }


def expert_states(model: torch.nn.Module) -> dict[str, Any]:
    """Bitsandbytes' QuantState of each stack of experts in 4 bits, by the parameter's name."""
    return {
        f"{path}.{name}": parametrizations[0].quant_state
        for path, module in model.named_modules()
        for name, parametrizations in getattr(module, "parametrizations", {}).items()
        if hasattr(parametrizations[0], "quant_state")
    }


@contextmanager
def quantizing_experts(quantization: dict[str, Any]) -> Iterator[None]:
    """Have transformers quantize stacked experts too in a block that loads a base in 4 bits, and PEFT adapt them later.

    Raises UsageError where bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        install = pip_command("install bitsandbytes")
        raise UsageError("bitsandbytes is not installed", key="model.quantization_config", fix=f"run: {install}")
    before = expert_quantizer.status().applied
    if quantization.get("load_in_4bit"):
        expert_quantizer.apply()
        parametrized_lora.apply()
    try:
        yield
    finally:
        if not before:  # other code of this process loads what it loads as before
            expert_quantizer.undo()


def settings_on_disk(config: PreTrainedConfig) -> BitsAndBytesConfig | None:
    """Return how bitsandbytes has quantized a checkpoint, by its own config; None where it has not."""
    quantization = quantization_of(config)
    if quantization is None or quantization.method != "bitsandbytes":
        return None
    return AutoQuantizationConfig.from_dict(quantization_entries(config))


def place_quantized_weights(model: Any, config: PreTrainedConfig, quantization: dict[str, Any] | None) -> Any:
    """Put bitsandbytes' layers and 4-bit experts into a model on the meta device, as loading the base would.

    config: the base's, which may be quantized on disk, also by another method. quantization: `model.quantization_config`.
    """
    on_disk = quantization is None
    if on_disk and quantization_of(config) is not None and settings_on_disk(config) is None:
        return pack_layers(model, config)
    settings = settings_on_disk(config) if quantization is None else quantization_settings(quantization, model.dtype)
    if settings is None:
        return model
    with quantizing_experts(settings.to_dict()):
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=on_disk)
    with torch.device("meta"):
        place_quantized_layers(quantizer, model)
    if settings.load_in_4bit and not on_disk:
        expert_quantizer.place_meta_stacks(model, quantizer)
    model.hf_quantizer, model.is_quantized = quantizer, True
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = settings.load_in_4bit, settings.load_in_8bit
    model.quantization_method = settings.quant_method
    model.config.quantization_config = settings  # by which an adapter is kept in float32
    keep_4bit_unpacked(model)
    return model


def refuse_wrong_layers(model: PreTrainedModel) -> None:
    """Raise UsageError where nothing was quantized, or the LM head was."""
    layers = quantized_layers(model)
    if not layers and not expert_states(model):
        message = f"{type(model).__name__} has no linear layers or experts that bitsandbytes could quantize"
        raise UsageError(message, key="model.quantization_config", fix="drop it")
    for name, module in layers.items():
        if module is model.get_output_embeddings():
            key = "model.quantization_config.llm_int8_skip_modules"
            problem = f"it replaces transformers' own list, so {name} would be quantized"
            raise UsageError(f"{problem}, which TRL's losses read as it is", key=key, fix=f"add {name} to the list")


def refuse_misread(model: PreTrainedModel) -> None:
    """Raise UsageError for 4-bit weights that bitsandbytes misreads on this CPU."""
    layers = quantized_layers(model) if model.device.type == "cpu" else {}
    columns = {name: module.in_features for name, module in layers.items()}
    if layers:
        columns |= {name: state.shape[-1] for name, state in expert_states(model).items()}
    misread = [name for name, number in columns.items() if not reads_4bit_rows(number)]
    if misread:
        leaves = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in misread))
        message = f"bitsandbytes {version('bitsandbytes')} misreads the 4-bit weights of {misread[0]} on this CPU"
        skip = f"model.quantization_config.llm_int8_skip_modules: [lm_head, {leaves}]"
        fix = f"run on a GPU, or set model.name to the full-precision model with {skip}"
        raise UsageError(f"{message} ({len(misread)} layers in all)", key="model", fix=fix)


@functools.cache
def reads_4bit_rows(columns: int) -> bool:
    """Test whether bitsandbytes reads 4-bit weights with so many columns on this CPU.

    On CPUs with AVX512, 0.50.2 counts whole blocks of 64 to a row and scales the others by a neighbour's. Each block of the
    test is one number, which is read back exactly where blocks are counted correctly.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = (torch.arange(4 * columns) // 64 + 1.0).view(4, columns)
    return torch.equal(dequantize_4bit(*quantize_4bit(weights, blocksize=64, quant_type="nf4")), weights)


def cast_unquantized(model: Any, dtype: torch.dtype) -> None:
    """Give the unquantized weights of a base that bitsandbytes quantized on disk the dtype they were asked for.

    transformers 5.24 leaves each "weight" of such a base in its stored dtype. Modules that it keeps in float32 stay.
    """
    if not any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
        return
    skipped = float32_modules(model, dtype)
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float32, torch.float16, torch.bfloat16) and not any(
            part in name for part in skipped
        ):
            parameter.data = parameter.data.to(dtype)


def keep_4bit_unpacked(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights at the first forward without gradients, on CPUs with AVX512-BF16.

    Repacked, they pass no gradient to what came before the layer.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            vars(module)["support_avx512bf16_for_cpu"] = False


# ------------------------------------------------------------------------------------------- what is loaded, and how large


@dataclass(frozen=True)
class WeightCount:
    """Elements of a model's parameters by storage format. bytes: of all storages, constants of blocks included."""

    elements: dict[str, int]
    bytes: int

    @property
    def quantized(self) -> float:
        """Return the share of the elements that is in 4 or 8 bits."""
        inside = sum(number for kind, number in self.elements.items() if kind.endswith("-bit"))
        return inside / sum(self.elements.values())

    def __str__(self) -> str:
        total = sum(self.elements.values())
        largest = sorted(self.elements.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{number / total:.1%} in {kind}" for kind, number in largest)
        return f"{format_memory(self.bytes)} of weights, {shares}"


def count_weights(model: torch.nn.Module) -> WeightCount:
    """Counted from the storages of a model, loaded or of fake tensors: its config is not asked."""
    elements: Counter[str] = Counter()
    storages: dict[int, int] = {}
    for path, parameter in model.named_parameters():  # tied ones once
        parent, _, name = path.rpartition(".")
        module: Any = model.get_submodule(parent)
        # Of experts the state is in the first parametrization of torch's ParametrizationList.
        is_parametrized = name == "original" and hasattr(module, "__getitem__")
        state = getattr(module[0] if is_parametrized else parameter, "quant_state", None)
        if state is not None:
            elements[f"{state.quant_type} 4-bit"] += 2 * parameter.untyped_storage().nbytes()
        elif isinstance(module, PackedLinear):
            elements[f"{module.bits}-bit"] += module.in_features * module.out_features
        elif parameter.dtype == torch.int8:
            elements["8-bit"] += parameter.numel()
        else:
            elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
        for tensor in (parameter, *constants_of(state), getattr(parameter, "SCB", None)):
            if tensor is not None:
                storages[storage_key(tensor)] = tensor.untyped_storage().nbytes()
    return WeightCount(dict(elements), sum(storages.values()))


def count_meta_bytes(model: torch.nn.Module) -> int:
    """Estimate the bytes of the loaded weights of a model of `place_quantized_weights`."""
    size = 0.0
    packed = {id(module.weight) for module in model.modules() if isinstance(module, PackedLinear)}
    for parameter in model.parameters():  # tied ones once
        if hasattr(parameter, "quant_type"):  # a linear layer's, not packed yet
            size += FOUR_BIT * parameter.numel()
        elif parameter.dtype == torch.uint8:  # packed already: by bitsandbytes without its scales, else with them
            size += parameter.numel() * (1 if id(parameter) in packed else 2 * FOUR_BIT)
        else:
            size += parameter.numel() * (1 if hasattr(parameter, "SCB") else parameter.element_size())
    return int(size)


def constants_of(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a QuantState: scales of the blocks, and the constants of their compression."""
    if state is not None:
        yield from (tensor for tensor in (state.absmax, state.code, state.offset) if tensor is not None)
        yield from constants_of(state.state2)


# --------------------------------------------------------------- layers of GPTQ, AWQ and compressed-tensors, for forecasts

# Sizes follow the formats. GPTQ and AWQ pack weights and zero points into int32, with a float16 scale for each group of a
# row (https://github.com/ModelCloud/GPTQModel). GPTQ adds an int32 for each column. A forward pass holds the layer's weight
# in the compute dtype while it multiplies. Their real kernels were not run here. FP8 and MXFP4 are not among them: transformers
# trains those only where it dequantizes them to 16 bits when it loads.


@dataclass(frozen=True)
class PackedFormat:
    """bits: of a weight. group: columns that share a scale, 0 where all of a row do."""

    method: str
    bits: int
    group: int = 0

    def layer_bytes(self, rows: int, columns: int) -> int:
        weights = ceil(rows * columns * self.bits / 8)
        groups = ceil(columns / self.group) if self.group > 0 else 1
        if self.method in ("gptq", "awq"):
            zeros = groups * ceil(rows * self.bits / 8)
            return weights + zeros + 2 * groups * rows + (4 * columns if self.method == "gptq" else 0)
        return weights + 2 * groups * rows


def read_format(entries: dict[str, Any]) -> tuple[PackedFormat, list[str]] | None:
    """Read the format of a checkpoint's `quantization_config`, and the modules it leaves out; None for others."""
    method, bits = str(entries.get("quant_method", "")), entries.get("bits") or entries.get("w_bit")
    group = entries.get("group_size", entries.get("q_group_size", 128)) or 0
    left_out = [*(entries.get("modules_to_not_convert") or ()), *(entries.get("ignore") or ()), "lm_head"]
    if method in ("gptq", "awq") and bits:
        return PackedFormat(method, int(bits), int(group)), left_out
    groups = entries.get("config_groups")
    if method == "compressed-tensors" and groups:
        weights = next(iter(groups.values()))["weights"]
        return PackedFormat(method, int(weights["num_bits"]), int(weights.get("group_size") or 0)), left_out
    return None


class PackedLinear(nn.Linear):
    """Linear layer with a packed weight: uint8, (bytes,), scales included."""

    def __init__(self, layer: nn.Linear, packed: PackedFormat) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.bits, self.compute_dtype = packed.bits, layer.weight.dtype
        size = packed.layer_bytes(self.out_features, self.in_features)
        weight = torch.empty(size, dtype=torch.uint8, device=layer.weight.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shape = (self.out_features, self.in_features)
        unpacked = torch.empty(shape, dtype=self.compute_dtype, device=self.weight.device)
        return nn.functional.linear(input.to(self.compute_dtype), unpacked, self.bias)


def pack_layers(model: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """Pack the quantized linear layers of a model in place. Unknown formats leave it as it is."""
    weight_format = read_format(quantization_entries(config))
    if weight_format is not None:
        packed, left_out = weight_format
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and should_convert_module(name, left_out):
                model.set_submodule(name, PackedLinear(module, packed))
    return model
