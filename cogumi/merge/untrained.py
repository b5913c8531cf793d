"""The merge of an adapter that is not trained yet, planned on shapes: what it would refuse is said before a download."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch

from cogumi.core.safetensors_file import Shard, Span
from cogumi.hub.downloads import WEIGHTS, Download, read_headers
from cogumi.merge.adapter_files import Adapter, read_json
from cogumi.merge.bases import Base, cached_snapshot, read_model
from cogumi.merge.changes import adapter_changes
from cogumi.merge.completeness import check_base
from cogumi.merge.parameter_map import meta_model, named_class, read_checkpoint
from cogumi.merge.plan import changes_by_tensor, plan_tensor
from cogumi.merge.quantized import quantization


def plan_adapter(lora: Any, of_base: Any, base: Base) -> None:
    """Plan the merge of an adapter that is not trained yet, as far as names, shapes and dtypes decide it.
    lora: its LoraConfig; of_base: the base's config. Raises UsageError for what build_plan would refuse then."""
    from peft import get_peft_model, get_peft_model_state_dict

    lora = copy.copy(lora)
    lora.init_lora_weights = True
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        adapted = get_peft_model(meta_model(of_base), copy.deepcopy(lora), low_cpu_mem_usage=True)
        tensors = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        adapter = Adapter(Path("lora"), lora.to_dict(), spans_of(tensors, "F32"))
        checkpoint = read_checkpoint(base, adapter)
        check_base(base, checkpoint, [])
        changes = adapter_changes(adapter, base, checkpoint, lora)
    for name, pieces in changes_by_tensor(changes, checkpoint, frozenset(), base, adapter).items():
        if name in checkpoint.spans:  # else a head that gets a tensor of its own
            plan_tensor(name, checkpoint.spans[name], pieces, base, "keep")


def expected_base(name: str, revision: str | None, of_base: Any, download: Download | None) -> Base:
    """A base as a merge will find it: with the headers of its weights, from the disk or the hub. Where there are none,
    and for the original of a quantized one, the class that its config names stands for them. of_base: its config.
    download: of the hub's, None where the hub is not asked. Raises UsageError for weights that are not in safetensors."""
    path = Path(name) if Path(name).is_dir() else cached_snapshot(name, revision)
    config = read_json(path / "config.json")
    here = download is not None and not download.missing
    if path == Path(name):
        here = any((path / file).exists() for file in WEIGHTS)
    if quantization(config) is None and here:
        return read_model(name, revision)
    if quantization(config) is None and download is not None:
        headers = read_headers(download)
        spans = tuple(Span(path, tensor, each.dtype, tuple(each.shape), 0, 0) for tensor, each in headers.items())
    else:
        spans = spans_of(meta_model(of_base, named_class(of_base)).state_dict(), "BF16")
    return Base(name, path, revision, config, (Shard(path, b"", {}, spans),), False)


def spans_of(tensors: dict[str, torch.Tensor], dtype: str) -> tuple[Span, ...]:
    """Spans of tensors that are in no file."""
    return tuple(Span(Path(), name, dtype, tuple(tensor.shape), 0, 0) for name, tensor in tensors.items())
