"""The LoRA that a run trains: its configuration, its targets, its precision."""

import copy
import difflib
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import Linear
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.models.base import RunBase, meta_model
from cogumi.models.quantized_bases import quantization_of
from cogumi.models.targets import measure_coverage, unmatched_names

log = logging.getLogger("cogumi")
# Rank 16 on every linear layer with alpha = 2r; dropout 0, because GSPO's ratio must be 1 before the first update.
DEFAULTS: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
TRAINED = "default"  # PEFT's name for the adapter that is trained


def lora_config(lora: dict[str, Any], revision: str | None = None, model: Any = None) -> LoraConfig:
    """Return the LoraConfig of a run: `lora:` over the defaults.

    `revision` is the base's, recorded for the merge. model: the base, of which all-linear leaves out, by
    `exclude_modules`, towers beside the language model and routers.
    """
    try:
        config = LoraConfig(**{**DEFAULTS, "task_type": "CAUSAL_LM", "revision": revision, **lora})
    except (ValueError, TypeError) as error:
        raise UsageError(one_line(error), key="lora") from error
    if model is None or config.target_modules != "all-linear":
        return config
    if towers := [*find_towers(model), *find_routers(model)]:
        excluded = config.exclude_modules or []
        if not isinstance(excluded, str):
            excluded = "|".join(rf"(.*\.)?{re.escape(name)}" for name in sorted(excluded))
        patterns = [rf"{re.escape(name)}(\..*)?" for name in towers]
        config.exclude_modules = "|".join(filter(None, [excluded, *patterns]))
    return config


