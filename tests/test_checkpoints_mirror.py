"""Checkpoints in another place: moto's S3 server with its failures, directories and full disks, and a Hugging Face repository.

No real hub was reached: tests/hub_server.py answers as its documented API does, and huggingface_hub's real filesystem
talks to it over HTTP, without Xet.
"""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_mounts import Mount, fill
from golden import Golden
from hub_server import HubServer, hub_server
from mirror_server import Bucket, s3_server
from processes import until

from cogumi.checkpoints import mirror as mirror_module
from cogumi.checkpoints.manifest import IDENTITY_NAME, MANIFEST_NAME, Identity, write_manifest
from cogumi.checkpoints.mirror import Mirror
from cogumi.checkpoints.verify import inspect
from cogumi.core.errors import UsageError

ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
STATE = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
WHOLE = ADAPTER | STATE | {MANIFEST_NAME, IDENTITY_NAME}
PATIENCE = 60.0  # far more than anything here takes


def make(home: Path, step: int, adapter: bool = True, say: str = "", size: int = 3000) -> Path:
    """A checkpoint with a manifest; what is in its files does not matter to a mirror."""
    path = home / f"checkpoint-{step}"
    path.mkdir(parents=True)
    for name in (ADAPTER if adapter else {"config.json", "model.safetensors"}) | STATE:
        (path / name).write_bytes(f"{name} of step {step}{say}\n".encode() * (size // 30))
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    Identity("ab12", {}).write(path)
    write_manifest(path, step)
    return path


def deliver(mirror: Mirror, *checkpoints: Path) -> None:
    """Send checkpoints, one after the other, and wait until each has arrived."""
    for checkpoint in checkpoints:
        mirror.send(checkpoint)
        assert mirror.finish(PATIENCE) == []


def filled(place: Any, home: Path, *steps: int) -> Mirror:
    mirror = Mirror(place)
    deliver(mirror, *(make(home, step) for step in steps))
    return mirror


def check_fetched(mirror: Mirror, there: Path, sent: Path) -> None:
    """The newest one that is fetched is what was sent, byte for byte, and nothing else is there."""
    assert mirror.fetch_newest(there, -1) == there / sent.name
    assert inspect(there / sent.name).state == "verified"
    assert contents(there / sent.name) == contents(sent)
    assert os.listdir(there) == [sent.name]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(mirror_module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(mirror_module, "TROUBLE_SECONDS", 10.0)
    caplog.set_level(logging.INFO, logger="cogumi")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    def lines() -> str:
        assert all("\n" not in record.getMessage() for record in caplog.records)
        return "\n".join(f"{record.levelname} {record.getMessage()}" for record in caplog.records)

    return lines


# ------------------------------------------------------------------------------------------------------------------- S3


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(server: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    made = Bucket(server, f"bucket-{abs(hash(request.node.name))}")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.proxy.stop()


def times(count: int, method: str, end: str, fault: Any) -> Callable[[str, str], Any]:
    """A fault for the first `count` requests of a method for an object whose name ends so."""
    left = [count]

    def pick(verb: str, path: str) -> Any:
        if verb != method or not path.partition("?")[0].endswith(end) or not left[0]:
            return None
        left[0] -= 1
        return fault

    return pick


@pytest.mark.parametrize("how", ["content", "manifest", "not an object", "no manifest"])
def test_a_mirror_with_nothing_but_damage_is_refused_on_a_fresh_machine(
    bucket: Bucket, tmp_path: Path, how: str
) -> None:
    mirror = filled(bucket.url, tmp_path / "here", 2, 4)
    size = (tmp_path / "here" / "checkpoint-4" / "optimizer.pt").stat().st_size
    for step in (2, 4):
        if how == "no manifest":
            for name in (MANIFEST_NAME, IDENTITY_NAME):
                bucket.direct.delete_file(f"{bucket.name}/runs/mine/checkpoint-{step}/{name}")
        elif how == "content":
            bucket.put(f"checkpoint-{step}/optimizer.pt", b"x" * size)
        else:
            bucket.put(f"checkpoint-{step}/{MANIFEST_NAME}", b"[1]" if how == "not an object" else b'{"format": 1')
    before = bucket.files()
    with pytest.raises(UsageError) as refused:
        mirror.fetch_newest(tmp_path / "there", -1)
    text = str(refused.value)
    assert "\n" not in text
    assert text.startswith(f"mirror {mirror}: none of its 2 checkpoints can be resumed from (checkpoint-4: ")
    assert f"cogumi.mirror={mirror}-2" in text
    assert ("optimizer.pt" if how == "content" else MANIFEST_NAME) in text
    assert list((tmp_path / "there").glob("*")) == []
    assert bucket.files() == before
    assert mirror.fetch_newest(tmp_path / "there", 1) is None, "there is a good one here"


def test_it_is_fetched_on_a_fresh_machine_byte_for_byte(bucket: Bucket, tmp_path: Path) -> None:
    sent = make(tmp_path / "here", 2)
    mirror = Mirror(bucket.url)
    assert mirror.fetch_newest(tmp_path / "there", -1) is None, "nothing is there"
    deliver(mirror, sent)
    assert mirror.fetch_newest(tmp_path / "there", 2) is None, "it is not newer"
    assert not (tmp_path / "there").exists()
    check_fetched(Mirror(bucket.url), tmp_path / "there", sent)


def test_of_several_that_wait_only_the_newest_goes_whole(bucket: Bucket, tmp_path: Path) -> None:
    mirror = Mirror(bucket.url)
    reached, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if path.endswith("checkpoint-2/optimizer.pt") and method == "PUT":
            reached.set()
            go_on.wait(PATIENCE)

    bucket.proxy.faults = hold
    paths = [make(tmp_path, step) for step in (2, 4, 6, 8)]
    mirror.send(paths[0])
    assert reached.wait(PATIENCE)
    for path in paths[1:]:
        mirror.send(path)
    assert mirror.pending() == {paths[0], paths[-1]}
    go_on.set()
    assert mirror.finish(PATIENCE) == []
    assert mirror.pending() == set()
    assert bucket.files() == {"checkpoint-2": WHOLE, "checkpoint-8": WHOLE}
    puts = [path.split("/")[-2:] for method, path in bucket.proxy.requests if method == "PUT"]
    assert [place for place, file in puts if file == "optimizer.pt"] == ["checkpoint-2", "checkpoint-8"]


def test_access_denied_is_said_and_that_resumability_has_stalled(
    bucket: Bucket, tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "TROUBLE_SECONDS", 0.2)
    mirror = filled(bucket.url, tmp_path, 2)
    assert mirror.stalled() == ""
    bucket.proxy.faults = times(10**9, "PUT", "optimizer.pt", (403, "AccessDenied"))
    for step in (4, 6):
        sent = make(tmp_path, step)
        mirror.send(sent)
        assert mirror.finish(PATIENCE) == [sent]
        assert f"ERROR {sent} is not mirrored to {mirror}: " in said()
        until(lambda: mirror.thread is None)  # the last try may be under way
    assert "ACCESS_DENIED" in said()
    assert "stalled at step 2: " in mirror.stalled()
    bucket.proxy.faults = lambda method, path: None
    deliver(mirror, make(tmp_path, 8))
    assert mirror.stalled() == ""
    # What had arrived of the others has cogumi's identity, and goes.
    assert bucket.files() == {"checkpoint-2": WHOLE, "checkpoint-8": WHOLE}
    again = Mirror(bucket.url)
    assert again.fetch_newest(tmp_path / "there", 8) is None
    bucket.proxy.stop()
    for step in (10, 12):
        again.send(make(tmp_path, step))
    assert "stalled at step 8: " in again.stalled(), "what was there before this process"
    again.finish(0)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("optimizer.pt", (500, "InternalError")),
        (MANIFEST_NAME, (503, "SlowDown")),
        ("adapter_model.safetensors", "cut"),
    ],
    ids=["500", "slow-down", "cut"],
)
def test_what_passes_is_tried_again(bucket: Bucket, tmp_path: Path, name: str, fault: Any) -> None:
    mirror = Mirror(bucket.url)
    bucket.proxy.faults = times(4, "PUT", name, fault)
    deliver(mirror, make(tmp_path, 2))
    assert bucket.files() == {"checkpoint-2": WHOLE}
    tries = [path for method, path in bucket.proxy.requests if method == "PUT" and name in path]
    assert len(tries) == 5


def test_a_server_that_is_gone_in_the_middle_and_back_later(bucket: Bucket, tmp_path: Path, said: Any) -> None:
    mirror = Mirror(bucket.url)
    gone = threading.Event()

    def leave(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("optimizer.pt") and not gone.is_set():
            gone.set()
            bucket.proxy.stop()

    bucket.proxy.faults = leave
    mirror.send(make(tmp_path, 2))
    assert gone.wait(PATIENCE)
    until(lambda: "failed" in said())
    assert MANIFEST_NAME not in bucket.files()["checkpoint-2"]
    bucket.proxy.start()
    assert mirror.finish(PATIENCE) == []
    assert bucket.files() == {"checkpoint-2": WHOLE}


@pytest.mark.parametrize("fault", [None, (403, "AccessDenied"), (403, "SignatureDoesNotMatch")])
def test_a_server_that_refuses_at_the_start(bucket: Bucket, fault: Any) -> None:
    if fault is None:
        bucket.proxy.stop()
    bucket.proxy.faults = lambda method, path: fault
    reason = "connect" if fault is None else ""
    with pytest.raises(UsageError, match=rf"^mirror s3://bucket\S+ cannot be written \(.*{reason}.*\)"):
        Mirror(bucket.url)
    assert len(bucket.proxy.requests) == (fault is not None), "it was tried again"


def test_a_bucket_that_is_not_there(bucket: Bucket) -> None:
    with pytest.raises(UsageError, match=r"s3://nobodys/run cannot be written \(.*bucket"):
        Mirror("s3://nobodys/run")


def test_an_object_damaged_on_its_way_is_noticed_and_sent_again(bucket: Bucket, tmp_path: Path, said: Any) -> None:
    mirror = Mirror(bucket.url)
    damage = times(1, "PUT", "optimizer.pt", True)

    def after(method: str, path: str) -> None:
        if damage(method, path):
            bucket.put("checkpoint-2/optimizer.pt", b"o" * 2900)

    bucket.proxy.after = after
    sent = make(tmp_path, 2)
    deliver(mirror, sent)
    assert "optimizer.pt is read back differently" in said()
    check_fetched(mirror, tmp_path / "there", sent)


def test_older_trainer_state_that_cannot_be_removed_is_said(bucket: Bucket, tmp_path: Path, said: Any) -> None:
    mirror = filled(bucket.url, tmp_path, 2, 4)
    bucket.proxy.faults = times(10**9, "DELETE", f"checkpoint-2/{MANIFEST_NAME}", (403, "AccessDenied"))
    mirror.send(make(tmp_path, 6))
    assert mirror.finish(PATIENCE) == [], "it has arrived, whatever became of the older one"
    assert bucket.files() == {f"checkpoint-{step}": WHOLE for step in (2, 4, 6)}
    assert f"ERROR cannot remove older checkpoints from {mirror}: " in said()


def test_a_removal_that_was_interrupted_is_finished_by_the_next(bucket: Bucket, tmp_path: Path) -> None:
    mirror = filled(bucket.url, tmp_path, 2, 4)
    bucket.proxy.faults = times(1, "DELETE", "checkpoint-2/scheduler.pt", (403, "AccessDenied"))
    deliver(mirror, make(tmp_path, 6))
    left = bucket.files()["checkpoint-2"]
    assert {"scheduler.pt", IDENTITY_NAME} <= left
    assert MANIFEST_NAME not in left
    deliver(mirror, make(tmp_path, 8))
    assert bucket.files() == {"checkpoint-6": WHOLE, "checkpoint-8": WHOLE}


def test_a_half_uploaded_one_is_passed_over(bucket: Bucket, tmp_path: Path, said: Any) -> None:
    mirror = Mirror(bucket.url)
    bucket.proxy.faults = times(10**9, "PUT", f"checkpoint-2/{MANIFEST_NAME}", (500, "InternalError"))
    sent = make(tmp_path, 2)
    mirror.send(sent)
    until(lambda: "failed" in said())
    assert mirror.finish(0) == [sent]
    assert f"ERROR {sent} is not mirrored to {mirror}: OSError: " in said()
    assert "INTERNAL_FAILURE" in said()
    until(lambda: bucket.files() == {"checkpoint-2": WHOLE - {MANIFEST_NAME}})  # the last try may be under way
    assert mirror.fetch_newest(tmp_path / "there", -1) is None
    assert f"checkpoint-2 of {mirror} is not resumed from: its upload did not end" in said()


def test_a_mirror_given_up_within_a_try_keeps_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "RETRY_SECONDS", 0.01)
    mirror, tries, is_over = Mirror(tmp_path / "mirror"), list[int](), threading.Event()

    def send(*_: Any) -> None:
        tries.append(len(tries))
        if len(tries) > 1:
            is_over.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mirror.place, "send", send)
    mirror.send(make(tmp_path, 2))
    until(lambda: len(tries) == 2)
    assert mirror.finish(0)
    is_over.set()
    until(lambda: mirror.thread is None)
    assert "No space left on device" in mirror.stalled()


def test_what_is_not_cogumis_is_left_alone(bucket: Bucket, tmp_path: Path, said: Any) -> None:
    bucket.put("checkpoint-9/optimizer.pt", b"somebody's")  # starting at step 0 would write over it
    mirror = filled(bucket.url, tmp_path, 2, 4)
    assert mirror.fetch_newest(tmp_path / "there", 4) is None
    assert f"WARNING checkpoint-9 of {mirror} is not resumed from: it has no {MANIFEST_NAME}" in said()
    for name in ("checkpoint-1/optimizer.pt", "checkpoint-best/optimizer.pt", "optimizer.pt", "checkpoint-8/mine.pt"):
        bucket.put(name, b"somebody's")
    sent = make(tmp_path, 8)
    mirror.send(sent)
    assert mirror.finish(PATIENCE) == [sent]
    assert "ValueError: checkpoint-8 there is not cogumi's" in said()
    deliver(mirror, make(tmp_path, 10))
    files = bucket.files()
    assert "checkpoint-2" not in files
    assert files["checkpoint-1"] == files["checkpoint-best"] == {"optimizer.pt"}
    assert files["checkpoint-8"] == {"mine.pt"}
    assert "optimizer.pt" in files


def test_the_same_step_of_another_run_is_replaced_but_not_sent_twice(bucket: Bucket, tmp_path: Path) -> None:
    mirror = Mirror(bucket.url)
    deliver(mirror, make(tmp_path / "old", 2, adapter=False))
    new = make(tmp_path / "new", 2, say=" anew")
    deliver(mirror, new)
    deliver(mirror, new)
    assert bucket.files() == {"checkpoint-2": WHOLE}
    check_fetched(mirror, tmp_path / "there", new)
    assert sum(method == "PUT" and path.endswith("optimizer.pt") for method, path in bucket.proxy.requests) == 2


def test_a_process_that_ends_does_not_wait_for_an_upload_that_hangs(bucket: Bucket, tmp_path: Path) -> None:
    over = threading.Event()
    bucket.proxy.faults = lambda method, path: over.wait() and None if path.endswith("optimizer.pt") else None
    script = """
import sys, time
from pathlib import Path
from cogumi.checkpoints import mirror as module
from cogumi.checkpoints.mirror import Mirror
module.REQUEST_SECONDS = 1.0
mirror = Mirror(sys.argv[1])
mirror.send(Path(sys.argv[2]))
print("sent", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, bucket.url, str(make(tmp_path, 2))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"sent\n"
        until(lambda: any(path.endswith("optimizer.pt") for _, path in bucket.proxy.requests))
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
    over.set()


# ---------------------------------------------------------------------------------------------------- addresses and failures


def test_wrong_addresses_are_said_at_once(tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(UsageError, match="holds a login") as raised:
        Mirror("s3://jane:very%2Fhush@bucket/run")
    assert "very" not in str(raised.value), "a login is not repeated"
    with pytest.raises(UsageError, match=r"gs://bucket/run cannot be opened .*gcsfs"):
        Mirror("gs://bucket/run")
    with golden.raises("mirror", message="s4://bucket"):
        Mirror("s4://bucket")
    with golden.raises("mirror", message="s3:///run"):
        Mirror("s3:///run")
    with golden.raises("mirror", message="regoin"):
        Mirror("s3://bucket/run?regoin=eu-west-1")
    with golden.raises("mirror", message=str(tmp_path / "volume")):
        Mirror(tmp_path / "volume" / "run")
    (tmp_path / "file").write_text("")
    with golden.raises("mirror", message=str(tmp_path / "file")):
        Mirror(tmp_path / "file")


# ------------------------------------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("name", ["optimizer.pt", "adapter_model.safetensors", MANIFEST_NAME])
@pytest.mark.parametrize("how", ["flipped", "shorter", "gone", "no text"])
def test_a_damaged_one_is_named_and_the_next_older_taken(tmp_path: Path, said: Any, name: str, how: str) -> None:
    mirror = filled(tmp_path / "mirror", tmp_path / "here", 1, 2, 4)
    assert set(contents(tmp_path / "mirror")) == {f"checkpoint-{step}/{name}" for step in (2, 4) for name in WHOLE}
    path = tmp_path / "mirror" / "checkpoint-4" / name
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        changed = {"flipped": data[:99] + bytes([data[99] ^ 1]) + data[100:], "shorter": data[:-1]}
        path.write_bytes(changed.get(how, b"\xff" * len(data)))
    assert mirror.fetch_newest(tmp_path / "there", -1) == tmp_path / "there" / "checkpoint-2"
    assert f"WARNING checkpoint-4 of {mirror} is not resumed from: " in said()
    assert name in said().partition("is not resumed from")[2]
    assert os.listdir(tmp_path / "there") == ["checkpoint-2"]


def test_a_full_disk_waits_for_space(mount: Mount, tmp_path: Path, said: Any) -> None:
    disk = mount()
    mirror = Mirror(disk / "mirror")
    filler = fill(disk, 0.999)
    sent = make(tmp_path / "here", 2, size=60_000)
    mirror.send(sent)
    until(lambda: "No space left" in said())
    assert mirror.pending() == {sent}
    assert mirror.fetch_newest(tmp_path / "there", -1) is None
    filler.unlink()
    assert mirror.finish(PATIENCE) == []
    assert inspect(disk / "mirror" / "checkpoint-2").state == "verified"


def test_a_full_disk_here_ends_the_fetching(mount: Mount, tmp_path: Path, golden: Golden) -> None:
    mirror = Mirror(tmp_path / "mirror")
    deliver(mirror, make(tmp_path / "here", 2, size=60_000))
    disk = mount()
    fill(disk, 0.999)
    with golden.raises("mirror", message="No space left on device"):
        mirror.fetch_newest(disk, -1)
    assert os.listdir(disk) == ["filler"]


def test_a_checkpoint_in_the_way_is_set_aside(tmp_path: Path, said: Any) -> None:
    sent = make(tmp_path / "here", 2)
    mirror = Mirror(tmp_path / "mirror")
    deliver(mirror, sent)
    (sent / "optimizer.pt").write_bytes(b"damaged")
    assert mirror.fetch_newest(tmp_path / "here", -1) == sent
    assert inspect(sent).state == "verified"
    assert [name.startswith("aside-checkpoint-2-") for name in sorted(os.listdir(tmp_path / "here"))] == [True, False]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("removed", "it was removed before it was read, or has no manifest"),
        ("damaged", "optimizer.pt has other bytes on the disk"),
    ],
)
def test_one_that_is_bad_on_the_disk_is_not_called_mirrored(how: str, words: str, tmp_path: Path, said: Any) -> None:
    mirror = Mirror(tmp_path / "mirror")
    sent = make(tmp_path / "here", 2)
    if how == "removed":
        shutil.rmtree(sent)
    else:
        (sent / "optimizer.pt").write_bytes(b"x" * (sent / "optimizer.pt").stat().st_size)
    mirror.send(sent)
    assert mirror.finish(PATIENCE) == [sent]
    assert f"ERROR {sent} is not mirrored to {mirror}: CheckpointDamaged: {words}" in said()
    assert mirror.fetch_newest(tmp_path / "there", -1) is None


def test_names_that_lead_out_of_a_checkpoint_are_refused(tmp_path: Path, said: Any) -> None:
    mirror = filled(tmp_path / "mirror", tmp_path / "here", 2)
    from cogumi.checkpoints.manifest import seal

    (tmp_path / "mirror" / "outside").write_bytes(b"mine")
    entry = {"size": 4, "sha256": "0" * 64}
    text = seal({"format": 1, "step": 2, "files": {"../outside": entry}})
    (tmp_path / "mirror" / "checkpoint-2" / MANIFEST_NAME).write_text(text)
    with pytest.raises(UsageError, match="none of its 1 checkpoints"):
        mirror.fetch_newest(tmp_path / "there", -1)
    assert "'../outside', which is outside the checkpoint" in said()
    deliver(mirror, make(tmp_path / "here", 4))
    assert (tmp_path / "mirror" / "outside").read_bytes() == b"mine"


# ------------------------------------------------------------------------------------------------- a Hugging Face repository


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """As with HF_ENDPOINT and HF_HUB_DISABLE_XET set before Python starts."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    with hub_server(tmp_path / "hub") as made:
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + template)
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", made.token)
        yield made
        for thread in threading.enumerate():  # or it would ask a server that is gone
            if thread.name == "cogumi-mirror":
                thread.join(PATIENCE)


