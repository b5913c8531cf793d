"""Find and read the base; where the adapter was trained on a quantized one, prove that it was made from this one.

A name proves nothing: base and instruct models have the same shapes. Two things do prove it. What the quantizer left alone
(embeddings, norms, heads, router weights) must be the candidate's, bit for bit. And quantizing the candidate's weights must
give the codes that are stored, which a fine-tuned sibling's do not.
"""

import logging
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Shard, Span, leading_rows_equal, read_shard
from cogumi.merge.adapter_files import Adapter, BaseRecord, read_base_record, read_json, weights_sample
from cogumi.merge.quantized import BNB_4BIT, Bnb4bit, Mismatch, compare_codes, quantization, quantized_tensors
from cogumi.models.quantized_bases import full_precision_names, is_hub_id

log = logging.getLogger(__name__)

# Methods that may move a scale from a quantized weight into the norm before it (AWQ: scale_ln_fcs, and llm-compressor's
# AWQ and SmoothQuant modifiers), so that vectors of the right base need not be equal. Matrices must be.
SCALES_FOLDED = ("awq", "compressed-tensors", "modelopt")
# Fields that decide how equal shapes are used. Sizes are compared where they matter: in the tensors.
IDENTITY = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class BaseProof:
    """Why the full-precision base is the right one. The last three are compare_codes' of 4 bits, else 0 or None.

    tensors_equal: those that the quantized checkpoint holds unquantized.
    """

    tensors_equal: int
    sampled_tensors: int
    nf4_error: float | None
    codes_differing: float | None


@dataclass(frozen=True)
class Base:
    """A model on disk. `name` is the name it was requested by.

    quantized: stored tensors that are dequantized before the update (base_mode="dequant"). trained_on: the quantized
    model that the adapter was trained on, or how this one was quantized in memory ("nf4"). proof: why that model was
    quantized from this one. known_config: its transformers config, if it has been read.
    """

    name: str
    path: Path
    commit: str | None
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    quantized: dict[str, Bnb4bit] = field(default_factory=dict)
    trained_on: str | None = None
    proof: BaseProof | None = None
    known_config: Any = field(default=None, repr=False, compare=False)

    @cached_property
    def model_config(self) -> Any:
        """Its transformers config, read once and not to be changed."""
        return self.known_config if self.known_config is not None else read_model_config(self, self.path)

    @property
    def tensors(self) -> dict[str, Span]:
        """Tensors of the model by name; quantized ones with the shape and dtype that they decode to."""
        auxiliary = {name for tensor in self.quantized.values() for name in tensor.auxiliary}
        spans = {span.name: span for shard in self.shards for span in shard.spans if span.name not in auxiliary}
        for name, tensor in self.quantized.items():
            dtype = next(label for label, known in FLOAT_DTYPES.items() if known == tensor.dtype)
            spans[name] = replace(spans[name], shape=tensor.shape, dtype=dtype)
        return spans


