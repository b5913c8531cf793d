"""The full-precision model that the merge of a run will need, found before anything is downloaded or trained.

A base that is quantized on disk cannot take the update: the sum would be quantized again. The merge is into the model
that it was quantized from, or, by `cogumi.base_mode: dequant`, into its 4-bit weights read as floats.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes
from cogumi.hub.downloads import Download, find_commit, plan_download
from cogumi.merge.bases import compare_models, is_local, read_model
from cogumi.merge.quantized import BNB_4BIT, Mismatch, full_precision_names, is_hub_id, quantization

NO_MERGE = "set cogumi.merge: false to train without it"


@dataclass(frozen=True)
class Original:
    """name: a directory or hub id. kind: how the base is quantized. download: None where the model is a directory."""

    name: str
    kind: str
    download: Download | None
    revision: str | None = None

    def __str__(self) -> str:
        said = f"the base is quantized ({self.kind}); the merge is into {self.name}"
        if self.download is None:
            return f"{said}, which is here"
        if not self.download.missing:
            return f"{said}, which is in the cache ({format_bytes(self.download.total)})"
        return f"{said}, of which {format_bytes(self.download.to_fetch)} are to be fetched"


def find_original(base: str, config: Any, wanted: str | None, base_mode: str) -> Original | None:
    """What the merge of a run will need beside its base; None where it is the base itself. Nothing is downloaded.

    base: a directory or hub id. config: its transformers config. wanted, base_mode: `cogumi.merge_base` and
    `cogumi.base_mode`. Raises UsageError where there is no such model, and for a mode that the base does not have.
    """
    kind = quantization(config.to_dict())
    if base_mode == "dequant" and kind != BNB_4BIT:
        what = f"{base} is {f'quantized ({kind})' if kind else 'not quantized'}, and dequant reads bitsandbytes' 4 bits"
        raise UsageError(what, key="cogumi.base_mode", fix="drop it")
    if kind is None or base_mode == "dequant":
        if wanted is not None:
            why = "is not quantized on disk" if kind is None else "is dequantized itself (cogumi.base_mode)"
            raise UsageError(f"it would be ignored: {base} {why}", key="cogumi.merge_base", fix="drop it")
        return None
    names = (wanted,) if wanted is not None else full_precision_names(base, kind)
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
    what = f"{base} is quantized ({kind}), and the full-precision model that the merge needs is not found{tried}"
    dequant = "set cogumi.base_mode: dequant, or " if kind == BNB_4BIT else ""
    fix = f"set cogumi.merge_base to its directory or hub id, or {dequant}{NO_MERGE}"
    raise UsageError(what, key="model.name" if wanted is None else "cogumi.merge_base", fix=fix)


def prove_original(base: str, revision: str | None, original: Original) -> None:
    """Raise UsageError unless the base was quantized from the original. Both are here."""
    try:
        compare_models(read_model(base, revision), read_model(original.name, original.revision))
    except Mismatch as mismatch:
        what = f"{base} ({original.kind}) was not quantized from {original.name}: {mismatch}"
        fix = f"set cogumi.merge_base to the model that it was quantized from, or {NO_MERGE}"
        raise UsageError(what, key="cogumi.merge_base", fix=fix) from mismatch
