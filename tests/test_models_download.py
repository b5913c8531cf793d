"""Fetching a model from the hub: what is chosen, that bytes are fetched once whatever ends the process, and what is refused.

The server is tests/hub_server.py; whoever fetches is a process of its own, as HF_ENDPOINT is read at import.
"""

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prepared_process
import pytest
from filelock import FileLock
from hub_server import HubServer

from cogumi.core.errors import UsageError
from cogumi.hub import downloads as download

FETCH = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
logging.getLogger("httpx").setLevel(logging.ERROR)
from cogumi.core.errors import UsageError
from cogumi.hub import downloads as download
name, revision = sys.argv[1], sys.argv[2] or None
try:
    plan = download.plan_download(name, download.find_commit(name, revision))
    if plan is not None:
        download.refuse_no_room([plan])
        print("PATHS", json.dumps(list(plan.sizes)), flush=True)
        print("AT", download.fetch(plan))
    else:
        print("AT", None)
except UsageError as error:
    print("REFUSED", error)
assert "torch" not in sys.modules
"""
BIG = 6_000_000


def noise(size: int, seed: int) -> bytes:
    return b"".join(hashlib.sha256(b"%d %d" % (seed, n)).digest() for n in range(size // 32 + 1))[:size]


def repository(size: int = BIG) -> dict[str, bytes]:
    """Two shards and their index, what belongs to them, and what does not."""
    shards = {f"model-0000{n}-of-00002.safetensors": noise(size, n) for n in (1, 2)}
    index = {"metadata": {}, "weight_map": {f"w{n}": name for n, name in enumerate(shards)}}
    return shards | {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tool.jinja": b"{{ tools }}",
        "modeling_own.py": b"",
        "README.md": b"# a model",
        "original/consolidated.00.pth": noise(1000, 3),
        "original/params.json": b"{}",
        "consolidated.safetensors": noise(1000, 4),
        "pytorch_model.bin": noise(1000, 5),
        "model.gguf": noise(1000, 6),
        "onnx/model.onnx": noise(1000, 7),
    }


NEEDED = [
    "additional_chat_templates/tool.jinja",
    "chat_template.jinja",
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "modeling_own.py",
    "tokenizer.json",
]


def started(hub: HubServer, cache: Path, name: str = "someone/model", revision: str = "", **more: Any) -> Any:
    environment = {**os.environ, **hub.environment(cache, more.pop("token", None)), **more.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-c", more.pop("code", FETCH), name, revision],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


def fetched(hub: HubServer, cache: Path, name: str = "someone/model", revision: str = "", **more: Any) -> str:
    process = started(hub, cache, name, revision, **more)
    said, _ = process.communicate(timeout=300)  # a training imports torch
    assert process.returncode == 0, said
    return said


def place(said: str) -> Path:
    return Path(next(line.removeprefix("AT ") for line in said.splitlines() if line.startswith("AT ")))


def refused(said: str) -> str:
    (line,) = (line for line in said.splitlines() if line.startswith("REFUSED "))
    return line.removeprefix("REFUSED ")


HEADERS = 100_001  # bytes of each file that huggingface_hub asks for to read its headers, before the download


def weights_sent(hub: HubServer) -> int:
    return sum(count for path, count in hub.sent.items() if path.endswith(".safetensors"))


def test_what_transformers_loads_is_fetched_and_nothing_else(hub: HubServer, tmp_path: Path) -> None:
    files = repository()
    commit = hub.publish("someone/model", files)
    said = fetched(hub, tmp_path / "cache")
    assert json.loads(said.partition("PATHS ")[2].splitlines()[0]) == NEEDED
    snapshot = place(said)
    assert snapshot.name == commit
    here = {path.relative_to(snapshot).as_posix(): path.read_bytes() for path in snapshot.rglob("*") if path.is_file()}
    assert here == {path: files[path] for path in NEEDED}
    assert f"download: someone/model at {commit[:7]}: 8 files, 12.0 MB; 12.0 MB to fetch into " in said
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_what_is_here_is_not_fetched_again_and_no_network_is_needed_for_it(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.publish("someone/model", repository(1000))
    fetched(hub, tmp_path / "cache")
    before = dict(hub.sent)
    said = fetched(hub, tmp_path / "cache")
    assert hub.sent == before
    assert "; 0 B to fetch into " in said
    hub.server.stop()
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert place(fetched(hub, tmp_path / "cache", env=env)).name == commit


def test_a_killed_download_leaves_whole_files_and_no_parts(hub: HubServer, tmp_path: Path) -> None:
    """The part of a file that a kill left is removed by the next download, which fetches that file alone."""
    files = repository(40_000_000) | {"model-00001-of-00002.safetensors": noise(1000, 1)}
    hub.publish("someone/model", files)
    hub.bytes_per_second = 20_000_000
    process = started(hub, tmp_path / "cache")
    while weights_sent(hub) < 15_000_000:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=20)
    assert [path.stat().st_size > 2**20 for path in (tmp_path / "cache").rglob("*.incomplete")] == [True]
    hub.bytes_per_second, hub.sent = None, {}
    snapshot = place(fetched(hub, tmp_path / "cache"))
    assert all((snapshot / path).read_bytes() == files[path] for path in NEEDED)
    assert weights_sent(hub) == 40_000_000
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_what_has_arrived_is_told_while_it_arrives(hub: HubServer, tmp_path: Path) -> None:
    files = repository(1000) | {"model-00001-of-00002.safetensors": noise(36_000_000, 1)}
    hub.publish("someone/model", files)
    hub.bytes_per_second = 12_000_000  # huggingface_hub counts parts of 10 MiB: one is here every 0.9 s
    told_in_a_line = r"lambda here, total: print(f'TOLD {here} {total}\n', end='', flush=True)"  # by several threads
    code = FETCH.replace("fetch(plan)", f"fetch(plan, {told_in_a_line})")
    said = fetched(hub, tmp_path / "cache", code=code)
    told = [tuple(map(int, line.split()[1:])) for line in said.splitlines() if line.startswith("TOLD ")]
    total = sum(len(files[path]) for path in NEEDED)
    assert {of for _, of in told} == {total}
    assert told[0][0] == len(files["model.safetensors.index.json"])  # which was read for its shards
    megabytes = [here // 10**6 for here, _ in told]
    assert megabytes == sorted(megabytes)  # of one of huggingface_hub's bars, and not of that of files as well
    assert any(10 <= here < total // 10**6 for here in megabytes)


def test_a_part_that_another_process_writes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    plan = download.Download("someone/model", "0" * 40, {})
    parts = {name: plan.storage / "blobs" / f"{name}.12345678.incomplete" for name in ("dead", "alive")}
    parts["dead"].parent.mkdir(parents=True)
    for part in parts.values():
        part.touch()
    locks = tmp_path / ".locks" / "models--someone--model"
    locks.mkdir(parents=True)
    with FileLock(locks / "alive.lock"):
        download.remove_leftovers(plan)
    assert [part.exists() for part in parts.values()] == [False, True]


def test_a_whole_model_needs_no_writing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache may be shared and read-only."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    plan = download.Download("someone/model", "0" * 40, {"config.json": 2})
    plan.snapshot.mkdir(parents=True)
    (plan.snapshot / "config.json").write_text("{}")
    download.refuse_no_room([plan])
    assert not (tmp_path / ".locks").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_cache_that_takes_no_file_is_not_a_hub_that_does_not_answer(number: int) -> None:
    with (
        pytest.raises(UsageError, match=re.escape(os.strerror(number))) as refused,
        download.hub_errors_refused("someone/model", None, "model"),
    ):
        raise OSError(number, os.strerror(number), "/cache/blobs/x")
    assert "does not answer" not in str(refused.value)
    assert refused.value.fix == download.MORE_ROOM


def test_a_connection_that_breaks_is_taken_up(hub: HubServer, tmp_path: Path) -> None:
    files = repository()
    hub.publish("someone/model", files)
    cuts: list[str] = []

    def fault(method: str, path: str, headers: Mapping[str, str]) -> Any:
        if method == "GET" and path.endswith("00001-of-00002.safetensors") and not cuts:
            cuts.append(path)
            return "cut"
        return None

    hub.faults = fault
    said = fetched(hub, tmp_path / "cache")
    assert len(cuts) == 1
    assert all((place(said) / path).read_bytes() == files[path] for path in NEEDED)


def test_a_hub_that_stops_answering_ends_it_in_one_line_and_whole_files_stay(hub: HubServer, tmp_path: Path) -> None:
    files = repository()
    hub.publish("someone/model", files)
    hub.faults = lambda method, path, headers: 503 if path.endswith("2-of-00002.safetensors") else None
    said = refused(fetched(hub, tmp_path / "cache"))
    assert said.startswith("model.name: the download of someone/model broke off (")
    assert "6.0 MB of 12.0 MB are missing; start again with the same words: whole files stay" in said
    hub.faults, hub.sent = lambda method, path, headers: None, {}
    assert (place(fetched(hub, tmp_path / "cache")) / "config.json").exists()
    assert weights_sent(hub) == BIG


def test_a_gated_model_says_what_to_accept_and_which_token(hub: HubServer, tmp_path: Path) -> None:
    hub.publish("someone/model", repository(1000))
    hub.gated.add("someone/model")
    page = f"; accept its licence at {hub.url}/someone/model, and set HF_TOKEN to a token of that account"
    assert f"is gated, and no HF_TOKEN is set{page}" in refused(fetched(hub, tmp_path / "cache"))
    other = refused(fetched(hub, tmp_path / "cache", token="hf_" + "x" * 34))
    assert f"the account of HF_TOKEN has no access yet{page}" in other
    assert place(fetched(hub, tmp_path / "cache", token=hub.token)).is_dir()


REFUSED = [
    ("someone/modle", "", "no model at 'someone/modle' on the hub, or it is private and no HF_TOKEN is set; "
     "did you mean someone/model?"),
    ("someone/model", "v2", "someone/model has no revision 'v2'"),
    ("someone/gguf", "", "someone/gguf has no model.safetensors or pytorch_model.bin, so transformers cannot load it; "
     "for an adapter use model.adapter, for a GGUF file name its full-precision original"),
    ("someone/torn", "", "someone/torn has no model-00002-of-00002.safetensors"),
    ("someone/adapter", "", "someone/adapter holds no config.json"),
]  # fmt: skip


def test_a_model_that_could_not_be_loaded_is_refused(hub: HubServer, tmp_path: Path) -> None:
    files = repository(1000)
    hub.publish("someone/model", files)
    hub.publish("someone/gguf", {"config.json": b"{}", "model.Q4.gguf": b"x"})
    hub.publish("someone/torn", {path: data for path, data in files.items() if "00002-of" not in path})
    hub.publish("someone/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"})
    requests = [(name, revision) for name, revision, _ in REFUSED]
    code = f"import sys\nfor asked in {requests!r}:\n    sys.argv[1:] = asked\n" + textwrap.indent(FETCH, "    ")
    said = [line for line in fetched(hub, tmp_path / "cache", code=code).splitlines() if line.startswith("REFUSED ")]
    for line, (_, _, says) in zip(said, REFUSED, strict=True):
        assert line.startswith(f"REFUSED model.name: {says}")
    assert weights_sent(hub) == 0


def test_without_network_or_room_it_is_refused_before_a_byte_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    hub.publish("someone/model", repository(1000))
    room = FETCH.replace("from cogumi.hub import downloads as download", """from cogumi.hub import downloads as download
