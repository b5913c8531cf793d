"""Which base: found, read, and, where the adapter was trained on a quantized one, proven to be what that was made from."""

import logging
import os
from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import Shard, read_shard
from cogumi.merge.adapter_files import Adapter, Base, read_json
from cogumi.merge.base_proof import BaseProof, Mismatch, prove_base
from cogumi.merge.provenance import BaseRecord, read_base
from cogumi.merge.quantized import (
    DEQUANTIZED_KINDS,
    full_precision_names,
    quantization,
    quantized_tensors,
    refuse_dequantize,
)

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
        raise UsageError(
            f"adapter {adapter.path} does not record its base model", fix="pass base=<directory or hub id>"
        )
    if revision is None and name == recorded and not Path(name).is_dir():
        revision = recorded_revision(adapter, record)
    if base is None and base_mode == "full":
        refuse_absent_quantized(name, revision)
    found = read_model(name, revision)
    kind = quantization(found.config)
    if base_mode == "dequant":
        return dequantized(found, kind, record)
    if kind is None:
        return trained_elsewhere(found, adapter, record, recorded)
    return find_full_precision(found, kind)


def refuse_absent_quantized(name: str, revision: str | None) -> None:
    """Raise UsageError, with what to pass, where a recorded base is not here and its name says that it is quantized."""
    candidates = full_precision_names(name, None)
    if not candidates or is_here(name, revision):
        return
    what = f"base {name}, which the adapter records, is not here, and by its name it is quantized; "
    proof = f" (with {name} here too, cogumi proves that the two belong together)"
    here = next((candidate for candidate in candidates if is_here(candidate, None)), None)
    if here is not None:
        raise UsageError(f"{what}pass base={here}, its full-precision model by name, which is here{proof}")
    hub = next((candidate for candidate in candidates if is_hub_id(candidate)), None)
    if hub is not None:
        raise UsageError(f"{what}run: hf download {hub} and pass base={hub}{proof}")


def is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def recorded_revision(adapter: Adapter, record: BaseRecord | None) -> str | None:
    """The commit of the base's repository that the adapter was trained on, or else the branch or tag."""
    known: str | None = (record.commit or record.revision) if record is not None else None
    return known or adapter.config.get("revision")


def trained_elsewhere(found: Base, adapter: Adapter, record: BaseRecord | None, recorded: str | None) -> Base:
    """A full-precision base with what is known of the one that the adapter was trained on."""
    trained_on = found
    if recorded and recorded != found.name:
        try:
            revision = None if Path(recorded).is_dir() else recorded_revision(adapter, record)
            trained_on = read_model(recorded, revision)
        except UsageError as error:  # the base was passed because of that, maybe
            log.warning("not proven that %s fits the adapter, which was trained on another: %s", found.name, error)
            return found
    if quantization(trained_on.config) is not None:
        return replace(found, trained_on=trained_on, proof=prove(trained_on, found))
    if trained_on.path.resolve() != found.path.resolve():
        log.warning("the adapter was trained on %s: not proven that %s is the same model", recorded, found.name)
    if record is None or record.quantization is None:
        return found
    in_memory = record.quantization
    return replace(found, trained_in=in_memory.type or f"{in_memory.method} {in_memory.bits}-bit")


def prove(quantized: Base, full: Base) -> BaseProof:
    """prove_base in the names that were asked for: it knows only the files, which for a hub id are in the hub's cache."""
    try:
        return prove_base(quantized.shards, quantized.config, full.shards, full.config)
    except UsageError as error:
        text = str(error)
        for base in (quantized, full):
            text = text.replace(os.fspath(base.path), base.name)
        raise UsageError(text) from error.__cause__


def find_full_precision(found: Base, kind: str) -> Base:
    """The full-precision model of a quantized base: the first that its name leads to, that is here, and that is proven.

    Raises UsageError saying why each that is here is not the one, and what to download or pass.
    """
    names = full_precision_names(found.name, kind)
    refused = []
    for name in names:
        if not is_here(name, None):
            continue
        try:
            candidate = read_model(name, None)
        except UsageError as error:
            refused.append(f"not whole: {error}")
            continue
        own = quantization(candidate.config)
        if own is not None:
            refused.append(f"{name} is quantized itself ({own})")
            continue
        try:
            proof = prove(found, candidate)
        except UsageError as error:
            if not isinstance(error.__cause__, Mismatch):  # the quantized base itself is damaged
                raise
            refused.append(f"{name} is not what it was quantized from: {error.__cause__}")
            continue
        log.info("base %s is quantized (%s); merging into %s", found.name, kind, name)
        return replace(candidate, trained_on=found, proof=proof)
    why = f" ({'; '.join(refused)})" if refused else ""
    hub = next((name for name in names if is_hub_id(name) and not is_here(name, None)), None)
    fetch = f"run: hf download {hub}; or " if hub else ""
    instead = " or base_mode='dequant'" if kind in DEQUANTIZED_KINDS else ""
    raise UsageError(
        f"base {found.name} is quantized ({kind}), and merging into it would lose nearly all of the "
        f"update; its full-precision model is not here{why}",
        fix=f"{fetch}pass base=<the full-precision model>{instead}",
    )


