"""Copy checkpoints to a directory, an object store or a Hugging Face repository, in a thread."""

import hashlib
import json
import logging
import math
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol
from huggingface_hub import HfApi

from cogumi.checkpoints.commit import open_staging, remove_staging, set_aside
from cogumi.checkpoints.manifest import (
    CHECKPOINT_NAME,
    IDENTITY_NAME,
    MANIFEST_NAME,
    CheckpointDamaged,
    Identity,
    Manifest,
    parse_identity,
    parse_manifest,
    read_manifest,
    step_of,
)
from cogumi.checkpoints.verify import inspect
from cogumi.core.durability import NO_SPACE, sha256_file, sync_path
from cogumi.core.errors import UsageError, best_effort
from cogumi.core.formatting import format_bytes, format_command, is_command
from cogumi.core.liveness import beat

log = logging.getLogger(__name__)

MAX_WHOLE = 2  # in the mirror, beside the best one: a fault damages the newest one, as on the disk
RETRY_SECONDS = 60.0  # for a server that is gone; the libraries retry single requests themselves
TROUBLE_SECONDS = 60.0  # of failures at the end of the training, after which the upload is given up
REQUEST_SECONDS = 10.0  # without a byte: a process that ends waits for a request that hangs
CHUNK_BYTES = 1 << 20
Files = dict[str, int]  # the sizes of a checkpoint's files, by name


