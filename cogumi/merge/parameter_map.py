"""Map of a model's parameters to the tensors of its checkpoint, and the changes that an adapter can make to them.

A checkpoint's tensors need not be the model's parameters: transformers renames, stacks, concatenates, splits and
transposes on load. From its own mapping, asked with a model on the meta device, follows which rows of which stored
tensor hold which rows of which parameter.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import Span, matrix_shape
from cogumi.merge.adapter_files import PREFIX, Adapter
from cogumi.merge.bases import Base
from cogumi.models.base import auto_class, meta_model, named_class

# What PEFT puts between a module's name and that of its own tensor, or else the tensor's name.
OWN_PART = re.compile(r"\.(lora_|modules_to_save\.|token_adapter\.|base_layer\.|original_module\.).*|\.[^.]+$")


def module_of(key: str) -> str:
    """Return the module of a tensor in an adapter's file, "" for one of the model itself (final_logits_bias)."""
    return OWN_PART.sub("", f".{key.removeprefix(PREFIX)}").removeprefix(".")


@dataclass(frozen=True)
class Place:
    """Rows of a stored tensor, seen as a matrix of its last dimension, that hold one piece of a parameter.

    Its rows `first` to `last - 1` hold the parameter's rows from `offset` on, with all columns. matrix: the number of
    the matrix in a stack of experts, else 0. transposed: the stored rows are that matrix's columns.
    """

    tensor: str
    first: int
    last: int
    matrix: int = 0
    offset: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A base under the class that an adapter was trained on.

    spans: the stored tensors, without the head of another class. places: of its parameters in them. tied: its tied
    parameters (head -> embedding). config, kind: of that class, as for meta_model. architecture: its name. sizes: elements of
    its parameters.
    """

    spans: dict[str, Span]
    places: dict[str, tuple[Place, ...]]
    tied: dict[str, str]
    config: Any
    kind: Any
    architecture: str
    sizes: dict[str, int]


@dataclass(frozen=True)
class LowRank:
    """scaling * B @ A on one parameter, from the tensors `key_a` [count * r, in] and `key_b` [out, r * count] of a file.

    count: how many matrices the parameter stacks (experts); A holds their factors one after the other, B interleaved (r,
    count), as PEFT stores target_parameters. transposed: the parameter's matrices are [in, out]. key_a None: B is a bias
    [out], added as it is (lora_bias).
    """

    file: Path
    key_a: str | None
    key_b: str
    rank: int
    scaling: float
    count: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows of a parameter that are replaced by those of a tensor [len(indices), columns] (trainable tokens)."""

    file: Path
    key: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """Changes of one parameter, in this order: replaced whole, updated, rescaled (DoRA), rows replaced.

    magnitude: (file, key) of DoRA's magnitude, one for each output: a row, or a column where the low rank is transposed.
    """

    whole: Span | None = None
    terms: tuple[LowRank, ...] = ()
    magnitude: tuple[Path, str] | None = None
    rows: Rows | None = None


@dataclass
class Changes:
    """Changes of one adapter, by parameter. vocabulary: rows of the embedding where the adapter resized it."""

    parameters: dict[str, Change] = field(default_factory=dict)
    vocabulary: int | None = None


def read_checkpoint(base: Base, adapter: Adapter) -> Checkpoint:
    """Map a base to the class that the adapter was trained on. Raises UsageError if there is none, or two tensors are one."""
    config, kind = trained_class(base, adapter)
    model = meta_model(config, kind)
    spans = base.tensors
    places = parameter_places(model, spans)
    if kind in head_classes(config) and kind is not named_class(config):  # the head of the base's class is not loaded
        others = parameter_places(meta_model(config, named_class(config)), spans)
        dead = {place.tensor for locations in others.values() for place in locations}
        dead -= {place.tensor for locations in places.values() for place in locations}
        spans = {name: span for name, span in spans.items() if name not in dead}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return Checkpoint(spans, places, dict(model.all_tied_weights_keys), config, kind, type(model).__name__, sizes)


