"""Fetch an adapter that is elsewhere (`model.adapter`): on the hub, in an object store, or in a mirror's newest checkpoint.

It comes before anything trains, and decisions.json keeps which one it was: commit and digest. A resumed run takes the same.
"""

import hashlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub as hf
import platformdirs
from huggingface_hub.errors import HFValidationError

from cogumi.checkpoints.manifest import CHECKPOINT_NAME, MANIFEST_NAME, CheckpointDamaged, read_manifest
from cogumi.checkpoints.mirror import Store, describe, newest_first
from cogumi.config.schema import RunConfig
from cogumi.core.durability import sha256_file
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import DECISIONS, read_section, write_section
from cogumi.hub.downloads import hub_errors_refused
from cogumi.telemetry.status import is_run

log = logging.getLogger("cogumi")

CONFIG, SECTION = "adapter_config.json", "adapter"  # SECTION: of decisions.json
# Of an adapter and its tokenizer; the optimizer beside them stays where it is.
NEEDED = re.compile(
    r"adapter_(config\.json|model.*\.safetensors(\.index\.json)?)|cogumi-(base|manifest)\.json|.*\.(jinja|tiktoken|model)|"
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_template).*"
)
HUB_PLACE = re.compile(r"(?:hf://)?(\w[\w.-]*/\w[\w.-]*)(?:@([^/]+))?((?:/.+)?)")
ANOTHER_RUN = "put that one back, or start again in another cogumi.run_dir"


def find_adapter(run: RunConfig) -> None:
    """Fetch `model.adapter` where it is not a directory of an adapter; a resumed run takes the one that it began with.

    Afterwards `run.model.adapter_dir` is its directory. Raises UsageError if it cannot be had, or is another one now.
    """
    source = run.model.adapter
    if source is None or run.model._fetched:
        return
    section = read_section(run.run_dir / DECISIONS, SECTION)
    known: dict[str, str] = section if section.get("source") == source else {}
    on_hub = HUB_PLACE.fullmatch(source)
    if on_hub and not source.startswith("hf://"):
        on_hub = None if Path(source).exists() or on_hub[3] else on_hub
    if on_hub or "://" in source or is_mirror(Path(source)):
        try:
            run.model._fetched = {"source": source, **fetch_adapter(source, on_hub, known)}
        except HFValidationError as error:
            raise UsageError(one_line(error).rstrip("."), key="model.adapter") from error
        except UsageError as error:
            raise UsageError(error.message, place=error.place, key="model.adapter", fix=error.fix) from error


def record_adapter(run: RunConfig) -> None:
    """Keep which adapter was fetched, and log it."""
    if pinned := {key: value for key, value in run.model._fetched.items() if key != "directory"}:
        log.info("model.adapter: %s", ", ".join(f"{key} {value}" for key, value in pinned.items() if value))
        write_section(run.run_dir / DECISIONS, SECTION, pinned)


def is_mirror(place: Path) -> bool:
    """Tell a directory of checkpoints from an adapter, and from a run, whose own adapter is named to the user."""
    is_other = not place.is_dir() or (place / CONFIG).exists() or is_run(place)
    return not is_other and any(CHECKPOINT_NAME.fullmatch(path.name) for path in place.iterdir())


def fetch_adapter(source: str, on_hub: re.Match[str] | None, known: Mapping[str, str]) -> dict[str, str]:
    """Copy an adapter into the cache of its digest, unless it is there. Returns what it is known by, and its directory."""
    cache = Path(platformdirs.user_cache_dir("cogumi")) / "adapters"
    if known and (cached := cache / known["sha256"]).is_dir() and digest_of(cached) == known["sha256"]:
        return {**known, "directory": str(cached)}
    if "@" in urlsplit(source).netloc and not on_hub:
        fix = "keys belong into the environment, such as AWS_ACCESS_KEY_ID, or a profile"
        raise UsageError("its URL holds a login, which would be written into logs", fix=fix)
    commit = "" if on_hub is None else known.get("commit") or find_commit(*on_hub.group(1, 2))
    store = Store(f"hf://{on_hub[1]}@{commit}{on_hub[3]}" if on_hub else source)
    folders = list_folders(store)
    if known and known["folder"] not in folders:
        raise UsageError(f"{source} no longer has {known['folder']}, with which this run began", fix=ANOTHER_RUN)
    cache.mkdir(parents=True, exist_ok=True)
    for folder in [known["folder"]] if known else folders:
        with tempfile.TemporaryDirectory(dir=cache, prefix=".unfinished-") as scratch:
            for file in folders[folder]:
                with reading(store):
                    store.fs.get_file("/".join(filter(None, (store.root, folder, file))), f"{scratch}/{file}")
            try:
                refuse_damaged(Path(scratch))
            except CheckpointDamaged as damage:
                log.warning("%s of %s is not started from: %s", folder, source, damage)
                continue
            digest = digest_of(Path(scratch))
            if known and known["sha256"] != digest:
                raise UsageError(f"{source} has another {folder} than when this run began", fix=ANOTHER_RUN)
            shutil.copytree(scratch, cache / digest, dirs_exist_ok=True)
            return {"commit": commit, "folder": folder, "sha256": digest, "directory": str(cache / digest)}
    raise UsageError(f"{source} has only damaged adapters", fix="name another one")


def find_commit(name: str, revision: str | None) -> str:
    with hub_errors_refused(name, revision, "adapter"):
        return str(hf.HfApi().resolve_revision(name, revision=revision).resolved)


def list_folders(store: Store) -> dict[str, list[str]]:
    """Return the files of each adapter at a place: its own, its `adapter/`, its whole checkpoints with the newest first."""
    with reading(store):
        paths = sorted(store.fs.find(store.root, **({} if store.on_hub else {"on_error": "raise"})))
    files: dict[str, list[str]] = {}
    for folder, _, name in (path.removeprefix(f"{store.root}/").rpartition("/") for path in paths):
        if NEEDED.fullmatch(name):
            files.setdefault(folder, []).append(name)
    whole = newest_first(name for name in files if CHECKPOINT_NAME.fullmatch(name) and MANIFEST_NAME in files[name])
    folders = {name: files[name] for name in ("", "adapter", *whole) if CONFIG in files.get(name, ())}
    if not folders:
        fix = "name a directory, a repository or a mirror that holds a LoRA adapter"
        raise UsageError(f"{store.name} holds no {CONFIG}, nor a whole checkpoint with one", fix=fix)
    return folders


def refuse_damaged(directory: Path) -> None:
    """Raise CheckpointDamaged unless the files that a manifest lists have the bytes that were saved."""
    manifest = read_manifest(directory)
    for file, entry in manifest.files.items() if manifest is not None else ():
        if NEEDED.fullmatch(file) and (
            not (directory / file).exists() or sha256_file(directory / file) != entry.sha256
        ):
            raise CheckpointDamaged(f"{file} is missing, or has other bytes than were saved")


def digest_of(directory: Path) -> str:
    digests = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


@contextmanager
def reading(store: Store) -> Iterator[None]:
    """Turn whatever the store raises into a UsageError with the reason."""
    try:
        yield
    except Exception as error:  # each of fsspec's stores has errors of its own
        message = f"{store.name} cannot be read ({describe(error)})"
        raise UsageError(message, fix="correct its address or its access") from error