class Mirror:
    """Sends committed checkpoints to another place, and fetches the newest one from there.

    url: a directory whose parent exists, any fsspec URL such as s3://BUCKET/PATH, or hf://USER/REPO[/folder]. Each run needs
    a place of its own: the checkpoints of two runs have the same names. Raises UsageError unless it can be written to.
    """

    def __init__(self, url: str | Path) -> None:
        if "@" in urlsplit(str(url)).netloc:
            fix = "keys belong into the environment, such as AWS_ACCESS_KEY_ID, or a profile"
            raise UsageError("the mirror's URL holds a login, which would be written into logs", fix=fix)
        self.url, self.place = str(url), Store(str(url))
        self.changed = threading.Condition()
        self.waiting: Path | None = None
        self.under_way: Path | None = None
        self.given_up: Path | None = None  # by `finish`, while its last try was under way
        self.stopped = False
        self.thread: threading.Thread | None = None
        self.lost: dict[Path, str] = {}
        self.trouble = ""  # the failure of the last try
        self.failing = False  # it will be tried again
        self.reached: int | None = None  # the step of the newest whole checkpoint in the mirror
        self.behind = 0  # checkpoints sent after that one
        self.newest = 0  # the step of the last one sent
        self.behind_since = self.waiting_since = 0.0
        self.best: Path | None = None  # which stays there
        self.follows: Path | None = None  # the best one, where it is not there yet
        with self.place.reaching("cannot be written"):
            self.place.check()

    def __str__(self) -> str:
        return self.place.name

    def send(self, checkpoint: Path) -> None:
        """Queue a committed checkpoint; returns at once. Of several that wait only the newest is sent."""
        with self.changed:
            if checkpoint in self.pending():
                return
            if self.waiting is not None:
                log.warning("%s is not mirrored to %s: a newer one waits", self.waiting, self)
            self.waiting, self.stopped = checkpoint, False
            self.newest, self.waiting_since = step_of(checkpoint), time.monotonic()
            self.behind_since = self.behind_since if self.behind else self.waiting_since
            self.behind += 1
            if self.thread is None:
                # A daemon: it may wait for a server that is gone, and must not keep the process alive.
                self.thread = threading.Thread(target=self.work, name="cogumi-mirror", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def pending(self) -> frozenset[Path]:
        """Return the checkpoints that are still to be read, and must not be removed."""
        return frozenset(path for path in (self.waiting, self.under_way) if path is not None)

    def stalled(self) -> str:
        """Say from which older step a fresh machine would resume, and why; "" if the newest checkpoint is there or on its way."""
        if self.behind == 0 or (self.behind == 1 and not (self.trouble or self.lost)):
            return ""
        where = "before the first checkpoint" if self.reached is None else f"at step {self.reached}"
        why = self.trouble or next(reversed(self.lost.values()), "it is slower than the training saves")
        return f"resumability has stalled {where}: the newest checkpoint is not whole in {self} ({why})"

    def lag(self) -> dict[str, float]:
        """Return by how many steps the newest whole checkpoint there is behind the newest here, and for how many seconds."""
        with self.changed:
            late = self.behind > 0
            steps, seconds = self.newest - (self.reached or 0), time.monotonic() - self.behind_since
        return {"perf/mirror_lag_steps": steps * late, "perf/mirror_lag_seconds": seconds * late}

    def finish(self, patience: float, ended: Callable[[], bool] = lambda: False) -> list[Path]:
        """Wait until everything has arrived, at most `patience` seconds, or a minute of failures, or until `ended`.

        Returns what was not mirrored since the last call, each logged as an error with its reason.
        """
        with self.changed:
            if self.pending():
                names = ", ".join(path.name for path in self.pending())
                log.warning("waiting for %s to reach %s, at most %.0f minutes", names, self, patience / 60)
            deadline, troubled = time.monotonic() + patience, math.inf
            while self.pending() and time.monotonic() < min(deadline, troubled) and not ended():
                self.changed.wait(0.2)
                troubled = min(troubled, time.monotonic() + TROUBLE_SECONDS) if self.failing else math.inf
            for path in self.pending():
                self.lose(path, self.trouble or "it took too long")
            self.given_up, self.waiting, self.stopped, self.failing = self.under_way, None, True, False
            self.changed.notify_all()
            lost, self.lost = self.lost, {}
            return list(lost)

    def lose(self, checkpoint: Path, why: str) -> None:
        self.lost[checkpoint] = why
        log.error("%s is not mirrored to %s: %s", checkpoint, self, why)

    def work(self) -> None:
        """Mirror what waits, and retry what failed, until nothing is left. Runs in the thread."""
        while True:
            with self.changed:
                self.under_way, self.waiting, self.given_up = self.waiting, None, None
                if self.under_way is None:
                    self.thread = None
                    self.changed.notify_all()
                    return
            checkpoint, failure = self.under_way, self.mirror(self.under_way)
            with self.changed:
                # A try that was given up says nothing of what was sent since; what was known before it stays.
                self.trouble, self.failing = self.trouble if failure and checkpoint == self.given_up else "", False
                if failure is None:
                    self.note_arrival(checkpoint)
                elif isinstance(failure, CheckpointDamaged | ValueError):  # of the disk, or a mistake: it stays so
                    self.lose(checkpoint, describe(failure))
                elif checkpoint != self.given_up:
                    self.trouble, self.failing = describe(failure), not self.stopped
                    log.warning("mirroring %s to %s failed (%s)", checkpoint.name, self, self.trouble)
                    self.changed.wait_for(lambda: self.waiting or self.stopped, RETRY_SECONDS)
                    if self.waiting is None and not self.stopped:
                        self.waiting = checkpoint

    def note_arrival(self, checkpoint: Path) -> None:
        """Record a checkpoint that has arrived, and have the best one follow the newest where it was passed over."""
        if checkpoint != self.best or step_of(checkpoint) == self.newest:
            self.reached, self.behind = step_of(checkpoint), int(self.waiting is not None)
            self.behind_since = self.waiting_since
        if self.waiting is None and self.follows != checkpoint:
            self.waiting = self.follows

    def mirror(self, checkpoint: Path) -> Exception | None:
        """Upload a checkpoint and remove older ones. Returns the error, or None once it has arrived."""
        try:
            manifest = read_manifest(checkpoint)
            if manifest is None:
                raise CheckpointDamaged("it was removed before it was read, or has no manifest")
            self.place.send(checkpoint, manifest)
        except Exception as error:  # noqa: BLE001  a filesystem may raise anything, and the training must not end by it
            return error
        log.info("%s is in %s and verified (%s)", checkpoint, self, format_bytes(manifest.bytes))
        with best_effort(f"remove older checkpoints from {self}"):
            tree = self.place.tree()
            older = [name for name in newest_first(tree) if step_of(Path(name)) < step_of(checkpoint)]
            complete = [name for name in older if MANIFEST_NAME in tree[name]]
            best = "" if self.best is None else self.best.name
            self.follows = None if MANIFEST_NAME in tree.get(best, {}) else self.best
            for name in older if checkpoint.name != best or step_of(checkpoint) == self.newest else ():
                if (name in complete[MAX_WHOLE - 1 :] and name != best) or is_unfinished(tree[name]):
                    self.place.remove(name, tree[name])
        return None

    def fetch_newest(
        self, output_dir: Path, newer_than: int, is_ours: Callable[[Identity, str], bool] = lambda *_: True
    ) -> Path | None:
        """Download the newest whole checkpoint beyond a step (-1: any) into `output_dir`; None if there is none.

        Raises UsageError if the mirror cannot be read. Or it has only damaged checkpoints and this machine has none:
        starting at step 0 would throw that training away. is_ours: gets a checkpoint's identity and a description.
        """
        with self.place.reaching("cannot be listed"):
            tree = self.place.tree()
        damaged: list[str] = []
        for name in newest_first(tree):
            files, step = tree[name], step_of(Path(name))
            if step <= newer_than:
                self.reached = step if MANIFEST_NAME in files else None
                break
            if is_unfinished(files):
                log.warning("%s of %s is not resumed from: its upload did not end (no %s)", name, self, MANIFEST_NAME)
                continue
            try:
                with self.place.reaching("cannot be read"):
                    manifest = self.manifest_there(name, files)
                    identity = parse_identity(self.place.text(name, IDENTITY_NAME) if IDENTITY_NAME in files else "")
                    if not is_ours(identity, f"{name} in the mirror {self}"):
                        log.warning("%s of %s is not resumed from: it is of another training", name, self)
                        continue
                    fetched = self.fetch(name, manifest, output_dir)
                self.reached = step
                self.fetch_best(fetched, tree)
                return fetched
            except CheckpointDamaged as damage:
                log.warning("%s of %s is not resumed from: %s", name, self, damage)
                damaged.append(f"{name}: {damage}")
            finally:
                remove_staging(output_dir)
        if damaged and newer_than < 0:
            raise UsageError(
                f"mirror {self}: none of its {len(damaged)} checkpoints can be resumed from "
                f"({damaged[0]}), and {output_dir} holds none",
                fix=f"put a good one there, or start over at step 0, on purpose and with an empty mirror: {self.restart()}",
            )
        return None

    def restart(self) -> str:
        """Return the command that trains from step 0, with a mirror beside this one; its override alone in a script."""
        place, *query = self.url.partition("?")
        mirror = f"cogumi.mirror={place}-2{''.join(query)}"
        words = [word for word in sys.argv if not word.startswith("cogumi.mirror=")]
        return format_command([*words, mirror]) if is_command(words[0]) else shlex.quote(mirror)

    def fetch_best(self, fetched: Path, tree: dict[str, Files]) -> None:
        """Download the best checkpoint of the training that a fetched one is of, where it is another one and not here."""
        with suppress(OSError, ValueError):  # plain Trainer's state may be missing, which a resume refuses
            state = json.loads((fetched / "trainer_state.json").read_text(encoding="utf-8"))
            name = Path(state.get("best_model_checkpoint") or fetched.name).name
            if CHECKPOINT_NAME.fullmatch(name) and not (fetched.parent / name).exists():
                try:
                    with self.place.reaching("cannot be read"):
                        self.fetch(name, self.manifest_there(name, tree.get(name, {})), fetched.parent)
                except CheckpointDamaged as damage:
                    log.warning("%s, the best one, cannot be fetched from %s: %s", name, self, damage)

    def manifest_there(self, name: str, files: Files) -> Manifest:
        """Read the manifest of a checkpoint in the mirror. Raises CheckpointDamaged if it does not fit the files there."""
        if MANIFEST_NAME not in files:
            raise CheckpointDamaged(f"it has no {MANIFEST_NAME}")
        manifest = parse_manifest(self.place.text(name, MANIFEST_NAME))
        for file in manifest.files:
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or file == "":
                raise CheckpointDamaged(f"{MANIFEST_NAME} lists {file!r}, which is outside the checkpoint")
            if file not in files:
                raise CheckpointDamaged(f"{file} is missing")
        return manifest

    def fetch(self, name: str, manifest: Manifest, output_dir: Path) -> Path:
        """Download and verify one checkpoint. Raises CheckpointDamaged if it is not what was saved."""
        log.info("fetching %s from %s (%s)", name, self, format_bytes(manifest.bytes))
        staged = open_staging(output_dir) / name
        for file in [*manifest.files, MANIFEST_NAME]:
            self.place.fs.get_file(f"{self.place.root}/{name}/{file}", str(staged / file))
            beat()
        finding = inspect(staged)
        if finding.state != "verified":
            raise CheckpointDamaged(finding.reason)
        for path in [*sorted(staged.rglob("*"), reverse=True), staged]:
            sync_path(path)
        final = output_dir / name
        if final.exists():
            log.warning("%s was there already, and is %s now", final, set_aside(final).name)
        staged.rename(final)
        sync_path(output_dir)
        log.info("%s is fetched from %s and verified", final, self)
        return final


def describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def newest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: step_of(Path(name)), reverse=True)


