"""`cogumi merge --check DIR`: is a merged directory still what its manifest says, and base + adapter?"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.core.durability import drop_from_memory, sha256_file
from cogumi.core.errors import MergeError, UsageError
from cogumi.core.notices import working
from cogumi.merge.adapter_files import resolve_adapter
from cogumi.merge.bases import decoded, read_model
from cogumi.merge.executor import Advance, cores, progress_bar, spoken, threads, verify_shards
from cogumi.merge.merge_manifest import MANIFEST_NAME
from cogumi.merge.plan import MergePlan, build_plan


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
        again = f"not compared with base + adapter again: {self.missing}"
        if self.elements is not None:
            again = f"{self.elements:,} computed elements compared with base + adapter again"
        return f"{self.directory}: {self.files} files ({spoken(self.bytes)}) are what the manifest says; {again}"


@working("check: the merged directory is being read")
def check_merged(directory: Path, workers: int | None = None, *, progress: bool = True) -> CheckReport:
    """Re-read a merged directory: every hash, and every element where base and adapter are still at hand.

    Raises UsageError when the directory holds no manifest; MergeError naming the first file or tensor that is not what it
    was.
    """
    workers = workers or cores()
    manifest = read_manifest(directory)
    present = sum((directory / name).stat().st_size for name in manifest.outputs if (directory / name).is_file())
    total = 0
    with threads(workers) as pool, progress_bar(progress, "hashing", present) as hashed:
        digests = {name: pool.submit(read_back, directory / name, hashed) for name in manifest.outputs}
        for name, digest in digests.items():
            found, size = digest.result()
            total += size
            if found is None:
                raise MergeError(
                    f"{directory / name} is gone; the directory is not whole: fetch it again, or merge again"
                )
            if found != manifest.outputs[name]:
                raise MergeError(
                    f"{directory / name} is not the file that was merged: its sha256 is {found}, "
                    f"not {manifest.outputs[name]}; fetch it again, or merge again"
                )
    extra = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in manifest.outputs)
    if extra:
        raise MergeError(f"{directory / extra[0]} was not written by the merge")
    missing = changed_input(manifest, workers, progress)
    if missing is not None:
        return CheckReport(directory, len(manifest.outputs), total, None, missing)
    plan = plan_again(manifest)
    with progress_bar(progress, "verifying", plan.shard_bytes) as checked:
        checks = verify_shards(plan, directory, workers, checked)
    return CheckReport(directory, len(manifest.outputs), total, sum(check.elements for check in checks.values()), None)


@dataclass(frozen=True)
class Manifest:
    """What a check needs of a manifest. outputs: sha256 by file of the directory; inputs: sha256 by file elsewhere."""

    outputs: dict[str, str]
    inputs: dict[Path, str]
    base: Path
    adapters: list[tuple[Path, float]]
    dtype: str
    base_mode: str


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise UsageError(f"{directory} holds no {MANIFEST_NAME}, so it is not a directory that cogumi merged")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MergeError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict) or values.get("format") != 2:
        raise UsageError(f"{path} has a format that this version does not know", fix="merge again")
    try:
        return parse_manifest(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise MergeError(f"{path} is damaged: an entry is missing or of another kind ({error})") from error


def parse_manifest(values: dict[str, Any]) -> Manifest:
    """Raises KeyError, TypeError or AttributeError where it is not what a merge writes."""
    inputs = [values["base"], *values["adapters"]]
    return Manifest(
        outputs=values["files"] | {name: shard["sha256"] for name, shard in values["shards"].items()},
        inputs={Path(each["path"]) / name: digest for each in inputs for name, digest in each["sha256"].items()},
        base=Path(values["base"]["path"]),
        adapters=[(Path(each["path"]), each["weight"]) for each in values["adapters"]],
        dtype=values["dtype"],
        base_mode=values["base_mode"],
    )


def read_back(path: Path, hashed: Advance) -> tuple[str | None, int]:
    """(sha256, bytes) of a file, read from the disk rather than from memory; None where it is gone."""
    if not path.is_file():
        return None, 0
    drop_from_memory(path)
    digest, size = sha256_file(path), path.stat().st_size
    hashed(size)
    return digest, size


def changed_input(manifest: Manifest, workers: int, progress: bool) -> str | None:
    """Which file of base or adapters is gone, or not the one that was merged; None when all are as they were."""
    for path in manifest.inputs:
        if not path.is_file():
            return f"{path} is gone"
    total = sum(path.stat().st_size for path in manifest.inputs)
    with threads(workers) as pool, progress_bar(progress, "inputs", total) as hashed:
        digests = {path: pool.submit(read_back, path, hashed) for path in manifest.inputs}
        for path, digest in digests.items():
            if digest.result()[0] != manifest.inputs[path]:
                return f"{path} has changed since"
    return None


def plan_again(manifest: Manifest) -> MergePlan:
    """The plan of the merge, from inputs that are what they were."""
    adapters = [(resolve_adapter(path), weight) for path, weight in manifest.adapters]
    found = read_model(str(manifest.base), None)
    return build_plan(adapters, decoded(found) if manifest.base_mode == "dequant" else found, manifest.dtype)
