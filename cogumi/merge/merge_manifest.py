"""cogumi-merge.json beside merged weights, and later the check that the directory is still what it says."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cogumi.core.durability import blake3_file, bytes_in_memory, drop_from_memory, sync_path, write_synced
from cogumi.core.errors import MergeError, UsageError
from cogumi.core.formatting import format_bytes, join_names
from cogumi.core.notices import show_seconds, show_stage
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, read_elements
from cogumi.merge.adapter_files import read_json, resolve_adapter, weight_files
from cogumi.merge.arithmetic import BLOCK_ELEMENTS, DeltaStats
from cogumi.merge.bases import dequantized_base, read_model
from cogumi.merge.foreign_adapters import as_installed
from cogumi.merge.output_directory import add_end_token
from cogumi.merge.plan import INDEX_NAME, MergePlan, TensorPlan, build_plan
from cogumi.merge.stream import Outcome, available_cores, progress_bar, thread_pool, verify_shards
from cogumi.merge.tokenizer_files import settle_tokenizer

MANIFEST_NAME = "cogumi-merge.json"
# Files that no loader of models reads, in lower case: pages, licences, and those of git, the hub and editors. Any other may
# be read instead of the merged model, or on top of it: a *.bin, an adapter_config.json, a tokenizer.json, a *.py.
UNREAD_FILES = (
    "*.md", "cogumi-certificate.json", ".gitattributes", ".gitignore", ".ds_store", "licen[cs]e", "licen[cs]e.txt", "notice",
    "notice.txt",
)  # fmt: skip
UNREAD_FOLDERS = (".cache", ".git", ".ipynb_checkpoints")
MAX_NAMES = 5  # in a message
FORMAT = 4
FLOAT32_FORMAT = 3  # computed DoRA and dequantized weights in float32


def write_side_files(plan: MergePlan, partial: Path) -> None:
    """Write config, index, tokenizer and the rest beside the shards, each on the disk before the next."""
    write_synced(partial / "config.json", plan.config)
    if plan.index is not None:
        write_synced(partial / INDEX_NAME, (json.dumps(plan.index, indent=2) + "\n").encode())
    for name, source in plan.side_files.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        write_synced(partial / name, source.read_bytes())
    settle_tokenizer(partial, plan.base.path)
    add_end_token(partial)


def write_manifest(partial: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, with the hashes of what stands beside the shards, last of all files."""
    beside = [path for path in sorted(partial.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
    manifest["files"] = {path.relative_to(partial).as_posix(): blake3_file(path) for path in beside}
    write_synced(partial / MANIFEST_NAME, (json.dumps(manifest, indent=2) + "\n").encode())


def build_manifest(
    plan: MergePlan, outcome: Outcome, options: dict[str, str | None], checks: dict[str, Any]
) -> dict[str, Any]:
    """Return the manifest as plain JSON values. options: of the call. checks: of the models' logits, by name."""
    base = plan.base
    # The hub's cache links each shard to a file that is named after its sha256.
    blobs = {shard.path.name: shard.path.resolve() for shard in base.shards}
    changed = [tensor for tensor in plan.tensors if tensor.updated or tensor.replaced]
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("cogumi", "torch", "transformers", "peft", "safetensors")},
        "base": {
            "name": base.name,
            "path": str(base.path.resolve()),
            "commit": base.commit,
            "blake3": {"config.json": blake3_file(base.path / "config.json")} | outcome.inputs,
            "sha256": {name: blob.name for name, blob in blobs.items() if re.fullmatch("[0-9a-f]{64}", blob.name)},
            "trained_on": base.trained_on,
            "proof": asdict(base.proof) if base.proof else None,
        },
        "adapters": [
            {
                "path": str(adapter.path.resolve()),
                "weight": weight,
                "reading": adapter.reading,
                "blake3": hash_adapter(adapter.path),
            }
            for adapter, weight in plan.adapters
        ],
        **options,
        **{name: asdict(check) if check else None for name, check in checks.items()},
        "shards": {shard.name: {"bytes": shard.bytes, "blake3": outcome.digests[shard.name]} for shard in plan.shards},
        **totals(plan, outcome),
        "notes": plan.notes,
        "tensors": {tensor.target.name: tensor_entry(tensor, outcome) for tensor in changed},
    }