from cogumi.core import disk_space
from dataclasses import replace
found = disk_space.filesystem_of
disk_space.filesystem_of = lambda path: replace(f := found(path), space=replace(f.space, free=1500))
""")  # fmt: skip
    said = refused(fetched(hub, tmp_path / "cache", code=room))
    assert "missing; make room, or set HF_HOME to a directory on another disk" in said
    assert weights_sent(hub) == 0
    said = refused(fetched(hub, tmp_path / "cache", env={"HF_HUB_OFFLINE": "1"}))
    assert "without model-00001-of-00002.safetensors, and HF_HUB_OFFLINE is set, so the hub was not asked" in said
    said = refused(fetched(hub, tmp_path / "empty", env={"HF_HUB_OFFLINE": "1"}))
    assert "no model at 'someone/model': there is no such file or directory" in said
    assert "so the hub was not asked; give a directory, or unset HF_HUB_OFFLINE" in said
    hub.server.stop()
    assert f"{hub.url} does not answer" in refused(fetched(hub, tmp_path / "empty"))


def test_a_directory_is_left_alone(hub: HubServer, tmp_path: Path) -> None:
    assert "AT None" in fetched(hub, tmp_path / "cache", str(tmp_path))
    assert "AT None" in fetched(
        hub, tmp_path / "cache", "no/such/model"
    )  # the hub could not have it: read_base says so
    assert not hub.requests


TRAIN = """
import json, sys
import cogumi
from cogumi.core.errors import UsageError
try:
    result = cogumi.train(json.loads(sys.argv[1]))
    print("PASSED", result.passed, result.base)