def is_unfinished(files: Files) -> bool:
    """Detect an interrupted upload or removal: the identity is uploaded first and removed last."""
    return IDENTITY_NAME in files and MANIFEST_NAME not in files


def open_s3(url: str) -> tuple[Any, str]:
    """Open S3 by pyarrow's client: s3fs needs botocore, and that an older python-dateutil than the lanes have."""
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    class S3(ArrowFSWrapper):
        """An object store has no directories; Arrow would put empty objects in their place."""

        def mkdirs(self, path: str, exist_ok: bool = False) -> None:
            pass

        def isdir(self, path: str) -> bool:
            return False  # of what is downloaded: every path is a file's

        def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return super().open(path, mode, **options | ({"seekable": False} if mode == "rb" else {}))

    client, root = S3FileSystem.from_uri(url)
    options = client.__reduce__()[1][0]  # what the URL says, to which the rest is added
    options |= {"request_timeout": REQUEST_SECONDS, "connect_timeout": REQUEST_SECONDS}
    options |= {"retry_strategy": AwsStandardS3RetryStrategy(max_attempts=3), "allow_delayed_open": True}
    return S3(S3FileSystem(**options), skip_instance_cache=True), root


class Store:
    """A directory of a filesystem that fsspec or pyarrow knows.

    hf:// is huggingface_hub's filesystem, where each written file is a commit: a checkpoint's files go as one.
    """

    def __init__(self, url: str) -> None:
        self.name, protocol = url.partition("?")[0], get_protocol(url)
        self.on_s3, self.on_hub = protocol in ("s3", "s3a"), protocol == "hf"
        self.root: str
        try:
            self.fs, self.root = open_s3(url) if self.on_s3 else fsspec.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            fix = "name a directory, s3://BUCKET/PATH or hf://USER/REPO"
            raise UsageError(f"mirror {self.name} cannot be opened ({error})", fix=fix) from error
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.root = self.root.rstrip("/")
        if self.is_local:
            self.fs, self.root = LocalFileSystem(auto_mkdir=True), os.path.abspath(self.root)
        self.repository = "/".join(self.root.split("/")[:2])  # on the hub, of a root such as USER/REPO/folder

    @contextmanager
    def reaching(self, failed: str) -> Iterator[None]:
        """Turn whatever the store raises into a UsageError with the reason; CheckpointDamaged stays as it is."""
        try:
            yield
        except (CheckpointDamaged, UsageError):
            raise
        except Exception as error:  # each of fsspec's stores has errors of its own
            full = isinstance(error, OSError) and error.errno in NO_SPACE
            fix = "free space" if full else "correct its address or its access, or leave it out"
            raise UsageError(f"mirror {self.name} {failed} ({describe(error)})", fix=fix) from error

    def check(self) -> None:
        """Write, read and remove a small file. Creates a private repository if there is none. Raises what fails."""
        if self.is_local and not Path(self.root).parent.is_dir():
            raise FileNotFoundError(f"{Path(self.root).parent} is not there (not mounted?)")
        if self.on_hub:
            HfApi().create_repo(self.repository, private=True, exist_ok=True)
            HfApi().auth_check(self.repository, write=True)
            return
        path, data = f"{self.root}/.cogumi-mirror-check-{os.getpid()}", os.urandom(64)
        self.write(path, data)
        if self.fs.cat_file(path) != data:
            raise OSError("what was written is read back differently")
        self.fs.rm_file(path)

    def tree(self, names: re.Pattern[str] = CHECKPOINT_NAME) -> dict[str, Files]:
        """List the files of each checkpoint, whole or not; or of the directories of other names."""
        self.fs.invalidate_cache()
        checkpoints: dict[str, Files] = {}
        options = {} if self.on_hub else {"on_error": "raise"}
        with suppress(FileNotFoundError):
            for path, info in self.fs.find(self.root, detail=True, **options).items():
                checkpoint, _, file = path.removeprefix(f"{self.root}/").partition("/")
                if file and names.fullmatch(checkpoint):
                    checkpoints.setdefault(checkpoint, {})[file] = info["size"]
        return checkpoints

    def text(self, checkpoint: str, file: str) -> str:
        return bytes(self.fs.cat_file(f"{self.root}/{checkpoint}/{file}")).decode(errors="replace")

    def write(self, path: str, data: bytes) -> None:
        self.fs.pipe_file(path, data)
        if self.is_local:
            sync_path(Path(path))

    def remove(self, checkpoint: str, files: Iterable[str]) -> None:
        """Remove a checkpoint; without its manifest, removed first, it no longer counts as whole."""
        place = f"{self.root}/{checkpoint}"
        if MANIFEST_NAME in files:
            self.fs.rm_file(f"{place}/{MANIFEST_NAME}")
        if not self.on_s3:
            self.fs.rm(place, recursive=True)
            return
        for file in sorted({*files} - {MANIFEST_NAME}, key=lambda file: file == IDENTITY_NAME):
            self.fs.rm_file(f"{place}/{file}")

    def send(self, checkpoint: Path, manifest: Manifest, sealed: str = "") -> None:
        """Upload a checkpoint, read each file back, and write the manifest last: it proves the rest.

        sealed: the manifest's text, of another directory than a checkpoint, which is sent in any case.
        """
        name, text = checkpoint.name, sealed or (checkpoint / MANIFEST_NAME).read_text(encoding="utf-8")
        if not sealed and (uploaded := self.tree().get(name)):
            sizes = {file: entry.size for file, entry in manifest.files.items()}
            if (
                MANIFEST_NAME in uploaded
                and self.text(name, MANIFEST_NAME) == text
                and sizes.items() <= uploaded.items()
            ):
                return
            if not uploaded.keys() & {MANIFEST_NAME, IDENTITY_NAME}:
                raise ValueError(f"{name} there is not cogumi's")
            self.remove(name, uploaded)
        for file, entry in manifest.files.items():
            if sha256_file(checkpoint / file) != entry.sha256:
                raise CheckpointDamaged(f"{file} has other bytes on the disk than were saved (its sha256 differs)")
        self.upload(checkpoint, sorted(manifest.files, key=lambda file: file != IDENTITY_NAME))
        for file, entry in manifest.files.items():
            digest = hashlib.sha256()
            with self.fs.open(f"{self.root}/{name}/{file}", "rb") as opened:
                while chunk := opened.read(CHUNK_BYTES):
                    digest.update(chunk)
            if digest.hexdigest() != entry.sha256:
                raise OSError(f"{file} is read back differently (its sha256 differs)")
        self.write(f"{self.root}/{name}/{MANIFEST_NAME}", text.encode())
        if self.text(name, MANIFEST_NAME) != text:
            raise OSError(f"{MANIFEST_NAME} is read back differently")

    def upload(self, checkpoint: Path, files: list[str]) -> None:
        if self.on_hub:
            inside = "/".join([*self.root.split("/")[2:], checkpoint.name])
            HfApi().upload_folder(
                repo_id=self.repository, folder_path=checkpoint, path_in_repo=inside, allow_patterns=files
            )
            self.fs.invalidate_cache()
            return
        for file in files:
            path = f"{self.root}/{checkpoint.name}/{file}"
            # So that no reader sees half of it; a checkpoint has a manifest for that.
            beside = f"{path}.partial" if self.is_local and not CHECKPOINT_NAME.fullmatch(checkpoint.name) else path
            self.fs.put_file(str(checkpoint / file), beside)
            if self.is_local:
                sync_path(Path(beside))
                os.replace(beside, path)
