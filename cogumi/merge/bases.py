"""Which base: found, read, and, where the adapter was trained on a quantized one, proven to be what that was made from."""

import logging
from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from cogumi.errors import UsageError
from cogumi.merge.base_proof import prove_base
from cogumi.merge.quantized import full_precision_names, quantization, quantized_tensors, refuse_dequantize
from cogumi.merge.resolve import Adapter, Base, read_json
from cogumi.merge.tensorfile import Shard, read_shard
from cogumi.models.provenance import BaseRecord, read_base

log = logging.getLogger(__name__)


def resolve_base(adapter: Adapter, base: str | None, revision: str | None, base_mode: str) -> Base:
    """The model to merge into: a directory, or a hub id whose snapshot is in the local cache.

    Without `base`, what the adapter records: in cogumi-base.json (the commit it was trained on), else in its config. A
    quantized one is never merged into as it is: with base_mode="full" the full-precision model is looked for by name
    and proven to be what it was quantized from; with "dequant" its weights are decoded, and the update goes on those.

    Raises UsageError when there is none, it is incomplete or not in safetensors, or the proof fails.
    """
    record = read_base(adapter.path)
    recorded = record.name if record else adapter.config.get("base_model_name_or_path")
    name = base if base is not None else recorded
    if not name:
        raise UsageError(f"adapter {adapter.path} does not record its base model; pass base=<directory or hub id>")
    if base is None:
        refuse_absent_quantized(name)
    found = read_model(name, revision or (recorded_revision(adapter, record) if name == recorded else None))
    kind = quantization(found.config)
    if base_mode == "dequant":
        return dequantized(found, kind, adapter, record)
    if kind is None:
        return trained_elsewhere(found, adapter, record, recorded)
    full = find_full_precision(found, kind)
    return replace(full, trained_on=found, proof=prove_base(found.shards, found.config, full.shards, full.config))


def refuse_absent_quantized(name: str) -> None:
    """Raise UsageError, with what to pass, where a recorded base is not here and its name says that it is quantized."""
    full = [candidate for candidate in full_precision_names(name, None) if is_hub_id(candidate)]
    if full and find_model(name, None) is None:
        raise UsageError(
            f"base {name}, which the adapter records, is not here, and by its name it is quantized; run: hf download "
            f"{full[0]} and pass base={full[0]} (with {name} here too, cogumi proves that the two belong together)"
        )


def is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def recorded_revision(adapter: Adapter, record: BaseRecord | None) -> str | None:
    if record is not None:
        return record.commit or record.revision
    revision: str | None = adapter.config.get("revision")
    return revision


def trained_elsewhere(found: Base, adapter: Adapter, record: BaseRecord | None, recorded: str | None) -> Base:
    """A full-precision base with what is known of the one that the adapter was trained on."""
    if record is not None and record.quantization is not None and record.name == found.name:
        quantized = record.quantization
        return replace(found, trained_in=quantized.type or f"{quantized.method} {quantized.bits}-bit")
    if not recorded or recorded == found.name:
        return found
    trained_on = find_model(recorded, recorded_revision(adapter, record))
    if trained_on is None:
        log.warning(
            "%s, which the adapter was trained on, is not here: not proven that %s fits it", recorded, found.name
        )
    if trained_on is None or quantization(trained_on.config) is None:
        return found
    proof = prove_base(trained_on.shards, trained_on.config, found.shards, found.config)
    return replace(found, trained_on=trained_on, proof=proof)


def find_full_precision(found: Base, kind: str) -> Base:
    """The full-precision model of a quantized base, by name. Raises UsageError saying what to download or pass."""
    names = full_precision_names(found.name, kind)
    for name in names:
        candidate = find_model(name, None)
        if candidate is not None and quantization(candidate.config) is None:
            log.info("base %s is quantized (%s); merging into %s", found.name, kind, candidate.name)
            return candidate
    hub = next((name for name in names if is_hub_id(name)), None)
    fetch = f"run: hf download {hub}; or " if hub else ""
    raise UsageError(
        f"base {found.name} is quantized ({kind}), and merging into it would lose nearly all of the update; its "
        f"full-precision model is not here; {fetch}pass base=<the full-precision model>"
    )


