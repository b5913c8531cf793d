"""A copy of the checkpoints in another place, made by a thread of its own beside the training."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cogumi.checkpoints.commit import open_staging, remove_staging, set_aside
from cogumi.checkpoints.manifest import (
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
from cogumi.checkpoints.mirror_store import RECORD_NAME, HubRepository, Store, is_inside, redact_secrets, secrets_of
from cogumi.checkpoints.verify import inspect
from cogumi.core.durability import NO_SPACE, sync_path
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_bytes

log = logging.getLogger(__name__)

KEPT_WHOLE = 2  # The newest one is what a fault damages, as on the disk.
RETRY_SECONDS = 60.0  # The libraries retry a request by themselves; this is for a server that is gone.
TROUBLE_SECONDS = 60.0  # At the end: what has not worked by then is given up.
REMIND_SECONDS = 600.0  # between two lines about a mirror that falls behind


class Mirror:
    """Sends committed checkpoints to another place, and fetches the newest one from there.

    url: a directory (its parent exists), any fsspec URL such as s3://BUCKET/PATH, or hf://USER/REPO[/folder]. Each run has a
    place of its own: the checkpoints of two runs have the same names. Writes there at once, and raises UsageError where that
    is not possible, with the reason.
    """

    def __init__(self, url: str | Path) -> None:
        self.secrets = secrets_of(str(url))
        self.place: Store | HubRepository = HubRepository(str(url)) if str(url).startswith("hf://") else Store(str(url))
        self.changed = threading.Condition()
        self.waiting: Path | None = None
        self.under_way: Path | None = None
        self.stopped = False
        self.thread: threading.Thread | None = None
        self.lost: dict[Path, str] = {}
        self.trouble = ""
        self.failing = False  # the checkpoint under way
        # The step of the newest whole checkpoint in the place, since when, and how many were sent after it.
        self.reached: int | None = None
        self.since, self.behind, self.reminded = time.time(), 0, -math.inf
        with self.reaching("cannot be written"):
            self.place.check()

    def __str__(self) -> str:
        return self.place.name

    def send(self, checkpoint: Path) -> None:
        """Have a committed checkpoint mirrored; returns at once. Of several that wait only the newest is sent."""
        with self.changed:
            if checkpoint in self.pending():
                return
            if self.waiting is not None:
                log.warning("%s is not mirrored to %s: a newer one waits", self.waiting, self)
            self.waiting, self.stopped = checkpoint, False
            self.behind += 1
            self.warn_if_stalled()
            if self.thread is None:
                # A daemon: it may wait for a server that is gone, and the process must end when it is told to.
                self.thread = threading.Thread(target=self.work, name="cogumi-mirror", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def pending(self) -> frozenset[Path]:
        """The checkpoints that are still to be read. One that is still removed is named as not mirrored."""
        return frozenset(path for path in (self.waiting, self.under_way) if path is not None)

    def stalled(self) -> str:
        """From which older step a fresh machine would resume, and why; "" where the newest checkpoint is there or on its way."""
        if self.behind == 0 or (self.behind == 1 and not (self.trouble or self.lost)):
            return ""
        where = "before the first checkpoint" if self.reached is None else f"at step {self.reached}"
        since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.since))
        why = self.trouble or next(reversed(self.lost.values()), "it is slower than the training saves")
        return f"resumability has stalled {where} since {since}: the newest checkpoint is not whole in {self} ({why})"

    def warn_if_stalled(self) -> None:
        if (said := self.stalled()) and time.monotonic() - self.reminded > REMIND_SECONDS:
            self.reminded = time.monotonic()
            log.warning("%s", said)

    def finish(self, patience: float, ended: Callable[[], bool] = lambda: False) -> list[Path]:
        """Wait until everything has arrived, at most `patience` seconds, or a minute of trouble, or until `ended`.

        Returns what was not mirrored since the last time, each logged as an error with its reason."""
        with self.changed:
            if self.pending():
                names = ", ".join(path.name for path in self.pending())
                log.warning("waiting for %s to reach %s, at most %.0f minutes", names, self, patience / 60)
            deadline, troubled = time.monotonic() + patience, math.inf
            while self.pending() and time.monotonic() < min(deadline, troubled) and not ended():
                self.changed.wait(0.2)
                troubled = min(troubled, time.monotonic() + TROUBLE_SECONDS) if self.failing else math.inf
            for path in self.pending():
                self.lost[path] = self.trouble or f"it was not there after {patience:.0f} s"
                log.error("%s did not reach %s: %s", path, self, self.lost[path])
            self.waiting, self.stopped, self.failing = None, True, False
            self.changed.notify_all()
            lost, self.lost = self.lost, {}
            return list(lost)

    def work(self) -> None:
        """In the thread: mirror what waits, and try again what failed, until nothing is left."""
        while True:
            with self.changed:
                self.under_way, self.waiting = self.waiting, None
                if self.under_way is None:
                    self.thread = None
                    self.changed.notify_all()
                    return
            checkpoint, failure = self.under_way, self.mirror(self.under_way)
            with self.changed:
                self.trouble = "" if failure is None else self.describe(failure)
                self.failing = False
                if failure is None:
                    self.reached, self.since = step_of(checkpoint), time.time()
                    self.behind = int(self.waiting is not None)
                    if self.reminded > -math.inf and not self.behind:
                        self.reminded = -math.inf
                        log.warning("%s is whole in %s: resumability has stalled no longer", checkpoint.name, self)
                elif isinstance(failure, CheckpointDamaged | ValueError):  # of the disk, or a mistake: it stays so
                    self.lost[checkpoint], self.trouble = self.trouble, ""
                    log.error("%s is not mirrored to %s: %s", checkpoint, self, self.lost[checkpoint])
                elif not self.stopped:
                    log.warning("mirroring %s to %s failed (%s)", checkpoint.name, self, self.trouble)
                    self.failing = True
                    self.changed.wait_for(lambda: self.waiting or self.stopped, RETRY_SECONDS)
                    if self.waiting is None and not self.stopped:
                        self.waiting = checkpoint
                    else:
                        self.failing = False
                    self.warn_if_stalled()

    def mirror(self, checkpoint: Path) -> Exception | None:
        """Bring a checkpoint there; what failed, or None once it has arrived."""
        began = time.monotonic()
        try:
            manifest = read_manifest(checkpoint)
            if manifest is None:
                raise CheckpointDamaged("it was removed before it was read, or has no manifest")
            self.place.send(checkpoint, manifest)
        except Exception as error:  # noqa: BLE001  a filesystem may raise anything, and the training must not end by it
            return error
        seconds = time.monotonic() - began
        log.info("%s is in %s and verified (%s, %.0f s)", checkpoint, self, format_bytes(manifest.bytes), seconds)
        try:
            self.remove_older(step_of(checkpoint))
        except Exception as error:  # noqa: BLE001
            log.warning("removing older checkpoints from %s failed (%s)", self, self.describe(error))
        return None

    def remove_older(self, newest: int) -> None:
        """Of checkpoints older than one that has just been verified, leave one whole; and nothing of older uploads."""
        found, whole = self.place.tree(), 1
        for name in newest_first(found):
            files, step = found[name], step_of(Path(name))
            if step > newest and MANIFEST_NAME in files:
                log.warning("%s holds %s of another run: give each run a place of its own", self, name)
            if step >= newest or not files.keys() & {MANIFEST_NAME, RECORD_NAME}:
                continue
            try:
                if MANIFEST_NAME in files:
                    self.manifest_there(name, files)
                    whole += 1
                    if whole <= KEPT_WHOLE:
                        continue
                text = self.place.text(name, MANIFEST_NAME if MANIFEST_NAME in files else RECORD_NAME)
                ours = [file for file in parse_manifest(text).files if file in files and is_inside(file)]
                self.place.discard(name, ours, text)  # what others put there stays
            except CheckpointDamaged as damage:
                log.warning("%s of %s stays as it is: %s", name, self, damage)

    def fetch_newest(
        self, output_dir: Path, newer_than: int, is_ours: Callable[[Identity, str], bool] | None = None
    ) -> Path | None:
        """Download the newest whole checkpoint beyond a step into `output_dir`; None where there is none.

        is_ours: whether one is of this training, from its identity and its place in words (None: any is); it may raise.
        Newer ones that are not whole, or do not verify, are logged with their reason. Raises UsageError where the
        mirror cannot be reached or the disk is full. Raises it too where the mirror has only damaged checkpoints and
        this machine has none (newer_than is -1). A start at step 0 would throw that training away.
        """
        with self.reaching("cannot be listed"):
            found = self.place.tree()
        damaged: list[str] = []
        for name in newest_first(found):
            files, step = found[name], step_of(Path(name))
            if step <= newer_than and MANIFEST_NAME in files:
                self.reached = step
                break
            if step <= newer_than:
                continue
            try:
                with self.reaching("cannot be read"):
                    if MANIFEST_NAME not in files and RECORD_NAME in files:  # an upload that did not end
                        log.warning("%s of %s is not resumed from: its trainer state is not there", name, self)
                        continue
                    manifest = self.manifest_there(name, files)
                    place = f"{name} in the mirror {self}"
                    if is_ours is not None and not is_ours(self.identity_of(name, files), place):
                        log.warning("%s of %s is not resumed from: it is of another training", name, self)
                        continue
                    fetched = self.fetch(name, manifest, output_dir)
                self.reached = step
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
                fix=f"put a good one there, or start over at step 0 with an empty mirror: cogumi.mirror={self}-2",
            )
        return None

    def identity_of(self, name: str, files: dict[str, int]) -> Identity:
        """Raises CheckpointDamaged for a checkpoint that does not name its training."""
        if IDENTITY_NAME not in files:
            raise CheckpointDamaged(f"{IDENTITY_NAME} is missing")
        try:
            return parse_identity(self.place.text(name, IDENTITY_NAME))
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{IDENTITY_NAME} is damaged") from error

    def manifest_there(self, name: str, files: dict[str, int]) -> Manifest:
        """The manifest of a checkpoint in the mirror. Raises CheckpointDamaged where it does not fit what is there."""
        if MANIFEST_NAME not in files:
            raise CheckpointDamaged(f"it has no {MANIFEST_NAME}")
        manifest = parse_manifest(self.place.text(name, MANIFEST_NAME))
        for file, entry in manifest.files.items():
            if not is_inside(file):
                raise CheckpointDamaged(f"{MANIFEST_NAME} lists {file!r}, which is outside the checkpoint")
            if file not in files:
                raise CheckpointDamaged(f"{file} is missing")
            if files[file] != entry.size:
                raise CheckpointDamaged(f"{file} has {files[file]:,} bytes, and {entry.size:,} were saved")
        return manifest

    def fetch(self, name: str, manifest: Manifest, output_dir: Path) -> Path:
        """Download one checkpoint and verify it. Raises CheckpointDamaged where it is not what was saved."""
        log.info("fetching %s from %s (%s)", name, self, format_bytes(manifest.bytes))
        staged = open_staging(output_dir) / name
        try:
            for file in [*manifest.files, MANIFEST_NAME]:
                (staged / file).parent.mkdir(parents=True, exist_ok=True)
                self.place.download(name, file, staged / file)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            reason = f"{name} of the mirror does not fit on the disk of {staged} ({error.strerror})"
            raise UsageError(reason, fix="free space there") from error
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

    @contextmanager
    def reaching(self, failed: str) -> Iterator[None]:
        """Whatever the place raises in the block is a UsageError with the reason; CheckpointDamaged stays as it is."""
        try:
            yield
        except (CheckpointDamaged, UsageError):
            raise
        except Exception as error:
            raise UsageError(
                f"mirror {self} {failed} ({self.describe(error)})",
                fix="correct its address or its access, or leave it out",
            ) from error

    def describe(self, error: Exception) -> str:
        """An error in one line, without the secrets of the URL."""
        return redact_secrets(" ".join(f"{type(error).__name__}: {error}".split()), self.secrets)[:300]


def newest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: step_of(Path(name)), reverse=True)