REPOSITORY = "someone/runs"


def newest_commit(hub: HubServer) -> Path:
    return hub.root / "model" / REPOSITORY / hub.refs("model", REPOSITORY)["main"]


@pytest.mark.parametrize("folder", ["", "mine/first"])
def test_a_repository_gets_a_commit_of_files_before_one_of_the_manifest(
    hub: HubServer, tmp_path: Path, folder: str, said: Any
) -> None:
    mirror = Mirror(f"hf://{REPOSITORY}/{folder}".rstrip("/"))
    assert hub.private == {REPOSITORY}
    assert mirror.fetch_newest(tmp_path / "there", -1) is None
    deliver(mirror, make(tmp_path / "here", 2))
    commits = hub.root / "model" / REPOSITORY
    assert len([path for path in commits.iterdir() if path.is_dir()]) == 3
    for step in (4, 6):
        sent = make(tmp_path / "here", step)
        deliver(mirror, sent)
    place = f"{folder}/" if folder else ""
    names = {path for path in contents(newest_commit(hub)) if path != ".gitattributes"}
    assert names == {f"{place}checkpoint-{step}/{name}" for step in (4, 6) for name in WHOLE}
    check_fetched(mirror, tmp_path / "there", sent)
    assert hub.token not in said()


@pytest.mark.parametrize(
    ("end", "words"), [("auth-check/write", "cannot be written"), ("commit/main", "HfHubHTTPError")]
)
def test_a_hub_that_refuses_to_be_written(
    hub: HubServer, tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch, end: str, words: str
) -> None:
    monkeypatch.setattr(mirror_module, "TROUBLE_SECONDS", 0.2)
    hub.faults = lambda method, path, headers: 403 if path.endswith(end) else None
    if end == "auth-check/write":
        with pytest.raises(UsageError, match=f"mirror hf://{REPOSITORY} {words}"):
            Mirror(f"hf://{REPOSITORY}")
        assert sum(path.endswith(end) for _, path in hub.requests) == 1
        return
    sent = make(tmp_path, 2)
    mirror = Mirror(f"hf://{REPOSITORY}")
    mirror.send(sent)
    assert mirror.finish(PATIENCE) == [sent]
    assert f"ERROR {sent} is not mirrored to hf://{REPOSITORY}: {words}" in said()


@pytest.mark.parametrize("name", ["optimizer.pt", "tokenizer.json"])
def test_what_the_hub_holds_is_compared(hub: HubServer, tmp_path: Path, said: Any, name: str) -> None:
    mirror = Mirror(f"hf://{REPOSITORY}")
    damaged = []

    def damage(method: str, path: str, headers: Any) -> None:
        if f"/resolve/main/checkpoint-2/{name}" in path and not damaged:
            stored = newest_commit(hub) / "checkpoint-2" / name
            damaged.append(stored.read_bytes())
            stored.write_bytes(b"x" * len(damaged[0]))

    hub.faults = damage
    deliver(mirror, make(tmp_path / "here", 2))
    assert f"{name} is read back differently" in said()
    stored = newest_commit(hub) / "checkpoint-2" / name
    assert stored.read_bytes() == damaged[0]
    stored.write_bytes(damaged[0][:-1] + b"x")
    with pytest.raises(UsageError, match="none of its 1 checkpoints"):
        mirror.fetch_newest(tmp_path / "there", -1)
    assert f"checkpoint-2 of hf://{REPOSITORY} is not resumed from: {name} has other bytes" in said()
