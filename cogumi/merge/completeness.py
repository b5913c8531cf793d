"""Check that a checkpoint holds everything that transformers loads a model from.

transformers fills a missing tensor with random numbers and says so in its log alone. Its own loader is run here on tensors
that have a shape and no memory: those of the base, then those of the planned output.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cogumi.core.checkpoint_faults import Fault, incomplete
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span
from cogumi.merge.adapter_files import BOTH_SIDES, PREFIX, Adapter
from cogumi.merge.bases import Base, read_model_config
from cogumi.merge.parameter_map import Checkpoint, renamed_tensors
from cogumi.models.base import meta_model, named_class
from cogumi.patches.trl_internals import drop_ignored_keys

# The dtypes that transformers casts to a parameter's as they are. Others need a scale, or are packed.
CAST_DTYPES = (*FLOAT_DTYPES, "F64")
# Last part of the name of a weight that may be packed or in 8 bits: module.qweight, experts.down_proj_blocks.
PACKED = re.compile(r"(\.q?weight(_packed)?|_blocks)$")
SCALES = re.compile(r"scale|absmax|SCB")
Stored = Mapping[str, tuple[tuple[int, ...], str]]  # tensor -> (shape, safetensors' dtype)


def find_faults(model: Any, stored: Stored) -> list[Fault]:
    """Return what transformers would fill with random numbers, or refuse, if it loaded these tensors; by parameter.

    Tied weights, what the class leaves to be computed, and stored tensors that it does not load are no faults.
    model: on the meta device; it is used up.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging as transformers_logging

    needed = dict(model.state_dict())
    shapes = {name: str(list(tensor.shape)) for name, tensor in needed.items()}
    transforms: list[Any] = list(get_model_conversion_mapping(model))
    for transform in transforms:
        if getattr(transform, "force_cpu", False):  # for what is too large for a GPU; here nothing has a size
            transform.force_cpu = False
    tensors = {name: torch.empty(shape, device="meta") for name, (shape, _) in stored.items()}
    tied = dict(model.all_tied_weights_keys)
    loading = LoadStateDictConfig(weight_mapping=transforms, dtype=torch.float32, device_map={"": "meta"})
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        loaded, _ = convert_and_load_state_dict_in_model(model, tensors, loading, None)
    finally:
        if shows_progress:
            transformers_logging.enable_progress_bar()
    drop_ignored_keys(model, loaded)
    packed = [name for name, (_, dtype) in stored.items() if dtype not in CAST_DTYPES]
    missing = without_tied(loaded.missing_keys, tied) | loaded.conversion_errors.keys()
    faults = {name: Fault(name, "", shapes[name]) for name in missing}
    faults |= {name: Fault(name, str(list(shape)), shapes[name]) for name, shape, _ in loaded.mismatched_keys}
    for tensor, name, _ in renamed_tensors(model, packed) if packed else ():
        if name in needed and needed[name].is_floating_point():
            faults.setdefault(name, Fault(name, stored[tensor][1], "a float dtype"))
    for name, tensor in absent_parts(model, stored, faults).items() if faults else ():
        faults[name] = replace(faults[name], tensor=tensor)
    return [faults[name] for name in sorted(faults)]


def without_tied(missing: set[str], tied: dict[str, str]) -> set[str]:
    """Leave out parameters that transformers ties to a stored one; where none of a group is stored, keep the source."""
    groups: dict[str, set[str]] = {}
    for target, source in tied.items():
        groups.setdefault(source, {source}).add(target)
    left = set(missing)
    for source, group in groups.items():
        left -= group - {source} if group <= missing else group
    return left


def absent_parts(model: Any, stored: Stored, parameters: Collection[str]) -> dict[str, str]:
    """Return, by parameter that is stacked from numbered lists (experts), the first tensor that is not stored."""
    sources: dict[str, list[str]] = {}
    for tensor, name, pattern in renamed_tensors(model, stored):
        if name in parameters and pattern is not None and "*" in pattern:
            sources.setdefault(name, []).append(tensor)
    absent = {}
    for name, tensors in sources.items():
        numbered = [re.split(r"(?<=\.)(\d+)(?=\.)", tensor) for tensor in tensors]
        # The number of the expert is the first that differs between the tensors, which are of one layer.
        places = range(1, min(map(len, numbered)), 2)
        place = next((place for place in places if len({part[place] for part in numbered}) > 1), None)
        if place is not None:
            stems = sorted({("".join(part[:place]), "".join(part[place + 1 :])) for part in numbered})
            count = model.state_dict()[name].shape[0]
            names = (f"{before}{number}{after}" for before, after in stems for number in range(count))
            if (first := next((part for part in names if part not in tensors), None)) is not None:
                absent[name] = first
    return absent


