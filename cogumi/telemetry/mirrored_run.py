"""A run's files in its mirror, beside the checkpoints: `run/`, and `adapter/` once it is trained.

What another machine needs to continue the run is in each checkpoint, as one file that the checkpoint's manifest covers: at
whatever moment a machine is destroyed, the newest whole checkpoint there has it as it was when that was saved.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cogumi.checkpoints.commit import remove_if_there
from cogumi.checkpoints.interruption import Watchdog
from cogumi.checkpoints.manifest import MANIFEST_NAME, CheckpointDamaged, describe_files, parse_manifest, seal
from cogumi.checkpoints.mirror import Mirror, Store, describe
from cogumi.core.durability import sha256_file, write_synced
from cogumi.core.errors import UsageError, best_effort
from cogumi.core.liveness import beat
from cogumi.core.run_directory import (
    COMPARISON,
    DECISIONS,
    FORECAST,
    ROLLOUTS,
    SAMPLES_FILE,
    is_running,
    same_process,
    this_process,
    write_atomic,
    write_json,
)
from cogumi.telemetry.status import AT_WORK, read_json_or_empty

log = logging.getLogger(__name__)

RUN, ADAPTER = "run", "adapter"  # the names of their directories
MIRRORED_ADAPTER = "mirrored adapter"  # the check of the verdict
PACKED = "cogumi-run-files.json"  # in a checkpoint: the texts of RESUMED, by name
RESUMED = (
    *("config.yaml", DECISIONS, FORECAST, "loss.json", "metrics.jsonl", SAMPLES_FILE, ROLLOUTS),
    *("flags.json", "heartbeat.json", "status.json"),
)
# As they were last, whatever the checkpoint, and the key that tells when.
NEWER = {"flags.json": "step", "heartbeat.json": "time", "status.json": "time"}
# In this order: the state goes last, as it tells that the rest is there.
SENT = (
    *RESUMED[:-1],
    *("run.log", "metrics.json", "forgetting.json", COMPARISON, "verdict.json", "report.html", "DONE", "status.json"),
)
FINISHED = "finished"  # begins the states of a run that came to its end
LOOK_SECONDS, SEND_SECONDS, HUB_SECONDS = 1.0, 30.0, 120.0  # each upload to the hub is a commit
RETRY_SECONDS = 15.0
END_SECONDS = 30.0  # for the thread, and then for a server that fails, after a run has ended
ADAPTER_SECONDS = 3600.0  # for which the adapter is tried
LARGE_BYTES = 10e6  # of a file that is sent less often than SEND_SECONDS, in proportion
LOG_BYTES = 1_000_000  # of run.log, its end


class RunMirror:
    """Sends what has changed in a run's directory, and its adapter, from a thread; a failing server never ends the run."""

    def __init__(self, run_dir: Path, url: str) -> None:
        self.run_dir, self.place = run_dir, Store(url)
        self.sent: dict[str, tuple[int, int]] = {}
        self.not_before: dict[str, float] = {}
        self.interval = HUB_SECONDS if self.place.on_hub else SEND_SECONDS
        self.adapter: Path | None = None  # until it is there
        self.trouble = ""  # the failure of the last try
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work, name="cogumi-run-mirror", daemon=True)

    def work(self) -> None:
        """Send twice a minute, and at once what is final, until the run is over. Runs in the thread."""
        due = 0.0
        while not self.over.wait(LOOK_SECONDS):
            status = self.run_dir / "status.json"
            is_final = read_json_or_empty(status).get("state", AT_WORK[0]) not in AT_WORK
            is_urgent = self.adapter is not None or (is_final and signature(status) != self.sent.get(status.name))
            if time.monotonic() >= due or (is_urgent and not self.trouble):
                self.send()
                due = time.monotonic() + (RETRY_SECONDS if self.trouble else self.interval)

    def send(self, everything: bool = False) -> None:
        try:
            self.send_files(everything)
            if self.adapter is not None and not everything:
                text = seal(describe_files(self.adapter, 0))
                self.place.send(self.adapter, parse_manifest(text), text)
                log.info("%s is in %s and verified", self.adapter, self.place.name)
                self.adapter = None
            self.trouble = ""
        except Exception as error:  # noqa: BLE001  a filesystem may raise anything, and the training must not end by it
            if not self.trouble:
                log.warning("the run does not reach %s, and is tried again (%s)", self.place.name, describe(error))
            self.trouble = describe(error)

    def send_files(self, everything: bool) -> None:
        """Upload the files that changed since they were sent. everything: also large ones that were sent a moment ago."""
        now, changed = time.monotonic(), dict[str, tuple[int, int]]()
        for name in SENT:
            seen = signature(self.run_dir / name)
            if seen is not None and seen != self.sent.get(name) and (everything or now >= self.not_before.get(name, 0)):
                changed[name] = seen
        with TemporaryDirectory(prefix="cogumi-mirror-") as scratch:
            copies = Path(scratch, RUN)  # as they are now: the run goes on writing
            copies.mkdir()
            for name in changed:
                data = (self.run_dir / name).read_bytes()
                (copies / name).write_bytes(data[-LOG_BYTES:] if name == "run.log" else data)
            if changed:
                self.place.upload(copies, list(changed))
        self.sent |= changed
        self.not_before |= {name: now + SEND_SECONDS * size / LARGE_BYTES for name, (_, size) in changed.items()}

    def wait_for_adapter(self) -> str:
        """Wait until the adapter is in the mirror, at most an hour. Returns why it is not; "" once it is."""
        deadline = time.monotonic() + ADAPTER_SECONDS
        while self.adapter is not None and time.monotonic() < deadline:
            beat()  # it has a limit of its own
            time.sleep(0.1)
        missing = "" if self.adapter is None else self.trouble or "its upload takes too long"
        self.adapter = None
        return missing

    def close(self) -> None:
        """Send what is left. A run that was refused, and has no directory any more, leaves nothing there."""
        self.over.set()
        self.thread.join(END_SECONDS)
        if not self.run_dir.exists():
            with best_effort(f"remove the refused run from {self.place.name}"):
                if self.sent:
                    self.place.remove(RUN, self.sent)
            return
        deadline = time.monotonic() + END_SECONDS
        while True:
            self.send(everything=True)
            if not self.trouble or time.monotonic() > deadline:
                break
            time.sleep(END_SECONDS / 10)
        if self.trouble:
            log.error("the end of %s is not in %s: %s", self.run_dir, self.place.name, self.trouble)


