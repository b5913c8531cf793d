"""Which adapter, which base: found, read and judged fit for an exact merge before anything else happens."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open

from cogumi.errors import UsageError
from cogumi.merge.tensorfile import Shard, read_shard

ADAPTER_WEIGHTS = "adapter_model.safetensors"
QUANTIZED_SUFFIXES = ("-bnb-4bit", "-4bit")

# adapter_config.json entries that plain LoRA uses, or that do not change what a trained adapter computes. Any other
# entry that is set to something is refused: a LoRA variant this module has never heard of must not merge as plain LoRA.
PLAIN_ENTRIES = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
}
# Initialisations that leave the base weights as they are and train an ordinary LoRA pair.
PLAIN_INITS = (True, False, "gaussian", "orthogonal")
REFUSED_ENTRIES = {
    "alora_invocation_tokens": "activated LoRA applies to some positions only, which no merged weight can express",
    "layer_replication": "layer_replication changes the number of layers",
    "lora_bias": "lora_bias trains biases that the base checkpoint may not have",
    "modules_to_save": "modules_to_save holds whole trained modules next to the LoRA factors",
    "target_parameters": "target_parameters (MoE experts) puts LoRA on bare parameters",
    "trainable_token_indices": "trainable_token_indices holds trained embedding rows",
    "use_dora": "DoRA rescales whole weight rows, which a low-rank update alone does not express",
}


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA adapter of a kind that can be merged.

    factors: module name -> (key of A, key of B). whole: parameter name -> key, for full weights stored with the factors
    (PEFT does that with the base weight of a head that it adapts); they must turn out to be the base's own.
    """

    path: Path
    config: dict[str, Any]
    factors: dict[str, tuple[str, str]]
    whole: dict[str, str]

    @property
    def weights(self) -> Path:
        return self.path / ADAPTER_WEIGHTS


@dataclass(frozen=True)
class Base:
    """A full-precision base model on disk. `name` is what it was asked for as; `indexed` says if it has an index."""

    name: str
    path: Path
    commit: str | None
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    indexed: bool


def read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} ({what}) is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} ({what}) should hold a JSON object, not a {type(value).__name__}")
    return value


def resolve_adapter(path: Path) -> Adapter:
    """Read an adapter directory. Raises UsageError when it is missing, damaged, or not plain LoRA on linear layers."""
    if not path.is_dir():
        raise UsageError(f"adapter {path} is not a directory; pass the directory that PEFT's save_pretrained wrote")
    if not (path / "adapter_config.json").is_file():
        raise UsageError(f"adapter {path} has no adapter_config.json; pass the directory PEFT's save_pretrained wrote")
    config = read_json(path / "adapter_config.json", "adapter config")
    refuse_unsupported(path, config)
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f"adapter {path} has no {ADAPTER_WEIGHTS}; save it again with save_pretrained (safetensors)")
    read_shard(path / ADAPTER_WEIGHTS)  # a truncated file is named here, in words
    with safe_open(path / ADAPTER_WEIGHTS, framework="pt") as weights:
        factors, whole = sort_keys(path, list(weights.keys()))
        refuse_empty_or_broken(path, weights, factors)
    return Adapter(path, config, factors, whole)


def refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    """Raise UsageError unless the config describes plain LoRA: merging anything else as LoRA is silently wrong."""

    def refuse(reason: str) -> UsageError:
        return UsageError(f"adapter {path} cannot be merged yet: {reason}; load it with PEFT on the base instead")

    if config.get("peft_type") != "LORA":
        raise refuse(f"it is a {config.get('peft_type')} adapter and only LORA is supported")
    if config.get("bias", "none") != "none":
        raise refuse(f"bias={config['bias']!r} trains biases next to the LoRA factors")
    init = config.get("init_lora_weights", True)
    if init not in PLAIN_INITS:
        raise refuse(
            f"init_lora_weights={init!r}: only adapters started from {PLAIN_INITS} are proven to belong to an "
            "unaltered base (PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it when training starts)"
        )
    for entry, reason in REFUSED_ENTRIES.items():
        if config.get(entry):
            raise refuse(reason)
    for entry in sorted(config.keys() - PLAIN_ENTRIES - {"bias", "init_lora_weights"}):
        if config[entry]:
            raise refuse(f"adapter_config.json sets {entry}={config[entry]!r}, which this merge does not know")


