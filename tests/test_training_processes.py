"""`cogumi train` in two processes over gloo: the training of one process, and what is left where one of them dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prepared_process
import pytest
import yaml
from processes import processes_with, until
from safetensors.torch import load_file

from cogumi.config.schema import load_config
from cogumi.core.run_directory import read_jsonl
from cogumi.runs import rank_launcher
from cogumi.runs.rank_launcher import find_port

pytestmark = pytest.mark.slow("runs in two processes, which each import torch and TRL")
REPOSITORY = Path(__file__).parents[1]
# AdamW divides by the size of a gradient. With its usual epsilon of 1e-8 the last bit of a gradient near zero can turn a whole
# step around, and which bits FSDP2's sums end in depends on the type of CPU (docs/scale.md).
COMMON: dict[str, Any] = {
    "max_steps": 6, "learning_rate": 1e-4, "adam_epsilon": 1e-5, "gradient_checkpointing": False, "logging_steps": 1,
    "save_steps": 3,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "sft": {
        "data": {"source": "cogumi:stdlib-chat-noisy", "format": "chat", "eval_rows": 20, "max_rows": 200},
        "train": {"max_length": 256, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "cogumi": {"method": "sft"},
    },
    "dpo": {
        "data": {"source": "cogumi:stdlib-pairs", "format": "preference", "eval_rows": 8, "max_rows": 200},
        "train": {
            "max_length": 256, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
        },
        "cogumi": {"method": "dpo"},
    },
    "gspo": {
        "data": {"source": "cogumi:stdlib-tasks", "format": "chat", "eval_rows": 8},
        "train": {
            "num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2, "temperature": 0.7,
            "max_completion_length": 12, "learning_rate": 1e-3,
        },
        "cogumi": {"method": "gspo", "rewards": ["exact_answer", "answer_similarity"], "samples_every": 2},
    },
}  # fmt: skip
Start = Callable[..., subprocess.Popen[str]]


def config(method: str, run_dir: Path, **cogumi: Any) -> dict[str, Any]:
    found = METHODS[method]
    model = {"name": "cogumi:small-base", "dtype": "float32"}
    train, options = COMMON | found["train"], found["cogumi"] | cogumi
    return {
        "model": model, "lora": {"r": 4}, "data": found["data"], "train": train,
        "cogumi": options | {"run_dir": str(run_dir)},
    }  # fmt: skip


def start_in(folder: Path, values: dict[str, Any], name: str = "run", real: bool = False) -> subprocess.Popen[str]:
    """Starts `cogumi train` on a config, with its output in a file. real: with a Python that imports everything itself."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    places = f"{REPOSITORY}:{folder}" if real else str(REPOSITORY)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    python = sys.executable if real else prepared_process.as_program(folder / "python", environment)
    with (folder / f"{name}.said").open("w") as said:
        return subprocess.Popen(
            [python, "-m", "cogumi", "train", str(path)],
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=said,
            text=True,
        )


def run_in(
    folder: Path, method: str, name: str, train: dict[str, Any] | None = None, real: bool = False, **cogumi: Any
) -> Path:
    """Runs `cogumi train` to its end; the run's directory."""
    values = config(method, folder / name, **cogumi)
    values["train"] |= train or {}
    if cogumi.get("tuning") == "full":
        del values["lora"]
    assert start_in(folder, values, name, real).wait(timeout=300) == 0, (folder / f"{name}.said").read_text()[-4000:]
    return folder / name


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return partial(start_in, tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    return partial(run_in, tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty steps in two processes that nothing interrupted."""
    return run_in(tmp_path_factory.mktemp("whole"), "sft", "whole", processes=2, train={"max_steps": 40})


def losses(run_dir: Path, key: str = "loss") -> dict[int, float]:
    return {row["step"]: row[key] for row in read_jsonl(run_dir / "metrics.jsonl") if key in row}


def apart(one: Path, other: Path) -> float:
    """The largest difference of a step's loss."""
    ours, theirs = losses(one), losses(other)
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] - theirs[step]) for step in ours)