def find_routers(model: Any) -> list[str]:
    """Linear layers whose forward pass gives more than their product, by name, as Llama 4's routers do: PEFT's fails there."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and type(module).__module__.startswith("transformers.models."):
            with torch.no_grad():
                made = module(module.weight.new_zeros(1, module.in_features))
            if not isinstance(made, torch.Tensor):
                names.append(name)
    return names


def find_towers(model: Any) -> list[str]:
    """List the modules with linear layers beside the language model of a multimodal model.

    They are towers for images or sound and their projections. Text does not pass through them, so they learn nothing.
    """
    if model.config.get_text_config() is model.config or (language := model.get_decoder()) is model:
        return []
    towers, parent, head = [], "", model.get_output_embeddings()
    for part in next(name for name, module in model.named_modules() if module is language).split("."):
        for name, child in model.get_submodule(parent).named_children():
            learns = any(isinstance(module, torch.nn.Linear | Conv1D) for module in child.modules())
            if name != part and child is not head and learns:
                towers.append(f"{parent}.{name}".lstrip("."))
        parent = f"{parent}.{part}".lstrip(".")
    return towers


def check_targets(lora: dict[str, Any], base: RunBase, is_own: bool = True) -> str:
    """Raise UsageError for a name in `lora:` that matches nothing in the base, before anything is loaded or prepared.

    is_own: whether `lora:` is the run's own, and not that of the adapter that it starts from, whose tensors decide. Returns
    the share of the parameters under the adapter, in words; "" for a base that cannot be built of its config alone, which
    is left for PEFT to refuse.
    """
    try:
        model = meta_model(base.config)
    except (ValueError, ImportError, RuntimeError):
        return ""
    config = lora_config(lora, model=model)
    config.init_lora_weights = True  # others read weights
    entries = config.to_dict() | {"exclude_modules": lora.get("exclude_modules")}  # without towers of all-linear
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    # gpt-oss in 4 bits by unsloth has a module for each expert of a stack.
    stacks = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    split = [f"{name}s{end}" for name in stacks for end in ("", ".0")]
    modules, adapted, failure = [*(name for name, _ in model.named_modules()), *split], set(), None
    with warnings.catch_warnings(action="ignore"):
        try:
            if not isinstance(config.target_modules, str):
                # PEFT targets stacks of experts by the names that their single experts had.
                renamed = copy.deepcopy(config)
                convert_peft_config_for_transformers(renamed, model=model, conversions=None)
                entries |= {"target_modules": renamed.target_modules, "target_parameters": renamed.target_parameters}
        except ValueError as error:  # one of two targets that have become one
            raise UsageError(one_line(error), key="lora.target_modules") from error
        try:
            tuner: Any = get_peft_model(model, config, low_cpu_mem_usage=True).base_model
            adapted = {*tuner.targeted_parameter_names, *(f"{name}.weight" for name in tuner.targeted_module_names)}
        except (ValueError, TypeError, re.error) as error:
            failure = error
    targeted = {*adapted, *(name.rpartition(".")[0] for name in adapted)}
    unmatched = unmatched_names(entries, modules, sizes, targeted) if is_own else {}
    # Without any target the patterns match nothing either.
    if keys := [key for key in unmatched if adapted or key.startswith("target_")]:
        raise no_match(keys[0], unmatched[keys[0]], meta_model(base.config))
    if failure is not None:
        raise UsageError(one_line(failure), key="lora") from failure
    saved = tuple(config.modules_to_save or ())
    adapted |= {name for name in sizes if name.rpartition(".")[0].endswith(saved)}
    return str(measure_coverage(sizes, adapted))


def no_match(key: str, names: list[str], base: Any) -> UsageError:
    """Return the error for names in `lora:` that match nothing in the base, with those that are near them."""
    head = base.get_output_embeddings()
    modules = [(name.rpartition(".")[2], module) for name, module in base.named_modules() if name]
    linear = [name for name, module in modules if isinstance(module, torch.nn.Linear | Conv1D) and module is not head]
    known = dict.fromkeys(name for name, _ in modules)
    noun, fix = "module", f"its linear modules are {', '.join(dict.fromkeys(linear))} (all-linear takes them all)"
    if key == "target_parameters":
        stacks = (".".join(name.split(".")[-3:]) for name, tensor in base.named_parameters() if tensor.ndim == 3)
        noun, known = "parameter", dict.fromkeys(stacks)
        fix = f"its stacks of experts are {', '.join(known) or 'none'}"
    elif key == "layers_to_transform":
        noun, fix = "layer", f"its layers are 0 to {base.config.get_text_config().num_hidden_layers - 1}"
    elif key.endswith("_pattern"):
        noun, fix = "module under the adapter", "drop it, or add its module to the targets"
    near = [
        match for name in names for match in difflib.get_close_matches(name, known, n=1, cutoff=0.75) if match != name
    ]
    message = f"{', '.join(names)}: no {noun} of {type(base).__name__} matches"
    return UsageError(message, key=f"lora.{key}", fix=f"did you mean {', '.join(near)}? {fix}" if near else fix)


def keep_float32(model: Any) -> None:
    """Give the adapter on a quantized base the float32 back that PEFT made it in.

    Before there is an optimizer. TRL 1.15 casts it to bfloat16, where an update below 2^-9 of a weight is lost. What is
    trained whole (modules_to_save) gets the base's dtype.
    """
    if quantization_of(model.config) is None:
        return
    base = model.get_base_model().dtype
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32 if "lora_" in name else base)


class CastOutsideAutocast:
    """True outside autocast, where PEFT has to cast an input to the adapter's dtype; autocast casts inputs by itself."""

    def __bool__(self) -> bool:
        return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def drop_casts(model: Any) -> int:
    """Under autocast, spare plain LoRA layers PEFT's cast to float32, which autocast takes back. Returns their number.

    No bit changes. Left out are dropout, which draws another mask in another dtype, and variants such as DoRA.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) is Linear and not module.lora_variant]
    exact = [layer for layer in layers if not any(isinstance(part, torch.nn.Dropout) for part in layer.modules())]
    for layer in exact:
        layer.cast_input_dtype_enabled = CastOutsideAutocast()
    return len(exact)


def differing_tensors(model: Any, adapter: Path) -> list[str]:
    """List the tensors that differ, in any bit, between the model's adapter and the one saved from it."""
    live, saved = get_peft_model_state_dict(model), load_file(adapter / SAFETENSORS_WEIGHTS_NAME)
    same = {name for name in live.keys() & saved.keys() if torch.equal(live[name].cpu(), saved[name])}
    return sorted((live.keys() | saved.keys()) - same)
