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
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import Span
from cogumi.merge.adapter_files import FACTOR, OTHER_BASE, PREFIX, Adapter, as_written, read_base_record
from cogumi.merge.bases import Base
from cogumi.merge.expert_layout import ExpertLayout, Reading, Stack, as_reading, expert_factors, read_layout
from cogumi.merge.parameter_map import candidate_classes, module_of, renamed_tensors, weight_converters
from cogumi.models.base import meta_model
from cogumi.patches.trl_internals import swaps_features, targets_as_named

EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")
# Layers of single experts where even the checkpoint has a stack: of unsloth's gpt-oss in 4 bits, and of Tinker.
SPLIT_STACK = re.compile(
    r"(?P<root>.*\.experts)\.(?:(?P<stack>gate_up|down)_projs\.(?P<index>\d+)|(?P<number>\d+)\.(?P<part>gate|up|down)_proj)"
)
# Tinker's names of modules, and transformers'.
TINKER_NAMES = {r"\.attn\.": ".self_attn.", r"\.w1$": ".gate_proj", r"\.w2$": ".down_proj", r"\.w3$": ".up_proj"}
TINKER_NAMES |= {r"^(model\.)?(language_model\.)?unembed_tokens$": "lm_head"}
# Where a multimodal class, in one version or another, and a class for text alone have the text model.
TEXT_PART = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?|^model\.")
# Layers that one side has in one and the other has apart; rows follow each other.
FUSED_LAYERS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# New names of an adapter's modules by the old, layers that a model of the base stacks, and that model.
Located = tuple[dict[str, tuple[str, ...]], list["Expert"], Any]


@dataclass(frozen=True)
class Expert:
    """A linear layer of one expert, and where the model stacks it: part `part` of `parts` of a matrix's outputs.

    axis: of the stack [experts, first, last], which holds the layer's inputs. interleaved: the parts alternate row by row.
    """

    module: str
    parameter: str
    number: int
    axis: int
    part: int = 0
    parts: int = 1
    interleaved: bool = False


