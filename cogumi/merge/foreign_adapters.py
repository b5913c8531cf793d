"""Adapters of other versions and engines, rewritten as the installed PEFT would have saved them.

Modules may have the names of another transformers, experts may be one by one where the model now has a stack, and the factors
of a stack may be in another order (expert_layout). Everything else of a merge knows one form alone, and so does PEFT when it
loads the adapter for the comparison of logits. Rewriting permutes factors and puts zeros between them; only experts with
different scalings need a product, of lora_B in float32.
"""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import Span
from cogumi.merge.adapter_files import FACTOR, OTHER_BASE, PREFIX, Adapter, read_base_record
from cogumi.merge.bases import Base
from cogumi.merge.expert_layout import Reading, Stack, as_reading, read_layout
from cogumi.merge.parameter_map import (
    candidate_classes,
    meta_model,
    read_model_config,
    renamed_tensors,
    weight_converters,
)
from cogumi.patches.trl_internals import swaps_features

EXPERT_NUMBER = re.compile(r"\.experts\.(?:(?:gate_up|down)_projs\.)?(\d+)(?:\.|$)")
# gpt-oss in 4 bits by unsloth: a linear layer for each expert, [out, in], of a stack that is [in, out].
SPLIT_STACK = re.compile(r"(?P<stack>.*\.experts\.(?:gate_up|down)_proj)s\.(?P<number>\d+)")


@dataclass(frozen=True)
class Expert:
    """A module of one expert, and where the model stacks it: rows of part `part` of `parts` of a matrix's outputs."""

    module: str
    parameter: str
    number: int
    part: int = 0
    parts: int = 1


def as_installed(adapter: Adapter, base: Base, expert_layout: str | None = None) -> Adapter:
    """Return the adapter as the installed PEFT and transformers would have saved it, or itself if it is that already.

    Raises UsageError for an adapter of which more than one reading, or none, fits the base.
    """
    modules = {match["module"] for span in adapter.spans if (match := FACTOR.fullmatch(span.name))}
    modules = {module.removeprefix(PREFIX) for module in modules}
    config = read_model_config(base, base.path)
    renamed, experts, model = locate_modules(modules, config, set(base.tensors))
    if renamed or experts:
        adapter = with_model_names(adapter, base, model, renamed, experts)
    if not adapter.config.get("target_parameters") or experts:
        return adapter
    return with_installed_order(adapter, base, model, expert_layout)


def locate_modules(modules: set[str], config: Any, stored: set[str]) -> tuple[dict[str, str], list[Expert], Any]:
    """Find an adapter's modules in the model of a base.

    Returns:
        Modules that have another name in the model, experts that the model stacks, and the model on the meta device. The
        first class in which every module is found is taken; modules that no class has are left to PEFT's own error.
    """
    first = None
    for kind in candidate_classes(config):
        model = meta_model(config, kind)
        known = {name.replace(".base_layer", "") for name, _ in model.named_modules()}
        unknown = {module for module in modules if module.replace(".base_layer", "") not in known}
        renamed, experts = {}, []
        names = {f"{module}.weight": module for module in unknown}
        for name, parameter, pattern in renamed_tensors(model, names):
            module = names[name]
            if split := SPLIT_STACK.fullmatch(module):
                experts.append(Expert(module, split["stack"], int(split["number"])))
            elif pattern is None and parameter.removesuffix(".weight") in known:
                renamed[module] = parameter.removesuffix(".weight")
            elif pattern is not None and (number := EXPERT_NUMBER.search(module)):
                patterns = source_patterns(model, pattern)
                experts.append(Expert(module, parameter, int(number[1]), patterns.index(pattern), len(patterns)))
        first = first or (renamed, experts, model)
        if len(renamed) + len(experts) == len(unknown):
            return renamed, experts, model
    assert first is not None, "a config has at least one class"
    return first


def source_patterns(model: Any, pattern: str) -> list[str]:
    """Return the patterns that a converter concatenates, in order. Of two converters, transformers takes the last."""
    return list(
        [converter for converter in weight_converters(model) if pattern in converter.source_patterns][
            -1
        ].source_patterns
    )


