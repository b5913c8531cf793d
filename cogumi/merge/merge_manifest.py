"""What is written beside a merged model: cogumi's manifest, and README.md."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from cogumi.core.durability import sha256_file, write_synced
from cogumi.merge.adapter_files import ADAPTER_WEIGHTS
from cogumi.merge.executor import Outcome
from cogumi.merge.logits import LogitCheck
from cogumi.merge.plan import INDEX_NAME, MergePlan, TensorPlan
from cogumi.merge.quantization_error import median

FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
LICENCE_KEYS = ("license", "license_name", "license_link")
HUB_SNAPSHOT = re.compile(r"models--(.+)/snapshots/[0-9a-f]{40}/?$")


@dataclass(frozen=True)
class CardAdapter:
    """One merged adapter. weight: what its update was multiplied by, 1 unless several were combined."""

    name: str
    sha256: str
    weight: float = 1.0


def model_card(
    *,
    base: str,
    base_commit: str | None,
    base_sha256: str,
    adapters: Sequence[CardAdapter],
    dtype: str,
    tensors_merged: int,
    tensors_copied: int,
    elements: int | None,
    not_nearest: int = 0,
    delta_retained: float | None = None,
    noise_ratio: float | None = None,
    dequantized: bool = False,
    logits: str | None = None,
    licence: dict[str, str] | None = None,
) -> str:
    """Markdown with YAML front matter, in the words of https://huggingface.co/docs/hub/model-cards.

    base: hub id or directory; of a directory, only the last part of its path appears, as people publish their
    cards. base_sha256: of the list of the base's files with their sha256, as the manifest has it. dtype: what the
    merged weights are stored in, or "keep". elements, not_nearest: MergeReport's; elements None when nothing was
    verified. delta_retained: the smallest share of an update that arrived. noise_ratio: q/delta, the size of the
    quantization error that training saw relative to the update. dequantized: the base is that quantized one,
    dequantized (base_mode="dequant"). logits: LogitCheck in words. licence: licence_of(base).

    The relation is `finetune`: on the hub, `merge` means several models made into one.
    """
    hub_id = hub_id_of(base)
    shown = hub_id or Path(base).name
    data = ModelCardData(
        base_model=hub_id,
        base_model_relation="finetune" if hub_id else None,
        library_name="transformers",
        tags=["cogumi", "merged"],
        **dict(licence or {}),  # type: ignore[arg-type]
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {shown} with {'an adapter' if len(adapters) == 1 else f'{len(adapters)} adapters'} merged in",
        made_of(shown, hub_id, base_commit, base_sha256, adapters, dtype),
        "## What was checked\n\n"
        + "\n".join(
            checked(tensors_merged, tensors_copied, elements, not_nearest)
            + measured(delta_retained, noise_ratio, dequantized, logits)
        ),
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("<this directory or repository>", dtype="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained("<this directory or repository>")\n```\n\n'
        "To check it again, against the hashes in `cogumi-merge.json`: `cogumi merge --check <this directory>`.",
    ]
    return "\n\n".join(parts) + "\n"


def made_of(
    shown: str, hub_id: str | None, commit: str | None, sha256: str, adapters: Sequence[CardAdapter], dtype: str
) -> str:
    base = f"[{shown}](https://huggingface.co/{shown})" if hub_id else f"{shown}, a local directory"
    lines = [
        "| | |\n|---|---|",
        f"| base | {base} |",
        f"| base commit | {f'`{commit}`' if commit else 'none: not from the hub'} |",
        f"| base files (sha256 of their sha256) | `{sha256}` |",
    ]
    for adapter in adapters:
        weight = "" if adapter.weight == 1 else f", times {adapter.weight:g}"
        lines.append(f"| adapter {adapter.name}{weight} (sha256) | `{adapter.sha256}` |")
    lines.append(f"| stored as | {'the dtypes of the base' if dtype == 'keep' else dtype} |")
    lines.append(f"| made by | cogumi {version('cogumi')} |")
    return "\n".join(lines)


def checked(tensors_merged: int, tensors_copied: int, elements: int | None, not_nearest: int) -> list[str]:
    counts = f"{tensors_merged} tensors hold base + update, computed in float32 and rounded once"
    if elements is None:
        return [f"- {counts}. **The written files were not compared with base and adapter.**"]
    ties = f", but for {not_nearest:,} that lie between two as closely as float32 can tell" if not_nearest else ""
    return [
        f"- {counts}. All {elements:,} elements that were computed (or decoded, or converted) were read back from disk and "
        f"compared with the base, and its update, in float64: each is the nearest value that can be stored{ties}.",
        f"- {tensors_copied} tensors are the bytes of the base; that was compared too.",
    ]


def measured(
    delta_retained: float | None, noise_ratio: float | None, dequantized: bool, logits: str | None
) -> list[str]:
    lines = []
    if delta_retained is not None:
        lines.append(f"- Of each tensor's update, at least {delta_retained:.2%} arrived in the rounded weights.")
    error = "" if noise_ratio is None else f", whose error is {noise_ratio:.2g} times as large as the update"
    if dequantized:
        lines.append(
            f"- The base is a quantized model, dequantized again{error}: what training saw is what is stored here."
        )
    elif noise_ratio is not None:
        lines.append(
            f"- The adapter was trained on a quantized base{error}. This model has the update without that error."
        )
    lines.append(f"- Logits: {logits}." if logits else "- Logits of this model were not compared with the adapter's.")
    lines.append("- What the model is good for was not measured here.")
    return lines


def hub_id_of(base: str) -> str | None:
    """`owner/name` of a base on the hub, also where it was given as a snapshot in the hub's cache; else None."""
    snapshot = HUB_SNAPSHOT.search(Path(base).as_posix())
    if snapshot:
        return snapshot[1].replace("--", "/", 1)
    if Path(base).is_dir() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) or base.startswith("."):
        return None
    return base


def licence_of(base: Path) -> dict[str, str]:
    """license, license_name and license_link from the front matter of the base's README.md, as far as they are there.

    A front matter that is not YAML says nothing that could be repeated, so it yields nothing.
    """
    path = base / "README.md"
    if not path.is_file():
        return {}
    block = FRONT_MATTER.match(path.read_text(encoding="utf-8", errors="replace"))
    try:
        data: Any = yaml.safe_load(block[1]) if block else None
    except yaml.YAMLError:
        return {}
    if not isinstance(data, dict):
        return {}
    return {key: data[key] for key in LICENCE_KEYS if isinstance(data.get(key), str)}


# ------------------------------------------------------------------------------------------------------- merge manifest


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
