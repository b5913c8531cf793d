"""Checks of a run's merge before anything is downloaded or trained.

A base that is quantized on disk cannot take the update: the sum would be quantized again. The merge is into the model
that it was quantized from, or, by `cogumi.base_mode: dequant`, into its 4-bit weights read as floats. The merge of the
untrained adapter is planned on shapes, with the code and the refusals of the merge itself.
"""

import copy
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cogumi.core.checkpoint_faults import incomplete
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes
from cogumi.core.safetensors_file import Shard, Span
from cogumi.hub.downloads import WEIGHTS, Download, find_commit, plan_download, read_headers
from cogumi.merge.adapter_files import Adapter, read_json
from cogumi.merge.bases import Base, cached_snapshot, compare_models, is_local, read_model, read_shards
from cogumi.merge.changes import adapter_changes
from cogumi.merge.completeness import check_base, find_faults, find_unscaled, stored_of
from cogumi.merge.parameter_map import read_checkpoint
from cogumi.merge.plan import changes_by_tensor, plan_tensor
from cogumi.merge.quantized import BNB_4BIT, Mismatch, quantization, quantized_tensors
from cogumi.models.base import RunBase, meta_model, named_class
from cogumi.models.quantized_bases import full_precision_names, is_hub_id

NO_MERGE = "set cogumi.merge: false to train without it"


@dataclass(frozen=True)
class Original:
    """Full-precision model of a quantized base.

    name: a directory or hub id. kind: how the base is quantized. download: None where the model is a directory.
    """

    name: str
    kind: str
    download: Download | None
    revision: str | None = None

    def __str__(self) -> str:
        target = f"the base is quantized ({self.kind}); the merge is into {self.name}"
        if self.download is None:
            return f"{target}, which is here"
        if not self.download.missing:
            return f"{target}, which is in the cache ({format_bytes(self.download.total)})"
        return f"{target}, of which {format_bytes(self.download.to_fetch)} are to be fetched"


def find_original(base: str, config: Any, merge_base: str | None, base_mode: str) -> Original | None:
    """Find the full-precision model that the merge of a run needs; None where the base itself will do.

    Nothing is downloaded. Raises UsageError where there is no such model, and for a mode that the base does not have.
    """
    kind = quantization(config.to_dict())
    if base_mode == "dequant" and kind != BNB_4BIT:
        state = f"quantized ({kind})" if kind else "not quantized"
        problem = f"{base} is {state}, and dequant reads bitsandbytes' 4 bits"
        raise UsageError(problem, key="cogumi.base_mode", fix="drop it")
    if kind is None or base_mode == "dequant":
        if merge_base is not None:
            why = "is not quantized on disk" if kind is None else "is dequantized itself (cogumi.base_mode)"
            raise UsageError(f"it would be ignored: {base} {why}", key="cogumi.merge_base", fix="drop it")
        return None
    names = (merge_base,) if merge_base is not None else full_precision_names(base, kind)
    for name in names:
        if Path(name).is_dir() and is_local(name):
            return Original(name, kind, None)
    refused = []
    for name in filter(is_hub_id, names):
        try:
            commit = find_commit(name)
            if (download := plan_download(name, commit)) is not None:
                return Original(name, kind, download, commit)
        except UsageError as error:
            refused.append(error.message)
    tried = f": {'; '.join(refused)}" if refused else f" ({', '.join(names)})" if names else ""
    message = f"{base} is quantized ({kind}), and the full-precision model that the merge needs is not found{tried}"
    dequant = "set cogumi.base_mode: dequant, or " if kind == BNB_4BIT else ""
    fix = f"set cogumi.merge_base to its directory or hub id, or {dequant}{NO_MERGE}"
    raise UsageError(message, key="model.name" if merge_base is None else "cogumi.merge_base", fix=fix)


def prove_original(base: str, revision: str | None, original: Original) -> None:
    """Raise UsageError unless the base was quantized from the original. Both are on the disk."""
    try:
        compare_models(read_model(base, revision), read_model(original.name, original.revision))
    except Mismatch as mismatch:
        message = f"{base} ({original.kind}) was not quantized from {original.name}: {mismatch}"
        fix = f"set cogumi.merge_base to the model that it was quantized from, or {NO_MERGE}"
        raise UsageError(message, key="cogumi.merge_base", fix=fix) from mismatch


