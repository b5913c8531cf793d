"""cogumi-merge.json beside merged weights, and later the check that the directory is still what it says."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cogumi.core.durability import drop_from_memory, sha256_file, write_synced
from cogumi.core.errors import MergeError, UsageError
from cogumi.core.formatting import format_bytes
from cogumi.core.notices import show_seconds
from cogumi.merge.adapter_files import ADAPTER_WEIGHTS, resolve_adapter
from cogumi.merge.bases import dequantized_base, read_model
from cogumi.merge.logits import LogitCheck
from cogumi.merge.plan import INDEX_NAME, MergePlan, TensorPlan, build_plan
from cogumi.merge.stream import DeltaStats, Outcome, available_cores, progress_bar, thread_pool, verify_shards

MANIFEST_NAME = "cogumi-merge.json"


def write_side_files(plan: MergePlan, partial: Path) -> None:
    """Write config, index, tokenizer and the rest beside the shards, each on the disk before the next."""
    write_synced(partial / "config.json", plan.config)
    if plan.index is not None:
        write_synced(partial / INDEX_NAME, (json.dumps(plan.index, indent=2) + "\n").encode())
    for name, source in plan.side_files.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        write_synced(partial / name, source.read_bytes())


def write_manifest(partial: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, with the hashes of what stands beside the shards, last of all files."""
    beside = [path for path in sorted(partial.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
    manifest["files"] = {path.relative_to(partial).as_posix(): sha256_file(path) for path in beside}
    write_synced(partial / MANIFEST_NAME, (json.dumps(manifest, indent=2) + "\n").encode())


def build_manifest(
    plan: MergePlan, outcome: Outcome, options: dict[str, str], logits: LogitCheck | None
) -> dict[str, Any]:
    """The manifest as plain JSON values. options: dtype, base_mode and verify, as they were asked for."""
    base = plan.base
    changed = [tensor for tensor in plan.tensors if tensor.updated or tensor.replaced]
    return {
        "format": 2,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("cogumi", "torch", "transformers", "peft", "safetensors")},
        "base": {
            "name": base.name,
            "path": str(base.path.resolve()),
            "commit": base.commit,
            "sha256": {"config.json": sha256_file(base.path / "config.json")} | outcome.inputs,
            "trained_on": base.trained_on,
            "proof": asdict(base.proof) if base.proof else None,
        },
        "adapters": [
            {
                "path": str(adapter.path.resolve()),
                "weight": weight,
                "sha256": {name: sha256_file(adapter.path / name) for name in ("adapter_config.json", ADAPTER_WEIGHTS)},
            }
            for adapter, weight in plan.adapters
        ],
        **options,
        "logits": asdict(logits) if logits else None,
        "shards": {shard.name: {"bytes": shard.bytes, "sha256": outcome.digests[shard.name]} for shard in plan.shards},
        **totals(plan, outcome),
        "tensors": {tensor.target.name: tensor_entry(tensor, outcome) for tensor in changed},
    }


def totals(plan: MergePlan, outcome: Outcome) -> dict[str, Any]:
    """The figures of a MergeReport."""
    stats, checks = outcome.stats.values(), outcome.checks.values()
    everything = DeltaStats()
    for stat in stats:
        everything.add(stat)
    return {
        "tensors_merged": sum(tensor.updated for tensor in plan.tensors),
        "tensors_replaced": sum(tensor.replaced for tensor in plan.tensors),
        "tensors_copied": sum(tensor.copied for tensor in plan.tensors),
        "tensors_converted": sum(not (tensor.updated or tensor.replaced or tensor.copied) for tensor in plan.tensors),
        "bytes": plan.shard_bytes,
        "max_delta": max((stat.max_abs_delta for stat in stats), default=0.0),
        "max_delta_ratio": max((stat.ratio or 0.0 for stat in stats), default=0.0),
        "delta_retained": everything.retained,
        "elements": sum(check.elements for check in checks),
        "not_nearest": sum(check.not_nearest for check in checks),
        "largest_error": max((check.largest_error for check in checks), default=0.0),
    }


def tensor_entry(tensor: TensorPlan, outcome: Outcome) -> dict[str, Any]:
    """One changed tensor: what was put on it, and how much."""
    name = tensor.target.name
    entry: dict[str, Any] = {"replaced": True} if tensor.replaced else {}
    if terms := tensor.terms:
        entry |= {"rank": max(term.rank for term in terms), "scaling": sorted({term.scaling for term in terms})}
    if stats := outcome.stats.get(name):
        entry |= {"max_abs_delta": stats.max_abs_delta, "delta_over_weight": stats.ratio}
        entry["delta_retained"] = stats.retained
    return entry | (asdict(outcome.checks[name]) if name in outcome.checks else {})


@dataclass(frozen=True)
class CheckReport:
    """files: compared with the manifest's hashes. elements: compared with base + adapter again, None where one of these
    is gone or has changed; `missing` then names it."""

    directory: Path
    files: int
    bytes: int
    elements: int | None
    missing: str | None

    def __str__(self) -> str:
        again = f"not compared with base + adapter again: {self.missing}"
        if self.elements is not None:
            again = f"{self.elements:,} computed elements compared with base + adapter again"
        return f"{self.directory}: {self.files} files ({format_bytes(self.bytes)}) are what the manifest says; {again}"


@show_seconds("check: the merged directory is being read")
def check_merged(directory: Path, workers: int | None = None, *, progress: bool = True) -> CheckReport:
    """Re-read a merged directory: every hash, and every element where base and adapter are still at hand.

    Raises UsageError without a manifest. Raises MergeError naming the first file or tensor that is not what it was.
    """
    workers = workers or available_cores()
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise UsageError(f"{directory} holds no {MANIFEST_NAME}, so it is not a directory that cogumi merged")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != 2:
            raise UsageError(f"{path} has a format that this version does not know", fix="merge again")
        entries = [manifest["base"], *manifest["adapters"]]
        inputs = {Path(each["path"]) / name: digest for each in entries for name, digest in each["sha256"].items()}
        shards = {name: shard["sha256"] for name, shard in manifest["shards"].items()}
        outputs = {directory / name: digest for name, digest in (manifest["files"] | shards).items()}
        adapters = [(Path(each["path"]), each["weight"]) for each in manifest["adapters"]]
        base, dtype, base_mode = manifest["base"]["path"], manifest["dtype"], manifest["base_mode"]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise MergeError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if changed := changed_file(outputs, workers, progress, "hashing"):
        raise MergeError(f"{changed}; the directory is not whole: fetch it again, or merge again")
    extra = sorted(path for path in directory.glob("*.safetensors") if path not in outputs)
    if extra:
        raise MergeError(f"{extra[0]} was not written by the merge")
    total = sum(path.stat().st_size for path in outputs)
    if missing := changed_file(inputs, workers, progress, "inputs"):
        return CheckReport(directory, len(outputs), total, None, missing)
    found = read_model(base, None)
    found = dequantized_base(found) if base_mode == "dequant" else found
    plan = build_plan([(resolve_adapter(path), weight) for path, weight in adapters], found, dtype)
    with progress_bar(progress, "verifying", plan.shard_bytes) as checked:
        elements = verify_shards(plan, directory, workers, checked)
    return CheckReport(directory, len(outputs), total, elements, None)


def changed_file(sha256: dict[Path, str], workers: int, progress: bool, name: str) -> str | None:
    """The first file that is gone or has another sha256, in words. Read from the disk rather than from memory."""
    if gone := next((path for path in sha256 if not path.is_file()), None):
        return f"{gone} is gone"

    def read_back(path: Path) -> str | None:
        drop_from_memory(path)
        same = sha256_file(path) == sha256[path]
        hashed(path.stat().st_size)
        return None if same else f"{path} has changed since the merge"

    total = sum(path.stat().st_size for path in sha256)
    with thread_pool(workers) as pool, progress_bar(progress, name, total) as hashed:
        return next(filter(None, pool.map(read_back, sha256)), None)