def as_installed(adapter: Adapter, base: Base, expert_layout: str | None = None) -> Adapter:
    """Return the adapter as the installed PEFT and transformers would have saved it, or itself if it is that already.

    Raises UsageError for an adapter of which more than one reading, or none, fits the base.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    factors = {module_of(span.name) for span in adapter.spans if FACTOR.fullmatch(span.name)}
    modules = factors | {module_of(span.name) for span in adapter.spans}
    renamed, experts, model = located = locate_modules(modules, base.model_config)
    kinds, has_stacks = dict(model.named_modules()), adapter.config.get("target_parameters")
    is_unnamed = adapter.config.get("target_modules") in (None, "all-linear")
    if adapter.config.get("layers_to_transform") is not None:  # versions of PEFT count T5's layers differently
        lora = LoraConfig.from_pretrained(str(adapter.directory))
        is_unnamed |= not all(check_target_module_exists(lora, module) for module in factors)
    has_routers = any(target_of(kinds, module).endswith(".weight") for module in factors)
    stacks = {module: names[0] for module, names in renamed.items() if module in factors and names[0] not in kinds}
    layout = read_stacks(adapter, model, stacks, expert_layout) if stacks else None
    if renamed or experts or (factors and not has_stacks and (is_unnamed or has_routers)):
        adapter = with_model_names(adapter, base, located, layout)
    if has_stacks and not (experts or layout):
        adapter = with_installed_order(adapter, base, model, expert_layout)
    return with_scaled_embeddings(adapter, kinds)


def target_of(kinds: Mapping[str, Any], module: str) -> str:
    """Return what PEFT targets for factors of a module: it, or the matrix of a router, a layer up to transformers 4; else ""."""
    from transformers.pytorch_utils import Conv1D

    if getattr(getattr(kinds.get(module), "weight", None), "ndim", 0) != 2:
        return ""  # of a stack of experts
    return module if isinstance(kinds[module], nn.Linear | nn.Embedding | Conv1D) else f"{module}.weight"


def with_scaled_embeddings(adapter: Adapter, kinds: Mapping[str, Any]) -> Adapter:
    """Divide updates of Gemma 3's embeddings by the scale that PEFT up to 0.17 left out; others scaled in the model then.

    BART's kin (BioGPT, XGLM), whose scale is a plain number, did so under a part of the versions of transformers.
    """
    layers = {span.name: kinds.get(module_of(span.name)) for span in adapter.spans}
    gemma = {key: layer for key, layer in layers.items() if stack_family(layer) in ("gemma3", "gemma3n")}
    kin = {key: scale for key, layer in layers.items() if isinstance(scale := getattr(layer, "embed_scale", 1), float)}
    scales = kin | {key: getattr(layer, "scalar_embed_scale", 1) for key, layer in gemma.items()}
    keys = [key for key, scale in scales.items() if scale != 1 and re.search("lora_|trainable_tokens", key)]
    if adapter.config.get("peft_version") or not keys:
        return adapter
    if keys[0] in kin:
        problem = f"PEFT up to 0.17 trained {keys[0]} with the embedding's scale of {scales[keys[0]]:g} or without"
        raise adapter.refused(f"{problem}, depending on the transformers of then", fix=as_written(adapter.config))
    if wrong := [key for key in keys if "lora_embedding_" not in key]:
        problem = f"PEFT up to 0.17 trained {wrong[0]} without the embedding's scale of {scales[wrong[0]]:g}"
        raise adapter.refused(f"{problem}, which no weights do", fix=as_written(adapter.config))
    tensors = load_file(adapter.weights)
    tensors |= {key: tensors[key].double() / scales[key] for key in keys if "lora_embedding_B" in key}
    return adapter.rewritten(tensors, adapter.config, "embedding's update divided by its scale (PEFT up to 0.17)")


def locate_modules(modules: set[str], config: Any) -> Located:
    """Return names of an adapter's modules in a model that has others, layers that it stacks, and that model of a base.

    The first class in which every module is found is taken; modules that no class has are left to the plan's own error.
    """
    first = None
    for kind in candidate_classes(config):
        model = meta_model(config, kind)
        known = {name for name, _ in model.named_modules()}
        unknown = modules - known
        parameters = dict(model.named_parameters())
        renamed: dict[str, tuple[str, ...]] = {}
        by_module: dict[str, Expert] = {}
        text = text_sides(model)[0][0].rpartition(".")[0]
        others = {module: (module, other_name(module), TEXT_PART.sub(f"{text}.", module)) for module in unknown}
        names = {f"{name}.weight": module for module in unknown for name in others[module]}
        for name, parameter, pattern in renamed_tensors(model, names):
            module = names[name]
            number = EXPERT_NUMBER.search(module)
            patterns = stacked_patterns(model, pattern) if pattern else []
            if pattern is None and parameter.removesuffix(".weight") in known:
                renamed[module] = (parameter.removesuffix(".weight"),)
            elif pattern is None and parameter in parameters and parameters[parameter].ndim == 3:
                renamed[module] = (parameter,)  # of a stack that was a module, as GraniteMoe's input_linear
            elif patterns and number and parameter in parameters:
                part = patterns.index(str(pattern))
                by_module[module] = Expert(module, parameter, int(number[1]), axis=2, part=part, parts=len(patterns))
        for module in unknown - renamed.keys() - by_module.keys():
            if expert := expert_of_stack(model, module, parameters) or part_of_layer(model, module, known):
                by_module[module] = expert
            elif layers := split_layers(model, module, known):
                renamed[module] = layers
            elif (stack := f"{model.base_model_prefix}.{module}") in known:  # transformers puts it before weights alone
                renamed[module] = (stack,)
        experts = [by_module[module] for module in sorted(by_module)]
        if len(renamed) + len(experts) == len(unknown):
            return renamed, experts, model
        first = first or (renamed, experts, model)
    assert first is not None, "a config has at least one class"
    return first


def text_sides(model: Any) -> list[tuple[str, Any]]:
    """Return name and module of a model's embedding and of its head: "" and None where it reads no text, or has no head."""
    sides: list[Any] = [None, None]
    with suppress(NotImplementedError):
        sides = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {id(module): name for name, module in model.named_modules() if hasattr(module, "weight")}
    return [(names[id(side)], side) if id(side) in names else ("", None) for side in sides]