FACTOR_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
WHOLE_KEY = re.compile(r"base_model\.model\.(?P<module>.+?)(\.base_layer)?\.(?P<kind>weight|bias)")


def sort_keys(path: Path, keys: list[str]) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """(factors, whole) as in Adapter, with every key in exactly one place. Raises UsageError for any other key."""
    sides: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for key in sorted(keys):
        if "lora_embedding_" in key:
            raise UsageError(f"adapter {path} cannot be merged yet: {key} is LoRA on an embedding")
        factor = FACTOR_KEY.fullmatch(key)
        other = None if "lora_" in key else WHOLE_KEY.fullmatch(key)
        if factor:
            sides.setdefault(factor["module"], {})[factor["side"]] = key
        elif other and f"{other['module']}.{other['kind']}" not in whole:
            whole[f"{other['module']}.{other['kind']}"] = key
        else:
            raise UsageError(f"adapter {path} cannot be merged yet: {key} is not a LoRA factor of a linear layer")
    if not sides:
        raise UsageError(f"adapter {path}: {ADAPTER_WEIGHTS} holds no LoRA factors of linear layers")
    for module, pair in sides.items():
        if len(pair) != 2:
            raise UsageError(f"adapter {path}: {module} has only {next(iter(pair.values()))}; the other half is gone")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}, whole


def refuse_empty_or_broken(path: Path, weights: Any, factors: dict[str, tuple[str, str]]) -> None:
    """Raise UsageError for NaN or infinite factors, and for an adapter whose every update is zero.

    A single zero module is allowed: a layer that never receives gradient keeps its B at zero, and merges exactly.
    """
    changes_something = False
    for pair in factors.values():
        nonzero = True
        for key in pair:
            tensor = weights.get_tensor(key)
            if not bool(torch.isfinite(tensor).all()):
                raise UsageError(f"adapter {path}: {key} holds NaN or infinity; take an earlier checkpoint")
            nonzero = nonzero and bool(tensor.any())
        changes_something = changes_something or nonzero
    if not changes_something:
        raise UsageError(
            f"adapter {path} changes nothing: every lora_A or lora_B is zero, as right after initialisation; "
            "was this adapter saved before training?"
        )


def refuse_quantized_name(name: str) -> None:
    if name.rstrip("/").lower().endswith(QUANTIZED_SUFFIXES):
        raise UsageError(
            f"base {name} is quantized, and merging into it would lose nearly all of the update; "
            "pass base=<the full-precision model>"
        )


def resolve_base(adapter: Adapter, base: str | None, revision: str | None) -> Base:
    """Find the base: a directory, or a hub id whose snapshot is in the local cache.

    Without `base`, the adapter's own record of it is taken, with the revision it records. Raises UsageError when
    there is none, it is quantized, incomplete, or not in safetensors.
    """
    recorded = adapter.config.get("base_model_name_or_path")
    name = base if base is not None else recorded
    if not name:
        raise UsageError(f"adapter {adapter.path} does not record its base model; pass base=<directory or hub id>")
    refuse_quantized_name(name)
    if Path(name).is_dir():
        if revision is not None:
            raise UsageError(f"base {name} is a directory, which has no revisions; leave out base_revision")
        path = Path(name)
    else:
        if revision is None and name == recorded:
            revision = adapter.config.get("revision")
        path = cached_snapshot(name, revision)
    if not (path / "config.json").is_file():
        raise UsageError(f"base {path} has no config.json; pass base=<a model directory or hub id>")
    config = read_json(path / "config.json", "base config")
    if "quantization_config" in config:
        method = (config["quantization_config"] or {}).get("quant_method", "unknown method")
        raise UsageError(
            f"base {name} is quantized ({method}), and merging into it would lose nearly all of the update; "
            "pass base=<the full-precision model>"
        )
    shards, indexed = base_shards(path)
    return Base(name, path, snapshot_commit(path), config, shards, indexed)


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
