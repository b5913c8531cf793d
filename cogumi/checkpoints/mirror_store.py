"""Where a mirror is: a directory or an object store, read and written at a limited rate.

s3:// goes through pyarrow's client, which every lane has: s3fs needs botocore, and that an older python-dateutil than the
lanes'. It takes the keys and the profile that the AWS tools take, and AWS_ENDPOINT_URL. Everything else is fsspec's.
"""

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from cogumi.checkpoints.manifest import (
    CHECKPOINT_NAME,
    FORMAT,
    MANIFEST_NAME,
    CheckpointDamaged,
    FileEntry,
    Manifest,
    entries_in,
    read_manifest,
    sealed,
)
from cogumi.core.durability import sync_path
from cogumi.core.errors import UsageError
from cogumi.core.formatting import pip

# How much may go at once after a pause: what the rate allows in this many seconds.
BURST_SECONDS = 1.0


class GivenUp(Exception):
    """Nobody waits for the mirror any more."""


class Pace:
    """A token bucket: lets through at most `rate` bytes a second, and nothing any more once it was stopped."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.stopped = threading.Event()
        self.clock = time.monotonic
        self.lock = threading.Lock()
        self.paid_until = self.clock()

    def let(self, size: int) -> None:
        """Return when `size` more bytes may go. Raises GivenUp once stopped."""
        if self.rate is not None:
            with self.lock:
                now = self.clock()
                self.paid_until = max(self.paid_until, now - BURST_SECONDS) + size / self.rate
                wait = self.paid_until - now
            if wait > 0:
                self.stopped.wait(wait)
        if self.stopped.is_set():
            raise GivenUp


# --------------------------------------------------------------------------------------------------------- mirror store


# Beside a checkpoint's files wherever there is no manifest: which of them are whole, and which are on their way in or out.
RECORD_NAME = "cogumi-mirror.json"
CHUNK_BYTES = 1 << 20
S3_OPTIONS = ("region", "endpoint_override", "scheme")
# Arrow's client would try a request for minutes, unheard; the mirror tries again by itself, and says so. A process that
# ends waits for a request that hangs (not one that ends by os._exit), so that the time without a byte is short.
REQUEST_SECONDS, CONNECT_SECONDS, S3_TRIES = 10.0, 10.0, 0


class ArrivedDifferently(OSError):
    """What is read back from the mirror is not what was sent."""


def record_text(step: int, files: dict[str, FileEntry], unfinished: Iterable[str]) -> str:
    """files: whole and verified. unfinished: may be there in part; nobody needs them, unless a manifest says otherwise."""
    entries = {name: asdict(entry) for name, entry in files.items()}
    return sealed({"format": FORMAT, "step": step, "files": entries, "unfinished": sorted(unfinished)})


def read_record(text: str) -> tuple[dict[str, FileEntry], list[str]]:
    """(files, unfinished) of a record. Raises CheckpointDamaged where it cannot be believed."""
    try:
        content = json.loads(text)
        content.pop("checksum")
        if content["format"] != FORMAT or sealed(content) != text or not isinstance(content["unfinished"], list):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{RECORD_NAME} is damaged") from error
    return entries_in(content, RECORD_NAME), [str(file) for file in content["unfinished"]]


def manifest_in(text: str) -> Manifest:
    """A manifest from its text. Raises CheckpointDamaged where it cannot be believed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, MANIFEST_NAME).write_text(text, encoding="utf-8")
        manifest = read_manifest(Path(folder))
    assert manifest is not None
    return manifest