def other_name(module: str) -> str:
    """Return the name that transformers has for a module of Tinker's, or the same name."""
    for pattern, name in TINKER_NAMES.items():
        module = re.sub(pattern, name, module)
    return module


def expert_of_stack(model: Any, module: str, parameters: Mapping[str, Any]) -> Expert | None:
    """Return where a model stacks a layer of one expert that no checkpoint of it stores; None if it has no such stack."""
    match = SPLIT_STACK.fullmatch(other_name(module))
    if match is None:
        return None
    kind = match["stack"] or {"gate": "gate_up", "up": "gate_up"}.get(match["part"], match["part"])
    _, parameter, _ = next(iter(renamed_tensors(model, [f"{match['root']}.{kind}_proj"])))
    if parameter not in parameters:
        return None
    stack = model.get_submodule(parameter.rpartition(".")[0])
    part, parts = (int(match["part"] == "up"), 2) if match["part"] in ("gate", "up") else (0, 1)
    axis = 1 if getattr(stack, "is_transposed", False) or stack_family(stack) == "llama4" else 2
    number, interleaved = int(match["index"] or match["number"]), not getattr(stack, "is_concatenated", True)
    return Expert(module, parameter, number, axis, part, parts, interleaved)


def part_of_layer(model: Any, module: str, known: set[str]) -> Expert | None:
    """Return where a model fuses a layer, such as q_proj in qkv_proj; None if it has no such layer."""
    parent, _, leaf = module.rpartition(".")
    for fused, parts in FUSED_LAYERS.items():
        if leaf in parts:
            _, parameter, _ = next(iter(renamed_tensors(model, [f"{parent}.{fused}.weight"])))
            if parameter.removesuffix(".weight") in known:
                return Expert(module, parameter, 0, axis=2, part=parts.index(leaf), parts=len(parts))
    return None


def split_layers(model: Any, module: str, known: set[str]) -> tuple[str, ...]:
    """Return the layers of a model that a layer such as qkv_proj fuses, in the order of its rows; () if there are none."""
    parent, _, leaf = module.rpartition(".")
    names = [f"{parent}.{part}.weight" for part in FUSED_LAYERS.get(leaf, ())]
    layers = [next(iter(renamed_tensors(model, [name])))[1].removesuffix(".weight") for name in names]
    return tuple(layers) if known.issuperset(layers) else ()


def stack_family(stack: Any) -> str:
    """Return transformers' folder of a class."""
    return type(stack).__module__.rpartition(".")[0].rpartition(".")[2]