def find_unscaled(stored: Stored) -> list[Fault]:
    """Return the quantized weights of a checkpoint that it has no scales of; transformers loads some as they are."""
    leaves = [(name, name.rpartition(".")[2]) for name in sorted(stored)]
    scales = {name: match for name, leaf in leaves if (match := SCALES.search(leaf))}
    scaled = {name[: match.start() - len(match.string)].rstrip("._") for name, match in scales.items()}
    faults = []
    for name, _ in leaves:
        stem, dtype = PACKED.sub("", name), stored[name][1]
        is_weight = (stem != name or dtype.startswith("F8")) and dtype not in CAST_DTYPES and name not in scales
        if is_weight and not scaled & {name, stem, f"{stem}.weight"}:
            faults.append(Fault(name, dtype, "a scale beside it"))
    return faults


def check_base(
    base: Base, checkpoint: Checkpoint, adapters: Collection[Adapter]
) -> tuple[frozenset[str], tuple[Fault, ...]]:
    """Compare a base with what transformers loads under the class that the adapter was trained on.

    Returns the parameters that an adapter brings whole and that the base lacks, or has in another shape (a head), and those
    that are missing: a merge copies what is there, and only a loader needs the rest. Raises UsageError for a stored tensor
    of a shape or dtype that the class does not load.
    """
    adapter_tensors = {span.name.removeprefix(PREFIX) for adapter in adapters for span in adapter.spans}
    faults = find_faults(meta_model(checkpoint.config, checkpoint.kind), stored_of(checkpoint.spans.values()))
    added_parameters = frozenset(
        fault.parameter
        for fault in faults
        if fault.parameter in adapter_tensors and (fault.parameter in checkpoint.spans or not fault.stored)
    )
    faults = [fault for fault in faults if fault.parameter not in added_parameters]
    if unfit := [fault for fault in faults if not fault.is_missing]:
        raise incomplete(base.name, checkpoint.architecture, unfit)
    return added_parameters, tuple(faults)


def check_output(
    base: Base, checkpoint: Checkpoint, adapter: Adapter, entries: dict[str, Any], targets: Collection[Span]
) -> tuple[Fault, ...] | None:
    """Raise UsageError unless transformers will load the planned output as whole as its base, as its own config.json says.

    entries: that config. targets: the planned tensors. Returns the parameters that base and output lack; None where the
    output has the base's class, config, names and shapes.
    """
    with TemporaryDirectory() as directory:  # transformers decodes what JSON has no word for (infinity) in files alone
        (Path(directory) / "config.json").write_text(json.dumps(entries), encoding="utf-8")
        config = read_model_config(base, Path(directory))
    kind, stored = named_class(config) or checkpoint.kind, stored_of(targets)
    if kind is checkpoint.kind and entries == base.config and stored == stored_of(checkpoint.spans.values()):
        return None
    faults = find_faults(meta_model(config, kind), stored)
    rows = config.get_text_config().vocab_size
    is_resized = rows != checkpoint.config.get_text_config().vocab_size
    if resized := [fault for fault in faults if is_resized and fault.needed.startswith(f"[{rows}")]:
        message = f"it resized the vocabulary to {rows} and does not bring all of it: {resized[0]} in the merged model"
        raise adapter.refused(message, fix=BOTH_SIDES)
    # Under its own config: a head that is tied there and no longer tied in the output is not missing in the base.
    base_faults = find_faults(meta_model(checkpoint.config, kind), stored_of(base.tensors.values())) if faults else []
    if lost := [fault for fault in faults if not fault.is_missing or fault not in base_faults]:
        raise incomplete(base.name, kind.__name__, lost)
    return tuple(faults)


def stored_of(spans: Collection[Span]) -> Stored:
    return {span.name: (span.shape, span.dtype) for span in spans}


def describe_missing(missing: Sequence[Fault]) -> str:
    first, *others = missing
    more = f", and {len(others)} more" if others else ""
    return f"the merged model is as incomplete as its base: {first}{more}"
