"""Getting a model from the hub before it is loaded: which commit, which files, is there room; then the bytes, whatever happens.

huggingface_hub 1.33 downloads each file under a name of its own process and removes it on failure (its pull request 4228),
so that a killed download of 16 GB begins again with nothing. Here the large files are written to blobs/<hash>.incomplete,
added to by whoever comes next, and become part of the cache when their sha256 is right; then snapshot_download finds them.
"""

import difflib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import httpx
from huggingface_hub import (
    HfApi,
    RepoFile,
    constants,
    get_cached_repo_tree,
    get_token,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.file_download import get_hf_file_metadata, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, hf_raise_for_status, validate_repo_id
from tqdm.auto import tqdm

from cogumi.core.disk_space import Need, disks_of, spoken
from cogumi.core.durability import NO_SPACE, sha256_file
from cogumi.core.errors import UsageError

log = logging.getLogger("cogumi")
# What transformers looks for, in its order; an index names its shards. Everything else of that kind stays on the hub.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Beside the weights: configs, tokenizers in all their forms, chat templates, code of models that bring their own.
BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "additional_chat_templates/*")
OTHER_KINDS = {".gguf", ".onnx", ".pth", ".msgpack", ".h5"}  # of weights, which only others load
AT_ONCE = 8  # files, as huggingface_hub
TRIES = 6  # in a row, of a file of which nothing came; 1, 2, 4, 8, 16 seconds between them
UNREACHABLE = (httpx.ConnectError, httpx.TimeoutException, OfflineModeIsEnabled)
BUSY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a commit. etag: its name among the cache's blobs; sha256: None where the hub tells only git's hash."""

    path: str
    size: int
    etag: str
    sha256: str | None


@dataclass(frozen=True)
class Download:
    """What loading a model from the hub takes. `files` are all that are needed, here or not."""

    name: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def storage(self) -> Path:
        """The repository's directory in the hub's cache."""
        return cache() / repo_folder_name(repo_id=self.name, repo_type="model")

    @property
    def snapshot(self) -> Path:
        return self.storage / "snapshots" / self.commit

    def blob(self, file: RemoteFile) -> Path:
        return self.storage / "blobs" / file.etag

    def partial(self, file: RemoteFile) -> Path:
        return self.storage / "blobs" / f"{file.etag}.incomplete"

    def is_here(self, file: RemoteFile) -> bool:
        return self.blob(file).exists() or (self.snapshot / file.path).exists()

    def bytes_of(self, file: RemoteFile) -> int:
        """How much of a file is here already."""
        return file.size if self.is_here(file) else min(file.size, size_or_0(self.partial(file)))

    @property
    def total(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def here(self) -> int:
        return sum(map(self.bytes_of, self.files))

    @property
    def missing(self) -> list[RemoteFile]:
        return [file for file in self.files if not self.is_here(file)]

    @property
    def linked(self) -> bool:
        """Whether loading finds every file; a fetch that was killed may have left some that are here and not found."""
        return all((self.snapshot / file.path).exists() for file in self.files)

    def __str__(self) -> str:
        here, total = self.here, self.total
        said = f"{self.name} at {self.commit[:7]}: {len(self.files)} files, {spoken(total)}"
        if not self.missing:
            return f"{said}, all in {cache()}"
        return f"{said}; {spoken(here)} are here, {spoken(total - here)} to fetch into {cache()}"


def find_commit(name: str, revision: str | None = None) -> str | None:
    """The commit that a hub id means now, or None for what is no hub id: a directory, or a name the hub could not have.

    Without a network it is the one that the cache knows. Raises UsageError, with the fix, where there is no such model,
    revision or permission, or nobody answers.
    """
    if not is_hub_id(name):
        return None
    try:
        commit: str = HfApi().resolve_revision(name, revision=revision).resolved
        if not (cache() / repo_folder_name(repo_id=name, repo_type="model") / "snapshots" / commit).is_dir():
            # Anybody may ask about a gated model; only this tells whether its files may be had.
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=commit))
    except RemoteEntryNotFoundError:
        raise UsageError(
            f"{name} holds no config.json, so transformers cannot load it",
            key="model.name",
            fix=(
                "an adapter is started from with model.adapter, and a GGUF file has a "
                "full-precision original to name instead"
            ),
        ) from None
    except (HfHubHTTPError, RevisionResolutionError, httpx.TransportError, OfflineModeIsEnabled) as error:
        raise refusal(name, revision, error) from None
    return commit


def plan_download(name: str, commit: str | None) -> Download | None:
    """What is to be fetched for a hub id at a commit, checked against the disk of the cache; None for a directory.

    Fetches at most the index of the weights. Raises UsageError where the repository has no weights that transformers
    loads, the disk has no room for what is missing, or something is missing and nobody answers.
    """
    if commit is None or not is_hub_id(name):
        return None
    try:
        answered, tree = True, list(HfApi().list_repo_tree(name, recursive=True, revision=commit))
        every = {file.path: remote(file) for file in tree if isinstance(file, RepoFile)}
    except UNREACHABLE:
        answered, every = False, known_offline(name, commit)
    except HfHubHTTPError as error:
        raise refusal(name, commit, error) from None
    try:
        weights = weight_files(name, commit, every)
    except (HfHubHTTPError, httpx.TransportError, OfflineModeIsEnabled) as error:
        raise refusal(name, commit, error) from None
    if not answered:
        refuse_incomplete(name, commit, every, weights)
    elif not weights:
        raise UsageError(
            f"model.name: {name} has no weights that transformers loads ({' or '.join(WEIGHTS[::2])})"
            + (f", only {', '.join(others)}" if (others := sorted(OTHER_KINDS & suffixes(every))) else "")
        )
    elif absent := [path for path in weights if path not in every]:
        raise UsageError(
            f"{name} lacks {absent[0]}, which the index of its weights names",
            key="model.name",
            fix="it cannot be loaded",
        )
    wanted = {*weights, *(path for path in every if is_beside(path))}
    download = Download(name, commit, tuple(every[path] for path in sorted(wanted)))
    refuse_no_room(download)
    return download


def fetch(download: Download, told: Callable[[int, int], None] | None = None) -> Path:
    """Fetch what is missing and return the snapshot's directory. What an earlier fetch left is not fetched again.

    told: called about once a second with the bytes that are here and the bytes there will be. Raises UsageError when the
    hub does not answer any more or the disk is full; what came is kept.
    """
    log.info("download: %s", download)
    began, before, total = time.monotonic(), download.here, download.total
    missing = download.missing
    # Without a sha256 it is a text file, and above this size the hub serves it in chunks only: both are huggingface_hub's.
    ours = [file for file in missing if file.sha256 and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE]
    stopping = threading.Event()
    pool = ThreadPoolExecutor(AT_ONCE)
    bar = tqdm(total=total, initial=before, unit="B", unit_scale=True, desc=download.name, disable=not missing)
    try:
        pending: set[Future[None]] = {pool.submit(fetch_file, download, file, stopping) for file in ours}
        while pending:
            done, pending = wait(pending, timeout=1, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            here = download.here
            bar.update(here - bar.n)
            if told is not None:
                told(here, total)
        if not download.linked:
            paths = [literal(file.path) for file in download.files]
            snapshot_download(download.name, revision=download.commit, allow_patterns=paths)
    except OSError as error:
        if error.errno in NO_SPACE:
            so_far = f"{spoken(download.here)} of {spoken(total)} are here"
            raise UsageError(
                f"{cache()}: {error.strerror} while {download.name} was fetched ({so_far})",
                key="model.name",
                fix="make room, or set HF_HOME to a directory on another disk",
            ) from None
        if isinstance(error, HfHubHTTPError):
            raise refusal(download.name, download.commit, error) from None
        raise
    except httpx.TransportError as error:
        raise UsageError(broken_off(download, error)) from None
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)
        bar.close()
    seconds, fetched = time.monotonic() - began, total - before
    if missing:
        log.info("download: %s in %.1f s (%s/s)", spoken(fetched), seconds, spoken(fetched / max(seconds, 1e-9)))
    return download.snapshot


def fetch_model(name: str, revision: str | None = None) -> Path | None:
    """The directory of a hub id's files at a revision, fetched where they are not here; None for a directory."""
    download = plan_download(name, find_commit(name, revision))
    return None if download is None else fetch(download)


