"""What a checkpoint is worth: every byte of one that cogumi wrote is checked, and the structure of any other.

A resume takes the highest number, skips an optimizer that is missing, and torch.load does not compare checksums
(transformers 5.17, torch 2.13). Neither torch nor transformers is imported here. The checkpoints are those of one process
or of several with whole copies of the model: FSDP and DeepSpeed have no `optimizer.pt` and are rejected.
"""

import json
import os
import re
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cogumi.checkpoints.manifest import (
    CHECKPOINT_NAME,
    MANIFEST_NAME,
    CheckpointDamaged,
    Manifest,
    list_manifest_files,
    read_manifest,
)
from cogumi.core.durability import sha256_file
from cogumi.core.errors import UsageError

# The names are transformers' (trainer.py, utils/__init__.py) and PEFT's (utils/constants.py).
STATE = "trainer_state.json"
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
RNG = re.compile(r"rng_state(_\d+)?\.pth")
WHOLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

# What torch.save writes into a checkpoint. Another .bin or .pt may be anybody's, in any format.
TORCH_FILE = re.compile(
    r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth|training_args\.bin|(pytorch|adapter)_model.*\.bin"
)
# A file with one of these endings that the manifest does not list could be loaded in place of one that it does.
LOADED_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".index.json")
TEXT_SUFFIXES = (".jinja", ".md", ".txt")

# How a zip file without a comment ends, which is how torch.save ends one.
ZIP_END_BYTES, ZIP_END = 22, b"PK\x05\x06"


@dataclass(frozen=True)
class CheckpointState:
    """What came of looking at one checkpoint.

    verified: every file has the size and the sha256 of the manifest, and nothing that a resume needs is missing.
    unverified: there is no manifest (plain Trainer wrote it), and its structure is whole; a changed number is not seen.
    rejected: `reason` says in one line what is wrong; "" for verified. `bytes` is what the directory's files weigh.
    """

    path: Path
    step: int
    state: Literal["verified", "unverified", "rejected"]
    reason: str
    bytes: int


def inspect(directory: Path, whole: bool = True) -> CheckpointState:
    """Look at a checkpoint; reads all of it (about a second a GB). Raises UsageError unless it is named checkpoint-STEP.

    whole: without it names and sizes are checked, and no file is read. Then verified means that it was when it was
    saved, for which there is a manifest (`cogumi.checkpoints.commit`); a byte that changed since is not seen.
    What cannot be read is rejected with the system's reason, for a resume would not be able to read it either.
    """
    name = CHECKPOINT_NAME.fullmatch(directory.name)
    if name is None:
        raise UsageError(f"{directory} is not named checkpoint-STEP", fix="name the directory of one checkpoint")
    step, weight = int(name[1]), 0
    try:
        os.listdir(directory)  # rglob finds nothing in a directory that is not there, and says nothing
        files, weight = list_manifest_files(directory), bytes_of(directory)
        manifest = read_manifest(directory)
        if manifest is not None:
            check_listed(manifest, files, step, whole)
        if whole:
            check_complete(files)
            check_step(files, step)
        if whole and manifest is None:
            check_structure(files)
    except CheckpointDamaged as damage:
        return CheckpointState(directory, step, "rejected", str(damage), weight)
    except OSError as error:
        place = os.path.relpath(error.filename, directory.parent) if error.filename else directory.name
        reason = f"{place} cannot be read ({error.strerror or error})"
        return CheckpointState(directory, step, "rejected", reason, weight)
    if manifest is None:
        checked = "only the structure was checked" if whole else "nothing was checked"
        return CheckpointState(directory, step, "unverified", f"no {MANIFEST_NAME}: {checked}", weight)
    return CheckpointState(directory, step, "verified", "", weight)


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def check_listed(manifest: Manifest, files: dict[str, Path], step: int, whole: bool) -> None:
    """Raise CheckpointDamaged unless every file is the one that was saved: names, step and sizes, then hashes if `whole`."""
    if manifest.step != step:
        raise CheckpointDamaged(
            f"{MANIFEST_NAME} is of step {manifest.step}, not {step}: the directory was renamed, or parts of two mixed"
        )
    require(manifest.files.keys() - files.keys())
    for name, entry in manifest.files.items():
        size = files[name].stat().st_size
        if size != entry.size:
            raise CheckpointDamaged(f"{name} has {size:,} bytes, and {entry.size:,} were saved")
    for name in files.keys() - manifest.files.keys():
        if name.endswith(LOADED_SUFFIXES):
            raise CheckpointDamaged(f"{name} was added after the checkpoint was saved, and a resume might load it")
    for name, entry in manifest.files.items() if whole else ():
        with reading(files[name]):
            same = sha256_file(files[name]) == entry.sha256
        if not same:
            raise CheckpointDamaged(f"{name} has other bytes than were saved (its sha256 differs)")


def check_complete(files: dict[str, Path]) -> None:
    """Raise CheckpointDamaged unless there is everything that a resumed run needs to continue as if it had not stopped."""
    missing = {name for name in (STATE, OPTIMIZER, SCHEDULER) if name not in files}
    if not any(RNG.fullmatch(name) for name in files):
        missing.add("rng_state.pth")
    if missing == {OPTIMIZER, SCHEDULER, "rng_state.pth"}:
        raise CheckpointDamaged(
            "it has no optimizer, scheduler and RNG state (save_only_model=True?): a run cannot resume"
        )
    require(missing, " (Trainer writes that last: the save did not finish)" if STATE in missing else "")
    check_adapters(files)
    indexes = [name for name in INDEXES if name in files]
    for name in indexes:
        require(set(shards_of(name, files[name]).values()) - files.keys(), f" (named in {name})")
    if not indexes and not any(is_weights(name) for name in files):
        raise CheckpointDamaged("it has no weights: neither a model's nor an adapter's")


