"""What the merge will write, decided in full and checked before the first byte.

Names are the hard part. A checkpoint's tensor names need not be the model's parameter names: transformers renames and
fuses on load. So the model is built on the meta device (no memory), PEFT injects the adapter there, which yields rank,
scaling and layer type per module by PEFT's own rules, and transformers' own renaming maps disk names to parameters.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cogumi.errors import UsageError
from cogumi.merge.resolve import Adapter, Base
from cogumi.merge.sidefiles import side_files
from cogumi.merge.tensorfile import FLOAT_DTYPES, Shard, Span, element_count, header_for

OUTPUT_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
MERGEABLE_DTYPES = tuple(OUTPUT_DTYPES.values())
INDEX_NAME = "model.safetensors.index.json"
# Rows are merged in blocks of about this many elements: 1 MiB in float32, so that temporaries stay in the cache and
# memory does not grow with the tensor. Fixed, because the block's shape can change the last bit of a matrix product.
BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class LowRank:
    """delta = scaling * B @ A, transposed when the layer stores its weight as [in, out] (fan_in_fan_out)."""

    module: str
    key_a: str
    key_b: str
    rank: int
    scaling: float
    transposed: bool


@dataclass(frozen=True)
class TensorPlan:
    """One output tensor: the span it comes from, the span it goes to, and what is added to it (None: nothing)."""

    source: Span
    target: Span
    update: LowRank | None


@dataclass(frozen=True)
class ShardPlan:
    """One output shard: its header, ready to write, and its tensors in file order."""

    source: Path
    name: str
    header: bytes
    tensors: tuple[TensorPlan, ...]

    @property
    def bytes(self) -> int:
        return self.tensors[-1].target.end if self.tensors else len(self.header)


@dataclass(frozen=True)
class MergePlan:
    adapter: Adapter
    base: Base
    shards: tuple[ShardPlan, ...]
    index: dict[str, Any] | None
    config: bytes
    side_files: dict[str, Path]

    @property
    def shard_bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def updates(self) -> int:
        return sum(tensor.update is not None for shard in self.shards for tensor in shard.tensors)

    @property
    def copies(self) -> int:
        return sum(tensor.update is None for shard in self.shards for tensor in shard.tensors)


def build_plan(adapter: Adapter, base: Base, dtype: str) -> MergePlan:
    """Plan every output tensor. Raises UsageError naming the key when adapter and base do not fit together."""
    spans = {span.name: span for shard in base.shards for span in shard.spans}
    updates = map_updates(adapter, base, spans)
    shards = tuple(plan_shard(shard, updates, dtype) for shard in base.shards)
    return MergePlan(
        adapter,
        base,
        shards,
        output_index(base, shards),
        output_config(base, dtype),
        side_files(adapter.path, base.path),
    )


def map_updates(adapter: Adapter, base: Base, spans: dict[str, Span]) -> dict[str, LowRank]:
    """Disk name -> update. Every adapter key is used exactly once and every targeted module has its key."""
    model = meta_model(base)
    disk_names = parameter_to_disk(model, list(spans))
    tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
    layers = lora_layers(adapter, base, model)
    for module in adapter.factors.keys() - layers.keys():
        raise UsageError(
            f"adapter {adapter.path}: {adapter.factors[module][0]} maps to no targeted linear layer of base "
            f"{base.name}; is this the base the adapter was trained on?"
        )
    for module in layers.keys() - adapter.factors.keys():
        raise UsageError(
            f"adapter {adapter.path} targets {module} in base {base.name} but holds no factors for it; "
            "is this the base the adapter was trained on?"
        )
    updates: dict[str, LowRank] = {}
    with safe_open(adapter.weights, framework="pt") as weights:
        shapes = {key: tuple(weights.get_slice(key).get_shape()) for key in weights.keys()}  # noqa: SIM118
    for module, layer in sorted(layers.items()):
        key_a, key_b = adapter.factors[module]
        parameter = f"{module}.weight"
        if parameter in tied:
            raise UsageError(
                f"adapter {adapter.path} cannot be merged yet: {key_a} updates {parameter}, which is tied to another "
                "weight (tie_word_embeddings), so folding it in would change both"
            )
        if parameter not in disk_names:
            raise UsageError(
                f"adapter {adapter.path} cannot be merged: {key_a} updates {parameter}, which has no tensor of its own "
                f"in base {base.name} (absent, or stored in another layout)"
            )
        span = spans[disk_names[parameter]]
        update = LowRank(module, key_a, key_b, layer.r["default"], layer.scaling["default"], layer.fan_in_fan_out)
        check_shapes(adapter, base, span, update, shapes)
        if span.dtype not in MERGEABLE_DTYPES:
            raise UsageError(f"base {base.name}: {span.name} is stored as {span.dtype}; only {MERGEABLE_DTYPES} merge")
        updates[span.name] = update
    refuse_trained_whole_weights(adapter, base, disk_names)
    return updates


def refuse_trained_whole_weights(adapter: Adapter, base: Base, disk_names: dict[str, str]) -> None:
    """Raise UsageError unless every full weight that came with the adapter is the base's, in the adapter's dtype."""
    files = {span.name: shard.path for shard in base.shards for span in shard.spans}
    for parameter, key in adapter.whole.items():
        name = disk_names.get(parameter)
        with safe_open(adapter.weights, framework="pt") as weights:
            same = name is not None and same_weight(weights.get_slice(key), files[name], name)
        if not same:
            raise UsageError(
                f"adapter {adapter.path} cannot be merged yet: {key} is not a LoRA factor but a whole weight, and not "
                f"the one in base {base.name} (a trained module, a resized vocabulary, or another base?)"
            )


def same_weight(stored: Any, path: Path, name: str) -> bool:
    """Whether `stored` (a safetensors slice) equals the tensor in the shard, cast to the dtype it was stored in."""
    with safe_open(path, framework="pt") as shard:
        own = shard.get_slice(name)
        shape = own.get_shape()
        if stored.get_shape() != shape:
            return False
        step = max(1, BLOCK_ELEMENTS // max(1, element_count(tuple(shape[1:]))))
        for first in range(0, shape[0], step):
            block = stored[first : first + step]
            if not torch.equal(block, own[first : first + step].to(block.dtype)):
                return False
    return True


def check_shapes(adapter: Adapter, base: Base, span: Span, update: LowRank, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise UsageError unless B [out, r] @ A [r, in] has the shape of the base tensor."""
    if len(span.shape) != 2:
        raise UsageError(f"base {base.name}: {span.name} has shape {span.shape}; only matrices take a LoRA update")
    outputs, inputs = reversed(span.shape) if update.transposed else span.shape
    for key, expected in ((update.key_a, (update.rank, inputs)), (update.key_b, (outputs, update.rank))):
        if shapes[key] != expected:
            raise UsageError(
                f"adapter {adapter.path}: {key} has shape {shapes[key]} where {span.name} {span.shape} of base "
                f"{base.name} and rank {update.rank} need {expected}; is this the base it was trained on?"
            )