# ------------------------------------------------------------------------------------------------------------ one file


def fetch_file(download: Download, file: RemoteFile, stopping: threading.Event) -> None:
    """Bring one file into the cache, from where an earlier try ended. Raises what the last of TRIES tries raised."""
    lock = cache() / ".locks" / download.storage.name / f"{file.etag}.lock"  # huggingface_hub's own
    for path in (lock, download.partial(file)):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        failed = 0
        while not download.is_here(file) and not stopping.is_set():
            before = size_or_0(download.partial(file))
            try:
                stream_rest(download, file, stopping)
                if not stopping.is_set():
                    accept(download, file)
            except (httpx.TransportError, HfHubHTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code not in BUSY:
                    raise
                here = size_or_0(download.partial(file))
                failed = 1 if here > before else failed + 1
                if failed == TRIES:
                    raise
                pause = 2 ** (failed - 1)
                log.warning(
                    "download: %s broke off at %s of %s (%s); goes on from there in %d s, try %d of %d",
                    *(file.path, spoken(here), spoken(file.size), reason_of(error), pause, failed + 1, TRIES),
                )
                stopping.wait(pause)


def stream_rest(download: Download, file: RemoteFile, stopping: threading.Event) -> None:
    """Add what is missing to the partial file. Every try asks the hub again: where it sends us expires within the hour."""
    partial = download.partial(file)
    have = size_or_0(partial)
    if have >= file.size:
        return
    url = hf_hub_url(download.name, file.path, revision=download.commit)
    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    with (
        partial.open("ab", buffering=0) as out,
        get_session().stream(
            "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
        ) as answer,
    ):
        hf_raise_for_status(answer)
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:  # the range was ignored, and all of it comes
            out.truncate(0)
        for block in answer.iter_bytes():
            out.write(block)
            if stopping.is_set():
                return


def accept(download: Download, file: RemoteFile) -> None:
    """Make a whole partial file part of the cache; remove it, and raise httpx.ProtocolError, where it is not that file."""
    partial = download.partial(file)
    size = size_or_0(partial)
    if size < file.size:
        raise httpx.RemoteProtocolError(f"the connection ended after {spoken(size)}")
    if size > file.size or sha256_file(partial) != file.sha256:
        partial.unlink()
        raise httpx.RemoteProtocolError("what came has another sha256, and is thrown away")
    partial.rename(download.blob(file))


# ---------------------------------------------------------------------------------------------------- what is needed


def weight_files(name: str, commit: str, paths: Iterable[str]) -> list[str]:
    """Of a repository's weights those that transformers would load; none where it has none that transformers loads."""
    there = set(paths)
    first = next((path for path in WEIGHTS if path in there), None)
    if first is None:
        return []
    if not first.endswith(".index.json"):
        return [first]
    index = json.loads(Path(hf_hub_download(name, first, revision=commit)).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def is_beside(path: str) -> bool:
    """Whether a file is loaded beside the weights. A pattern without a slash is for the top directory alone."""
    return any(PurePosixPath(path).match(kind) and path.count("/") == kind.count("/") for kind in BESIDE)


def suffixes(paths: Iterable[str]) -> set[str]:
    return {PurePosixPath(path).suffix for path in paths}


def refuse_incomplete(name: str, commit: str, every: Mapping[str, RemoteFile], weights: list[str]) -> None:
    """Raise UsageError where nobody answers and the cache does not have all of a model."""
    here = Download(name, commit, tuple(every.values()))
    absent = [path for path in weights if path not in every or not here.is_here(every[path])]
    if absent or not weights:
        what = (
            f"{len(absent)} of {len(weights)} files of its weights, the first {absent[0]}" if absent else "its weights"
        )
        raise UsageError(
            f"{cache()} has {name} without {what}, and nobody answers at {constants.ENDPOINT}: "
            "connect, or unset HF_HUB_OFFLINE",
            key="model.name",
        )


def remote(file: RepoFile) -> RemoteFile:
    if file.lfs is None:
        return RemoteFile(file.path, file.size, file.blob_id, None)
    return RemoteFile(file.path, file.lfs.size, file.lfs.sha256, file.lfs.sha256)


def known_offline(name: str, commit: str) -> dict[str, RemoteFile]:
    """The files of a commit as the cache knows them: all, where they were listed once, or those that are in it."""
    try:
        return {file.path: remote(file) for file in get_cached_repo_tree(name, revision=commit)}
    except CachedRepoTreeNotFoundError:
        snapshot = Download(name, commit, ()).snapshot
        here = (path for path in snapshot.rglob("*") if path.is_file())
        return {
            (inside := path.relative_to(snapshot).as_posix()): RemoteFile(inside, path.stat().st_size, "", None)
            for path in here
        }


def refuse_no_room(download: Download) -> None:
    """Raise UsageError where the filesystem of the cache does not have what is missing."""
    missing = download.total - download.here
    (disk,) = disks_of([Need("model", cache(), missing, missing, 2 * len(download.missing))], ask=True)
    if disk.refusal:
        raise UsageError(
            f"{download}; {disk.filesystem.mount} has {spoken(disk.filesystem.space.free)} free: {disk.refusal}",
            key="model.name",
            fix="make room, or set HF_HOME to a directory on another disk",
        )


# --------------------------------------------------------------------------------------------------------- refusals


def refusal(name: str, revision: str | None, error: Exception) -> UsageError:
    """What the hub's error means to whoever wrote the config, in one line."""
    token, page = get_token() is not None, f"{constants.ENDPOINT}/{name}"
    if isinstance(error, GatedRepoError):
        how = "the account of HF_TOKEN has no access yet" if token else "no HF_TOKEN is set"
        text = f"{name} is gated, and {how}: accept its licence at {page}, and set HF_TOKEN to a token of that account"
    elif isinstance(error, RevisionNotFoundError):
        text = f"{name} has no revision {revision!r}; see {page}/commits/main, or drop model.revision"
    elif isinstance(error, RepositoryNotFoundError):
        how = "or HF_TOKEN may not see it" if token else "or it is private and no HF_TOKEN is set"
        text = f"no model at {name!r} on the hub, {how}{nearest(name)}"
    elif isinstance(error, HfHubHTTPError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
        text = (
            f"{constants.ENDPOINT} refuses HF_TOKEN; make another at {constants.ENDPOINT}/settings/tokens, or unset it"
        )
    elif isinstance(error, HfHubHTTPError):
        text = f"{constants.ENDPOINT} answers {error.response.status_code} about {name}; try again later"
    else:
        text = (
            f"no model at {name!r}: there is no such directory, the cache {cache()} does not have it, and nobody answers "
            f"at {constants.ENDPOINT}: give a directory, connect, or unset HF_HUB_OFFLINE"
        )
    return UsageError(text, key="model.name")


def nearest(name: str) -> str:
    """A model of the same owner whose name is near, as words to add."""
    owner, slash, _ = name.partition("/")
    if not slash:
        return ""
    try:
        names = [model.id for model in HfApi().list_models(author=owner, limit=500)]
    except (HfHubHTTPError, httpx.TransportError) as error:
        log.debug("no names near %s: %s", name, error)
        return ""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def broken_off(download: Download, error: Exception) -> str:
    return (
        f"model.name: the download of {download.name} broke off for good ({reason_of(error)}); {spoken(download.here)} of "
        f"{spoken(download.total)} are here and stay: start again with the same words"
    )


def reason_of(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"the hub answers {error.response.status_code}"
    return " ".join(f"{type(error).__name__}: {error}".split())


# --------------------------------------------------------------------------------------------------------- small things


def is_hub_id(name: str) -> bool:
    """Whether a name is one that the hub could have, and is no directory here."""
    if Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def cache() -> Path:
    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def literal(path: str) -> str:
    """A path as a pattern that matches it alone."""
    return path.replace("[", "[[]")


def size_or_0(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