def dequantized(found: Base, kind: str | None, adapter: Adapter, record: BaseRecord | None) -> Base:
    """A quantized base whose weights are to be decoded. Raises UsageError where there is nothing to decode."""
    if kind is None:
        in_memory = " (it was quantized in memory while training)" if record and record.quantization else ""
        raise UsageError(
            f"base {found.name} is not quantized on disk{in_memory}, so there is nothing to dequantize; leave out "
            "base_mode, or pass base=<the quantized checkpoint>"
        )
    refuse_dequantize(found.name, kind)
    return decoded(found)


def decoded(found: Base) -> Base:
    """A bitsandbytes checkpoint with what is needed to read its weights as floats."""
    return replace(found, quantized=quantized_tensors(found.shards, found.config))


def read_model(name: str, revision: str | None) -> Base:
    """Read a model's config and tensor headers. Raises UsageError when it is not here, or not whole."""
    if Path(name).is_dir():
        path = Path(name)
        if revision is not None and snapshot_commit(path) != revision:
            raise UsageError(f"base {name} is a directory, which has no revisions; leave out base_revision")
    else:
        path = cached_snapshot(name, revision)
    if not (path / "config.json").is_file():
        raise UsageError(f"base {path} has no config.json; pass base=<a model directory or hub id>")
    config = read_json(path / "config.json", "base config")
    shards, indexed = base_shards(path)
    return Base(name, path, snapshot_commit(path), config, shards, indexed)


def find_model(name: str, revision: str | None) -> Base | None:
    """Like read_model, for a name that is only a guess: None where there is no such model here."""
    if not Path(name).is_dir():
        try:
            snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=["config.json"])
        except (LocalEntryNotFoundError, HFValidationError):
            return None
    elif not (Path(name) / "config.json").is_file():
        return None
    return read_model(name, None if Path(name).is_dir() else revision)


def cached_snapshot(name: str, revision: str | None) -> Path:
    """The hub cache's directory for `name`. Nothing is downloaded: a merge must not fill the disk by surprise."""
    at = f" at revision {revision}" if revision else ""
    try:
        # Which weight files are there is checked against the index below; from_pretrained caches no more than it needs.
        found = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=["config.json"])
    except LocalEntryNotFoundError as error:
        extra = f" --revision {revision}" if revision else ""
        raise UsageError(
            f"base {name}{at} is neither a directory nor in the hub cache; run: hf download {name}{extra}"
        ) from error
    except HFValidationError as error:
        raise UsageError(f"base {name} is neither an existing directory nor a hub id") from error
    return Path(found)


def snapshot_commit(path: Path) -> str | None:
    """The commit of a hub cache directory (.../snapshots/<40 hex digits>), or None for any other directory."""
    resolved = path.resolve()
    is_commit = len(resolved.name) == 40 and all(digit in "0123456789abcdef" for digit in resolved.name)
    return resolved.name if is_commit and resolved.parent.name == "snapshots" else None


def base_shards(path: Path) -> tuple[tuple[Shard, ...], bool]:
    """Every weight file of the base, and whether an index names them. Same precedence as transformers."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return (read_shard(single),), False
    if not index.is_file():
        raise UsageError(f"base {path} has no model.safetensors and no index of shards; only safetensors are merged")
    weight_map = read_json(index, "shard index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index} has no weight_map; download the base again")
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise UsageError(f"base {path} lacks {missing[0]} ({len(missing)} of {len(files)} shards); download it again")
    shards = tuple(read_shard(path / file) for file in files)
    place: dict[str, str] = {}
    for shard in shards:
        for span in shard.spans:
            if span.name in place:
                raise UsageError(f"base {path} holds {span.name} twice, in {place[span.name]} and {shard.path.name}")
            place[span.name] = shard.path.name
    for name, file in weight_map.items():
        if place.get(name) != file:
            raise UsageError(f"{index} places {name} in {file}, which does not hold it; download the base again")
    return shards, True
