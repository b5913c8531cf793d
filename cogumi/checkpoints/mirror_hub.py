"""A mirror in a Hugging Face repository: one commit a checkpoint, so that it is there whole or not at all.

What a later commit deletes stays in the repository's history, and counts for the account's storage, until it is removed
there (Settings, Storage).
"""

import hashlib
import io
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cogumi.checkpoints.manifest import CHECKPOINT_NAME, MANIFEST_NAME, FileEntry, Manifest
from cogumi.checkpoints.mirror_store import RECORD_NAME, ArrivedDifferently, Pace, record_text
from cogumi.core.durability import sha256_file
from cogumi.core.errors import UsageError

URL = re.compile(r"hf://([\w.-]+/[\w.-]+?)(?:/(.+?))?/*")


class HubRepository:
    """hf://USER/REPO or hf://USER/REPO/folder: a model repository, made private where there is none.

    The token is huggingface_hub's: HF_TOKEN, or what `hf auth login` saved.
    """

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfApi

        found = URL.fullmatch(url)
        if found is None or found[1].startswith(("datasets/", "spaces/")):
            raise UsageError(f"mirror {url}: write hf://USER/REPO or hf://USER/REPO/folder, a model repository")
        self.name, self.repo = url, found[1]
        self.folder = f"{found[2]}/" if found[2] else ""
        self.api = HfApi()

    def check(self) -> None:
        """Make the repository where it is missing. Raises what the hub answers to a token that cannot write there."""
        self.api.create_repo(self.repo, private=True, exist_ok=True)
        self.api.auth_check(self.repo, write=True)

    # ---------------------------------------------------------------------------------------------------- what is there

    def tree(self) -> dict[str, dict[str, int]]:
        """The size of every file of each checkpoint, whole or not."""
        from huggingface_hub import RepoFile
        from huggingface_hub.errors import EntryNotFoundError

        found: dict[str, dict[str, int]] = {}
        try:
            for entry in self.api.list_repo_tree(self.repo, self.folder.rstrip("/") or None, recursive=True):
                checkpoint, _, file = entry.path.removeprefix(self.folder).partition("/")
                if isinstance(entry, RepoFile) and file and CHECKPOINT_NAME.fullmatch(checkpoint):
                    found.setdefault(checkpoint, {})[file] = entry.size
        except EntryNotFoundError:  # the folder comes with the first commit
            return {}
        return found

    def text(self, checkpoint: str, file: str) -> str:
        """A small file."""
        with tempfile.TemporaryDirectory() as folder:
            return self.fetched(f"{checkpoint}/{file}", folder).read_text(encoding="utf-8", errors="replace")

    def fetched(self, name: str, folder: str, revision: str | None = None) -> Path:
        return Path(self.api.hf_hub_download(self.repo, self.folder + name, revision=revision, local_dir=folder))

    def download(self, checkpoint: str, file: str, target: Path, pace: Pace) -> None:
        pace.let(0)
        with tempfile.TemporaryDirectory(dir=target.parents[len(Path(file).parts)]) as folder:
            self.fetched(f"{checkpoint}/{file}", folder).rename(target)

    # ------------------------------------------------------------------------------------------------------------- sending

    def send(self, checkpoint: Path, manifest: Manifest, whole: bool, arrived: set[str], pace: Pace) -> None:
        """Commit the files of `manifest`, and compare with what the hub has then. See Store.send."""
        from huggingface_hub import CommitOperationAdd

        name = checkpoint.name
        files: dict[str, Path | bytes] = {file: checkpoint / file for file in manifest.files}
        if whole:
            files[MANIFEST_NAME] = checkpoint / MANIFEST_NAME
        else:
            files[RECORD_NAME] = record_text(manifest.step, manifest.files, []).encode()
        operations: list[Any] = [
            CommitOperationAdd(f"{self.folder}{name}/{file}", self.source(content, pace))
            for file, content in files.items()
        ]
        pace.let(0)
        what = "checkpoint" if whole else "adapter"
        commit = self.api.create_commit(self.repo, operations, commit_message=f"{what} of step {manifest.step}")
        wanted = {file: entry.sha256 for file, entry in manifest.files.items()}
        if whole:
            wanted[MANIFEST_NAME] = sha256_file(checkpoint / MANIFEST_NAME)
        self.compare(name, wanted, commit.oid)

    def source(self, content: Path | bytes, pace: Pace) -> Any:
        """What is handed to the hub's client: a file that is read at our pace, where there is one, or its path.

        The client sends an open file over plain HTTP; with a path it may use its faster protocol, which has no brake.
        """
        if isinstance(content, bytes) or pace.rate is None:
            return content
        return Braked(content, pace)

    def compare(self, name: str, wanted: dict[str, str], revision: str) -> None:
        paths = {f"{self.folder}{name}/{file}": file for file in wanted}
        told = {info.path: info for info in self.api.get_paths_info(self.repo, list(paths), revision=revision)}
        for path, file in paths.items():
            info: Any = told.get(path)
            if info is None:
                raise ArrivedDifferently(f"{file} is not in the commit")
            if info.lfs is not None:
                sha256 = info.lfs.sha256
            else:
                with tempfile.TemporaryDirectory() as folder:
                    sha256 = hashlib.sha256(self.fetched(f"{name}/{file}", folder, revision).read_bytes()).hexdigest()
            if sha256 != wanted[file]:
                raise ArrivedDifferently(f"{file} is another file in the commit (its sha256 differs)")

    def reduce(self, name: str, step: int, keep: dict[str, FileEntry], going: Iterable[str]) -> None:
        """Leave of a checkpoint only what can be deployed, nothing where that is nothing."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        there, place = self.tree().get(name, {}), f"{self.folder}{name}/"
        gone = [file for file in [MANIFEST_NAME, *going] if file in there]
        operations: list[Any] = [CommitOperationDelete(place + file) for file in gone]
        if keep:
            operations.append(CommitOperationAdd(place + RECORD_NAME, record_text(step, keep, []).encode()))
        elif RECORD_NAME in there:
            operations.append(CommitOperationDelete(place + RECORD_NAME))
        if operations:
            self.api.create_commit(
                self.repo, operations, commit_message=f"{'adapter alone' if keep else 'nothing'} of {name}"
            )


class Braked(io.BufferedReader):
    """A file that is read no faster than a pace allows. Hashing it, which the hub's client does first, counts as well."""

    def __init__(self, path: Path, pace: Pace) -> None:
        super().__init__(io.FileIO(path, "rb"))
        self.pace = pace

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.pace.let(len(data))
        return data