def refuse_missing_weights(base: RunBase) -> None:
    """Raise UsageError for a model's directory in which a file of its weights is missing or empty."""
    path, custom = Path(base.name), getattr(base.config, "transformers_weights", None)
    names = [custom] if custom else WEIGHTS
    files = [path / name for name in names if (path / name).is_file()][:1]
    fault = "" if files else f"{path} holds no weights: none of {', '.join(names)}"
    if files and files[0].suffix == ".json":
        files += sorted({path / shard for shard in read_json(files[0]).get("weight_map", {}).values()})
    if lacking := [file for file in files if not file.is_file() or not file.stat().st_size]:
        state = "empty" if lacking[0].is_file() else f"missing, which {files[0].name} names"
        fault = f"{lacking[0]} is {state} ({len(lacking)} of {len(files)} files)"
    if fault and path.is_dir():
        raise UsageError(fault, key="model.name", fix="copy the file there, or download the model again")


def check_loadable(model: RunBase) -> None:
    """Raise UsageError for a base of which transformers would fill a part with random numbers, by its files' headers.

    Nothing is refused of weights that are not in safetensors, nor, before they are downloaded, of quantized ones: the
    report of what was loaded is read in the end (`load_model`).
    """
    download, name, config = model.download, model.name, model.config.to_dict()
    path = Path(name) if download is None else download.snapshot
    kind = quantization(config)
    files = download.sizes if download is not None else [file for file in WEIGHTS if (path / file).is_file()]
    if not set(WEIGHTS[:2]) & set(files):
        return
    if download is not None and download.missing:
        if kind is not None:
            return
        base = expected_base(name, download.commit, model.config, download)
    else:
        shards, _ = read_shards(name, path)
        base = Base(name, path, None, config, shards, quantized_tensors(shards, config))
    stored = stored_of(base.tensors.values())
    faults = find_faults(meta_model(model.config), stored) if kind is None or base.quantized else find_unscaled(stored)
    if faults:
        raise incomplete(name, type(meta_model(model.config)).__name__, faults, key="model.name")


def plan_adapter(lora: Any, model: RunBase, base: Base) -> None:
    """Plan the merge of an untrained adapter on a model into a base, by names and shapes. Raises UsageError as build_plan."""
    from peft import get_peft_model, get_peft_model_state_dict

    lora = copy.copy(lora)
    lora.init_lora_weights = True
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        adapted = get_peft_model(meta_model(model.config), copy.deepcopy(lora), low_cpu_mem_usage=True)
        tensors = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        lora = adapted.peft_config["default"]  # with stacks of experts where it names their layers of transformers 4
        adapter = Adapter(Path("lora"), lora.to_dict(), spans_of(tensors, "F32"), directory=Path("lora"))
        checkpoint = read_checkpoint(base, adapter)
        if missing := check_base(base, checkpoint, [])[1]:  # which the run would load as random numbers
            raise incomplete(base.name, checkpoint.architecture, missing)
        changes = adapter_changes(adapter, base, checkpoint, lora)
    for name, pieces in changes_by_tensor(changes, checkpoint, frozenset(), base, adapter).items():
        if name in checkpoint.spans:  # else a head that gets a tensor of its own
            plan_tensor(name, checkpoint.spans[name], pieces, base, "keep")


def expected_base(name: str, revision: str | None, base_config: Any, download: Download | None) -> Base:
    """Return a base with the headers of its weights, from the disk or the hub.

    Where there are none, and for a quantized base, the shapes are those of the class that its config names. Raises
    UsageError for weights that are not in safetensors. download: None where the hub is not asked.
    """
    path = Path(name) if Path(name).is_dir() else cached_snapshot(name, revision)
    config = read_json(path / "config.json")
    on_disk = download is not None and not download.missing
    if path == Path(name):
        on_disk = any((path / file).exists() for file in WEIGHTS)
    if quantization(config) is None and on_disk:
        return replace(read_model(name, revision), known_config=base_config)
    if quantization(config) is None and download is not None:
        headers = read_headers(download)
        spans = tuple(Span(path, tensor, info.dtype, tuple(info.shape), 0, 0) for tensor, info in headers.items())
    else:
        spans = spans_of(meta_model(base_config, named_class(base_config)).state_dict(), "BF16")
    return Base(name, path, revision, config, (Shard(path, b"", {}, spans),), known_config=base_config)


def spans_of(tensors: dict[str, torch.Tensor], dtype: str) -> tuple[Span, ...]:
    """Return spans of tensors that are in no file."""
    return tuple(Span(Path(), name, dtype, tuple(tensor.shape), 0, 0) for name, tensor in tensors.items())