@contextmanager
def mirror_run(run_dir: Path, url: str | None, watchdog: Watchdog) -> Iterator[RunMirror | None]:
    """Send the run's files to its mirror in the block, and all that is left at its end."""
    if url is None:
        yield None
        return
    sender = RunMirror(run_dir, url)
    sender.thread.start()
    try:
        yield sender
    finally:
        with watchdog.excused():  # it has a limit of its own
            sender.close()


def signature(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file does; None without one."""
    try:
        return path.stat().st_mtime_ns, path.stat().st_size
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------------------------------------- back on another machine


def pack_run(run_dir: Path, checkpoint: Path) -> None:
    """Add to a checkpoint, before its manifest is written, what another machine needs to continue the run."""
    paths = [run_dir / name for name in RESUMED if (run_dir / name).exists()]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    write_synced(checkpoint / PACKED, json.dumps(texts).encode())


def fetch_unfinished(mirror: Mirror, run_dir: Path) -> bool:
    """Fetch the newest checkpoint into a new run directory, and the run's files as of then. Returns whether there is one."""
    point = mirror.fetch_newest(run_dir / "checkpoints", -1)
    if point is None or not (point / PACKED).exists():  # of an older cogumi: `protect` fetches it
        return False
    fetch_files(mirror.place, run_dir, (*NEWER, "run.log"))
    for name, text in json.loads((point / PACKED).read_bytes()).items():
        sent: dict[str, Any] = {}
        with best_effort(f"take {name} from {mirror} as it was last", UsageError):
            sent = read_json_or_empty(run_dir / name) if name in NEWER else {}
        if name in RESUMED and (not sent or json.loads(text)[NEWER[name]] > sent[NEWER[name]]):
            write_atomic(run_dir / name, text)
    if read_json_or_empty(run_dir / "status.json").get("state", FINISHED).startswith(FINISHED):  # without its adapter
        write_json(run_dir / "status.json", {"state": "failed", "reason": "its adapter is not whole in the mirror"})
    return True


def fetch_finished(mirror: Mirror, run_dir: Path) -> bool:
    """Fetch a run that is finished in its mirror, with its adapter. Returns whether it is; nothing is fetched otherwise."""
    place = mirror.place
    parts = place.tree(re.compile(f"{RUN}|{ADAPTER}"))
    if not {"status.json", "verdict.json"} <= parts.get(RUN, {}).keys():
        return False
    status, verdict = (json.loads(place.text(RUN, name)) for name in ("status.json", "verdict.json"))
    missed = [check["name"] for check in verdict["checks"] if not check["passed"]]
    if not status["state"].startswith(FINISHED) or MIRRORED_ADAPTER in missed:
        return False
    try:
        files = mirror.manifest_there(ADAPTER, parts[ADAPTER]).files if ADAPTER in parts else {}
        for name, entry in files.items():
            place.fs.get_file(f"{place.root}/{ADAPTER}/{name}", str(run_dir / ADAPTER / name))
            if sha256_file(run_dir / ADAPTER / name) != entry.sha256:
                raise CheckpointDamaged(f"{ADAPTER}/{name} has other bytes than were sent (its sha256 differs)")
    except CheckpointDamaged as damage:
        log.warning("the adapter of the finished run in %s is made again: %s", mirror, damage)
        remove_if_there(run_dir / ADAPTER)
        return False
    fetch_files(place, run_dir, SENT)
    return True


def refuse_living_run(place: Store) -> None:
    """Raise UsageError where the run in a mirror is under way: its process lives here, or its heartbeat goes on elsewhere.

    A machine that was destroyed a moment ago is waited for until its next heartbeat is overdue.
    """
    files, overdue = place.tree(re.compile(RUN)).get(RUN, {}), 3 * (HUB_SECONDS if place.on_hub else SEND_SECONDS)
    if not {"status.json", "heartbeat.json"} <= files.keys():
        return

    def read(name: str) -> Any:
        place.fs.invalidate_cache()
        with suppress(ValueError):
            return json.loads(place.text(RUN, name))
        return {}

    status, first = read("status.json"), read("heartbeat.json")
    if status.get("state") not in AT_WORK or same_process(status, this_process()):  # an earlier run of this kernel
        return
    lives, where = is_running(status), f"process {status.get('pid')} on {status.get('host')}"
    if status.get("host") != this_process()["host"]:
        deadline = time.monotonic() + min(overdue, overdue + first.get("time", 0.0) - time.time())
        if time.monotonic() < deadline:
            log.warning("mirror %s: its run was at work a moment ago (%s); is it still?", place.name, where)
        while not lives and time.monotonic() < deadline:
            beat()
            time.sleep(min(RETRY_SECONDS, overdue / 10))
            lives = read("heartbeat.json") != first
    if lives:
        fix = "wait for it, end that one, or give this one its own mirror"
        raise UsageError(f"mirror {place.name} holds a run that is under way ({where})", fix=fix)


def fetch_files(place: Store, into: Path, names: tuple[str, ...] = SENT) -> None:
    """Download a run's files; the state last."""
    files = place.tree(re.compile(RUN)).get(RUN, {})
    for name in names:
        if name in files:
            write_atomic(into / name, bytes(place.fs.cat_file(f"{place.root}/{RUN}/{name}")))


@contextmanager
def fetched_for_reading(url: str) -> Iterator[Path]:
    """Fetch what tells how a run in a mirror stands into a temporary run directory. Raises UsageError if there is no run."""
    place = Store(url)
    with TemporaryDirectory(prefix="cogumi-status-") as scratch:
        run_dir = Path(scratch, RUN)
        run_dir.mkdir()
        with place.reaching("cannot be read"):
            fetch_files(place, run_dir, tuple(name for name in SENT if name not in ("report.html", ROLLOUTS)))
            for name, files in place.tree().items():
                if MANIFEST_NAME in files:
                    (run_dir / "checkpoints" / name).mkdir(parents=True)
        if not (run_dir / "status.json").exists():
            raise UsageError(f"mirror {place.name} holds no run", fix="name what cogumi.mirror names")
        yield run_dir