def hash_adapter(path: Path) -> dict[str, str]:
    """Return the BLAKE3 of an adapter's configuration and weights, by name."""
    return {file.name: blake3_file(file) for file in (path / "adapter_config.json", *weight_files(path))}


def refuse_second_merge(plan: MergePlan) -> None:
    """Raise UsageError for an adapter that the base is already merged with, as its manifest says."""
    path = plan.base.path / MANIFEST_NAME
    manifest = read_json(path) if path.is_file() else {}
    merged = {digest for part in manifest.get("adapters", []) for digest in part["blake3"].values()}
    for adapter, _ in plan.adapters:
        if merged & {blake3_file(file) for file in weight_files(adapter.path)}:
            problem = f"base {plan.base.name} is merged with it already ({MANIFEST_NAME})"
            raise adapter.refused(problem, fix=f"pass base={manifest['base']['name']}, where it can have any weight")


def totals(plan: MergePlan, outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a MergeReport."""
    stats = outcome.stats.values()
    everything = DeltaStats()
    for stat in stats:
        everything.add(stat)
    base = {} if plan.base.quantized else plan.base.tensors
    for tensor in plan.tensors:
        new, old = tensor.source, base.get(tensor.target.name)
        if not tensor.replaced or old is None or not isinstance(new, Span):
            continue
        if old.shape == new.shape and old.dtype in FLOAT_DTYPES:  # trained whole
            count = min(math.prod(new.shape), BLOCK_ELEMENTS)
            after, before = (read_elements(span, 0, count).double() for span in (new, old))
            delta, error = after - before, after.to(FLOAT_DTYPES[tensor.target.dtype]) - after
            everything.add(DeltaStats(delta_squares=float(delta @ delta), along_delta=float(error @ delta)))
    return {
        "tensors_merged": sum(tensor.updated for tensor in plan.tensors),
        "tensors_replaced": sum(tensor.replaced for tensor in plan.tensors),
        "tensors_copied": sum(tensor.copied for tensor in plan.tensors),
        "tensors_converted": sum(not (tensor.updated or tensor.replaced or tensor.copied) for tensor in plan.tensors),
        "bytes": plan.shard_bytes,
        "max_delta": max((stat.max_abs_delta for stat in stats), default=0.0),
        "max_delta_ratio": max((stat.ratio or 0.0 for stat in stats), default=0.0),
        "delta_retained": everything.retained,
        "elements": outcome.elements.total(),
    }


def tensor_entry(tensor: TensorPlan, outcome: Outcome) -> dict[str, Any]:
    """Describe the change of one tensor."""
    name = tensor.target.name
    entry: dict[str, Any] = {"replaced": True} if tensor.replaced else {}
    if terms := tensor.terms:
        entry |= {"rank": max(term.rank for term in terms), "scaling": sorted({term.scaling for term in terms})}
    if stats := outcome.stats.get(name):
        entry |= {"max_abs_delta": stats.max_abs_delta, "delta_over_weight": stats.ratio}
        entry["delta_retained"] = stats.retained
    return entry | ({"elements": outcome.elements[name]} if name in outcome.elements else {})


@dataclass(frozen=True)
class CheckReport:
    """Result of a check of a merged directory.

    files: compared with the manifest's hashes. bytes: of all of them. from_memory: how many of these bytes were in memory
    when they were read, None where the system does not say. beside: files that the merge did not write, and that no loader
    reads. elements: compared with base + adapter again, None where that was not possible; `missing` says why.
    """

    directory: Path
    files: int
    bytes: int
    from_memory: int | None
    beside: list[str]
    elements: int | None
    missing: str | None

    def __str__(self) -> str:
        source = "all read from the disk"
        if self.from_memory is None:
            source = "but this system does not say whether they were read from the disk or from memory"
        elif self.from_memory:
            source = f"but {self.from_memory:,} of {self.bytes:,} bytes were read from memory, not from the disk"
        again = f"not compared with base + adapter again: {self.missing}"
        if self.elements is not None:
            again = f"{self.elements:,} computed elements compared with base + adapter again"
        beside = (
            f"; not written by the merge, and read by no loader: {join_names(self.beside, MAX_NAMES)}"
            if self.beside
            else ""
        )
        summary = f"{self.directory}: {self.files} files ({format_bytes(self.bytes)}) are what the manifest says"
        return f"{summary}, {source}; {again}{beside}"


@show_seconds("check: the merged directory is being read")
def check_merged(directory: Path, workers: int | None = None, *, progress: bool = True) -> CheckReport:
    """Re-read a merged directory: every hash, and every element where base and adapter are still at hand.

    Raises UsageError without a manifest. Raises MergeError naming the files that the merge did not write and a loader may
    read. Otherwise it names the first file or tensor that is not what it was.
    """
    readers = workers or available_cores()
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise UsageError(f"{directory} holds no {MANIFEST_NAME}, so it is not a directory that cogumi merged")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] not in (FLOAT32_FORMAT, FORMAT):
            raise UsageError(f"{path} has a format that this version does not know", fix="merge again")
        inputs = {
            Path(source["path"]) / name: digest
            for source in (manifest["base"], *manifest["adapters"])
            for name, digest in source["blake3"].items()
        }
        shards = {name: shard["blake3"] for name, shard in manifest["shards"].items()}
        outputs = {directory / name: digest for name, digest in (manifest["files"] | shards).items()}
        adapters = [(Path(adapter["path"]), adapter["weight"]) for adapter in manifest["adapters"]]
        name, dtype, is_full = manifest["base"]["path"], manifest["dtype"], manifest["base_mode"] == "full"
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise MergeError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    others = [file.relative_to(directory) for file in list_files(directory) if file not in outputs.keys() | {path}]
    beside = sorted({name.parts[0] if name.parts[0] in UNREAD_FOLDERS else name.as_posix() for name in others})
    unread = {name for name in beside if any(fnmatch(name.lower(), pattern) for pattern in UNREAD_FILES)}
    if loaded := [name for name in beside if name not in unread.union(UNREAD_FOLDERS)]:
        message = f"{directory}: not written by the merge, and a loader may read it: {join_names(loaded, MAX_NAMES)}"
        raise MergeError(f"{message}; move it elsewhere, or merge again")
    changed, from_memory = read_back(outputs, readers, progress, "hashing")
    if changed:
        raise MergeError(f"{changed}; the directory is not whole: fetch it again, or merge again")
    total = sum(file.stat().st_size for file in outputs)
    report = CheckReport(directory, len(outputs), total, from_memory, beside, None, None)
    missing, _ = read_back(inputs, readers, progress, "hashing base and adapter")
    if missing:
        return replace(report, missing=missing)
    show_stage(progress, "reading the adapter and its base")
    base = read_model(name, None) if is_full else dequantized_base(read_model(name, None))
    layout = manifest.get("expert_layout")
    parts = [(as_installed(resolve_adapter(path), base, layout), weight) for path, weight in adapters]
    plan = build_plan(parts, base, dtype)
    if manifest["format"] == FLOAT32_FORMAT and not (is_full and plan.summed):
        return replace(report, missing="an earlier version merged it, in float32; merge again to compare")
    with progress_bar(progress, "verifying", plan.shard_bytes) as advance:
        return replace(report, elements=verify_shards(plan, directory, workers, advance))


def list_files(directory: Path) -> Iterator[Path]:
    """Yield every file and link below a directory. A link is one name, also to a directory."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from list_files(path)
        else:
            yield path


def read_back(digests: dict[Path, str], workers: int, progress: bool, name: str) -> tuple[str | None, int | None]:
    """Compare files with their digests. Each is written out and dropped from memory before it is read.

    Returns what is wrong with the first that is gone or changed, or None; and the bytes that were in memory all the same,
    None if unknown.
    """
    if gone := next((path for path in digests if not path.is_file()), None):
        return f"{gone} is gone", None

    def read(path: Path) -> tuple[str, int | None]:
        sync_path(path)
        drop_from_memory(path)
        held = bytes_in_memory(path)
        return blake3_file(path, hashed), held

    total, cached = sum(path.stat().st_size for path in digests), []
    with thread_pool(workers) as pool, progress_bar(progress, name, total) as hashed:
        for (path, expected), (digest, held) in zip(digests.items(), pool.map(read, digests), strict=True):
            if digest != expected:
                return f"{path} has changed since the merge", None
            cached.append(held)
    known = [held for held in cached if held is not None]
    return None, sum(known) if len(known) == len(cached) else None