class Store:
    """A directory of a filesystem that fsspec or pyarrow knows. Raises UsageError for a URL that neither does."""

    def __init__(self, url: str) -> None:
        self.name = redacted(url)
        self.fs, root = open_s3(url, self.name) if get_protocol(url) in ("s3", "s3a") else open_any(url, self.name)
        self.root = root.rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)
        # An object store has no directories, and Arrow would put empty objects in their place.
        self.has_folders = get_protocol(url) not in ("s3", "s3a")

    def check(self) -> None:
        """Write, read and remove a small file. Raises what fails."""
        if self.local and not Path(self.root).parent.is_dir():
            raise FileNotFoundError(f"{Path(self.root).parent} is not there (not mounted?)")
        name, data = f".cogumi-mirror-check-{os.getpid()}", os.urandom(64)
        self.write(name, [data])
        if b"".join(self.read(name)) != data:
            raise ArrivedDifferently("what was written is read back differently")
        self.remove(name)

    # ---------------------------------------------------------------------------------------------------- what is there

    def tree(self) -> dict[str, dict[str, int]]:
        """The size of every file of each checkpoint, whole or not."""
        names = [name for name, size in self.list("") if size is None and CHECKPOINT_NAME.fullmatch(name)]
        return {name: dict(self.files_below(name)) for name in names}

    def files_below(self, folder: str, inside: str = "") -> Iterator[tuple[str, int]]:
        for name, size in self.list(f"{folder}/{inside}"):
            if size is None:
                yield from self.files_below(folder, f"{inside}{name}/")
            else:
                yield inside + name, size

    def list(self, folder: str) -> list[tuple[str, int | None]]:
        """(name, size) of what is in a folder; the size of a folder is None. (fsspec's own `find` swallows errors.)"""
        path = f"{self.root}/{folder}".rstrip("/")
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return [
            (PurePosixPath(entry["name"]).name, None if entry["type"] == "directory" else entry["size"])
            for entry in entries
            if entry["name"].strip("/") != path.strip("/")
        ]

    def read(self, name: str) -> Iterator[bytes]:
        options: dict[str, Any] = {} if self.has_folders else {"seekable": False}
        with self.fs.open(f"{self.root}/{name}", "rb", **options) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def text(self, checkpoint: str, file: str) -> str:
        """A small file. Raises CheckpointDamaged where it is not a text."""
        try:
            return b"".join(self.read(f"{checkpoint}/{file}")).decode()
        except UnicodeDecodeError as error:
            raise CheckpointDamaged(f"{file} is damaged: it is not a text") from error

    def download(self, checkpoint: str, file: str, target: Path, pace: Pace) -> None:
        with target.open("xb") as local:
            for chunk in self.read(f"{checkpoint}/{file}"):
                pace.let(len(chunk))
                local.write(chunk)

    # ------------------------------------------------------------------------------------------------------------- sending

    def send(self, checkpoint: Path, manifest: Manifest, whole: bool, arrived: set[str], pace: Pace) -> None:
        """Upload the files of `manifest`, read each back, and then say that they are there.

        whole: with the manifest, so that it can be resumed from; otherwise `manifest` holds the deployable files only.
        arrived: those that an earlier try has brought there; added to. Raises CheckpointDamaged where the files on the
        disk are not those of the manifest any more.
        """
        if self.local and checkpoint.parent.resolve() == Path(self.root).resolve():
            raise ValueError(f"{self.root} is the directory of the checkpoints itself")
        name, step = checkpoint.name, manifest.step
        text = (checkpoint / MANIFEST_NAME).read_text(encoding="utf-8")
        there = dict(self.files_below(name))
        if self.has(there, manifest) and MANIFEST_NAME in there and self.text(name, MANIFEST_NAME) == text:
            return
        stale = self.stale(name, there) - manifest.files.keys()
        self.write(f"{name}/{RECORD_NAME}", [record_text(step, {}, stale | manifest.files.keys()).encode()])
        for file in [MANIFEST_NAME, *sorted(stale)]:
            self.remove(f"{name}/{file}", there=file in there)
        for file, entry in manifest.files.items():
            if file not in arrived:
                self.bring(checkpoint, file, entry, pace)
                arrived.add(file)
        if not self.has(dict(self.files_below(name)), manifest):
            arrived.clear()
            raise ArrivedDifferently(f"files of {name} that had arrived are gone")
        if not whole:
            self.write(f"{name}/{RECORD_NAME}", [record_text(step, manifest.files, []).encode()])
            return
        self.sync(name)
        self.write(f"{name}/{MANIFEST_NAME}", [text.encode()])
        if self.text(name, MANIFEST_NAME) != text:
            raise ArrivedDifferently(f"{MANIFEST_NAME} is read back differently")
        self.remove(f"{name}/{RECORD_NAME}")
        self.sync(name)

    def has(self, there: dict[str, int], manifest: Manifest) -> bool:
        return all(there.get(file) == entry.size for file, entry in manifest.files.items())

    def stale(self, name: str, there: dict[str, int]) -> set[str]:
        """What a manifest or a record of ours lists of an earlier checkpoint of this step. Others' files stay."""
        found: set[str] = set()
        with suppress(CheckpointDamaged):  # then it lists nothing
            if MANIFEST_NAME in there:
                found |= manifest_in(self.text(name, MANIFEST_NAME)).files.keys()
        with suppress(CheckpointDamaged):
            if RECORD_NAME in there:
                kept, unfinished = read_record(self.text(name, RECORD_NAME))
                found |= {*kept, *unfinished}
        return {file for file in found if safe(file)}

    def bring(self, checkpoint: Path, file: str, entry: FileEntry, pace: Pace) -> None:
        name, sent = f"{checkpoint.name}/{file}", hashlib.sha256()

        def chunks() -> Iterator[bytes]:
            with (checkpoint / file).open("rb") as local:
                while chunk := local.read(CHUNK_BYTES):
                    pace.let(len(chunk))
                    sent.update(chunk)
                    yield chunk

        self.write(name, chunks())
        if sent.hexdigest() != entry.sha256:
            raise CheckpointDamaged(f"{file} has other bytes on the disk than were saved (its sha256 differs)")
        back = hashlib.sha256()
        for chunk in self.read(name):
            pace.let(len(chunk))
            back.update(chunk)
        if back.hexdigest() != entry.sha256:
            raise ArrivedDifferently(f"{file} is read back differently (its sha256 differs)")

    def reduce(self, name: str, step: int, keep: dict[str, FileEntry], going: Iterable[str]) -> None:
        """Leave of a checkpoint only what can be deployed, nothing where that is nothing.

        It stops counting as whole before anything is removed, and what was to be removed is on record until it is.
        """
        there, going = dict(self.files_below(name)), [file for file in going if safe(file)]
        self.write(f"{name}/{RECORD_NAME}", [record_text(step, keep, going).encode()])
        for file in (MANIFEST_NAME, *going):
            self.remove(f"{name}/{file}", there=file in there)
        if keep:
            self.write(f"{name}/{RECORD_NAME}", [record_text(step, keep, []).encode()])
            return
        self.remove(f"{name}/{RECORD_NAME}")
        if self.local:
            with suppress(OSError):  # others' files, or folders of ours: nobody takes it for a checkpoint
                os.rmdir(f"{self.root}/{name}")

    # --------------------------------------------------------------------------------------------------------------- files

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        path = f"{self.root}/{name}"
        if self.has_folders:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.fs.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        if self.local:
            sync_path(Path(path))

    def remove(self, name: str, there: bool = True) -> None:
        if there:
            with suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{name}")

    def sync(self, name: str) -> None:
        """Wait until the names in a checkpoint's directory, and its own, are on the disk."""
        if self.local:
            for folder in (Path(self.root, name), Path(self.root)):
                sync_path(folder)