def trained_class(base: Base, adapter: Adapter) -> tuple[Any, Any]:
    """Return config and class of the model that the adapter was trained on, with the labels of a head that it brings."""
    config = copy.deepcopy(base.model_config)  # the labels are written into it
    shapes = {span.name.removeprefix(PREFIX): span.shape for span in adapter.spans}
    kind = adapted_class(config, shapes, adapter.config.get("task_type"))
    if kind in head_classes(config) and (labels := count_labels(config, kind, shapes)) is not None:
        config.num_labels = labels
    return config, kind


def head_classes(config: Any, task: str | None = None) -> list[Any]:
    """Return transformers' classes with a head for labels or rewards for a config, the task's first."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    mappings = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING]
    if task == "TOKEN_CLS":
        mappings.reverse()
    return [mapping[type(config)] for mapping in mappings if type(config) in mapping]


def count_labels(config: Any, kind: Any, shapes: dict[str, tuple[int, ...]]) -> int | None:
    """Return the labels of a head among these tensors, whose rows follow config.num_labels; None without a head."""
    two, three = copy.deepcopy(config), copy.deepcopy(config)
    two.num_labels, three.num_labels = 2, 3
    other = meta_model(three, kind).state_dict()
    for name, tensor in meta_model(two, kind).state_dict().items():
        if tensor.shape != other[name].shape and name in shapes:
            return shapes[name][0]
    return None


def adapted_class(config: Any, keys: Iterable[str], task: str | None = None) -> Any:
    """Return the class with the modules that an adapter's keys name: named_class, else auto_class, else one with a head.

    The first two differ where auto_class leaves towers out: `model.language_model.layers` is `model.layers` there.
    task: the adapter's task_type.
    """
    modules = {module_of(key) for key in keys}
    candidates = candidate_classes(config, task)
    for kind in candidates:
        if modules <= {name for name, _ in meta_model(config, kind).named_modules()}:
            return kind
    return candidates[0]


def candidate_classes(config: Any, task: str | None = None) -> list[Any]:
    """Return the classes that an adapter on a config may have been trained on: named_class, auto_class, those with a head."""
    kinds = [named_class(config), auto_class(config), *head_classes(config, task)]
    return [kind for kind in dict.fromkeys(kinds) if kind is not None]


def parameter_places(model: Any, spans: dict[str, Span]) -> dict[str, tuple[Place, ...]]:
    """Return parameter -> its places, for every parameter that the stored tensors make up in a way known here.

    Omitted are parameters with a tensor that is missing or has another size, and those that transformers converts by more
    than stack, concatenate, split and transpose, such as a permutation for rotary embeddings.
    """
    parameters = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    converters = weight_converters(model)
    plain: dict[str, str] = {}
    converted: dict[tuple[str, int], dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for tensor, name, pattern in renamed_tensors(model, spans):
        if pattern is not None:
            # Of two converters with one pattern, transformers takes the last.
            number = max(n for n, converter in enumerate(converters) if pattern in converter.source_patterns)
            converted[name, number][pattern].append(spans[tensor])
        elif name in parameters:
            if name in plain:
                message = f"base tensors {plain[name]} and {tensor} both load as {name}"
                raise UsageError(message, fix="the base is ambiguous")
            plain[name] = tensor
    places = {
        name: matrices_of(spans[tensor]) for name, tensor in plain.items() if spans[tensor].shape == parameters[name]
    }
    writer = getattr(model.config, "transformers_version", None)
    for (name, number), stored in converted.items():
        places |= converted_places(name, converters[number], stored, parameters, writer)
    return {name: pieces for name, pieces in places.items() if covers_parameter(pieces, parameters[name], spans)}


def weight_converters(model: Any) -> list[Any]:
    """Return transformers' conversions for a model that do more than rename."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    return [mapping for mapping in get_model_conversion_mapping(model) if isinstance(mapping, WeightConverter)]