def read_model_config(base: Base, directory: Path) -> Any:
    """Load the transformers config of a directory: the base's, or one that holds the config.json of the output."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        kind = base.config.get("model_type")
        raise UsageError(f"base {base.name} has model_type {kind!r}, which this transformers lacks: {error}") from error


def resolve_base(adapter: Adapter, base: str | None, revision: str | None, base_mode: str) -> Base:
    """Find the model to merge into: a directory, or a hub id whose snapshot is in the local cache.

    Without `base`, the adapter names it: in cogumi-base.json, with the commit it was trained on, else in its config.
    Where the base is quantized, base_mode="full" finds the full-precision model by name and proves that it is the
    original. Raises UsageError when there is no base, it is incomplete or not in safetensors, or the proof fails.
    """
    record = read_base_record(adapter.path)
    recorded = record.name if record else adapter.config.get("base_model_name_or_path")
    name = base if base is not None else recorded
    if not name:
        raise adapter.refused("it does not record its base model", fix="pass base=<directory or hub id>")
    trained_at = (record and (record.commit or record.revision)) or adapter.config.get("revision")
    if revision is None and name == recorded and not Path(name).is_dir():
        revision = trained_at
    model = read_model(name, revision)
    if base_mode == "dequant":
        return dequantized_base(model)
    if kind := quantization(model.config):
        return find_full_precision(model, kind)
    return compare_with_recorded(model, record, recorded, trained_at)


def check_further_base(adapter: Adapter, first: Base, base: str | None, revision: str | None, base_mode: str) -> None:
    """Raise UsageError unless another adapter of a sum, alone, would go into the same base, or equal weights elsewhere.

    One that records no base is taken. base, revision, base_mode: as for resolve_base.
    """
    record, sample = read_base_record(adapter.path), weights_sample(str(first.path))
    is_recorded = bool(record or adapter.config.get("base_model_name_or_path"))
    if base is None and (not is_recorded or (record and record.weights == sample is not None)):
        return
    fix = "pass base=<the model that all of them are added to>"
    try:
        other = resolve_base(adapter, base, revision, base_mode)
    except UsageError as error:
        raise adapter.refused(error.message, fix=error.fix if base else fix) from error
    if other.path.resolve() != first.path.resolve() and weights_sample(str(other.path)) != sample:
        name, known = (" at ".join(filter(None, (model.name, model.commit))) for model in (other, first))
        raise adapter.refused(f"it was trained on {name}, and the first adapter on {known}", fix=fix)


def compare_with_recorded(base: Base, record: BaseRecord | None, recorded: str | None, revision: str | None) -> Base:
    """Add to a full-precision base what is known of the one that the adapter was trained on."""
    trained_on = base
    if recorded and recorded != base.name:
        try:
            trained_on = read_model(recorded, None if Path(recorded).is_dir() else revision)
        except UsageError as error:  # the base was passed because of that, maybe
            log.warning("not proven that %s fits the adapter, which was trained on another: %s", base.name, error)
            return base
    if kind := quantization(trained_on.config):
        try:
            return replace(base, trained_on=trained_on.name, proof=compare_models(trained_on, base))
        except Mismatch as mismatch:
            message = f"base {base.name} is not what {trained_on.name} ({kind}) was quantized from: {mismatch}"
            fix = f"pass base=<the full-precision model that it was>{dequant_hint(kind)}"
            raise UsageError(message, fix=fix) from mismatch
    if trained_on.path.resolve() != base.path.resolve():
        log.warning("the adapter was trained on %s: not proven that %s is the same model", recorded, base.name)
    in_memory = record and record.quantization
    return replace(base, trained_on=str(in_memory)) if in_memory else base


def find_full_precision(base: Base, kind: str) -> Base:
    """Return the first model on the disk that a quantized base's name leads to and that is proven to be its original."""
    names = full_precision_names(base.name, kind)
    refused = []
    for name in filter(is_local, names):
        try:
            candidate = read_model(name, None)
        except UsageError as error:
            refused.append(f"{name} is not whole: {error}")
            continue
        try:
            proof = compare_models(base, candidate)
        except Mismatch as mismatch:
            refused.append(f"{name} is not the one: {mismatch}")
            continue
        log.info("base %s is quantized (%s); merging into %s", base.name, kind, name)
        return replace(candidate, trained_on=base.name, proof=proof)
    why = f" ({'; '.join(refused)})" if refused else ""
    hub = next((name for name in names if is_hub_id(name) and not is_local(name)), None)
    fetch = f"run: hf download {hub}; or " if hub else ""
    message = f"base {base.name} is quantized ({kind}), and merging into it would lose nearly all of the update"
    fix = f"{fetch}pass base=<the full-precision model>{dequant_hint(kind)}"
    raise UsageError(f"{message}; its full-precision model is not here{why}", fix=fix)


def dequant_hint(kind: str) -> str:
    return " or base_mode='dequant'" if kind == BNB_4BIT else ""


def dequantized_base(base: Base) -> Base:
    """Have a 4-bit bitsandbytes checkpoint read as floats. Raises UsageError for any other."""
    kind = quantization(base.config)
    if kind != BNB_4BIT:
        message = f"base {base.name} is {f'quantized ({kind})' if kind else 'not quantized on disk'}"
        fix = "leave out base_mode, or pass base=<a bitsandbytes 4-bit checkpoint>"
        raise UsageError(f"{message}, and base_mode='dequant' reads only bitsandbytes' 4 bits", fix=fix)
    return replace(base, quantized=quantized_tensors(base.shards, base.config))


def read_model(name: str, revision: str | None) -> Base:
    """Read a model's config and tensor headers. Raises UsageError if it is not on this machine, or incomplete."""
    path = Path(name)
    if not path.is_dir():
        path = cached_snapshot(name, revision)
    elif revision is not None and snapshot_commit(path) != revision:
        raise UsageError(f"base {name} is a directory, which has no revisions", fix="leave out base_revision")
    if not (path / "config.json").is_file():
        raise UsageError(f"base {path} has no config.json", fix="pass base=<a model directory or hub id>")
    return Base(name, path, snapshot_commit(path), read_json(path / "config.json"), base_shards(name, path))


def is_local(name: str) -> bool:
    """Return whether a model of this name, whole or not, is on the disk: a directory, or a snapshot in the hub's cache."""
    if Path(name).is_dir():
        return (Path(name) / "config.json").is_file()
    return is_hub_id(name) and isinstance(try_to_load_from_cache(name, "config.json"), str)


