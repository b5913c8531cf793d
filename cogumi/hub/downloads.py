"""Downloads of models and data sets of the Hugging Face hub: commit, files, disk space, then the download itself.

huggingface_hub downloads into its cache, and tries again where a connection breaks. It restarts a file whose download was
killed (its pull request 4228), so that two files at a time bound the loss.
"""

import errno
import functools
import glob
import hashlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub as hf
import platformdirs
from filelock import FileLock, Timeout
from huggingface_hub import errors
from huggingface_hub.utils import tqdm

from cogumi.config.binding import nearest
from cogumi.core.disk_space import Need, group_needs, hub_cache
from cogumi.core.durability import NO_SPACE
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes, one_line
from cogumi.core.liveness import beat
from cogumi.core.run_directory import write_json

log = logging.getLogger("cogumi")
# Of httpx, or since huggingface_hub 2 of httpx2.
TransportError: Any = sys.modules[errors.HTTPError.__module__].TransportError

MAX_FILES_AT_ONCE = 2
KEYS = {"model": "model.name", "dataset": "data.source", "adapter": "model.adapter"}
NAMES = {"model": "model", "dataset": "data set", "adapter": "adapter"}
NO_MODEL = "for an adapter use model.adapter, for a GGUF file name its full-precision original"
MORE_ROOM = "make room, or set HF_HOME to a directory on another disk"
UNWRITABLE = (*NO_SPACE, errno.EACCES, errno.EPERM, errno.EROFS)  # what the disk of the cache says


@dataclass(frozen=True)
class Download:
    """Files of one commit. sizes: the bytes of each file that is needed, in the cache or not."""

    name: str
    commit: str
    sizes: Mapping[str, int] = field(hash=False)
    kind: str = "model"

    @property
    def storage(self) -> Path:
        """The repository's directory in the hub's cache."""
        return hub_cache() / f"{self.kind}s--{self.name.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        return self.storage / "snapshots" / self.commit

    @property
    def missing(self) -> list[str]:
        return [path for path in self.sizes if not (self.snapshot / path).exists()]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @property
    def to_fetch(self) -> int:
        return sum(self.sizes[path] for path in self.missing)

    def __str__(self) -> str:
        size = f"{len(self.sizes)} files, {format_bytes(self.total)}; {format_bytes(self.to_fetch)} to fetch"
        return f"{self.name} at {self.commit[:7]}: {size} into {hub_cache()}"


def refuse_no_room(downloads: Sequence[Download]) -> None:
    """Raise UsageError if the filesystem of the Hugging Face cache lacks room for the missing files."""
    incomplete = [download for download in downloads if download.missing]
    if not incomplete:  # nothing is written: the cache may be read-only
        return
    for download in incomplete:
        remove_leftovers(download)
    missing, kind = sum(download.to_fetch for download in incomplete), incomplete[0].kind
    (disk,) = group_needs([Need(kind, hub_cache(), missing, missing)])
    if disk.refusal:
        free = f"{disk.filesystem.mount} has {format_bytes(disk.filesystem.space.free)} free"
        raise UsageError(f"{'; '.join(map(str, incomplete))}; {free}: {disk.refusal}", key=KEYS[kind], fix=MORE_ROOM)


