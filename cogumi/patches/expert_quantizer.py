"""bitsandbytes' 4 bits for stacked experts, which transformers' quantizer leaves in 16 bits.

gpt-oss, Qwen3-MoE, Mixtral and Llama 4 keep the weights of a layer's experts in parameters of shape (experts, rows,
columns). transformers 5 quantizes linear layers alone, so of gpt-oss-20b nine tenths would stay as they are. The
quantizer here quantizes each stack as it is loaded, and bitsandbytes' own parametrization dequantizes it when it is
read. unsloth replaces methods of the same class; where it is loaded, its own stay.
"""

import functools
import importlib
from typing import Any

from torch import nn

from cogumi.patches import PatchStatus

NAME = "experts in 4 bits"
METHOD = "bitsandbytes_4bit"


def expert_stacks(model: nn.Module, left_out: list[str] | None) -> list[tuple[str, nn.Module, str]]:
    """(name, module, name within it) of each stack to be quantized. left_out: `llm_int8_skip_modules`, completed."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    return [
        (f"{path}.{name}", module, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3  # (experts, rows, columns)
        and parameter.shape[0] == getattr(module, "num_experts", None)
        and should_convert_module(path, left_out)
    ]


def place_meta_stacks(model: nn.Module, quantizer: Any) -> None:
    """Quantize the expert stacks of a model on the meta device, for a forecast. The quantizer has placed its layers.

    Constants of the blocks are never compressed there; the parametrization keeps whether they are to be.
    """
    settings = quantizer.quantization_config
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for _, module, name in expert_stacks(model, quantizer.modules_to_not_convert):
        replace_parameter_4bit(module, name, quant_type=settings.bnb_4bit_quant_type)
        placed: Any = module.parametrizations
        vars(placed[name][0]).update(compress_statistics=settings.bnb_4bit_use_double_quant)


@functools.cache
def quantizer_class() -> type:
    """Transformers' quantizer with the stacks. Made once, since building it imports transformers and bitsandbytes."""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    class QuantizeExperts(Bnb4bitQuantize):  # type: ignore[misc]
        def convert(self, input_dict: Any, *args: Any, model: Any = None, **kwargs: Any) -> Any:
            stacks = self.hf_quantizer.stacks(model)
            settings, made, others = self.hf_quantizer.quantization_config, {}, {}
            for name, value in input_dict.items():
                if name not in stacks:
                    others[name] = value
                    continue
                packed, self.hf_quantizer.states[name] = quantize_4bit(
                    value[0] if isinstance(value, list) else value,
                    compress_statistics=settings.bnb_4bit_use_double_quant,
                    quant_type=settings.bnb_4bit_quant_type,
                )
                made[name] = nn.Parameter(packed, requires_grad=False)
            return made | super().convert(others, *args, model=model, **kwargs)  # type: ignore[misc]

    class ExpertQuantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.states: dict[str, Any] = {}
            self._stacks: frozenset[str] | None = None

        def stacks(self, model: Any) -> frozenset[str]:
            """Return the stacks of the model being loaded; none if its weights on disk are already quantized."""
            if self._stacks is None:
                stacks = [] if self.pre_quantized else expert_stacks(model, self.modules_to_not_convert)
                self._stacks = frozenset(name for name, _, _ in stacks)
            return self._stacks

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            return param_name in self.stacks(model) or super().param_needs_quantization(model, param_name, **kwargs)

        def get_quantize_ops(self) -> Any:
            return QuantizeExperts(self)

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            # In the order of the model's class, in which PEFT nests its wrappers of one module's parameters.
            for path, module in list(model.named_modules()):
                for leaf, packed in list(module.named_parameters(recurse=False)):
                    if (state := self.states.pop(f"{path}.{leaf}", None)) is not None:
                        replace_parameter_4bit_prequantized(module, leaf, state.as_dict(packed=True), packed.device)
            return super()._process_model_after_weight_loading(model, **kwargs)

    return ExpertQuantizer


def apply() -> PatchStatus:
    """Let transformers load bitsandbytes' 4 bits with the quantizer of this file, unless unsloth has changed its own."""
    if not (done := status()).applied and not done.reason.startswith("unsloth"):
        _mapping()[METHOD] = quantizer_class()
    return status()


def undo() -> PatchStatus:
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    if status().applied:
        _mapping()[METHOD] = Bnb4BitHfQuantizer
    return status()


def status() -> PatchStatus:
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    if _mapping()[METHOD] is not Bnb4BitHfQuantizer:
        return PatchStatus(NAME, True, "bitsandbytes quantizes stacked experts with the linear layers")
    if not Bnb4BitHfQuantizer.param_needs_quantization.__module__.startswith("transformers"):
        return PatchStatus(NAME, False, "unsloth has its own 4 bits for experts")
    return PatchStatus(NAME, False, "experts stay in 16 bits")


def _mapping() -> dict[str, Any]:
    return importlib.import_module("transformers.quantizers.auto").AUTO_QUANTIZER_MAPPING