def cached_snapshot(name: str, revision: str | None) -> Path:
    """Return the hub cache's directory for `name`. Nothing is downloaded: a merge must not fill the disk by surprise."""
    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError as error:
        fix = "pass base=<a directory or hub id>"
        raise UsageError(f"base {name} is neither an existing directory nor a hub id", fix=fix) from error
    if not isinstance(config, str):
        at, extra = (f" at revision {revision}", f" --revision {revision}") if revision else ("", "")
        fix = f"run: hf download {name}{extra}"
        if full := full_precision_names(name, None):
            fix += f", or pass base={full[0]}, its full-precision model by name"
        raise UsageError(f"base {name}{at} is neither a directory nor in the hub cache", fix=fix)
    return Path(config).parent


def snapshot_commit(path: Path) -> str | None:
    """Return the commit of a hub cache directory (.../snapshots/<40 hex digits>), or None for any other directory."""
    match = re.search("/snapshots/([0-9a-f]{40})$", path.resolve().as_posix())
    return match[1] if match else None


def base_shards(name: str, path: Path) -> tuple[Shard, ...]:
    """Read the weight files of a base. Raises UsageError where an index and they differ."""
    shards, weight_map = read_shards(name, path)
    held = sorted((span.name, span.path.name) for shard in shards for span in shard.spans)
    if weight_map is not None and held != sorted(weight_map.items()):
        other = min(set(held) ^ set(weight_map.items()), default=("a tensor", ""))[0]
        problem = f"the index of base {name} and the shards differ in where {other} is, or hold it twice"
        raise UsageError(problem, fix="download the base again")
    return shards


def read_shards(name: str, path: Path) -> tuple[tuple[Shard, ...], dict[str, str] | None]:
    """Read the weight files that transformers loads, and the index's map of tensors to them, None without an index."""
    single, index, again = path / "model.safetensors", path / "model.safetensors.index.json", "download the base again"
    if other := read_json(path / "config.json").get("transformers_weights"):
        fix = "load it with from_pretrained, save that with save_pretrained, and pass base=<that>"
        raise UsageError(f"base {name}: its config.json names {other} as transformers_weights", fix=fix)
    if single.is_file():
        return (read_shard(single),), None
    if not index.is_file():
        message = f"base {name} has no model.safetensors and no index of shards in {path}"
        fix = "download it as safetensors, or save it so (from_pretrained, save_pretrained): nothing else is merged"
        raise UsageError(message, fix=fix)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index} has no weight_map", fix=again)
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (path / file).is_file()]:
        raise UsageError(f"base {name} lacks {missing[0]} ({len(missing)} of {len(files)} shards)", fix=again)
    return tuple(read_shard(path / file) for file in files), weight_map


def compare_models(quantized: Base, full: Base) -> BaseProof:
    """Prove that a quantized checkpoint was made from a full-precision one. Raises Mismatch where it was not.

    It compares the configs' identity fields and every tensor that both hold in a float dtype, rounded to the quantized
    one's. For bitsandbytes' 4 bits it also compares the tensors' names and a sample of the codes. With other methods, a
    sibling that was trained with embeddings, head and norms frozen would pass.
    """
    kind = quantization(quantized.config)
    if own_kind := quantization(full.config):
        raise Mismatch(f"it is quantized itself ({own_kind})")
    ours, theirs = (model.config.get("text_config") or model.config for model in (quantized, full))
    for entry in IDENTITY:
        if None not in (ours.get(entry), theirs.get(entry)) and ours[entry] != theirs[entry]:
            raise Mismatch(f"its config says {entry}={theirs[entry]!r} where the quantized one says {ours[entry]!r}")
    packed = quantized_tensors(quantized.shards, quantized.config)
    stored, expected = (
        {name: span for name, span in model.tensors.items() if span.dtype in FLOAT_DTYPES}
        for model in (replace(quantized, quantized=packed), full)
    )
    modules = {name.rpartition(".")[0] for name in stored}
    for name in sorted(stored.keys() ^ expected.keys()) if packed else ():
        if name in stored:
            raise Mismatch(f"it has no {name}")
        if name.rpartition(".")[0] in modules:  # a bias, which the quantized model would not have computed with
            raise Mismatch(f"it has {name}, which the quantized one lacks")
    both = [(span, expected[name]) for name, span in stored.items() if name in expected]
    for span, other in both:
        if span.shape != other.shape:
            raise Mismatch(f"{span.name} is {list(other.shape)} where the quantized one has {list(span.shape)}")
    unpacked = [(span, other) for span, other in both if span.name not in packed]
    if kind in SCALES_FOLDED:
        unpacked = [(span, other) for span, other in unpacked if len(span.shape) > 1]
    if not unpacked:
        raise Mismatch("no tensor is stored unquantized in both, so nothing can be compared")
    # Small ones first: a norm that differs is found before gigabytes of embeddings are read.
    for span, other in sorted(unpacked, key=lambda pair: pair[0].end - pair[0].start):
        if not leading_rows_equal(span, other):
            raise Mismatch(f"{span.name}, which is stored unquantized, differs in {span.dtype}")
    return BaseProof(len(unpacked), *(compare_codes(packed, expected) if packed else (0, None, None)))