def weights_apart(one: Path, other: Path, name: str = "adapter/adapter_model.safetensors") -> float:
    ours, theirs = load_file(one / name), load_file(other / name)
    assert ours.keys() == theirs.keys()
    return max(float((ours[key] - theirs[key]).abs().max()) for key in ours)


def test_sft_of_two_processes_is_that_of_one_up_to_the_merged_model(run: Callable[..., Path]) -> None:
    one = run("sft", "one")
    two = run("sft", "two", processes=2)
    shared = run("sft", "shared", processes=2, sharding="fsdp2")
    for other in (two, shared):
        assert apart(one, other) < 1e-5
        assert weights_apart(one, other) < 1e-5
        assert (other / "DONE").exists()
        summaries = [json.loads((each / "metrics.json").read_text()) for each in (one, other)]
        assert summaries[0]["tokens"] == summaries[1]["tokens"]  # of both processes
        assert losses(other, "eval_loss").keys() == {0, 6}
        assert [row["step"] for row in read_jsonl(other / "samples.jsonl")] == [0] * 4 + [6] * 4
        flags = [json.loads((each / "flags.json").read_text())["flags"] for each in (one, other)]
        assert [each["level"] for each in flags[0]] == [each["level"] for each in flags[1]]
        assert "2 processes share each step of 8 examples: 2 x 4 x 1 accumulated" in (other / "run.log").read_text()
    samples = [read_jsonl(each / "samples.jsonl") for each in (one, two, shared)]
    assert samples[0][:4] == samples[1][:4] == samples[2][:4]
    checkpoints = [{path.name for path in each.glob("checkpoints/checkpoint-6/*")} for each in (two, shared)]
    assert all("rng_state_1.pth" in names for names in checkpoints)
    assert "pytorch_model_fsdp_0" in checkpoints[1]


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["dpo", "gspo"])
def test_sharded_and_whole_the_same_is_learned(method: str, run: Callable[..., Path]) -> None:
    two = run(method, "two", processes=2)
    shared = run(method, "shared", processes=2, sharding="fsdp2")
    assert apart(two, shared) < 1e-5
    for each in (two, shared):
        assert json.loads((each / "verdict.json").read_text())["passed"]
    if method == "dpo":  # gspo samples other completions in two processes
        assert apart(run(method, "one"), two) < 1e-5
    else:
        proof = json.loads((two / "verdict.json").read_text())["checks"]
        assert any(check["name"] == "loss that ran" and check["passed"] for check in proof)
        said = [row["completion"] for row in read_jsonl(two / "samples.jsonl")]
        assert said == [row["completion"] for row in read_jsonl(shared / "samples.jsonl")]


def test_every_weight_is_trained_and_saved_from_shards(run: Callable[..., Path]) -> None:
    one = run("sft", "one", tuning="full")
    shared = run("sft", "shared", tuning="full", processes=2, sharding="fsdp2")
    assert apart(one, shared) < 1e-5
    assert weights_apart(one, shared, "merged/model.safetensors") <= 2**-8  # a unit of bfloat16, which is saved


@pytest.mark.sweep
def test_packed_rows_and_the_planner_of_gspo(run: Callable[..., Path]) -> None:
    packed = run("sft", "packed", processes=2, merge=False, train={"packing": True, "per_device_train_batch_size": 8})
    decided = json.loads((packed / "decisions.json").read_text())["packing"]
    assert decided["safe"] is True
    planned: dict[str, Any] = {"per_device_train_batch_size": None, "steps_per_generation": None}
    plan = run("gspo", "planned", processes=2, merge=False, docs_per_step=16, train=planned)
    batch = json.loads((plan / "decisions.json").read_text())["batch"]
    assert batch["per_device_train_batch_size"] * batch["gradient_accumulation_steps"] == 8  # of each process
    assert [row["policy/staleness"] for row in read_jsonl(plan / "metrics.jsonl")[:3] if "loss" in row] == [0, 16, 32]