def meta_model(base: Base) -> Any:
    """The base's causal language model on the meta device: names and shapes, no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(base.path, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # The two ways transformers says that it knows no such architecture.
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"base {base.name} (model_type {base.config.get('model_type')!r}) is not a causal language model that this "
            f"transformers can build: {error}"
        ) from error


def parameter_to_disk(model: Any, disk_names: list[str]) -> dict[str, str]:
    """Parameter name -> disk name, for tensors that transformers loads as they are (renamed at most).

    Tensors that it converts on load (fused experts, permuted or transposed weights) are left out: adding a delta in
    the model's layout to bytes in the disk's layout would be wrong.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    parameters = model.state_dict()
    mapping: dict[str, str] = {}
    for disk_name in disk_names:
        name, converted = rename_source_key(disk_name, renamings, converters, model.base_model_prefix, parameters)
        if name not in parameters and disk_name in parameters:
            name, converted = disk_name, None  # the loader's own rule: a name that exists is not renamed away
        if converted is not None or name not in parameters:
            continue
        if name in mapping:
            raise UsageError(f"base tensors {mapping[name]} and {disk_name} both load as {name}; the base is ambiguous")
        mapping[name] = disk_name
    return mapping


def lora_layers(adapter: Adapter, base: Base, model: Any) -> dict[str, Any]:
    """Module name -> PEFT's LoRA layer, injected into `model` on meta. Rank, scaling and orientation are PEFT's."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora.layer import Linear, LoraLayer

    config = LoraConfig.from_pretrained(str(adapter.path))
    config.init_lora_weights = True  # how A and B began no longer matters
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:  # PEFT's word for "no target module found" and "this layer type is not supported"
        raise UsageError(f"adapter {adapter.path} does not fit base {base.name}: {error}") from error
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, layer in layers.items():
        if not isinstance(layer, Linear):
            kind = type(layer.get_base_layer()).__name__
            raise UsageError(f"adapter {adapter.path} cannot be merged yet: {name} is a {kind}, not a linear layer")
    return layers


def plan_shard(shard: Shard, updates: dict[str, LowRank], dtype: str) -> ShardPlan:
    """The output shard that keeps the base shard's names and order; only dtypes, and so offsets, may change."""
    tensors = []
    for span in shard.spans:
        out_dtype = OUTPUT_DTYPES[dtype] if dtype != "keep" and span.dtype in MERGEABLE_DTYPES else span.dtype
        length = span.end - span.start
        if out_dtype != span.dtype:
            length = element_count(span.shape) * FLOAT_DTYPES[out_dtype].itemsize
        tensors.append((span.name, out_dtype, span.shape, length))
    unchanged = all(out[1] == span.dtype for out, span in zip(tensors, shard.spans, strict=True))
    header = shard.header if unchanged else header_for(shard.metadata, tensors)
    plans = []
    position = len(header)
    for span, (name, out_dtype, shape, length) in zip(shard.spans, tensors, strict=True):
        plans.append(
            TensorPlan(
                span,
                Span(Path(shard.path.name), name, out_dtype, shape, position, position + length),
                updates.get(name),
            )
        )
        position += length
    return ShardPlan(shard.path, shard.path.name, header, tuple(plans))


def output_index(base: Base, shards: tuple[ShardPlan, ...]) -> dict[str, Any] | None:
    """The index of shards, with the real total of tensor bytes, or None when the base has none."""
    if not base.indexed:
        return None
    metadata = json.loads((base.path / INDEX_NAME).read_text(encoding="utf-8")).get("metadata") or {}
    targets = [(tensor.target, shard.name) for shard in shards for tensor in shard.tensors]
    metadata["total_size"] = sum(target.end - target.start for target, _ in targets)
    return {"metadata": metadata, "weight_map": {target.name: name for target, name in sorted(targets, key=_by_name)}}


def _by_name(item: tuple[Span, str]) -> str:
    return item[0].name


def output_config(base: Base, dtype: str) -> bytes:
    """The base's config.json: byte for byte, unless the dtype changes and has to be said there too."""
    text = (base.path / "config.json").read_bytes()
    if dtype == "keep":
        return text
    config = json.loads(text)
    set_dtype(config, dtype)
    return (json.dumps(config, indent=2) + "\n").encode()


def set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set every recorded dtype in a config, nested ones (text_config) included; transformers 4 said torch_dtype."""
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            config[key] = dtype
        elif isinstance(value, dict):
            set_dtype(value, dtype)