def with_model_names(
    adapter: Adapter, base: Base, model: Any, renamed: Mapping[str, str], experts: list[Expert]
) -> Adapter:
    """Rename modules and stack experts. The configuration names every module and its rank, so that PEFT guesses nothing."""
    if experts:
        check_promises(adapter, base)
    tensors = load_file(adapter.weights)
    of_experts = {expert.module for expert in experts}
    out, ranks, alphas, modules = {}, {}, {}, set()
    for name, tensor in tensors.items():
        match = FACTOR.fullmatch(name)
        module = (match["module"] if match else name.rpartition(".lora_")[0]).removeprefix(PREFIX)
        if module in of_experts:
            if match is None:
                raise adapter.refused(f"{name} is of a kind that no expert has", fix="only lora_A and lora_B merge")
            continue
        target = renamed.get(module, module)
        out[name.replace(f"{PREFIX}{module}", f"{PREFIX}{target}", 1)] = tensor
        if match and match["side"] == "A":
            scaling, rank = scaling_of(adapter.config, module), int(tensor.shape[0])
            modules.add(target)
            ranks[re.escape(target)], alphas[re.escape(target)] = rank, scaling * rank
    if experts and adapter.config.get("target_parameters"):
        raise adapter.refused("it changes experts as modules and as stacked parameters at once")
    stacks: dict[str, list[Expert]] = defaultdict(list)
    for expert in experts:
        stacks[expert.parameter].append(expert)
    parameters = dict(model.named_parameters())
    factors = {}
    for parameter, members in sorted(stacks.items()):
        a, b, scaling = stack_factors(adapter, members, tensors, parameters[parameter].shape)
        rank = a.shape[1]
        ranks[re.escape(parameter)], alphas[re.escape(parameter)] = rank, scaling * rank
        factors[parameter] = a, b
    config = {key: value for key, value in adapter.config.items() if not key.startswith(("layers_", "exclude_"))}
    config |= {"target_modules": sorted(modules), "use_rslora": False}
    if stacks:
        config["target_parameters"] = sorted(stacks)
    config |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    for key, wrapper in expert_wrappers(adapter, base, model, config).items():
        a, b = factors[wrapper.parameter]
        count, rank = a.shape[:2]
        flat_a, flat_b = a.reshape(count * rank, -1), b.permute(1, 2, 0).reshape(-1, rank * count)
        # lora_A reads the inputs, which are the last axis of a stack [experts, out, in] and the first of one [in, out].
        axis = 1 if wrapper.stored_in_out else 2
        a, b = as_reading(flat_a, flat_b, count, Reading(axis, grouped=False), wrapper.reading)
        out[f"{key}.lora_A.weight"], out[f"{key}.lora_B.weight"] = a, b
    reading = f"{len(experts)} modules of single experts, which this transformers stacks" if experts else ""
    return adapter.rewritten(out, config, reading)