def test_a_run_that_is_asked_to_end_resumes_with_two_processes_and_with_one(
    whole: Path, run: Callable[..., Path], start: Start, tmp_path: Path
) -> None:
    for name, then in (("two", 2), ("one", 1)):
        values = config("sft", tmp_path / name, processes=2)
        values["train"]["max_steps"] = 40
        asked = start(values, name=name)
        until(lambda: (tmp_path / name / "checkpoints/checkpoint-6").exists())  # noqa: B023
        asked.send_signal(signal.SIGTERM)
        assert asked.wait(timeout=60) == 128 + signal.SIGTERM
        status = json.loads((tmp_path / name / "status.json").read_text())
        assert status["state"] == "stopped"
        assert run("sft", name, processes=then, train={"max_steps": 40}) == tmp_path / name
        assert apart(whole, tmp_path / name) < (1e-7 if then == 2 else 1e-5)
    assert weights_apart(whole, tmp_path / "two") == 0


def pid_of_rank(folder: Path, rank: int) -> int:
    """The process of a rank that a launcher has started in a directory, or 0."""
    return next((each.pid for each in processes_with("RANK", rank) if each.info["cwd"] == str(folder)), 0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_one_that_dies_ends_the_run_and_is_named(
    rank: int, whole: Path, run: Callable[..., Path], start: Start, tmp_path: Path
) -> None:
    values = config("sft", tmp_path / "run", processes=2)
    values["train"]["max_steps"] = 40
    launcher = start(values)
    until(lambda: (tmp_path / "run/checkpoints/checkpoint-6").exists())
    pid = pid_of_rank(tmp_path, rank)
    assert pid
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    assert launcher.wait(timeout=60) == 75
    assert time.monotonic() - began < 60
    said = (tmp_path / "run.said").read_text().splitlines()
    assert said[-1].startswith(f"cogumi: process {rank} of 2 was ended by SIGKILL")
    assert "resumes from the last good checkpoint" in said[-1]
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["retriable"]) == ("failed", True)
    assert f"process {rank} of 2 was ended by SIGKILL" in status["reason"]
    assert (tmp_path / "run/rank-1.log").exists() == (rank == 1)
    resumed = run("sft", "run", processes=2, train={"max_steps": 40})
    assert weights_apart(whole, resumed) == 0


def test_one_that_dies_at_its_exit_takes_nothing_from_the_run(run: Callable[..., Path], tmp_path: Path) -> None:
    at_exit = "import atexit, os\nif os.environ.get('RANK') == '1':\n    atexit.register(os._exit, 3)\n"
    (tmp_path / "sitecustomize.py").write_text(at_exit)
    finished = run("sft", "run", processes=2, merge=False, real=True, train={"max_steps": 2})
    assert (finished / "DONE").exists()


def test_gloo_is_left_before_python_ends(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "import atexit\n"
        "from torch import distributed\n"
        "from cogumi.stack.ranks import Ranks\n"
        "atexit.register(lambda: print('left' if not distributed.is_initialized() else 'still there'))\n"
        "distributed.init_process_group('gloo')\n"
        "ranks = Ranks(distributed.get_rank(), 2)\n"
        "assert ranks.agree([ranks.leads]) == [True]\n"
    )
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "two.py"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("left") == 2  # both may write before either ends its line


