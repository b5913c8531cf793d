"""Adapters that name one linear layer per expert, as they were saved before transformers stacked the experts of a layer."""

import math
import re
from typing import Any

import torch

from cogumi.core.safetensors_file import Span
from cogumi.merge.adapter_files import FACTOR_KEY, OTHER_BASE, PREFIX, Adapter
from cogumi.merge.parameter_map import Change, LowRank

EXPERT = re.compile(r".+\.experts\.\d+\.[^.]+\.weight")


def layer_names(model: Any) -> set[str]:
    """The linear layers of a model, GPT-2's transposed ones included."""
    from transformers.pytorch_utils import Conv1D

    return {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}


def stored_modules(
    model: Any, config: Any, held: dict[str, Span], spans: dict[str, Span]
) -> dict[str, tuple[str, str]]:
    """Stored tensor -> (key of A, key of B), for factors of modules that this transformers no longer builds as layers.
    The checkpoint still stores one matrix per expert (and the router), and there the update can be added."""
    layers = layer_names(model)
    found: dict[str, tuple[str, str]] = {}
    for key in held:
        factor = FACTOR_KEY.fullmatch(key)
        if factor and factor["side"] == "A" and factor["module"] not in layers:
            tensor = f"{factor['module']}.weight"
            targeted = any(f".{tensor}".endswith(f".{parameter}") for parameter in config.target_parameters or ())
            if not targeted and tensor in spans and len(spans[tensor].shape) == 2:
                found[tensor] = (key, key.replace("lora_A", "lora_B"))
    return found


def layers_with_factors(adapter: Adapter, config: Any, model: Any, held: dict[str, Span], done: set[str]) -> list[str]:
    """The linear layers for which the file holds factors. Raises UsageError where it lacks those of a targeted one.
    done: parameters whose factors were found under the names of their stored tensors."""
    from peft.tuners.tuners_utils import check_target_module_exists

    found = []
    for layer in sorted(layer_names(model)):
        if f"{PREFIX}{layer}.lora_A.weight" in held:
            found.append(layer)
        elif f"{layer}.weight" in done or config.target_modules == "all-linear":
            continue
        elif check_target_module_exists(config, layer):
            raise adapter.refused(f"it targets {layer} but holds no factors for it", fix="is it damaged?")
    return found


def stored_changes(
    adapter: Adapter, config: Any, stored: dict[str, tuple[str, str]], spans: dict[str, Span]
) -> dict[str, Change]:
    """Changes by stored tensor, with PEFT's rules for patterns applied to the module's name."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    held = {span.name: span for span in adapter.spans}
    for tensor in spans:
        layer = tensor.removesuffix(".weight")
        if EXPERT.fullmatch(tensor) and tensor not in stored and check_target_module_exists(config, layer):
            raise adapter.refused(f"it targets {layer} but holds no factors for it", fix="is it damaged?")
    changes = {}
    for tensor, (key_a, key_b) in stored.items():
        module = tensor.removesuffix(".weight")
        if config.use_dora or config.lora_bias:
            raise adapter.refused(f"{key_a} is DoRA or has a bias on a layer that only the checkpoint still names")
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), module), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), module), config.lora_alpha)
        outputs, inputs = spans[tensor].shape
        found = held[key_a].shape, held[key_b].shape
        if found != ((rank, inputs), (outputs, rank)):
            what = f"{key_a} and its lora_B have shapes {found}, which do not fit {tensor} {spans[tensor].shape}"
            raise adapter.refused(f"{what} with rank {rank}", fix=OTHER_BASE)
        scaling = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        changes[tensor] = Change(terms=(LowRank(adapter.weights, key_a, key_b, rank, scaling),))
    return changes