def dequantized(found: Base, kind: str | None, record: BaseRecord | None) -> Base:
    """A quantized base whose weights are to be decoded. Raises UsageError where there is nothing to decode."""
    if kind is None:
        in_memory = ""
        if record is not None and record.quantization is not None and record.name == found.name:
            in_memory = " (it was quantized in memory while training)"
        raise UsageError(
            f"base {found.name} is not quantized on disk{in_memory}, so there is nothing to dequantize",
            fix="leave out base_mode, or pass base=<the quantized checkpoint>",
        )
    refuse_dequantize(found.name, kind)
    try:
        original = find_full_precision(found, kind)
    except UsageError:  # it is wanted for a figure only
        log.info("q/delta is not known: the full-precision model of %s is not here, or not proven to be it", found.name)
        return decoded(found)
    return replace(decoded(found), original=original, proof=original.proof)


def decoded(found: Base) -> Base:
    """A bitsandbytes checkpoint with what is needed to read its weights as floats."""
    return replace(found, quantized=quantized_tensors(found.shards, found.config))


def read_model(name: str, revision: str | None) -> Base:
    """Read a model's config and tensor headers. Raises UsageError when it is not here, or not whole."""
    if Path(name).is_dir():
        path = Path(name)
        if revision is not None and snapshot_commit(path) != revision:
            raise UsageError(f"base {name} is a directory, which has no revisions", fix="leave out base_revision")
    else:
        path = cached_snapshot(name, revision)
    if not (path / "config.json").is_file():
        raise UsageError(f"base {path} has no config.json", fix="pass base=<a model directory or hub id>")
    config = read_json(path / "config.json", "base config")
    shards, indexed = base_shards(name, path)
    return Base(name, path, snapshot_commit(path), config, shards, indexed)


def is_here(name: str, revision: str | None) -> bool:
    """Whether there is a model of this name, whole or not: a directory with a config, or a snapshot in the hub's cache."""
    if Path(name).is_dir():
        return (Path(name) / "config.json").is_file()
    try:
        path = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=["config.json"])
    except (LocalEntryNotFoundError, HFValidationError):
        return False
    return (Path(path) / "config.json").is_file()


def cached_snapshot(name: str, revision: str | None) -> Path:
    """The hub cache's directory for `name`. Nothing is downloaded: a merge must not fill the disk by surprise."""
    at = f" at revision {revision}" if revision else ""
    try:
        # Which weight files are there is checked against the index below; from_pretrained caches no more than it needs.
        found = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=["config.json"])
    except LocalEntryNotFoundError as error:
        extra = f" --revision {revision}" if revision else ""
        raise UsageError(
            f"base {name}{at} is neither a directory nor in the hub cache", fix=f"run: hf download {name}{extra}"
        ) from error
    except HFValidationError as error:
        raise UsageError(f"base {name} is neither an existing directory nor a hub id") from error
    return Path(found)


def snapshot_commit(path: Path) -> str | None:
    """The commit of a hub cache directory (.../snapshots/<40 hex digits>), or None for any other directory."""
    resolved = path.resolve()
    is_commit = len(resolved.name) == 40 and all(digit in "0123456789abcdef" for digit in resolved.name)
    return resolved.name if is_commit and resolved.parent.name == "snapshots" else None


def base_shards(name: str, path: Path) -> tuple[tuple[Shard, ...], bool]:
    """Every weight file of the base in `path`, and whether an index names them. Same precedence as transformers."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return (read_shard(single),), False
    if not index.is_file():
        raise UsageError(
            f"base {name} has no model.safetensors and no index of shards in {path}",
            fix="download all of it, as safetensors: nothing else is merged",
        )
    weight_map = read_json(index, "shard index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index} has no weight_map", fix="download the base again")
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise UsageError(
            f"base {name} lacks {missing[0]} ({len(missing)} of {len(files)} shards)", fix="download it again"
        )
    shards = tuple(read_shard(path / file) for file in files)
    place: dict[str, str] = {}
    for shard in shards:
        for span in shard.spans:
            if span.name in place:
                raise UsageError(f"base {name} holds {span.name} twice, in {place[span.name]} and {shard.path.name}")
            place[span.name] = shard.path.name
    for tensor, file in weight_map.items():
        if place.get(tensor) != file:
            raise UsageError(
                f"{index} places {tensor} in {file}, which does not hold it", fix="download the base again"
            )
    return shards, True