def test_a_pause_holds_both_and_a_file_asks_for_a_checkpoint(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    values = config("sft", run_dir, processes=2)
    values["train"] |= {"max_steps": 60, "save_steps": 1000}
    launcher = start(values)
    until(lambda: losses(run_dir) if (run_dir / "metrics.jsonl").exists() else None)
    (run_dir / "PAUSE").touch()
    until(lambda: (run_dir / "PAUSED").exists())
    steps = len(losses(run_dir))
    time.sleep(2)
    assert len(losses(run_dir)) == steps
    assert list(run_dir.glob("checkpoints/checkpoint-*"))
    (run_dir / "PAUSED").unlink()
    assert launcher.wait(timeout=120) == 0
    assert len(losses(run_dir)) == 60


@pytest.mark.parametrize("machines", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_the_users_own_launcher(machines: int, tmp_path: Path) -> None:
    """torchrun, and one on each of two machines, which are this one twice."""
    values = config("sft", tmp_path / "run", processes="all")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    where = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{find_port()}"]
    words = [*(where if machines == 2 else ["--standalone"]), "--nproc-per-node", str(2 // machines)]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "cogumi", "train", "run.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    agents = list[subprocess.Popen[bytes]]()
    for number in range(machines):
        with (tmp_path / f"{number}.said").open("wb") as output:
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output))
    codes = [agent.wait(timeout=300) for agent in agents]
    said = "\n".join((tmp_path / f"{number}.said").read_text() for number in range(machines))
    assert codes == [0] * machines, said[-3000:]
    assert said.count("run: finished, step 6/6") == 1
    assert (tmp_path / "run/DONE").exists()
    said = (tmp_path / "run/run.log").read_text()
    assert "cogumi.processes: all is 2 here" in said
    assert "2 processes share each step of 8 examples" in said


def test_a_signal_before_the_training_ends_all(start: Start, tmp_path: Path) -> None:
    launcher = start(config("sft", tmp_path / "run", processes=2))
    until(lambda: pid_of_rank(tmp_path, 1))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    assert "cogumi: interrupted" in (tmp_path / "run.said").read_text()


def test_a_signal_while_ranks_are_started_reaches_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*args, **options))
        if len(started) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(rank_launcher, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
    with pytest.raises(SystemExit) as ended:
        rank_launcher.train_in_processes(load_config(config("sft", tmp_path / "run", processes=2)), 2)
    assert ended.value.code == 128 + signal.SIGTERM
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2


def test_a_rank_does_not_wait_for_one_that_a_signal_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ended before its training handled signals, and the other one would wait for it to connect."""
    monkeypatch.setattr(rank_launcher, "GRACE_SECONDS", 0.2)
    ranks = [subprocess.Popen(["sh", "-c", command]) for command in ("trap '' TERM; sleep 60", "sleep 60")]
    time.sleep(0.2)  # until the shell has set its trap
    try:
        assert rank_launcher.wait_for_all(ranks, [signal.SIGTERM]) is None
        assert [process.poll() for process in ranks] == [None, -signal.SIGTERM]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_the_command_that_is_killed_leaves_a_checkpoint(start: Start, tmp_path: Path) -> None:
    values = config("sft", tmp_path / "run", processes=2)
    values["train"] |= {"max_steps": 5000, "save_steps": 5000}
    launcher = start(values)
    until(lambda: losses(tmp_path / "run") if (tmp_path / "run/metrics.jsonl").exists() else None)
    launcher.kill()
    launcher.wait()
    until(lambda: json.loads((tmp_path / "run/status.json").read_text())["state"] == "stopped")
    assert "the command that started this process is gone" in (tmp_path / "run/run.log").read_text()
    assert list((tmp_path / "run/checkpoints").glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("lora", {"target_modules": ["nix"]}, "no module of LlamaForCausalLM matches"),
        ("train", {"accelerator_config": {"split_batches": True}}, "train.accelerator_config: split_batches cuts"),
    ],
)
def test_a_refusal_comes_from_one_process(
    section: str, values: dict[str, Any], said: str, start: Start, tmp_path: Path
) -> None:
    asked = config("sft", tmp_path / "run", processes=2)
    asked[section] |= values
    assert start(asked).wait(timeout=120) == 2
    (line,) = [line for line in (tmp_path / "run.said").read_text().splitlines() if line.startswith("cogumi:")]
    assert said in line
    assert not (tmp_path / "run").exists()
