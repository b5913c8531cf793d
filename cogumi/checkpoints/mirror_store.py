"""Where a mirror is: a directory, an object store, or a Hugging Face repository."""

import hashlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from cogumi.checkpoints.manifest import CHECKPOINT_NAME, MANIFEST_NAME, CheckpointDamaged, Manifest, parse_manifest
from cogumi.core.durability import sha256_file, sync_path
from cogumi.core.errors import UsageError
from cogumi.core.formatting import pip_command

# A copy of the manifest that is written first: which files are ours while the manifest itself is not there.
RECORD_NAME = "cogumi-upload.json"
HUB_URL = re.compile(r"hf://([\w.-]+/[\w.-]+?)(?:/(.+?))?/*")
CHUNK_BYTES = 1 << 20
REQUEST_SECONDS = 10.0  # without a byte: a process that ends waits for a request that hangs


class ArrivedDifferently(OSError):
    """What is read back from the mirror is not what was sent."""


def is_inside(name: str) -> bool:
    """Whether a name that was read from a mirror stays inside its checkpoint."""
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts and name != ""


def secrets_of(url: str) -> list[str]:
    """What of a URL must not be repeated: the login and the options."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    found = [login, *login.split(":"), parts.query] if parts.scheme else []
    return [secret for each in found for secret in (each, unquote(each)) if secret]


def redact_secrets(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


class Store:
    """A directory of a filesystem that fsspec or pyarrow knows. Raises UsageError for a URL that neither does.

    s3:// goes through pyarrow's client, which every lane has: s3fs needs botocore, and that an older python-dateutil than
    the lanes'. It takes the keys and the profile that the AWS tools take, AWS_ENDPOINT_URL, and options in the URL.
    """

    def __init__(self, url: str) -> None:
        parts, protocol = urlsplit(url), get_protocol(url)
        _, at, host = parts.netloc.rpartition("@")
        self.name = f"{parts.scheme}://{'***@' if at else ''}{host}{parts.path}" if parts.scheme else url
        self.on_s3 = protocol in ("s3", "s3a")
        try:
            if self.on_s3:
                from fsspec.implementations.arrow import ArrowFSWrapper
                from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

                found, self.root = S3FileSystem.from_uri(url)
                options = found.__reduce__()[1][0]  # what the URL says, to which the rest is added
                options |= {"request_timeout": REQUEST_SECONDS, "connect_timeout": REQUEST_SECONDS}
                options |= {"retry_strategy": AwsStandardS3RetryStrategy(max_attempts=3), "allow_delayed_open": True}
                store = S3FileSystem(**options)
                self.fs: Any = ArrowFSWrapper(store, skip_instance_cache=True)
            else:
                self.fs, self.root = fsspec.url_to_fs(url)
        except ImportError as error:
            package = known_implementations[protocol]["class"].partition(".")[0]
            fix = f"{pip_command(f'install {package}=={fsspec.__version__}')}, the version of the installed fsspec"
            reason = f"mirror {self.name}: {protocol}:// needs the package {package} ({error})"
            raise UsageError(reason, fix=fix) from error
        except (ValueError, OSError) as error:
            reason = f"mirror {self.name} cannot be opened ({redact_secrets(str(error), secrets_of(url))})"
            raise UsageError(reason, fix="name a directory, s3://BUCKET/PATH or hf://USER/REPO") from error
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.root = os.path.abspath(self.root) if self.is_local else self.root.rstrip("/")

    def check(self) -> None:
        """Write, read and remove a small file. Raises what fails."""
        if self.is_local and not Path(self.root).parent.is_dir():
            raise FileNotFoundError(f"{Path(self.root).parent} is not there (not mounted?)")
        name, data = f".cogumi-mirror-check-{os.getpid()}", os.urandom(64)
        self.write(name, io.BytesIO(data))
        if b"".join(self.read(name)) != data:
            raise ArrivedDifferently("what was written is read back differently")
        self.fs.rm_file(f"{self.root}/{name}")

    def tree(self) -> dict[str, dict[str, int]]:
        """The size of every file of each checkpoint, whole or not."""
        self.fs.invalidate_cache()
        found: dict[str, dict[str, int]] = {}
        with suppress(FileNotFoundError):
            for path, info in self.fs.find(self.root, detail=True, on_error="raise").items():
                checkpoint, _, file = path.removeprefix(f"{self.root}/").partition("/")
                if file and CHECKPOINT_NAME.fullmatch(checkpoint):
                    found.setdefault(checkpoint, {})[file] = info["size"]
        return found

    def read(self, name: str) -> Iterator[bytes]:
        with self.fs.open(f"{self.root}/{name}", "rb", **({"seekable": False} if self.on_s3 else {})) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def text(self, checkpoint: str, file: str) -> str:
        return b"".join(self.read(f"{checkpoint}/{file}")).decode(errors="replace")

    def download(self, checkpoint: str, file: str, target: Path) -> None:
        with target.open("xb") as local:
            local.writelines(self.read(f"{checkpoint}/{file}"))

    def write(self, name: str, source: BinaryIO) -> None:
        path = f"{self.root}/{name}"
        if not self.on_s3:  # an object store has no directories, and Arrow would put empty objects in their place
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.fs.open(path, "wb") as file:
            shutil.copyfileobj(source, file, CHUNK_BYTES)
        if self.is_local:
            sync_path(Path(path))

    def discard(self, checkpoint: str, files: list[str], manifest: str) -> None:
        """Remove a checkpoint's files. It stops counting as whole first, and what is to go is on record until it is gone."""
        self.write(f"{checkpoint}/{RECORD_NAME}", io.BytesIO(manifest.encode()))
        self.remove(checkpoint, [MANIFEST_NAME, *files, RECORD_NAME])

    def remove(self, checkpoint: str, files: list[str]) -> None:
        """Remove files of a checkpoint in this order, and its directories where no others' files are left in them."""
        for file in files:
            with suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{checkpoint}/{file}")
        for folder in sorted({*map(os.path.dirname, files)}, reverse=True) if self.is_local else ():
            with suppress(OSError):
                os.rmdir(f"{self.root}/{checkpoint}/{folder}")

    def send(self, checkpoint: Path, manifest: Manifest) -> None:
        """Upload a checkpoint, read each file back, and write the manifest last: it proves the rest."""
        name, text = checkpoint.name, (checkpoint / MANIFEST_NAME).read_text(encoding="utf-8")
        if self.is_local and checkpoint.parent.resolve() == Path(self.root).resolve():
            raise ValueError(f"{self.root} is the directory of the checkpoints itself")
        there = self.tree().get(name, {})
        earlier = {file: self.text(name, file) for file in (MANIFEST_NAME, RECORD_NAME) if file in there}
        sizes = {file: entry.size for file, entry in manifest.files.items()}
        if earlier.get(MANIFEST_NAME) == text and sizes.items() <= there.items():
            return
        self.write(f"{name}/{RECORD_NAME}", io.BytesIO(text.encode()))
        stale = {MANIFEST_NAME}  # and what was listed of an earlier checkpoint of this step; others' files stay
        for other in earlier.values():
            with suppress(CheckpointDamaged):
                stale |= {file for file in parse_manifest(other).files if is_inside(file) and file not in sizes}
        self.remove(name, [*stale & there.keys()])
        for file, entry in manifest.files.items():
            if sha256_file(checkpoint / file) != entry.sha256:
                raise CheckpointDamaged(f"{file} has other bytes on the disk than were saved (its sha256 differs)")
            with (checkpoint / file).open("rb") as local:
                self.write(f"{name}/{file}", local)
            back = hashlib.sha256()
            for chunk in self.read(f"{name}/{file}"):
                back.update(chunk)
            if back.hexdigest() != entry.sha256:
                raise ArrivedDifferently(f"{file} is read back differently (its sha256 differs)")
        for folder in (Path(self.root, name), Path(self.root)) if self.is_local else ():
            sync_path(folder)  # the names, before the manifest that counts on them
        self.write(f"{name}/{MANIFEST_NAME}", io.BytesIO(text.encode()))
        if self.text(name, MANIFEST_NAME) != text:
            raise ArrivedDifferently(f"{MANIFEST_NAME} is read back differently")
        self.remove(name, [RECORD_NAME])
        if self.is_local:
            sync_path(Path(self.root, name))


