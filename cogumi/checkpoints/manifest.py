"""Manifests of checkpoints: each file's size and sha256, written last, and the identity of the training."""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cogumi.core import __version__
from cogumi.core.durability import sha256_file, sync_path, write_synced
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import write_atomic

MANIFEST_NAME = "cogumi-manifest.json"
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
FORMAT = 1
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "unsloth")


def step_of(directory: Path) -> int:
    match = CHECKPOINT_NAME.fullmatch(directory.name)
    assert match is not None, directory
    return int(match.group(1))


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
        """Sum of the files' sizes, without the manifest."""
        return sum(entry.size for entry in self.files.values())


@cache
def versions() -> dict[str, str | None]:
    """Return the installed versions of the packages that shape a training, cogumi's own included."""
    installed: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed | {"cogumi": __version__}


def write_manifest(directory: Path, step: int) -> None:
    """Describe every file below `directory`. A manifest is written after all of them are on the disk."""
    about = {"versions": versions(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    write_atomic(directory / MANIFEST_NAME, seal(describe_files(directory, step, **about)))
    sync_path(directory)


def describe_files(directory: Path, step: int, **about: Any) -> dict[str, Any]:
    """Return a manifest's content: every file below `directory`, and what else is known about them."""
    files = {name: asdict(FileEntry(path.stat().st_size, sha256_file(path)))
             for name, path in list_manifest_files(directory).items()}  # fmt: skip
    return {"format": FORMAT, "step": step, **about, "files": files}


def read_manifest(directory: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None without one. Raises CheckpointDamaged if it is not as written."""
    try:
        return parse_manifest((directory / MANIFEST_NAME).read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None


def parse_manifest(text: str) -> Manifest:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is damaged: it is not JSON any more") from error
    if not isinstance(content, dict):
        raise CheckpointDamaged(f"{MANIFEST_NAME} is damaged: it is not a JSON object any more")
    if content.get("format") != FORMAT:
        raise CheckpointDamaged(f"{MANIFEST_NAME} has format {content.get('format')!r}; this cogumi knows {FORMAT}")
    content.pop("checksum", None)
    if seal(content) != text:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is damaged: its own checksum does not fit")
    try:
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        return Manifest(content["step"], files, content.get("versions") or {})
    except (AttributeError, KeyError, TypeError) as error:  # sealed, and of another shape
        raise CheckpointDamaged(
            f"{MANIFEST_NAME} is damaged: it has no step, or no files with size and sha256"
        ) from error


def seal(content: dict[str, Any]) -> str:
    """Return the manifest's text with a checksum of its own, so that no byte of it can change unnoticed."""
    checksum = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps(content | {"checksum": checksum}, indent=1) + "\n"


def list_manifest_files(directory: Path) -> dict[str, Path]:
    """List the files below a checkpoint by relative name, sorted, without the manifest and its temporary file."""
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {
        name: paths[name]
        for name in sorted(paths)
        if name != MANIFEST_NAME and not name.startswith(f".{MANIFEST_NAME}.")
    }


# In each checkpoint, and so in its manifest; and in the directory of the checkpoints, where the training itself goes on.
IDENTITY_NAME = "cogumi-run.json"
RUN_NAME = ".cogumi-run"
NAME = re.compile("[0-9a-f]+")

# Arguments that do not shape what is learned: where things are, what is shown and kept, how they get there.
IGNORED_SETTINGS = (
    "output_dir", "logging", "log_", "save_", "eval_", "do_", "hub_", "push_", "report_to", "run_name", "project",
    "trackio", "dataloader_", "disable_tqdm", "use_cpu", "local_rank", "resume_", "include_", "ddp_", "debug",
    "load_best", "metric_for", "greater_is", "enable_jit", "vllm_", "torch_compile", "restore_", "prediction_",
    "per_device_eval", "accelerator_config", "deepspeed", "fsdp", "average_tokens", "batch_eval", "overwrite",
    "gradient_checkpointing", "activation_checkpointing",  # layers computed twice give what they gave
    "model_init",  # which may hold an access token
)  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """A training: its name, by chance, from its first step on; and what shapes it."""

    run: str
    settings: Mapping[str, Any]

    def write(self, checkpoint: Path) -> None:
        content = {"run": self.run, "settings": dict(self.settings)}
        write_synced(checkpoint / IDENTITY_NAME, (json.dumps(content, indent=1) + "\n").encode())


def read_settings(trainer: Any) -> dict[str, Any]:
    """Return the settings that shape a training: arguments, adapters, the numbers of weights and examples."""
    arguments = {
        key: value
        for key, value in trainer.args.to_dict().items()
        if value is not None and not key.startswith(IGNORED_SETTINGS)
    }
    adapters = {
        f"adapter {name}": {key: getattr(config, key, None) for key in ("r", "lora_alpha", "target_modules")}
        for name, config in (getattr(trainer.model, "peft_config", None) or {}).items()
    }
    counts: dict[str, Any] = {"parameters": sum(weight.numel() for weight in trainer.model.parameters())}
    if hasattr(trainer.train_dataset, "__len__"):
        counts["examples"] = len(trainer.train_dataset)
    plain = json.dumps(
        arguments | adapters | counts,
        default=lambda value: sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value),
        sort_keys=True,
    )
    return json.loads(plain)


def parse_identity(text: str) -> Identity:
    """Parse a checkpoint's identity. Raises CheckpointDamaged if it is none."""
    try:
        content = json.loads(text)
        return Identity(content["run"], content["settings"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(f"{IDENTITY_NAME} does not say which run it is of") from error


def read_run_name(directory: Path) -> str | None:
    """Return the training's name in a directory of checkpoints, or in one checkpoint. Raises UsageError if it is damaged."""
    run_file, identity_file = directory / RUN_NAME, directory / IDENTITY_NAME
    if run_file.exists():
        name = run_file.read_text(encoding="utf-8", errors="replace").strip()
        if name and not NAME.fullmatch(name):
            raise UsageError(f"{run_file} is damaged: {name[:20]!r} is no name of a training", fix="remove that file")
        return name or None
    if not identity_file.exists():
        return None
    try:
        return parse_identity(identity_file.read_text(encoding="utf-8")).run
    except CheckpointDamaged as error:
        raise UsageError(f"{identity_file} is damaged ({error})", fix="remove that file to resume from it") from error


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Up to three settings in which two trainings differ, in words; "" where they are the same."""
    keys = [key for key in sorted({*saved, *here}) if saved.get(key) != here.get(key)]
    text = ", ".join(f"{key}: {saved.get(key)} there, {here.get(key)} here" for key in keys[:3])
    return f"{text} and {len(keys) - 3} more" if len(keys) > 3 else text
