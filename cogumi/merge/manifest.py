"""cogumi-merge.json: what was merged into what, and what was checked, for whoever opens the directory later."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cogumi.durable import sha256_file, write_synced
from cogumi.merge.card import CardAdapter, licence_of, model_card
from cogumi.merge.logits import LogitCheck
from cogumi.merge.noise import median
from cogumi.merge.plan import INDEX_NAME, MergePlan, TensorPlan
from cogumi.merge.resolve import ADAPTER_WEIGHTS
from cogumi.merge.work import Outcome

MANIFEST_NAME = "cogumi-merge.json"
CARD_NAME = "README.md"


@dataclass(frozen=True)
class Facts:
    """What was asked and what came of it. inputs: sha256 by base shard; noise: q/delta by tensor."""

    dtype: str
    base_mode: str
    verify: str
    outcome: Outcome
    inputs: dict[str, str]
    noise: dict[str, float]
    logits: LogitCheck | None


def write_side_files(plan: MergePlan, partial: Path) -> None:
    """Write config, index, tokenizer and the rest beside the shards, each on the disk before the next."""
    write_synced(partial / "config.json", plan.config)
    if plan.index is not None:
        write_synced(partial / INDEX_NAME, (json.dumps(plan.index, indent=2) + "\n").encode())
    for name, source in plan.side_files.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        write_synced(partial / name, source.read_bytes())


def write_description(plan: MergePlan, partial: Path, facts: Facts) -> None:
    """Write the model card and, last of all files, the manifest."""
    manifest = build_manifest(plan, facts)
    write_synced(partial / CARD_NAME, card_of(plan, facts, manifest).encode())
    manifest["files"] = {
        path.relative_to(partial).as_posix(): sha256_file(path)
        for path in sorted(partial.rglob("*"))
        # The card is there to be edited.
        if path.is_file() and path.suffix != ".safetensors" and path.name != CARD_NAME
    }
    write_synced(partial / MANIFEST_NAME, (json.dumps(manifest, indent=2) + "\n").encode())


def card_of(plan: MergePlan, facts: Facts, manifest: dict[str, Any]) -> str:
    checks, retained = facts.outcome.checks.values(), [stats.retained for stats in facts.outcome.stats.values()]
    return model_card(
        base=plan.base.name,
        base_commit=plan.base.commit,
        base_sha256=hashlib.sha256(json.dumps(manifest["base"]["sha256"], sort_keys=True).encode()).hexdigest(),
        adapters=[
            CardAdapter(Path(entry["path"]).name, entry["sha256"][ADAPTER_WEIGHTS], entry["weight"])
            for entry in manifest["adapters"]
        ],
        dtype=facts.dtype,
        tensors_merged=sum(tensor.updated for tensor in plan.tensors),
        tensors_copied=manifest["tensors_copied"],
        elements=None if facts.verify == "none" else sum(check.elements for check in checks),
        not_nearest=sum(check.not_nearest for check in checks),
        delta_retained=min((share for share in retained if share is not None), default=None),
        noise_ratio=median(facts.noise),
        dequantized=facts.base_mode == "dequant",
        logits=str(facts.logits) if facts.logits else None,
        licence=licence_of(plan.base.path),
    )


def build_manifest(plan: MergePlan, facts: Facts) -> dict[str, Any]:
    """The manifest as plain JSON values."""
    base = plan.base
    return {
        "format": 2,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("cogumi", "torch", "transformers", "peft", "safetensors")},
        "base": {
            "name": base.name,
            "path": str(base.path.resolve()),
            "commit": base.commit,
            "sha256": {"config.json": sha256_file(base.path / "config.json")} | facts.inputs,
            "trained_on": base.trained_on.name if base.trained_on else base.trained_in,
            "proof": asdict(base.proof) if base.proof else None,
        },
        "adapters": [
            {
                "path": str(adapter.path.resolve()),
                "weight": weight,
                "sha256": {
                    file.name: sha256_file(file) for file in (adapter.path / "adapter_config.json", adapter.weights)
                },
            }
            for adapter, weight in plan.adapters
        ],
        "dtype": facts.dtype,
        "base_mode": facts.base_mode,
        "verify": facts.verify,
        "logits": asdict(facts.logits) if facts.logits else None,
        "q_over_delta": median(facts.noise),
        "shards": {
            shard.name: {"bytes": shard.bytes, "sha256": facts.outcome.digests[shard.name]} for shard in plan.shards
        },
        "side_files": {name: os.fspath(source.resolve()) for name, source in sorted(plan.side_files.items())},
        "tensors_copied": sum(tensor.copied for tensor in plan.tensors),
        "tensors": {
            tensor.target.name: tensor_entry(tensor, facts)
            for tensor in plan.tensors
            if tensor.updated or tensor.replaced
        },
    }


def tensor_entry(tensor: TensorPlan, facts: Facts) -> dict[str, Any]:
    """One changed tensor: what was put on it, and how much."""
    name, outcome = tensor.target.name, facts.outcome
    terms = [term for piece in tensor.pieces if piece.change for term in piece.change.terms]
    entry: dict[str, Any] = {"replaced": True} if tensor.replaced else {}
    if terms:
        entry |= {"rank": max(term.rank for term in terms), "scaling": sorted({term.scaling for term in terms})}
    if name in outcome.stats:
        stats = outcome.stats[name]
        entry |= {
            "max_abs_delta": stats.max_abs_delta,
            "delta_over_weight": stats.ratio,
            "delta_retained": stats.retained,
        }
    if name in facts.noise:
        entry["q_over_delta"] = facts.noise[name]
    return entry | (asdict(outcome.checks[name]) if name in outcome.checks else {})
