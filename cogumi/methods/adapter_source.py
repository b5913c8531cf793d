"""Fetch an adapter that is elsewhere (`model.adapter`): on the hub, in an object store, or in a mirror's newest checkpoint.

It comes before anything trains, and decisions.json keeps which one it was: commit and digest. A resumed run takes the same.
"""

import hashlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import huggingface_hub as hf
import platformdirs
from huggingface_hub.errors import HFValidationError

from cogumi.checkpoints.manifest import CHECKPOINT_NAME, MANIFEST_NAME, CheckpointDamaged, read_manifest
from cogumi.checkpoints.mirror import Store, newest_first
from cogumi.config.schema import RunConfig
from cogumi.core.durability import sha256_file
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import DECISIONS, describe_failure, read_section, write_section
from cogumi.hub.downloads import hub_errors_refused

log = logging.getLogger("cogumi")

CONFIG, SECTION = "adapter_config.json", "adapter"  # SECTION: of decisions.json
# Of an adapter and its tokenizer; the optimizer beside them stays where it is.
NEEDED = re.compile(
    r"adapter_(config\.json|model.*\.safetensors(\.index\.json)?)|cogumi-(base|manifest)\.json|.*\.(jinja|tiktoken|model)|"
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_template).*"
)
HUB_PLACE = re.compile(r"(?:hf://)?(\w[\w.-]*/\w[\w.-]*)(?:@([^/]+))?((?:/.+)?)")
TRAIN_AGAIN = "train that again, or set cogumi.from_failed: true here"
ANOTHER_RUN = "put that one back, or start again in another cogumi.run_dir"


def find_adapter(run: RunConfig) -> None:
    """Fetch `model.adapter` where it is not a directory of an adapter; a resumed run takes the one that it began with.

    Afterwards `run.model.adapter_dir` is its directory. Raises UsageError if it cannot be had, or is another one now.
    """
    source = run.model.adapter
    if source is None or run.model._fetched:
        return
    on_hub, place, is_url = HUB_PLACE.fullmatch(source), Path(source), "://" in source
    if on_hub and not is_url and (on_hub[3] or place.exists()):
        on_hub = None
    is_mirror = any(place.glob("checkpoint-*")) or (place / "run" / "verdict.json").exists()
    if not (on_hub or is_url) and ((place / CONFIG).exists() or not is_mirror):
        return
    known = read_section(run.run_dir / DECISIONS, SECTION)
    try:
        known = known if known.get("source") == source else {}
        run.model._fetched = fetch_adapter(source, on_hub, known, run.cogumi.from_failed)
    except UsageError as error:
        raise UsageError(error.message, place=error.place, key="model.adapter", fix=error.fix) from error
    except HFValidationError as error:
        raise UsageError(one_line(error).rstrip("."), key="model.adapter", fix="correct its name") from error


def record_adapter(run: RunConfig) -> None:
    if pinned := {key: value for key, value in run.model._fetched.items() if value and key != "directory"}:
        log.info("model.adapter: %s", ", ".join(f"{key} {value}" for key, value in pinned.items()))
        write_section(run.run_dir / DECISIONS, SECTION, pinned)


def fetch_adapter(
    source: str, on_hub: re.Match[str] | None, known: Mapping[str, str], from_failed: bool
) -> dict[str, str]:
    """Copy an adapter into the cache of its digest, unless it is there. Returns what it is known by, and its directory."""
    cache = Path(platformdirs.user_cache_dir("cogumi")) / "adapters"
    with suppress(KeyError, FileNotFoundError, CheckpointDamaged):
        if digest_of(cached := cache / known["sha256"]) == known["sha256"]:
            return {**known, "directory": str(cached)}
    commit, url = known.get("commit", ""), source
    if on_hub is not None:
        with hub_errors_refused(on_hub[1], on_hub[2], "adapter"):
            commit = commit or str(hf.HfApi().resolve_revision(on_hub[1], revision=on_hub[2]).resolved)
        url = f"hf://{on_hub[1]}@{commit}{on_hub[3]}"
    store = Store(url)
    with store.reaching("cannot be read"):
        return {"source": source, "commit": commit, **copy_adapter(store, known, from_failed, cache)}


def copy_adapter(store: Store, known: Mapping[str, str], from_failed: bool, cache: Path) -> dict[str, str]:
    """Copy the adapter at a place, or the known one of it, into the cache. Returns its folder, digest and directory."""
    folders = list_folders(store)
    if not known and not from_failed:
        refuse_failed_run(store)
    if known and known["folder"] not in folders:
        raise UsageError(f"{store.name} no longer has {known['folder']}, with which this run began", fix=ANOTHER_RUN)
    cache.mkdir(parents=True, exist_ok=True)
    for folder in [known["folder"]] if known else folders:
        with tempfile.TemporaryDirectory(dir=cache, prefix=".unfinished-") as scratch:
            for file in folders[folder]:
                store.fs.get_file("/".join(filter(None, (store.root, folder, file))), f"{scratch}/{file}")
            try:
                digest = digest_of(Path(scratch))
            except CheckpointDamaged as damage:
                log.warning("%s of %s is not started from: %s", folder, store.name, damage)
                continue
            if known and known["sha256"] != digest:
                raise UsageError(f"{store.name} has another {folder} than when this run began", fix=ANOTHER_RUN)
            shutil.copytree(scratch, directory := cache / digest, dirs_exist_ok=True)
        return {"folder": folder, "sha256": digest, "directory": str(directory)}
    raise UsageError(f"{store.name} has only damaged adapters", fix="name another one")


def list_folders(store: Store) -> dict[str, list[str]]:
    """Return the files of each adapter at a place: its own, its `adapter/`, its whole checkpoints with the newest first."""
    files: dict[str, list[str]] = {}
    for path in sorted(store.fs.find(store.root, **({} if store.on_hub else {"on_error": "raise"}))):
        folder, _, name = path.removeprefix(f"{store.root}/").rpartition("/")
        if NEEDED.fullmatch(name):
            files.setdefault(folder, []).append(name)
    complete = newest_first(name for name in files if CHECKPOINT_NAME.fullmatch(name) and MANIFEST_NAME in files[name])
    # Beside checkpoints it is a mirror's, where the manifest comes last: without one its upload did not end.
    final = ["adapter"] if not complete or MANIFEST_NAME in files.get("adapter", ()) else []
    folders = {name: files[name] for name in ("", *final, *complete) if CONFIG in files.get(name, ())}
    if not folders:
        fix = "name a directory, a repository or a mirror that holds a LoRA adapter"
        raise UsageError(f"{store.name} holds no {CONFIG}, nor a whole checkpoint with one", fix=fix)
    return folders


def refuse_failed_run(store: Store) -> None:
    """Raise UsageError for the mirror of a run whose checks failed or whose gate is not met."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("config.yaml", "verdict.json"):
            if store.fs.exists(path := f"{store.root}/run/{name}"):
                store.fs.get_file(path, f"{scratch}/{name}")
        if failure := describe_failure(Path(scratch), of_merge=False):
            raise UsageError(failure, place=store.name, fix=TRAIN_AGAIN)


def digest_of(directory: Path) -> str:
    """Return the digest of an adapter's files. Raises CheckpointDamaged if a manifest beside them is of others."""
    digests = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    manifest = read_manifest(directory)
    for file, entry in manifest.files.items() if manifest else ():
        if NEEDED.fullmatch(file) and digests.get(file) != entry.sha256:
            raise CheckpointDamaged(f"{file} is not what was saved")
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