def check_promises(adapter: Adapter, base: Base) -> None:
    """Raise UsageError where target_modules match a stored expert that the file has no factors of.

    With layers_to_transform the numbers that PEFT compares are the experts' in some versions, so nothing is promised.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    lora = LoraConfig.from_pretrained(str(adapter.directory))
    if lora.layers_to_transform is not None or not lora.target_modules:
        return
    names = {span.name for span in adapter.spans}
    for tensor in sorted(base.tensors):
        module = tensor.removesuffix(".weight")
        if ".experts." not in module or not check_target_module_exists(lora, module):
            continue
        if not any(f"{PREFIX}{module}.lora_{end}" in names for end in ("A.weight", "embedding_A")):
            problem = f"it lacks {module}, which its configuration promises for base {base.name}"
            raise adapter.refused(problem, fix=OTHER_BASE)


def scaling_of(config: Mapping[str, Any], module: str) -> float:
    """Return alpha / rank of a module, by PEFT's patterns: of several that match, the first."""
    from peft.utils.other import get_pattern_key

    ranks: dict[str, int] = config.get("rank_pattern") or {}
    alphas: dict[str, float] = config.get("alpha_pattern") or {}
    rank = ranks.get(get_pattern_key(list(ranks), module), int(config["r"]))
    alpha = alphas.get(get_pattern_key(list(alphas), module), float(config["lora_alpha"]))
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def stack_factors(
    adapter: Adapter, members: list[Expert], tensors: Mapping[str, torch.Tensor], shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return A [experts, r, in], B [experts, out, r] and the scaling of a stack from the factors of single experts.

    Parts of one matrix (gate and up) get ranks of their own, with zeros elsewhere; experts without factors are zero.
    """
    pairs = {}
    for expert in members:
        key = f"{PREFIX}{expert.module}"
        pairs[expert] = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
    ranks = [max((len(pairs[e][0]) for e in members if e.part == part), default=0) for part in range(members[0].parts)]
    scalings = {expert: scaling_of(adapter.config, expert.module) for expert in members}
    scaling = scalings[members[0]]
    is_uniform = len(set(scalings.values())) == 1
    dtype = pairs[members[0]][0].dtype if is_uniform else torch.float32
    (a0, b0), count = pairs[members[0]], shape[0]
    rows = b0.shape[0]
    a = torch.zeros(count, sum(ranks), a0.shape[1], dtype=dtype)
    b = torch.zeros(count, rows * members[0].parts, sum(ranks), dtype=dtype)
    if sorted((a.shape[2], b.shape[1])) != sorted(shape[1:]) or any(expert.number >= count for expert in members):
        name = members[0].parameter
        sizes = f"lora_A {tuple(a0.shape)} and lora_B {tuple(b0.shape)}"
        problem = f"its experts have {sizes}, which do not fit {name} {tuple(shape)}"
        raise adapter.refused(problem, fix=OTHER_BASE)
    for expert, (left, right) in pairs.items():
        if (left.shape[1], right.shape[0]) != (a0.shape[1], rows):
            raise adapter.refused(
                f"{expert.module} has factors of another size than {members[0].module}", fix=OTHER_BASE
            )
        first, rank = sum(ranks[: expert.part]), len(left)
        a[expert.number, first : first + rank] = left
        share = right if is_uniform else right.float() * (scalings[expert] / scaling)
        b[expert.number, expert.part * rows : (expert.part + 1) * rows, first : first + rank] = share
    return a, b, scaling


@dataclass(frozen=True)
class ExpertWrapper:
    """A stack of experts in PEFT's model. reading: the installed PEFT's. shape: of the parameter."""

    parameter: str
    shape: tuple[int, ...]
    stored_in_out: bool
    reading: Reading


def expert_wrappers(adapter: Adapter, base: Base, model: Any, config: Mapping[str, Any]) -> dict[str, ExpertWrapper]:
    """Return key of the factors -> the stack that PEFT puts them on, for every stack that a configuration targets."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.layer import ParamWrapper

    lora = LoraConfig(**{key: value for key, value in config.items() if key in LoraConfig.__dataclass_fields__})
    lora.init_lora_weights = True
    try:
        layers = get_peft_model(copy.deepcopy(model), lora, low_cpu_mem_usage=True)
    except (ValueError, TypeError) as error:  # no target found, which the plan reports
        raise UsageError(f"adapter {adapter.path} does not fit base {base.name}: {error}") from error
    wrappers = {}
    for name, module in layers.get_base_model().named_modules():
        if isinstance(module, ParamWrapper) and len(module.get_param().shape) == 3:
            parameter = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
            is_in_out = bool(getattr(module.get_base_layer(), "is_transposed", False))
            reading = Reading(2 if swaps_features(module) else 1, grouped=False)
            wrappers[f"{PREFIX}{name}"] = ExpertWrapper(parameter, tuple(module.get_param().shape), is_in_out, reading)
    return wrappers


def with_installed_order(adapter: Adapter, base: Base, model: Any, expert_layout: str | None) -> Adapter:
    """Rewrite the factors of expert stacks from the order of the version that wrote them to the installed PEFT's."""
    wrappers = expert_wrappers(adapter, base, model, adapter.config)
    spans: dict[str, Span] = {span.name: span for span in adapter.spans}
    stacks = {}
    for key, wrapper in wrappers.items():
        a, b = spans.get(f"{key}.lora_A.weight"), spans.get(f"{key}.lora_B.weight")
        if a is not None and b is not None:
            stacks[key] = Stack(wrapper.parameter, wrapper.shape, (a.shape, b.shape), wrapper.stored_in_out)
    if not stacks:
        return adapter
    record = read_base_record(adapter.path)
    trained_with = record.transformers if record else None
    layout = read_layout(adapter.config, list(stacks.values()), model.config.model_type, expert_layout, trained_with)
    tensors = load_file(adapter.weights)
    changed = False
    for key, stack in stacks.items():
        reading, installed = layout.readings[stack.parameter], wrappers[key].reading
        if reading != installed:
            changed = True
            names = f"{key}.lora_A.weight", f"{key}.lora_B.weight"
            factors = as_reading(tensors[names[0]], tensors[names[1]], stack.shape[0], reading, installed)
            tensors |= {names[0]: factors[0], names[1]: factors[1]}
    if not changed:
        return replace(adapter, reading=str(layout))
    return adapter.rewritten(tensors, adapter.config, str(layout))
