"""Linear layers as GPTQ, AWQ and compressed-tensors checkpoints hold them, on the meta device, for forecasts.

Sizes follow the formats. GPTQ and AWQ pack weights and zero points into int32, with a float16 scale for each group of a
row (https://github.com/ModelCloud/GPTQModel). GPTQ adds an int32 for each column. A forward pass holds the layer's weight
in the compute dtype while it multiplies. Their real kernels were not run here. FP8 and MXFP4 are not among them, because
transformers trains those only where it dequantizes them to 16 bits when it loads.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers.quantizers_utils import should_convert_module


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
    """The format of a checkpoint's `quantization_config`, and the modules that it leaves as they are; None for others."""
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
    """A linear layer whose weight is stored packed. weight: uint8, (bytes,), scales included."""

    def __init__(self, layer: nn.Linear, packed: PackedFormat) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.bits, self.compute_dtype = packed.bits, layer.weight.dtype
        size = packed.layer_bytes(self.out_features, self.in_features)
        self.weight = nn.Parameter(
            torch.empty(size, dtype=torch.uint8, device=layer.weight.device), requires_grad=False
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shape = (self.out_features, self.in_features)
        whole = torch.empty(shape, dtype=self.compute_dtype, device=self.weight.device)
        return nn.functional.linear(input.to(self.compute_dtype), whole, self.bias)


def pack_layers(model: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """The model with its quantized linear layers packed, in place. Of a format that is not known it stays as it is."""
    entries: Any = config.quantization_config
    found = read_format(entries if isinstance(entries, dict) else entries.to_dict())
    if found is not None:
        packed, left_out = found
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and should_convert_module(name, left_out):
                model.set_submodule(name, PackedLinear(module, packed))
    return model
