"""Adapters of other versions and engines, rewritten as the installed PEFT would have saved them.

Modules may have the names of another transformers, experts may be one by one where the model now has a stack, and the factors
of a stack may be in another order (expert_layout). Everything else of a merge knows one form alone, and so does PEFT when it
loads the adapter for the comparison of logits. Rewriting permutes factors and puts zeros between them; only experts with
different scalings need a product, of lora_B in float32.
"""

import copy
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import Span
from cogumi.merge.adapter_files import FACTOR, OTHER_BASE, PREFIX, Adapter, as_written, read_base_record
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

EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")
# gpt-oss in 4 bits by unsloth: a linear layer for each expert, [out, in], of a stack that is [in, out].
SPLIT_STACK = re.compile(r"(?P<stack>.*\.experts\.(?:gate_up|down)_proj)s\.(?P<number>\d+)")


@dataclass(frozen=True)
class Expert:
    """A linear layer of one expert, and where the model stacks it: part `part` of `parts` of a matrix's outputs.

    axis: of the stack [experts, first, last], which holds the layer's inputs.
    """

    module: str
    parameter: str
    number: int
    axis: int
    part: int = 0
    parts: int = 1


def as_installed(adapter: Adapter, base: Base, expert_layout: str | None = None) -> Adapter:
    """Return the adapter as the installed PEFT and transformers would have saved it, or itself if it is that already.

    Raises UsageError for an adapter of which more than one reading, or none, fits the base.
    """
    modules = {match["module"] for span in adapter.spans if (match := FACTOR.fullmatch(span.name))}
    modules = {module.removeprefix(PREFIX) for module in modules}
    config = read_model_config(base, base.path)
    renamed, experts, model = locate_modules(modules, config)
    if renamed or experts:
        adapter = with_model_names(adapter, base, model, renamed, experts)
    if not adapter.config.get("target_parameters") or experts:
        return adapter
    return with_installed_order(adapter, base, model, expert_layout)


def locate_modules(modules: set[str], config: Any) -> tuple[dict[str, str], list[Expert], Any]:
    """Find an adapter's modules in the model of a base.

    Returns:
        Modules that have another name in the model, experts that the model stacks, and the model on the meta device. The
        first class in which every module is found is taken; modules that no class has are left to the plan's own error.
    """
    first = None
    for kind in candidate_classes(config):
        model = meta_model(config, kind)
        known = {name for name, _ in model.named_modules()}
        unknown = {module for module in modules if module.replace(".base_layer", "") not in known}
        parameters = {name for name, _ in model.named_parameters()}
        renamed, experts = {}, []
        names = {f"{module}.weight": module for module in unknown}
        for name, parameter, pattern in renamed_tensors(model, names):
            module = names[name]
            split, number = SPLIT_STACK.fullmatch(module), EXPERT_NUMBER.search(module)
            patterns = stacked_patterns(model, pattern) if pattern else []
            if split and split["stack"] in parameters:
                experts.append(Expert(module, split["stack"], int(split["number"]), axis=1))
            elif pattern is None and parameter.removesuffix(".weight") in known:
                renamed[module] = parameter.removesuffix(".weight")
            elif patterns and number and parameter in parameters:
                part = patterns.index(str(pattern))
                experts.append(Expert(module, parameter, int(number[1]), axis=2, part=part, parts=len(patterns)))
        if len(renamed) + len(experts) == len(unknown):
            return renamed, experts, model
        first = first or (renamed, experts, model)
    assert first is not None, "a config has at least one class"
    return first


