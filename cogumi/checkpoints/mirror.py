"""A copy of the checkpoints in another place, made by a thread of its own while the training goes on.

The newest two checkpoints are there with all of them; of older ones stays what can be deployed. A place is a directory or
an object store (mirror_store.py), or a Hugging Face repository (mirror_hub.py).
"""

import errno
import itertools
import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from cogumi.checkpoints.commit import open_staging, remove_staging, set_aside, step_of
from cogumi.checkpoints.identity import IDENTITY_NAME, Identity, identity_in
from cogumi.checkpoints.manifest import MANIFEST_NAME, CheckpointDamaged, FileEntry, Manifest, read_manifest
from cogumi.checkpoints.mirror_hub import HubRepository
from cogumi.checkpoints.mirror_store import (
    RECORD_NAME,
    GivenUp,
    Pace,
    Store,
    manifest_in,
    read_record,
    safe,
    secrets_of,
)
from cogumi.checkpoints.verify import ADAPTER_CONFIG, inspect
from cogumi.core.durability import NO_SPACE, sync_path
from cogumi.core.errors import UsageError

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# What a model is loaded from, beside its base: PEFT's files, the tokenizer's and the processor's.
DEPLOYABLE = re.compile(
    r"(.+/)?(adapter_config\.json|adapter_model\..*|README\.md|chat_template\..*|additional_chat_templates/.*"
    r"|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|spiece\.model"
    r"|(pre)?processor_config\.json)"
)
FIRST_WAIT, LONGEST_WAIT = 1.0, 300.0
TROUBLE_SECONDS = 60.0  # at the end: what has not worked by then is said, and not waited for
# In the user's hands at the start, where waiting long for a wrong address helps nobody.
TRIES_AT_START = 4
# Checkpoints whose adapters wait for a place that cannot be reached; each keeps its space on the disk until then.
MOST_WAITING = 8
# How many stay whole in the mirror: the newest one is what a fault damages, as on the disk.
KEPT_WHOLE = 2
REMIND_SECONDS = 600.0  # between two lines about a mirror that falls behind

PERMANENT = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
# As S3's servers and Arrow's client spell it.
REFUSED = re.compile(
    r"access_?denied|no_?such_?bucket|invalid_?access_?key|signature_?does_?not_?match|(expired|invalid|authentication)_?token"
    r"|account_?problem|HTTP status 40[0134]|no credentials",
    re.IGNORECASE,
)
TRY_AGAIN_STATUS = (408, 425, 429)


