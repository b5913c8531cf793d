"""cogumi-manifest.json: the size and sha256 of every file of a checkpoint, written last, so that it proves the rest."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cogumi.core import __version__
from cogumi.core.durability import sha256_file, sync_path
from cogumi.core.run_directory import write_atomic

MANIFEST_NAME = "cogumi-manifest.json"
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
FORMAT = 1
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "unsloth")


class CheckpointDamaged(Exception):
    """A checkpoint is not what was saved. Its text is one line that names the file and what is wrong with it."""


@dataclass(frozen=True)
class FileEntry:
    """One file as it was saved: its length in bytes and its sha256, in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A manifest's content. `files` is by name relative to the checkpoint, with forward slashes."""

    step: int
    files: dict[str, FileEntry]
    versions: dict[str, str | None] = field(default_factory=dict)
    """Of the packages that trained it, None of one that was not installed; {} where an older cogumi saved it."""

    @property
    def bytes(self) -> int:
        """What the files weigh together, without the manifest."""
        return sum(entry.size for entry in self.files.values())


@cache
def versions() -> dict[str, str | None]:
    """The installed versions of what shapes a training, cogumi's own included."""
    return {name: installed(name) for name in PACKAGES} | {"cogumi": __version__}


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write_manifest(directory: Path, step: int) -> None:
    """Describe every file below `directory`; whoever reads the manifest later knows that all of them were on the disk.

    The caller has synced the files. The manifest appears whole or not at all, and is durable on return. Raises OSError,
    as a full disk does.
    """
    files = {name: FileEntry(path.stat().st_size, sha256_file(path)) for name, path in files_of(directory).items()}
    content = {
        "format": FORMAT,
        "step": step,
        "versions": versions(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {name: asdict(entry) for name, entry in files.items()},
    }
    write_atomic(directory / MANIFEST_NAME, sealed(content))
    sync_path(directory)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a checkpoint, None where there is none. Raises CheckpointDamaged where it cannot be believed."""
    try:
        text = (directory / MANIFEST_NAME).read_text(encoding="utf-8")
        content = json.loads(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is damaged: it is not JSON any more") from error
    if not isinstance(content, dict):
        raise CheckpointDamaged(f"{MANIFEST_NAME} is damaged: it is not a JSON object any more")
    if content.get("format") != FORMAT:
        raise CheckpointDamaged(f"{MANIFEST_NAME} has format {content.get('format')!r}; this cogumi knows {FORMAT}")
    content.pop("checksum", None)
    if sealed(content) != text:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is damaged: its own checksum does not fit")
    if not isinstance(content.get("step"), int):
        raise CheckpointDamaged(f"{MANIFEST_NAME} is damaged: it has no step")
    return Manifest(content["step"], entries_in(content, MANIFEST_NAME), versions_in(content))


def versions_in(content: dict[str, Any]) -> dict[str, str | None]:
    """The packages that wrote a checkpoint; none where the manifest does not say, as of an older cogumi."""
    found = content.get("versions")
    return found if isinstance(found, dict) else {}


def entries_in(content: dict[str, Any], name: str) -> dict[str, FileEntry]:
    """The files that a manifest, or a record of the mirror, lists. Raises CheckpointDamaged, with its name, for anything else."""
    files = content.get("files")
    for entry in files.values() if isinstance(files, dict) else [None]:
        if not (
            isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        ):
            raise CheckpointDamaged(f"{name} is damaged: it does not list each file with its size and sha256")
    return {file: FileEntry(entry["size"], entry["sha256"]) for file, entry in content["files"].items()}


def sealed(content: dict[str, Any]) -> str:
    """The manifest's text, with a checksum of its own, so that no byte of it can change unseen, the time's included."""
    checksum = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps(content | {"checksum": checksum}, indent=1) + "\n"


def files_of(directory: Path) -> dict[str, Path]:
    """Every file below a checkpoint, by relative name and in that order, without the manifest and its temporary file."""
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {
        name: paths[name]
        for name in sorted(paths)
        if name != MANIFEST_NAME and not name.startswith(f".{MANIFEST_NAME}.")
    }
