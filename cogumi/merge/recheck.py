"""`cogumi merge --check DIR`: is a merged directory still what its manifest says, and base + adapter?"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.errors import UsageError
from cogumi.merge.bases import decoded, read_model
from cogumi.merge.manifest import MANIFEST_NAME
from cogumi.merge.plan import MergePlan, build_plan
from cogumi.merge.progress import Advance, progress_bars
from cogumi.merge.resolve import resolve_adapter
from cogumi.merge.verify import MergeError, drop_cached_pages, sha256_file
from cogumi.merge.work import cores, threads, verify_shards


@dataclass(frozen=True)
class CheckReport:
    """files: compared with the manifest's hashes. elements: compared with base + adapter again, None where these are
    not where the manifest says, or have changed; `missing` then names what and why."""

    directory: Path
    files: int
    bytes: int
    elements: int | None
    missing: str | None

    def __str__(self) -> str:
        again = f"{self.elements:,} updated elements compared with base + adapter again"
        if self.elements is None:
            again = f"not compared with base + adapter again: {self.missing}"
        return f"{self.directory}: {self.files} files ({self.bytes / 1e9:.2f} GB) are what the manifest says; {again}"


def check_merged(directory: Path, workers: int | None = None, *, progress: bool = True) -> CheckReport:
    """Re-read a merged directory: every hash, and every element where base and adapter are still at hand.

    Raises UsageError when the directory holds no manifest; MergeError naming the first file or tensor that is not what it
    was.
    """
    workers = workers or cores()
    manifest = read_manifest(directory)
    expected = manifest["files"] | {name: shard["sha256"] for name, shard in manifest["shards"].items()}
    present = sum((directory / name).stat().st_size for name in expected if (directory / name).is_file())
    total = 0
    with threads(workers) as pool, progress_bars(progress, hashing=present) as (hashed,):
        digests = {name: pool.submit(read_back, directory / name, hashed) for name in expected}
        for name, digest in digests.items():
            found, size = digest.result()
            total += size
            if found is None:
                raise MergeError(f"{directory / name} is gone; the directory is not whole")
            if found != expected[name]:
                raise MergeError(f"{directory / name} is not the file that was merged: its sha256 is {found}")
    extra = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in expected)
    if extra:
        raise MergeError(f"{directory / extra[0]} was not written by the merge")
    plan, missing = plan_again(manifest)
    if plan is None:
        return CheckReport(directory, len(expected), total, None, missing)
    with progress_bars(progress, verifying=plan.shard_bytes) as (checked,):
        checks = verify_shards(plan, directory, workers, checked)
    return CheckReport(directory, len(expected), total, sum(check.elements for check in checks.values()), None)


def read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise UsageError(f"{directory} holds no {MANIFEST_NAME}, so it is not a directory that cogumi merged")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MergeError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != 2:
        raise UsageError(f"{path} has a format that this version does not know; merge again")
    return manifest


def read_back(path: Path, hashed: Advance) -> tuple[str | None, int]:
    """(sha256, bytes) of a file, read from the disk rather than from memory; None where it is gone."""
    if not path.is_file():
        return None, 0
    drop_cached_pages(path)
    digest, size = sha256_file(path), path.stat().st_size
    hashed(size)
    return digest, size


def plan_again(manifest: dict[str, Any]) -> tuple[MergePlan | None, str | None]:
    """The plan of the merge, or why it cannot be made again: an input is gone, or is not the one that was merged."""
    base = manifest["base"]
    inputs = [(Path(base["path"]), base["sha256"])]
    inputs += [(Path(entry["path"]), entry["sha256"]) for entry in manifest["adapters"]]
    for directory, digests in inputs:
        for name, digest in digests.items():
            if not (directory / name).is_file():
                return None, f"{directory / name} is gone"
            if sha256_file(directory / name) != digest:
                return None, f"{directory / name} has changed since"
    adapters = [(resolve_adapter(Path(entry["path"])), entry["weight"]) for entry in manifest["adapters"]]
    found = read_model(base["path"], None)
    return build_plan(
        adapters, decoded(found) if manifest["base_mode"] == "dequant" else found, manifest["dtype"]
    ), None
