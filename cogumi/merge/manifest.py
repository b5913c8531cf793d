"""cogumi-merge.json: what was merged into what, and what was checked, for whoever opens the directory later."""

import hashlib
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from cogumi.merge.plan import MergePlan
from cogumi.merge.stream import DeltaStats
from cogumi.merge.verify import ElementCheck

MANIFEST_NAME = "cogumi-merge.json"


def build_manifest(
    plan: MergePlan,
    dtype: str,
    verify: str,
    digests: dict[str, str],
    stats: dict[str, DeltaStats],
    checks: dict[str, ElementCheck],
) -> dict[str, Any]:
    """The manifest as plain JSON values. digests: sha256 by output shard; stats and checks: by tensor name."""
    return {
        "format": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("cogumi", "torch", "transformers", "peft", "safetensors")},
        "base": {"name": plan.base.name, "path": str(plan.base.path.resolve()), "commit": plan.base.commit},
        "adapter": {
            "path": str(plan.adapter.path.resolve()),
            "sha256": {
                file.name: sha256_file(file)
                for file in (plan.adapter.path / "adapter_config.json", plan.adapter.weights)
            },
        },
        "dtype": dtype,
        "verify": verify,
        "shards": {shard.name: {"bytes": shard.bytes, "sha256": digests[shard.name]} for shard in plan.shards},
        "side_files": {name: str(source.resolve()) for name, source in sorted(plan.side_files.items())},
        "tensors_copied": plan.copies,
        "tensors": {
            tensor.target.name: tensor_entry(tensor.update, stats[tensor.target.name], checks.get(tensor.target.name))
            for shard in plan.shards
            for tensor in shard.tensors
            if tensor.update is not None
        },
    }


def tensor_entry(update: Any, stats: DeltaStats, check: ElementCheck | None) -> dict[str, Any]:
    entry = {
        "module": update.module,
        "rank": update.rank,
        "scaling": update.scaling,
        "max_abs_delta": stats.max_abs_delta,
        "delta_over_weight": stats.ratio,
    }
    return entry | (asdict(check) if check else {})


def sha256_file(path: Any) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