def safe(name: str) -> bool:
    """Whether a name that was read from a mirror stays inside its checkpoint."""
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts and name != ""


# -------------------------------------------------------------------------------------------------------------- which store


def open_any(url: str, name: str) -> tuple[Any, str]:
    protocol = get_protocol(url)
    known = known_implementations.get(protocol)
    try:
        filesystem, path = fsspec.url_to_fs(url)
    except ImportError as error:
        package = known["class"].partition(".")[0] if known else protocol
        raise UsageError(
            f"mirror {name}: {protocol}:// needs the package {package} ({error})",
            fix=(f"{pip(f'install {package}=={fsspec.__version__}')}, the version of the installed fsspec"),
        ) from error
    except ValueError as error:
        raise UsageError(
            f"mirror {name}: nothing is known that reads {protocol}://",
            fix="name a directory, s3://BUCKET/PATH or hf://USER/REPO",
        ) from error
    return filesystem, os.path.abspath(path) if isinstance(filesystem, LocalFileSystem) else path


def open_s3(url: str, name: str) -> tuple[Any, str]:
    """s3://[KEY:SECRET@]BUCKET/PATH[?region=...&endpoint_override=...&scheme=...], as pyarrow writes it."""
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import AwsDefaultS3RetryStrategy, S3FileSystem, resolve_s3_region

    parts = urlsplit(url)
    options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    unknown = sorted(options.keys() - set(S3_OPTIONS))
    login, _, bucket = parts.netloc.rpartition("@")
    if unknown or not bucket:
        what = f"unknown option {unknown[0]}" if unknown else "no bucket"
        raise UsageError(
            f"mirror {name}: {what}", fix=f"write s3://BUCKET/PATH, with {', '.join(S3_OPTIONS)} as ?OPTION=..."
        )
    if login:
        key, _, secret = login.partition(":")
        options |= {"access_key": unquote(key), "secret_key": unquote(secret)}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if "endpoint_override" not in options and endpoint:
        options["endpoint_override"] = endpoint
    regions = ("AWS_REGION", "AWS_DEFAULT_REGION")
    if "region" not in options and "endpoint_override" not in options and not any(map(os.environ.get, regions)):
        try:
            options["region"] = resolve_s3_region(bucket)
        except OSError as error:
            raise UsageError(
                f"mirror {name}: the bucket is not found ({error})", fix="set its name, or AWS_REGION"
            ) from error
    filesystem = S3FileSystem(
        **options,
        request_timeout=REQUEST_SECONDS,
        connect_timeout=CONNECT_SECONDS,
        retry_strategy=AwsDefaultS3RetryStrategy(max_attempts=S3_TRIES),
        allow_delayed_open=True,
    )
    return ArrowFSWrapper(filesystem, skip_instance_cache=True), f"{bucket}{parts.path}"


def redacted(url: str) -> str:
    """A URL without what may be secret in it: the login and the options."""
    parts = urlsplit(url)
    if not parts.scheme:
        return url
    _, at, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{'***@' if at else ''}{host}{parts.path}"


def secrets_of(url: str) -> list[str]:
    """What of a URL must not be repeated, where an error message has it."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    found = [login, *login.split(":"), parts.query] if parts.scheme else []
    return [secret for each in found for secret in (each, unquote(each)) if secret]