def fetch(download: Download, report: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Download the missing files and return the snapshot's directory. Files that an earlier download finished stay.

    Raises UsageError when the hub does not answer, or the disk is full. report: called with the bytes on the disk and
    in total, first and then once a second.
    """
    log.info("download: %s", download)
    if not download.missing:
        return download.snapshot
    report(download.total - download.to_fetch, download.total)
    try:
        hf.snapshot_download(
            download.name,
            repo_type=download.kind,
            revision=download.commit,
            allow_patterns=[glob.escape(path) for path in download.sizes],
            max_workers=MAX_FILES_AT_ONCE,
            tqdm_class=bar_for(download, report),
        )
    except (OSError, TransportError) as error:
        if getattr(error, "errno", None) in UNWRITABLE:
            raise describe_hub_error(download.name, download.commit, error, download.kind) from None
        message = f"the download of {download.name} broke off ({type(error).__name__}: {one_line(error)[:300]})"
        message += f"; {format_bytes(download.to_fetch)} of {format_bytes(download.total)} are missing"
        fix = "start again with the same words: whole files stay"
        raise UsageError(message, key=KEYS[download.kind], fix=fix) from error
    return download.snapshot


def remove_leftovers(download: Download) -> None:
    """Remove partial files of a killed download: huggingface_hub neither continues nor removes them."""
    locks = hub_cache() / ".locks" / download.storage.name
    locks.mkdir(parents=True, exist_ok=True)
    for part in (download.storage / "blobs").glob("*.incomplete"):
        with suppress(Timeout), FileLock(locks / f"{part.name.partition('.')[0]}.lock", timeout=0):  # huggingface_hub's
            part.unlink(missing_ok=True)


def bar_for(download: Download, report: Callable[[int, int], None]) -> type[Any]:
    """Return a progress bar class for huggingface_hub that reports the bytes on the disk once a second."""
    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("name") == "huggingface_hub.snapshot_download"
            self.arrived, self.reported_at = download.total - download.to_fetch, 0.0
            super().__init__(*args, **options)

        def update(self, n: float | None = 1) -> bool | None:
            beat()
            self.arrived += int(n or 0)
            with lock:  # the threads of several files write the same status file
                if self.counts_bytes and time.monotonic() > self.reported_at + 1:
                    report(self.arrived, download.total)
                    self.reported_at = time.monotonic()
            return super().update(n)  # type: ignore[no-any-return]

    return Bar


# What transformers looks for, in its order; an index names its shards. Everything else of that kind stays on the hub.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Beside the weights: configs, tokenizers in all their forms, chat templates, code of models that bring their own.
SIDE_FILE_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "additional_chat_templates/*")


def find_commit(name: str, revision: str | None = None) -> str | None:
    """Return the current commit of a model's hub id; None for a directory, or an impossible name.

    Without a network it is the commit in the cache. Raises UsageError where the hub does not give the model.
    """
    if Path(name).exists():
        return None
    try:
        with hub_errors_refused(name, revision, "model"):
            commit = str(hf.HfApi().resolve_revision(name, revision=revision).resolved)
            if not Download(name, commit, {}).snapshot.is_dir():
                # The hub describes a gated model to everyone; only this tells whether its files may be had.
                hf.get_hf_file_metadata(hf.hf_hub_url(name, "config.json", revision=commit))
    except errors.HFValidationError:
        return None
    except errors.RemoteEntryNotFoundError:
        message = f"{name} holds no config.json, so transformers cannot load it"
        raise UsageError(message, key="model.name", fix=NO_MODEL) from None
    return commit


def plan_download(name: str, commit: str | None) -> Download | None:
    """List the files of a model at a commit that transformers needs; None for a directory.

    Raises UsageError where the repository has no weights that transformers loads. Without a network the cache must have
    all weights.
    """
    if commit is None or Path(name).exists():
        return None
    is_online = True
    with hub_errors_refused(name, commit, "model"):
        try:
            tree = hf.HfApi().list_repo_tree(name, recursive=True, revision=commit)
            sizes = {file.path: file.size for file in tree if isinstance(file, hf.RepoFile)}
        except (TransportError, errors.OfflineModeIsEnabled):
            is_online, snapshot = False, Download(name, commit, {}).snapshot
            files = [path for path in snapshot.rglob("*") if path.is_file()]
            sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files}
        first = next((path for path in WEIGHTS if path in sizes), None)
        weights = [] if first is None else [first]
        if first is not None and first.endswith(".index.json"):
            index = json.loads(Path(hf.hf_hub_download(name, first, revision=commit)).read_text(encoding="utf-8"))
            weights = sorted(set(index["weight_map"].values()))
    missing = next((path for path in weights if path not in sizes), None if weights else " or ".join(WEIGHTS[::2]))
    if missing is not None:
        message, fix = f"{name} has no {missing}, so transformers cannot load it", NO_MODEL
        if not is_online:
            silent, fix = describe_silence()
            message = f"{hub_cache()} has {name} without {missing}, and {silent}"
        raise UsageError(message, key="model.name", fix=fix)
    # From the root, as a pattern without a slash is for the top directory alone.
    beside = [path for path in sizes if any(PurePosixPath("/", path).match(f"/{kind}") for kind in SIDE_FILE_PATTERNS)]
    return Download(name, commit, {path: sizes[path] for path in sorted({*weights, *beside})})


@functools.cache
def read_headers(download: Download) -> dict[str, Any]:
    """Return tensor -> dtype and shape of a model that is not downloaded yet, from the headers of its files.

    Raises UsageError where the repository has no safetensors, or the hub does not answer.
    """
    if not any(path.endswith(".safetensors") for path in download.sizes):
        message = f"{download.name} has no safetensors, which alone are merged"
        raise UsageError(message, key="model.name", fix="name a repository that has them")
    with hub_errors_refused(download.name, download.commit, "model"):
        metadata = hf.HfApi().get_safetensors_metadata(download.name, revision=download.commit)
    return {name: info for file in metadata.files_metadata.values() for name, info in file.tensors.items()}


def dataset_files(name: str, revision: str | None, split: str | None, subset: str | None) -> tuple[str, list[str]]:
    """Return the commit and the files of one split of a data set: "train", or the only one, by default.

    The splits that `datasets` finds in a commit are recorded, so that a pinned data set needs no network once it is
    cached. Raises UsageError when the hub has no such data set, revision, subset or split, or refuses this token.
    """
    with hub_errors_refused(name, revision, "dataset"):
        commit = str(hf.HfApi().resolve_revision(name, revision=revision, repo_type="dataset").resolved)
    if commit != revision:
        log.info("%s is at commit %s now; to train on the same rows again: data.revision: %s", name, commit, commit)
    key = hashlib.sha256(json.dumps([name, commit, subset]).encode()).hexdigest()[:24]
    record = Path(platformdirs.user_cache_dir("cogumi")) / "hub" / f"{key}.json"
    if not record.is_file():
        with hub_errors_refused(name, revision, "dataset"):
            hf.HfApi().auth_check(name, repo_type="dataset")
            splits = split_files(name, subset, commit)
        base = f"hf://datasets/{name}@{commit}/"
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, {key: [url.removeprefix(base) for url in urls] for key, urls in splits.items()})
    return commit, choose_split(name, json.loads(record.read_text(encoding="utf-8")), split)


def fetch_dataset(name: str, commit: str, paths: Sequence[str]) -> list[Path]:
    """Download these files where they are not in the cache. Raises UsageError where the disk has no room for them."""
    download = Download(name, commit, dict.fromkeys(paths, 0), "dataset")
    if download.missing:
        with hub_errors_refused(name, commit, "dataset"):
            entries = hf.HfApi().get_paths_info(name, list(paths), revision=commit, repo_type="dataset")
        sizes = {entry.path: entry.size for entry in entries if isinstance(entry, hf.RepoFile)}
        download = Download(name, commit, sizes, "dataset")
        refuse_no_room([download])
        fetch(download)
    return [download.snapshot / path for path in paths]


def split_of(directory: str, split: str | None, subset: str | None = None) -> list[Path]:
    """Return the files of one split of a local directory that is laid out like a data set of the hub."""
    with hub_errors_refused(directory, None, "dataset"):
        splits = split_files(directory, subset, None)
    return [Path(file) for file in choose_split(directory, splits, split)]


def split_files(name: str, subset: str | None, commit: str | None) -> dict[str, list[str]]:
    from datasets import load_dataset_builder

    splits = load_dataset_builder(name, subset, revision=commit).config.data_files or {}
    return {str(split): [str(file) for file in files] for split, files in splits.items()}


def choose_split(name: str, splits: Mapping[str, Sequence[str]], split: str | None) -> list[str]:
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else "train"
    if split not in splits:
        fix = f"it has: {', '.join(splits) or 'none'}"
        raise UsageError(f"{name} has no split {split!r}", key="data.split", fix=fix)
    return list(splits[split])


@contextmanager
def hub_errors_refused(name: str, revision: str | None, kind: str) -> Iterator[None]:
    """Raise errors of the hub as UsageError. A file that is not in a repository is left to the caller."""
    try:
        yield
    except (errors.HFValidationError, errors.RemoteEntryNotFoundError):
        raise
    # OSError: the hub's own, and those of `datasets`. ValueError: no such subset; RuntimeError: a data set that is a script.
    except (OSError, errors.HTTPError, errors.RevisionResolutionError, ValueError, RuntimeError) as error:
        raise describe_hub_error(name, revision, error, kind) from error


def describe_hub_error(name: str, revision: str | None, error: Exception, kind: str) -> UsageError:
    """Describe an error of the hub in one line, with the key of the configuration."""
    endpoint, token, key = hf.constants.ENDPOINT, hf.get_token() is not None, KEYS[kind]
    page = f"{endpoint}/{'datasets/' * (kind == 'dataset')}{name}"
    noun, status, reason = NAMES[kind], status_of(error), f"{name}: {one_line(error)[:300]}"
    if isinstance(error, errors.GatedRepoError):
        text = f"{name} is gated, and {'the account of HF_TOKEN has no access yet' if token else 'no HF_TOKEN is set'}"
        fix = f"accept its licence at {page}, and set HF_TOKEN to a token of that account"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{name} has no revision {revision!r}"
        drop = f"@{revision}" if kind == "adapter" else f"{key.partition('.')[0]}.revision"
        fix = f"see {page}/commits/main, or drop {drop}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        how = "HF_TOKEN may not see it" if token else "it is private and no HF_TOKEN is set"
        text, fix = f"no {noun} at {name!r} on the hub, or {how}", suggest_name(name, kind)
    elif status is not None:
        text = f"{endpoint} answers {status} about {name}"
        fix = "unset HF_TOKEN, or set it to a valid one" if status == 401 else "try again later"
    elif getattr(error, "errno", None) in UNWRITABLE:
        text, fix = reason, MORE_ROOM
    elif isinstance(error, ValueError | RuntimeError) or type(error).__module__.startswith("datasets"):
        text, fix = reason, "data.subset names one of several" if isinstance(error, ValueError) else ""
    else:
        here = f"there is no such file or directory (looked from {Path.cwd()})"
        silent, fix = describe_silence()
        text = f"no {noun} at {name!r}: {here}, {hub_cache()} does not have it, and {silent}"
        fix = f"give a directory, or {fix}"
    return UsageError(text, key=key, fix=fix)


def describe_silence() -> tuple[str, str]:
    """Return why the hub has said nothing, and the fix."""
    if hf.constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set, so the hub was not asked", "unset HF_HUB_OFFLINE"
    return f"{hf.constants.ENDPOINT} does not answer", "connect"


def suggest_name(name: str, kind: str) -> str:
    """Return "did you mean ...?" with a repository of the same owner whose name is near, or an empty string."""
    owner = name.partition("/")[0]
    list_repositories: Any = hf.HfApi().list_datasets if kind == "dataset" else hf.HfApi().list_models
    try:
        near = nearest(name, [repository.id for repository in list_repositories(author=owner, limit=500)])
    except errors.HTTPError:
        return ""
    return f"did you mean {near}?" if near else ""


def status_of(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