def require(missing: Collection[str], why: str = "") -> None:
    if missing:
        raise CheckpointDamaged(f"{', '.join(sorted(missing))} {'is' if len(missing) == 1 else 'are'} missing{why}")


def is_weights(name: str) -> bool:
    """Whether Trainer looks there for weights: adapters have a directory each where there are several."""
    folder, _, file = name.rpartition("/")
    return name in WHOLE_WEIGHTS or (file in ADAPTER_WEIGHTS and "/" not in folder)


def check_adapters(files: dict[str, Path]) -> None:
    """Raise CheckpointDamaged where an adapter has only one of its two files."""
    parts = (ADAPTER_CONFIG, *ADAPTER_WEIGHTS)
    folders = {name[: name.rfind("/") + 1] for name in files if name.rpartition("/")[2] in parts}
    for inside in sorted(folders):
        if inside + ADAPTER_CONFIG not in files:
            require([inside + ADAPTER_CONFIG])
        if not any(inside + weights in files for weights in ADAPTER_WEIGHTS):
            require([inside + ADAPTER_WEIGHTS[0]])


def check_step(files: dict[str, Path], step: int) -> None:
    content = read_object(STATE, files[STATE])
    if content.get("global_step") != step:
        raise CheckpointDamaged(
            f"{STATE} is of step {content.get('global_step')}, not {step}: the directory was renamed, or parts of two mixed"
        )


def check_structure(files: dict[str, Path]) -> None:
    """Raise CheckpointDamaged where a file is cut off, empty or garbled. Quick checks of all files come first."""
    for name, path in files.items():
        if name.endswith(".json"):
            read_json(name, path)
        elif name.endswith(TEXT_SUFFIXES):
            check_text(name, path)
    tensors = {name: tensors_of(name, path) for name, path in files.items() if name.endswith(".safetensors")}
    index = files.get(INDEXES[0])
    for tensor, shard in shards_of(INDEXES[0], index).items() if index else ():
        if tensor not in tensors.get(shard, ()):
            raise CheckpointDamaged(f"{shard} has no tensor {tensor}, which {INDEXES[0]} says is in it")
    for name, path in files.items():
        if TORCH_FILE.fullmatch(name.rpartition("/")[2]):
            check_torch_file(name, path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file in an error of the block: a read that fails (a bad sector, a mount gone away) does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_json(name: str, path: Path) -> Any:
    try:
        with reading(path):
            return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{name} is damaged: it is not JSON any more") from error


def read_object(name: str, path: Path) -> dict[str, Any]:
    content = read_json(name, path)
    if not isinstance(content, dict):
        raise CheckpointDamaged(f"{name} is damaged: it is not a JSON object any more")
    return content


def shards_of(name: str, index: Path) -> dict[str, str]:
    """The shard that holds each tensor, as an index has it."""
    shards = read_object(name, index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointDamaged(f"{name} is damaged: its weight_map does not name the shards")
    return shards


def check_text(name: str, path: Path) -> None:
    """Raise CheckpointDamaged for what a crash makes of a text: nothing, or zeros where the end was."""
    with reading(path):
        text = path.read_bytes()
    if not text:
        raise CheckpointDamaged(f"{name} is empty")
    if b"\0" in text:
        raise CheckpointDamaged(f"{name} is damaged: it holds zero bytes, and it is a text")


def tensors_of(name: str, path: Path) -> set[str]:
    """The tensors of a safetensors file; the library checks that its header accounts for every byte of it."""
    from safetensors import SafetensorError, safe_open

    try:
        with reading(path), path.open("rb") as file:
            file.read(1)  # the library maps the file, and a bad sector is a signal then
        with reading(path), safe_open(path, framework="numpy") as tensors:
            return set(tensors.keys())
    except SafetensorError as error:
        raise CheckpointDamaged(f"{name} is damaged or cut off ({error})") from error


def check_torch_file(name: str, path: Path) -> None:
    """Raise CheckpointDamaged unless this is a whole zip file whose every record has the checksum that torch.save gave it."""
    with reading(path), path.open("rb") as file:
        file.seek(max(path.stat().st_size - ZIP_END_BYTES, 0))
        end = file.read()
        if not (end.startswith(ZIP_END) and end.endswith(b"\0\0")):
            raise CheckpointDamaged(f"{name} is cut off, or is not what torch.save wrote")
        try:
            with zipfile.ZipFile(file) as archive:
                whole = all(is_plain_record(record) for record in archive.infolist()) and archive.testzip() is None
                whole = whole and any(record.endswith("/data.pkl") for record in archive.namelist())
        except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
            raise CheckpointDamaged(f"{name} is damaged: {error or 'it ends too early'}") from error
    if not whole:
        raise CheckpointDamaged(f"{name} is damaged: its records are not those that torch.save wrote")


def is_plain_record(record: zipfile.ZipInfo) -> bool:
    """Whether a record's entry in the directory is one of torch.save's: stored as it is, on one disk, with nothing added.

    Not all of it is covered by a checksum, and what zipfile overlooks there makes torch.load fail.
    """
    return (
        record.compress_type == zipfile.ZIP_STORED
        and record.compress_size == record.file_size
        and record.flag_bits in (0, 0x8, 0x800, 0x808)  # sizes after the data, names in UTF-8
        and record.header_offset >= 0
        and record.volume == record.external_attr == len(record.comment) == 0
    )