class Mirror:
    """Sends committed checkpoints to another place, and fetches the newest one from there.

    url: a directory (its parent is there already), any fsspec URL such as s3://BUCKET/PATH, or hf://USER/REPO[/folder]. One run
    a place: two runs' checkpoints have the same names. rate: bytes a second, both ways together; None: as fast as it goes.
    Writes there at once, and raises UsageError where that is not possible, with the reason.
    """

    def __init__(self, url: str | Path, rate: float | None = None) -> None:
        if rate is not None and rate <= 0:
            raise UsageError(f"mirror: a rate of {rate} bytes a second sends nothing", fix="leave it out for no limit")
        self.rate = rate
        self.secrets = secrets_of(str(url))
        self.place: Store | HubRepository = HubRepository(str(url)) if str(url).startswith("hf://") else Store(str(url))
        self.changed = threading.Condition()
        self.waiting: dict[Path, bool] = {}  # oldest first; whether all of it is to go, or the adapter alone
        self.under_way: Path | None = None
        self.lost: dict[Path, str] = {}
        self.trouble = ""
        # The step of the newest whole checkpoint in the place, since when, and how many were sent after it.
        self.reached: int | None = None
        self.since = time.time()
        self.behind = 0
        self.said = -math.inf
        self.pace: Pace | None = None  # while a thread is at work
        self.patiently("cannot be written", self.place.check)

    def __str__(self) -> str:
        return self.place.name

    # ------------------------------------------------------------------------------------------------------ for the training

    def send(self, checkpoint: Path) -> None:
        """Have a committed checkpoint mirrored; returns at once. Of several that wait, only the newest goes with its
        trainer state, and it goes first; of the others goes what can be deployed."""
        with self.changed:
            if checkpoint in self.waiting:
                return
            self.waiting[checkpoint] = True
            self.behind += 1
            self.warn_if_stalled()
            while len(self.waiting) > MOST_WAITING:
                oldest = next(each for each in self.waiting if each != self.under_way)
                del self.waiting[oldest]
                self.lost[oldest] = f"{MOST_WAITING} newer ones wait"
                log.error("%s is not mirrored to %s: %s", oldest, self, self.lost[oldest])
            if self.pace is None:
                self.pace = Pace(self.rate)
                # A daemon: it may be waiting for a server that is gone, and the process must end when it is told to.
                threading.Thread(target=self.work, args=(self.pace,), name="cogumi-mirror", daemon=True).start()
            self.changed.notify_all()

    def busy(self) -> frozenset[Path]:
        """The checkpoints that are still to be read. One that is removed all the same is named as not mirrored."""
        with self.changed:
            return frozenset(self.waiting)

    def stalled(self) -> str:
        """From which older step a fresh machine would resume, and why; "" where the newest checkpoint is there or on its way."""
        if self.behind == 0 or (self.behind == 1 and not (self.trouble or self.lost)):
            return ""
        where = "before the first checkpoint" if self.reached is None else f"at step {self.reached}"
        since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.since))
        why = self.trouble or next(reversed(self.lost.values()), "it is slower than the training saves")
        return (
            f"resumability has stalled {where} since {since}: the newest checkpoint is not whole in {self} ({why}); "
            "without this disk the training would resume from there"
        )

    def warn_if_stalled(self) -> None:
        if (said := self.stalled()) and time.monotonic() - self.said > REMIND_SECONDS:
            self.said = time.monotonic()
            log.warning("%s", said)

    def finish(self, patience: float, ended: Callable[[], bool] = lambda: False) -> list[Path]:
        """Wait until everything has arrived, at most `patience` seconds, or a minute of trouble, or until `ended`; then stop.

        Returns what was not mirrored since the last time, each logged as an error with its reason."""
        with self.changed:
            if self.waiting:
                names = ", ".join(path.name for path in self.waiting)
                log.warning("waiting for %s to reach %s, at most %.0f minutes", names, self, patience / 60)
            deadline, troubled = time.monotonic() + patience, math.inf
            while self.waiting and time.monotonic() < min(deadline, troubled) and not ended():
                self.changed.wait(0.2)
                troubled = min(troubled, time.monotonic() + TROUBLE_SECONDS) if self.trouble else math.inf
            for path in self.waiting:
                self.lost[path] = self.trouble or f"it was not there after {patience:.0f} s"
                log.error("%s did not reach %s: %s", path, self, self.lost[path])
            self.waiting.clear()
            if self.pace is not None:
                self.pace.stopped.set()
                self.pace = None
            self.changed.notify_all()
            lost, self.lost = self.lost, {}
            return list(lost)

    # --------------------------------------------------------------------------------------------------------- in the thread

    def work(self, pace: Pace) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or pace.stopped.is_set())
                if pace.stopped.is_set():
                    return
                # First what can be resumed from, then the adapters of those before it.
                checkpoint, whole = next(
                    (item for item in self.waiting.items() if not item[1]), next(reversed(self.waiting.items()))
                )
                self.under_way = checkpoint
            reason = self.mirror(checkpoint, whole, pace)
            with self.changed:
                if pace.stopped.is_set():
                    return
                if reason and whole and self.is_superseded(checkpoint):
                    continue  # while it was tried again: at least what can be deployed, when a newer one is there
                if reason:
                    self.lost[checkpoint] = reason
                    log.error("%s is not mirrored to %s: %s", checkpoint, self, reason)
                    self.warn_if_stalled()
                elif whole:
                    self.arrived(checkpoint)
                self.waiting.pop(checkpoint, None)
                self.under_way = None
                self.changed.notify_all()

    def arrived(self, checkpoint: Path) -> None:
        """A checkpoint is whole in the place: of those before it the adapter is enough."""
        paths = list(self.waiting)
        older = paths[: paths.index(checkpoint)]
        self.waiting.update(dict.fromkeys(older, False))
        self.reached, self.since, self.behind = step_of(checkpoint), time.time(), len(paths) - len(older) - 1
        if self.said > -math.inf and not self.behind:
            self.said = -math.inf
            log.warning("%s is whole in %s: resumability has stalled no longer", checkpoint.name, self)

    def is_superseded(self, checkpoint: Path) -> bool:
        return next(reversed(self.waiting), checkpoint) != checkpoint

    def mirror(self, checkpoint: Path, whole: bool, pace: Pace) -> str:
        """Bring a checkpoint there: "" once it has arrived, or why it has not."""
        arrived: set[str] = set()

        def bring() -> None:
            manifest = manifest_of(checkpoint)
            adapter = deployable(manifest)
            files = adapter | {file: entry for file, entry in manifest.files.items() if whole}
            if not files:
                log.info("%s is not mirrored: a newer one waits, and it has no adapter", checkpoint)
                return
            began = time.monotonic()
            self.place.send(checkpoint, Manifest(manifest.step, files), whole, arrived, pace)
            size = sum(entry.size for entry in files.values()) / 1e9
            what = checkpoint.name if whole else f"the adapter of {checkpoint.name}"
            log.info("%s is in %s and verified (%.2f GB, %.0f s)", what, self, size, time.monotonic() - began)

        def given_up() -> bool:
            return pace.stopped.is_set() or (whole and self.is_superseded(checkpoint))

        reason = self.until_it_works(f"mirroring {checkpoint.name} to {self}", bring, given_up)
        if whole and not reason:
            self.until_it_works(f"removing older trainer state from {self}", lambda: self.tidy(checkpoint), given_up)
        return reason

    def until_it_works(self, what: str, act: Callable[[], None], given_up: Callable[[], bool]) -> str:
        """Try again after what passes; "" once it worked, or the reason where it does not pass or a newer one waits."""
        for attempt in itertools.count():
            try:
                act()
            except GivenUp:
                return "it was given up"
            except Exception as error:  # noqa: BLE001  a filesystem may raise anything, and the training must not end by it
                self.trouble = self.why(error)
                if not passes(error):
                    log.warning("%s failed (%s)", what, self.trouble)
                    return self.trouble
            else:
                self.trouble = ""
                return ""
            wait = waiting_time(attempt)
            log.warning("%s failed (%s); again in %.0f s", what, self.trouble, wait)
            with self.changed:
                if self.changed.wait_for(given_up, wait):
                    return self.trouble
        raise AssertionError  # count() does not end

    def tidy(self, newest: Path) -> None:
        """Of checkpoints older than one that has just been verified, leave one whole, and of the rest what can be deployed."""
        found, whole = self.place.tree(), 1
        for name in newest_first(found):
            files, step = found[name], step_of(Path(name))
            if step > step_of(newest) and MANIFEST_NAME in files:
                log.warning("%s holds %s of another run: give each run a place of its own", self, name)
            if step >= step_of(newest):
                continue
            try:
                if MANIFEST_NAME in files:
                    manifest = self.manifest_there(name, files)
                    whole += 1
                    if whole <= KEPT_WHOLE:
                        continue
                    keep = deployable(manifest)
                    self.place.reduce(name, step, keep, manifest.files.keys() - keep.keys())
                elif RECORD_NAME in files:
                    keep, unfinished = read_record(self.place.text(name, RECORD_NAME))
                    if unfinished:
                        self.place.reduce(name, step, keep, unfinished)
            except CheckpointDamaged as damage:
                log.warning("%s of %s stays as it is: %s", name, self, damage)

    # --------------------------------------------------------------------------------------------------------------- fetching

    def fetch_newest(
        self, output_dir: Path, newer_than: int, is_ours: Callable[[Identity, str], bool] | None = None
    ) -> Path | None:
        """Download the newest whole checkpoint beyond a step into `output_dir`; None where there is none.

        is_ours: whether one is of this training, from what it says of itself and its place in words (None: any is); it may raise.
        Newer ones that are not whole, or do not verify, are logged with their reason. Raises UsageError where the mirror
        cannot be reached, the disk does not take it, or all that is there is damaged and nothing is here (newer_than is
        -1): starting anew would be the wrong answer to that.
        """
        found = self.patiently("cannot be listed", self.place.tree)
        damaged: list[str] = []
        for name in newest_first(found):
            if step_of(Path(name)) <= newer_than:
                if MANIFEST_NAME in found[name]:
                    self.reached = step_of(Path(name))
                    break
                continue
            # An adapter, or an upload that did not end.
            if MANIFEST_NAME not in found[name] and RECORD_NAME in found[name]:
                log.warning("%s of %s is not resumed from: its trainer state is not there", name, self)
                continue
            try:
                if MANIFEST_NAME not in found[name]:
                    raise CheckpointDamaged(f"it has no {MANIFEST_NAME}")
                place = f"{name} in the mirror {self}"
                if is_ours is not None and not is_ours(self.identity_of(name, found[name]), place):
                    log.warning("%s of %s is not resumed from: it is of another training", name, self)
                    continue
                fetched = self.fetch(name, found[name], output_dir)
                self.reached = step_of(fetched)
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
                fix=(
                    "put a good one there, or start over at step 0 on purpose: the same command "
                    f"with an empty mirror, cogumi.mirror={self}-2 (protect: mirror=)"
                ),
            )
        return None

    def identity_of(self, name: str, files: Mapping[str, int]) -> Identity:
        """Raises CheckpointDamaged for a checkpoint that does not say whose it is."""
        if IDENTITY_NAME not in files:
            raise CheckpointDamaged(f"{IDENTITY_NAME} is missing")
        try:
            return identity_in(self.patiently("cannot be read", lambda: self.place.text(name, IDENTITY_NAME)))
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{IDENTITY_NAME} is damaged") from error

    def fetch(self, name: str, files: dict[str, int], output_dir: Path) -> Path:
        """Download one checkpoint and verify it. Raises CheckpointDamaged where it is not what was saved."""
        manifest = self.patiently("cannot be read", lambda: self.manifest_there(name, files))
        log.info("fetching %s from %s (%.2f GB)", name, self, manifest.bytes / 1e9)
        staged, pace = open_staging(output_dir) / name, Pace(self.rate)
        for file in [*manifest.files, MANIFEST_NAME]:
            target = staged / file
            target.parent.mkdir(parents=True, exist_ok=True)
            self.patiently("cannot be read", partial(self.download, name, file, target, pace))
        finding = inspect(staged)
        if finding.state != "verified":
            raise CheckpointDamaged(finding.reason)
        for path in sorted(staged.rglob("*"), reverse=True):
            sync_path(path)
        sync_path(staged)
        final = output_dir / name
        if final.exists():
            log.warning("%s was there already, and is %s now", final, set_aside(final).name)
        staged.rename(final)
        sync_path(output_dir)
        log.info("%s is fetched from %s and verified", final, self)
        return final

    def download(self, name: str, file: str, target: Path, pace: Pace) -> None:
        target.unlink(missing_ok=True)
        try:
            self.place.download(name, file, target, pace)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise UsageError(
                    f"{name} of the mirror does not fit on the disk of {target.parent} ({error.strerror})",
                    fix="free space there",
                ) from error
            raise

    def manifest_there(self, name: str, files: dict[str, int]) -> Manifest:
        """The manifest of a checkpoint in the mirror. Raises CheckpointDamaged where it does not fit what is there."""
        manifest = manifest_in(self.place.text(name, MANIFEST_NAME))
        for file, entry in manifest.files.items():
            if not safe(file):
                raise CheckpointDamaged(f"{MANIFEST_NAME} lists {file!r}, which is outside the checkpoint")
            if file not in files:
                raise CheckpointDamaged(f"{file} is missing")
            if files[file] != entry.size:
                raise CheckpointDamaged(f"{file} has {files[file]:,} bytes, and {entry.size:,} were saved")
        return manifest

    # ----------------------------------------------------------------------------------------------------------------- failures

    def patiently(self, failed: str, act: Callable[[], Result]) -> Result:
        """Try a few times what somebody waits for. Raises UsageError with the reason; CheckpointDamaged as it is."""
        for attempt in itertools.count(1):
            try:
                return act()
            except (CheckpointDamaged, UsageError):
                raise
            except Exception as error:
                no_space = isinstance(error, OSError) and error.errno in NO_SPACE
                if attempt == TRIES_AT_START or no_space or not passes(error):
                    raise UsageError(
                        f"mirror {self} {failed} ({self.why(error)})",
                        fix="correct its address or its access, or leave it out",
                    ) from error
                time.sleep(waiting_time(attempt - 1))
        raise AssertionError  # count() does not end

    def why(self, error: BaseException) -> str:
        """An error in one line, without the secrets of the URL."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text[:300]


def passes(error: Exception) -> bool:
    """Whether what failed may work later: anything but a refusal, a thing that is not there, and a mistake in a program."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status >= 500 or status in TRY_AGAIN_STATUS
    if isinstance(error, OSError):
        return error.errno not in PERMANENT and not REFUSED.search(str(error))
    return not isinstance(
        error,
        CheckpointDamaged
        | UsageError
        | TypeError
        | ValueError
        | LookupError
        | AttributeError
        | ImportError
        | NotImplementedError,
    )


def waiting_time(attempt: int) -> float:
    """Seconds before the next try: twice as many each time, and by chance less, so that many do not come at once."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(attempt, 20)) * random.uniform(0.5, 1.0)


def manifest_of(checkpoint: Path) -> Manifest:
    manifest = read_manifest(checkpoint)
    if manifest is None:
        raise CheckpointDamaged(
            "it was removed before it was read" if not checkpoint.exists() else f"it has no {MANIFEST_NAME}"
        )
    return manifest


def newest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: step_of(Path(name)), reverse=True)


def deployable(manifest: Manifest) -> dict[str, FileEntry]:
    """The files that an adapter is loaded from; none where the whole model was trained."""
    if not any(file.rpartition("/")[2] == ADAPTER_CONFIG for file in manifest.files):
        return {}
    return {file: entry for file, entry in manifest.files.items() if DEPLOYABLE.fullmatch(file)}