def stacked_patterns(model: Any, pattern: str) -> list[str]:
    """Return what a converter stacks and then concatenates by rows, in order; [] if it does something else.

    Of two converters with one pattern, transformers takes the last.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    converter = [converter for converter in weight_converters(model) if pattern in converter.source_patterns][-1]
    match converter.operations:
        case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return list(converter.source_patterns)
    return []


def with_model_names(
    adapter: Adapter, base: Base, model: Any, renamed: Mapping[str, str], experts: list[Expert]
) -> Adapter:
    """Rename modules and stack experts. The configuration names every module, so that PEFT matches no pattern of old names."""
    config = adapter.config
    has_patterns = bool(config.get("rank_pattern") or config.get("alpha_pattern"))
    if config.get("target_parameters") and (experts or has_patterns):
        problem = "it changes stacked parameters beside modules whose names or ranks are another version's"
        raise adapter.refused(problem, fix=as_written(adapter.config))
    if experts:
        check_promises(adapter, base)
    tensors = load_file(adapter.weights)
    of_experts = {expert.module for expert in experts}
    kinds = dict(model.named_modules())
    out, scalings = {}, {}  # scalings: module or stack -> (rank, alpha)
    modules = set()
    for name, tensor in tensors.items():
        match = FACTOR.fullmatch(name)
        module = (match["module"] if match else name.rpartition(".lora_")[0]).removeprefix(PREFIX)
        if module in of_experts:
            if match is None:
                raise adapter.refused(f"{name} is of a kind that no expert has", fix="only lora_A and lora_B merge")
            continue
        target = renamed.get(module, module)
        out[name.replace(f"{PREFIX}{module}", f"{PREFIX}{target}", 1)] = tensor
        is_matrix = getattr(getattr(kinds.get(target), "weight", None), "ndim", 0) == 2  # a stack of experts is none
        if match and match["side"] == "A" and is_matrix:
            modules.add(target)
            scalings[target] = len(tensor), scaling_of(config, module) * len(tensor)
    stacks: dict[str, list[Expert]] = defaultdict(list)
    for expert in experts:
        stacks[expert.parameter].append(expert)
    parameters = dict(model.named_parameters())
    factors = {}
    for parameter, members in sorted(stacks.items()):
        a, b, scaling = stack_factors(adapter, members, tensors, parameters[parameter].shape)
        factors[parameter] = a, b
        scalings[parameter] = a.shape[1], scaling * a.shape[1]
    config = {key: value for key, value in config.items() if not key.startswith(("layers_", "exclude_"))}
    config["target_modules"] = sorted(modules)
    if experts or has_patterns:
        # The most frequent is the default: PEFT tries every pattern on every module.
        (rank, alpha), _ = Counter(scalings.values()).most_common(1)[0]
        others = {re.escape(name): pair for name, pair in scalings.items() if pair != (rank, alpha)}
        config |= {"r": rank, "lora_alpha": alpha, "use_rslora": False}
        config["rank_pattern"] = {name: pair[0] for name, pair in others.items()}
        config["alpha_pattern"] = {name: pair[1] for name, pair in others.items()}
    if experts:
        config["target_parameters"] = sorted(stacks)
        for key, wrapper in expert_wrappers(adapter, base, model, config).items():
            a, b = factors[wrapper.parameter]
            count, rank = a.shape[:2]
            flat_a, flat_b = a.reshape(count * rank, -1), b.permute(1, 2, 0).reshape(-1, rank * count)
            axis = stacks[wrapper.parameter][0].axis
            a, b = as_reading(flat_a, flat_b, count, Reading(axis, grouped=False), wrapper.reading)
            out[f"{key}.lora_A.weight"], out[f"{key}.lora_B.weight"] = a, b
    reading = f"{len(experts)} layers of single experts, which this transformers stacks" if experts else ""
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
    axis = members[0].axis
    if (a.shape[2], b.shape[1]) != (shape[axis], shape[3 - axis]) or any(e.number >= count for e in members):
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
    """A stack of experts in PEFT's model. reading: the installed PEFT's. shape: of the parameter. family: see Stack."""

    parameter: str
    shape: tuple[int, ...]
    stored_in_out: bool
    family: str
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
            experts = module.get_base_layer()
            is_in_out = bool(getattr(experts, "is_transposed", False))
            family = type(experts).__module__.rpartition(".")[0].rpartition(".")[2]
            reading, shape = Reading(2 if swaps_features(module) else 1, grouped=False), tuple(module.get_param().shape)
            wrappers[f"{PREFIX}{name}"] = ExpertWrapper(parameter, shape, is_in_out, family, reading)
    return wrappers


def with_installed_order(adapter: Adapter, base: Base, model: Any, expert_layout: str | None) -> Adapter:
    """Rewrite the factors of expert stacks from the order of the version that wrote them to the installed PEFT's."""
    wrappers = expert_wrappers(adapter, base, model, adapter.config)
    spans: dict[str, Span] = {span.name: span for span in adapter.spans}
    stacks = {}
    for key, wrapper in wrappers.items():
        sides = [spans.get(f"{key}.lora_{side}.weight") for side in "AB"]
        shapes = [span.shape for span in sides if span is not None]
        if len(shapes) == 2:
            stacks[key] = Stack(
                wrapper.parameter, wrapper.shape, (shapes[0], shapes[1]), wrapper.stored_in_out, wrapper.family
            )
    if not stacks:
        return adapter
    record = read_base_record(adapter.path)
    trained_with = record.transformers if record else None
    try:
        layout = read_layout(adapter.config, list(stacks.values()), expert_layout, trained_with)
    except UsageError as error:
        raise UsageError(f"adapter {adapter.path}: {error.message}", key=error.key, fix=error.fix) from error
    changed = [key for key, stack in stacks.items() if layout.readings[stack.parameter] != wrappers[key].reading]
    if not changed:
        return replace(adapter, reading=str(layout))
    tensors = load_file(adapter.weights)
    for key in changed:
        stack, names = stacks[key], (f"{key}.lora_A.weight", f"{key}.lora_B.weight")
        a, b = (tensors[name] for name in names)
        readings = layout.readings[stack.parameter], wrappers[key].reading
        tensors |= dict(zip(names, as_reading(a, b, stack.shape[0], *readings), strict=True))
    return adapter.rewritten(tensors, adapter.config, str(layout))