def renamed_tensors(model: Any, stored: Iterable[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield stored tensor, first parameter that it loads as, and its converter's pattern or None, in transformers' order."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    converters, meta = weight_converters(model), model.state_dict()
    for tensor in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(tensor, renamings, converters, model.base_model_prefix, meta)
        if name not in meta and tensor in meta:
            name, pattern = tensor, None  # the loader's own rule: a name that exists is not renamed away
        yield tensor, name, pattern


def matrices_of(span: Span, offset: int = 0, transposed: bool = False) -> tuple[Place, ...]:
    """Return one place for each matrix of a stored tensor: of a stack, or the tensor itself."""
    count = span.shape[0] if len(span.shape) == 3 else 1
    rows = matrix_shape(span.shape)[0] // max(1, count)
    return tuple(
        Place(span.name, number * rows, (number + 1) * rows, number, offset, transposed) for number in range(count)
    )


def converted_places(
    name: str,
    converter: Any,
    stored: dict[str, list[Span]],
    parameters: dict[str, tuple[int, ...]],
    writer: str | None,
) -> dict[str, tuple[Place, ...]]:
    """Return {parameter: places} of one converter, {} if unknown.

    stored: source pattern -> tensors, in transformers' order. writer: the version of transformers that wrote the checkpoint.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    groups = [stored[pattern] for pattern in converter.source_patterns if pattern in stored]
    places: list[Place] = []
    offset = 0
    match converter.operations:
        case [split] if len(groups) == 1 and type(split).__name__ in ("Chunk", "Split") and split.dim == 0:
            return split_places(name, converter.target_patterns, groups[0][0], parameters)
        case [Transpose(dim0=1, dim1=2, check_dims=True)] if len(groups) == 1 and name in parameters:
            span = groups[0][0]
            is_square = len(span.shape) == 3 and span.shape[1] == span.shape[2]
            if is_square:  # [in, out] by transformers 4, and [out, in] by 5
                return {name: matrices_of(span, transposed=writer.startswith("4."))} if writer else {}
            return {name: matrices_of(span, transposed=len(span.shape) == 3 and span.shape != parameters[name])}
        case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)]:
            if len(groups) > 1 and len(converter.operations) == 1:
                return {}
            for group in groups:  # one tensor for each matrix (expert), which together hold its rows from `offset` on
                heights = [matrix_shape(span.shape)[0] for span in group]
                places += [
                    Place(span.name, 0, height, matrix=number, offset=offset)
                    for number, (span, height) in enumerate(zip(group, heights, strict=True))
                ]
                offset += heights[0]
        case [Concatenate(dim=dim)] if groups and dim == len(groups[0][0].shape) - 2:
            for group in groups:  # tensors that follow each other in the rows of every matrix
                places += matrices_of(group[0], offset)
                offset += group[0].shape[-2]
        case _:
            return {}
    return {name: tuple(places)}


def split_places(
    name: str, targets: list[str], span: Span, parameters: dict[str, tuple[int, ...]]
) -> dict[str, tuple[Place, ...]]:
    """Split the rows of a stored tensor that loads as several parameters by their sizes. name: of the first of them."""
    first = next((target for target in targets if target in name), None)
    if first is None:
        return {}
    before, _, after = name.partition(first)
    names = [before + target + after for target in targets]
    if not parameters.keys() >= set(names):
        return {}
    ends = list(accumulate(matrix_shape(parameters[parameter])[0] for parameter in names))
    return {name: (Place(span.name, start, end),) for name, start, end in zip(names, [0, *ends], ends, strict=False)}


def covers_parameter(places: tuple[Place, ...], shape: tuple[int, ...], spans: dict[str, Span]) -> bool:
    """Return whether the places hold exactly a parameter of this shape: every row of every matrix once."""
    rows, columns = matrix_shape(shape)
    count, height = (shape[0], shape[1]) if len(shape) == 3 else (1, rows)
    reached = [0] * count
    for place in sorted(places, key=lambda place: (place.matrix, place.offset)):
        stored_rows, width = matrix_shape(spans[place.tensor].shape)
        high = place.last - place.first
        if place.transposed:
            high, width = width, high
        if width != columns or place.last > stored_rows or place.matrix >= count:
            return False
        if reached[place.matrix] != place.offset:
            return False
        reached[place.matrix] += high
    return all(last == height for last in reached)