def stacked_patterns(model: Any, pattern: str) -> list[str]:
    """Return what a converter stacks and then concatenates by rows, in order; [] if it does something else."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    # Of two converters with one pattern, transformers takes the last.
    converter = [converter for converter in weight_converters(model) if pattern in converter.source_patterns][-1]
    match converter.operations:
        case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return list(converter.source_patterns)
    return []


def with_model_names(adapter: Adapter, base: Base, located: Located, layout: ExpertLayout | None) -> Adapter:
    """Rename modules and stack experts, those of `layout` whole. The configuration names all, so that no old pattern matches."""
    (renamed, experts, model), config = located, adapter.config
    has_patterns = bool(config.get("rank_pattern") or config.get("alpha_pattern"))
    if config.get("target_parameters") and (experts or (has_patterns and not layout)):
        problem = "it changes stacked parameters beside modules whose names or ranks are another version's"
        raise adapter.refused(problem, fix=as_written(adapter.config))
    parameters = dict(model.named_parameters())
    if experts:
        check_promises(adapter, base, experts, {name: len(parameter) for name, parameter in parameters.items()})
    tensors = load_file(adapter.weights)
    of_experts = {expert.module for expert in experts}
    plain = {module_of(name) for name in tensors} - of_experts
    placed = Counter(target for module in plain for target in renamed.get(module, (module,)))
    placed += Counter({expert.parameter.removesuffix(".weight") for expert in experts})
    placed += Counter(f"part {expert.part} of expert {expert.number} of {expert.parameter}" for expert in experts)
    if twice := next((place for place, count in placed.items() if count > 1), None):
        problem = f"it holds {twice} of base {base.name} twice, under the names of two versions"
        raise adapter.refused(problem, fix="leave one of them in the file")
    kinds = dict(model.named_modules())
    out, scalings = {}, {}  # scalings: module, router's matrix or stack -> (rank, alpha)
    for name, tensor in tensors.items():
        match, module = FACTOR.fullmatch(name), module_of(name)
        if module in of_experts:
            if match is None:
                problem = f"{name} is not of lora_A or lora_B, which alone merge into a stack of experts"
                raise adapter.refused(problem, fix=as_written(adapter.config))
            continue
        targets = renamed.get(module, (module,))
        is_a = match is not None and match["side"] == "A"
        heights = [len(kinds[target].weight) for target in targets] if len(targets) > 1 and not is_a else [len(tensor)]
        if sum(heights) != len(tensor):
            problem = f"{name} has {len(tensor)} rows for {', '.join(targets)} of {heights}"
            raise adapter.refused(problem, fix=OTHER_BASE)
        for target, part in zip(targets, tensor.split(heights) * (len(targets) if is_a else 1), strict=False):
            out[name.replace(f"{PREFIX}{module}", f"{PREFIX}{target}", 1)] = part.clone()
            if is_a and (matrix := target_of(kinds, target)):
                scalings[matrix] = len(tensor), scaling_of(config, module) * len(tensor)
    stacks: dict[str, list[Expert]] = defaultdict(list)
    for expert in experts:
        stacks[expert.parameter].append(expert)
    factors = {}
    readings = {parameter: Reading(members[0].axis, grouped=False) for parameter, members in stacks.items()}
    for module, (parameter, *_) in renamed.items():
        if layout and (reading := layout.readings.get(parameter)):
            a, b = (out.pop(f"{PREFIX}{parameter}.lora_{side}.weight") for side in "AB")
            factors[parameter] = a, b = expert_factors(a, b, len(parameters[parameter]), reading)
            readings[parameter] = replace(reading, grouped=False)
            scalings[parameter] = a.shape[1], scaling_of(config, f"{module}.weight") * a.shape[1]
    for parameter, members in sorted(stacks.items()):
        a, b, scaling = stack_factors(adapter, members, tensors, parameters[parameter].shape)
        if parameters[parameter].ndim == 2:
            module = parameter.removesuffix(".weight")
            out |= {f"{PREFIX}{module}.lora_A.weight": a[0], f"{PREFIX}{module}.lora_B.weight": b[0]}
            scalings[module] = a.shape[1], scaling * a.shape[1]
            continue
        factors[parameter] = a, b
        scalings[parameter] = a.shape[1], scaling * a.shape[1]
    config = {key: value for key, value in config.items() if not key.startswith(("layers_", "exclude_"))}
    config |= {"target_modules": sorted(scalings.keys() & kinds), "lora_dropout": 0}  # which no parameter has
    if layout or not config.get("target_parameters"):
        config["target_parameters"] = sorted(scalings.keys() - kinds)
    if saved := config.get("modules_to_save"):  # by their whole names: PEFT takes all that end with a name
        saving = [module for module in plain if any(f"{name}." in f"{module}." for name in saved)]
        config["modules_to_save"] = sorted(target for module in saving for target in renamed.get(module, (module,)))
    if experts or has_patterns:
        # The most frequent is the default: PEFT tries every pattern on every module.
        (rank, alpha), _ = Counter(scalings.values()).most_common(1)[0]
        others = {re.escape(name): pair for name, pair in scalings.items() if pair != (rank, alpha)}
        config |= {"r": rank, "lora_alpha": alpha, "use_rslora": False}
        config["rank_pattern"] = {name: pair[0] for name, pair in others.items()}
        config["alpha_pattern"] = {name: pair[1] for name, pair in others.items()}
    for key, wrapper in expert_wrappers(adapter, base, model, config).items() if factors else ():
        parameter = stack_parameter(key, wrapper)
        a, b = factors[parameter]
        count, rank = a.shape[:2]
        flat_a, flat_b = a.reshape(count * rank, -1), b.permute(1, 2, 0).reshape(-1, rank * count)
        installed = Reading(2 if swaps_features(wrapper) else 1, grouped=False)
        pair = as_reading(flat_a, flat_b, count, readings[parameter], installed)
        out[f"{key}.lora_A.weight"], out[f"{key}.lora_B.weight"] = pair
    evidence = f"{len(experts)} layers of single experts, which this transformers stacks" if experts else ""
    return adapter.rewritten(out, config, evidence or str(layout or ""))


def check_promises(adapter: Adapter, base: Base, experts: list[Expert], counts: Mapping[str, int]) -> None:
    """Raise UsageError where target_modules match an expert that the file has no factors of. counts: experts of each stack.

    With layers_to_transform the numbers that PEFT compares are the experts' in some versions, so nothing is promised.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    lora = LoraConfig.from_pretrained(str(adapter.directory))
    if lora.layers_to_transform is not None or not lora.target_modules:
        return
    modules = {expert.module for expert in experts}
    stored = {tensor.removesuffix(".weight") for tensor in base.tensors if ".experts." in tensor}
    if not stored & modules:  # the base has stacks, or other names: promised are all experts of a layer that has one
        patterns = {(EXPERT_NUMBER.sub(".experts.{}.", expert.module), counts[expert.parameter]) for expert in experts}
        stored = {pattern.format(number) for pattern, count in patterns for number in range(count)}
    for module in sorted(stored - modules):
        if check_target_module_exists(lora, module):
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
    first, parts, axis = members[0], members[0].parts, members[0].axis
    keys = {expert: f"{PREFIX}{expert.module}.lora" for expert in members}
    pairs = {expert: (tensors[f"{key}_A.weight"], tensors[f"{key}_B.weight"]) for expert, key in keys.items()}
    ranks = [max((len(pairs[e][0]) for e in members if e.part == part), default=0) for part in range(parts)]
    scalings = {expert: scaling_of(adapter.config, expert.module) for expert in members}
    scaling, is_uniform = scalings[first], len(set(scalings.values())) == 1
    (a0, b0), (count, *sides) = pairs[first], shape if len(shape) == 3 else (1, *shape)
    dtype = a0.dtype if is_uniform else torch.float32
    heights = [
        next((len(pairs[e][1]) for e in members if e.part == part), sides[2 - axis] // parts) for part in range(parts)
    ]
    if (a0.shape[1], sum(heights)) != (sides[axis - 1], sides[2 - axis]) or any(e.number >= count for e in members):
        sizes = f"lora_A {tuple(a0.shape)} and lora_B {tuple(b0.shape)} of {first.module}"
        raise adapter.refused(f"{sizes} do not fit {first.parameter} {tuple(shape)}", fix=OTHER_BASE)
    a = torch.zeros(count, sum(ranks), a0.shape[1], dtype=dtype)
    b = torch.zeros(count, sum(heights), sum(ranks), dtype=dtype)
    for expert, (left, right) in pairs.items():
        if (left.shape[1], len(right)) != (a0.shape[1], heights[expert.part]):
            raise adapter.refused(f"{expert.module} has factors of another size than {first.module}", fix=OTHER_BASE)
        column, rank, row = sum(ranks[: expert.part]), len(left), sum(heights[: expert.part])
        rows = slice(expert.part, None, parts) if expert.interleaved else slice(row, row + heights[expert.part])
        a[expert.number, column : column + rank] = left
        share = right if is_uniform else right.float() * (scalings[expert] / scaling)
        b[expert.number, rows, column : column + rank] = share
    return a, b, scaling


@targets_as_named()
def add_layers(adapter: Adapter, base: Base, model: Any, lora: Any) -> Any:
    """Return PEFT's model of a LoraConfig on a model on the meta device. Raises UsageError where it does not fit."""
    from peft import get_peft_model

    lora.init_lora_weights = True  # how A and B began no longer matters
    try:
        return get_peft_model(model, lora, low_cpu_mem_usage=True)
    except (ValueError, TypeError, AttributeError, re.error) as error:
        # No target module found; a setting that PEFT does not have; a class without what the task needs.
        raise UsageError(f"adapter {adapter.path} does not fit base {base.name}: {error}") from error


def expert_wrappers(adapter: Adapter, base: Base, model: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return key of the factors -> PEFT's wrapper of the stack that they are on, for every stack of a configuration."""
    from peft import LoraConfig
    from peft.tuners.lora.layer import ParamWrapper

    lora = LoraConfig(**{key: value for key, value in config.items() if key in LoraConfig.__dataclass_fields__})
    layers = add_layers(adapter, base, copy.deepcopy(model), lora)
    return {
        f"{PREFIX}{name}": module
        for name, module in layers.get_base_model().named_modules()
        if isinstance(module, ParamWrapper) and len(module.get_param().shape) == 3
    }


def stack_parameter(key: str, wrapper: Any) -> str:
    """Return the name of a wrapper's parameter in the base. key: of its factors."""
    return f"{key.removeprefix(PREFIX).replace('.base_layer', '')}.{wrapper.parameter_name}"


def layout_of(adapter: Adapter, stacks: list[Stack], chosen: str | None) -> ExpertLayout:
    record = read_base_record(adapter.path)
    try:
        return read_layout(adapter.config, stacks, chosen, record.transformers if record else None)
    except UsageError as error:
        raise UsageError(f"adapter {adapter.path}: {error.message}", key=error.key, fix=error.fix) from error


def read_stacks(adapter: Adapter, model: Any, names: Mapping[str, str], expert_layout: str | None) -> ExpertLayout:
    """Read the order of stacks that were modules of their own until transformers 5. names: parameter by module."""
    shapes, stacks = {span.name: span.shape for span in adapter.spans}, []
    for module, parameter in names.items():
        factors = shapes[f"{PREFIX}{module}.lora_A.weight"], shapes[f"{PREFIX}{module}.lora_B.weight"]
        family = stack_family(model.get_submodule(parameter.rpartition(".")[0]))
        stacks.append(Stack(parameter, tuple(model.get_parameter(parameter).shape), factors, False, family))
    return layout_of(adapter, stacks, expert_layout)


def with_installed_order(adapter: Adapter, base: Base, model: Any, expert_layout: str | None) -> Adapter:
    """Rewrite the factors of expert stacks from the order of the version that wrote them to the installed PEFT's."""
    wrappers = expert_wrappers(adapter, base, model, adapter.config)
    spans: dict[str, Span] = {span.name: span for span in adapter.spans}
    stacks = {}
    for key, wrapper in wrappers.items():
        factors = [spans.get(f"{key}.lora_{side}.weight") for side in "AB"]
        shapes = [span.shape for span in factors if span is not None]
        if len(shapes) == 2:
            experts, shape = wrapper.get_base_layer(), tuple(wrapper.get_param().shape)
            is_in_out = bool(getattr(experts, "is_transposed", False))
            parameter = stack_parameter(key, wrapper)
            stacks[key] = Stack(parameter, shape, (shapes[0], shapes[1]), is_in_out, stack_family(experts))
    if not stacks:
        return adapter
    layout = layout_of(adapter, list(stacks.values()), expert_layout)
    installed = {key: Reading(2 if swaps_features(wrappers[key]) else 1, grouped=False) for key in stacks}
    readings = {key: (layout.readings[stacks[key].parameter], installed[key]) for key in stacks}
    changed = [key for key, (stored, installed) in readings.items() if stored != installed]
    if not changed:
        return replace(adapter, reading=str(layout))
    tensors = load_file(adapter.weights)
    for key in changed:
        names = f"{key}.lora_A.weight", f"{key}.lora_B.weight"
        a, b = (tensors[name] for name in names)
        tensors |= dict(zip(names, as_reading(a, b, stacks[key].shape[0], *readings[key]), strict=True))
    return adapter.rewritten(tensors, adapter.config, str(layout))
