"""PEFT's `target_parameters` on parameters that are parametrized, as bitsandbytes' stacked experts in 4 bits are.

PEFT 0.20 finds such a parameter by its whole name alone. It nests two wrappers of one module in another order than on
plain parameters. It dequantizes a weight to ask for its shape, and leaves its own parametrization after each forward pass.
With these three methods an adapter has the names that it has on the full-precision base, so that PEFT loads it there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize

from cogumi.patches import PatchStatus, method_around

NAME = "LoRA on 4-bit experts"
_originals: dict[str, tuple[type, Any]] = {}


def parametrization_of(wrapper: Any) -> Any:
    """Return the parametrizations of the 4-bit parameter that PEFT's wrapper adapts; None for any other."""
    base, name = wrapper.get_base_layer(), wrapper.parameter_name
    return base.parametrizations[name] if is_quantized(base, name) else None


def is_quantized(module: Any, name: str) -> bool:
    """Return whether bitsandbytes has parametrized the parameter. PEFT parametrizes plain ones while in use."""
    return parametrize.is_parametrized(module, name) and hasattr(module.parametrizations[name][0], "quant_state")


def inject_parameters(tuner: Any, original: Any, peft_config: Any, model: Any, **kwargs: Any) -> list[str]:
    """`BaseTuner._inject_parameters`, which is asked for one parametrized parameter at a time, by its whole name."""
    target_parameters = peft_config.target_parameters
    parametrized = [
        (module, name)
        for path, module in model.named_modules()
        if parametrize.is_parametrized(module)
        for name in module.parametrizations
        if is_quantized(module, name)
        and any(f".{path}.{name}".replace(".base_layer", "").endswith(f".{key}") for key in target_parameters)
    ]
    injected: list[str] = []
    try:
        for target, name in reversed(parametrized):  # each further wrapper of a module goes inside the one before
            path = next(path for path, module in model.named_modules() if module is target)
            peft_config.target_parameters = [f"{path}.{name}"]
            injected += original(tuner, peft_config, model, **kwargs)
    finally:
        peft_config.target_parameters = target_parameters
    return injected + original(tuner, peft_config, model, **kwargs)


def get_param(wrapper: Any, original: Any) -> Tensor:
    """`ParamWrapper.get_param`, which is asked for shape, dtype and device: of a parametrized one a single zero, expanded."""
    parametrizations = parametrization_of(wrapper)
    if parametrizations is None:
        return original(wrapper)  # type: ignore[no-any-return]
    state = parametrizations[0].quant_state
    return parametrizations.original.new_zeros((), dtype=state.dtype).expand(state.shape)


@contextmanager
def activate_lora(wrapper: Any, original: Any, active_adapters: list[str]) -> Iterator[None]:
    """`ParamWrapper._activate_lora`, which adds its term to the dequantized weight while the module runs."""
    from peft.tuners.lora.layer import _LoraFactorsProxy, _LoraParameterProxy

    parametrizations = parametrization_of(wrapper)
    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    if parametrizations is None or not adapters:
        with original(wrapper, active_adapters):
            yield
        return
    if len(adapters) == 1 and wrapper.num_experts > 1:
        term: Any = _LoraFactorsProxy(*wrapper.get_delta_factors(adapters[0]))
    else:
        term = _LoraParameterProxy(sum(wrapper.get_delta_weight(name) for name in adapters))
    parametrizations.append(term)
    try:
        with parametrize.cached():
            yield
    finally:
        del parametrizations[-1]


def apply() -> PatchStatus:
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTuner

    ours = {"_inject_parameters": (BaseTuner, inject_parameters), "get_param": (ParamWrapper, get_param)}
    ours["_activate_lora"] = (ParamWrapper, activate_lora)
    for name, (owner, around) in ours.items():
        if name not in _originals:
            _originals[name] = owner, getattr(owner, name)
            setattr(owner, name, method_around(getattr(owner, name), around))
    return status()


def undo() -> PatchStatus:
    for name, (owner, original) in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    return status()


def status() -> PatchStatus:
    reason = "PEFT adapts parametrized parameters" if _originals else "PEFT adapts plain parameters alone"
    return PatchStatus(NAME, bool(_originals), reason)