class HubRepository:
    """hf://USER/REPO or hf://USER/REPO/folder: a model repository, made private where there is none.

    One commit a checkpoint, so that it is there whole or not at all. The token is huggingface_hub's: HF_TOKEN, or what
    `hf auth login` saved. What a later commit deletes stays in the repository's history, and counts for the account's
    storage, until it is removed there (Settings, Storage).
    """

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfApi

        found = HUB_URL.fullmatch(url)
        if found is None or found[1].startswith(("datasets/", "spaces/")):
            raise UsageError(f"mirror {url}: write hf://USER/REPO or hf://USER/REPO/folder, a model repository")
        self.name, self.repo = url, found[1]
        self.folder = f"{found[2]}/" if found[2] else ""
        self.api = HfApi()

    def check(self) -> None:
        """Make the repository where it is missing. Raises what the hub answers to a token that cannot write there."""
        self.api.create_repo(self.repo, private=True, exist_ok=True)
        self.api.auth_check(self.repo, write=True)

    def tree(self) -> dict[str, dict[str, int]]:
        """The size of every file of each checkpoint, whole or not."""
        from huggingface_hub import RepoFile
        from huggingface_hub.errors import EntryNotFoundError

        found: dict[str, dict[str, int]] = {}
        with suppress(EntryNotFoundError):  # the folder comes with the first commit
            for entry in self.api.list_repo_tree(self.repo, self.folder.rstrip("/") or None, recursive=True):
                checkpoint, _, file = entry.path.removeprefix(self.folder).partition("/")
                if isinstance(entry, RepoFile) and file and CHECKPOINT_NAME.fullmatch(checkpoint):
                    found.setdefault(checkpoint, {})[file] = entry.size
        return found

    def text(self, checkpoint: str, file: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            self.download(checkpoint, file, Path(folder, "text"))
            return Path(folder, "text").read_text(encoding="utf-8", errors="replace")

    def download(self, checkpoint: str, file: str, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parents[len(Path(file).parts)]) as folder:
            shutil.move(
                self.api.hf_hub_download(self.repo, f"{self.folder}{checkpoint}/{file}", local_dir=folder), target
            )

    def send(self, checkpoint: Path, manifest: Manifest) -> None:
        """Commit the files of the manifest and itself, and compare with what the hub has then."""
        from huggingface_hub.utils.sha import git_hash

        place, files = f"{self.folder}{checkpoint.name}", [*manifest.files, MANIFEST_NAME]
        commit = self.api.upload_folder(
            repo_id=self.repo,
            folder_path=checkpoint,
            path_in_repo=place,
            allow_patterns=files,
            commit_message=f"checkpoint of step {manifest.step}",
        )
        infos = self.api.get_paths_info(self.repo, [f"{place}/{file}" for file in files], revision=commit.oid)
        found: dict[str, Any] = {info.path: info for info in infos}
        for file in files:
            info, here = found.get(f"{place}/{file}"), checkpoint / file
            if info is None:
                raise ArrivedDifferently(f"{file} is not in the commit")
            if file != MANIFEST_NAME and sha256_file(here) != manifest.files[file].sha256:
                raise CheckpointDamaged(f"{file} has other bytes on the disk than were saved (its sha256 differs)")
            same = info.lfs.sha256 == sha256_file(here) if info.lfs else info.blob_id == git_hash(here.read_bytes())
            if not same:
                raise ArrivedDifferently(f"{file} is another file in the commit (its hash differs)")

    def discard(self, checkpoint: str, files: list[str], manifest: str) -> None:
        """Remove a checkpoint's files, in one commit."""
        from huggingface_hub import CommitOperationDelete

        operations = [CommitOperationDelete(f"{self.folder}{checkpoint}/{file}") for file in [*files, MANIFEST_NAME]]
        self.api.create_commit(self.repo, operations, commit_message=f"without {checkpoint}")