except UsageError as error:
    print("REFUSED", error)
"""


def train_apart(config: dict[str, Any], environment: dict[str, str]) -> str:
    """Train in a process of its own; what it says, and the end of what went wrong."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    command = [*prepared_process.python(environment), "-c", TRAIN, json.dumps(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr[-3000:]


@pytest.mark.slow("two runs in processes of their own")
def test_a_run_fetches_its_model_as_a_stage_and_goes_on_with_the_same_commit(
    hub: HubServer, tmp_path: Path, tiny_model: Path, code_parquet: Path
) -> None:
    """Killed while it downloads, started again after the branch has moved: the first commit is trained."""
    first = hub.publish("someone/model", tiny_model)
    run_dir = tmp_path / "run"
    config = {
        "model": {"name": "someone/model"},
        "lora": {"r": 2},
        "data": {"source": str(code_parquet), "max_rows": 16, "fim": {"max_length": 160, "middle_chars": [8, 32]}},
        "train": {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2},
        "cogumi": {"method": "sft", "run_dir": str(run_dir)},
    }
    size = (tiny_model / "model.safetensors").stat().st_size
    hub.bytes_per_second = size / 3
    process = started(hub, tmp_path / "cache", json.dumps(config), code=TRAIN)
    while weights_sent(hub) < size // 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["stage"], status["of"] >= size, status["bytes"] < status["of"]) == ("download", True, True)
    process.kill()
    process.communicate()

    moved = json.loads((tiny_model / "config.json").read_text()) | {
        "hidden_size": 8
    }  # PEFT reads the vocabulary of this
    hub.publish("someone/model", {"config.json": json.dumps(moved).encode()})
    hub.bytes_per_second, hub.sent = None, {}
    said = fetched(hub, tmp_path / "cache", json.dumps(config), code=TRAIN)
    assert "PASSED True someone/model" in said, said
    assert weights_sent(hub) == size + HEADERS
    record = json.loads((run_dir / "adapter" / "cogumi-base.json").read_text())
    assert (record["name"], record["commit"], record["revision"]) == ("someone/model", first, None)
    assert json.loads((run_dir / "decisions.json").read_text())["base"] == {"name": "someone/model", "commit": first}
    assert "revision: null" in (run_dir / "config.yaml").read_text()
    log = (run_dir / "run.log").read_text()
    assert f"download: someone/model at {first[:7]}" in log
