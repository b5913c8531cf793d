"""The command line as a user meets it: output and exit status, of processes where signals, terminals or imports matter."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import prepared_process
import pytest
import yaml
from builders import run_config, train_adapter

from cogumi import __version__ as package_version

ROOT = Path(__file__).parents[1]


def cogumi(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As Python itself starts it."""
    command, variables = [sys.executable, "-m", "cogumi", *words], os.environ | environment
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)


def begins(adapter: object, out: object) -> str:
    """What a merge says at once, before it has loaded anything."""
    return f"merging {adapter} into its base, as {out} ...\n"


@pytest.fixture
def config(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    section = {"eval_rows": 8, "fim": {"max_length": 160, "middle_chars": [8, 32]}}
    values = run_config("sft", tiny_model, code_parquet, "", data_section=section)
    del values["cogumi"]["run_dir"], values["cogumi"]["merge"]
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_version_is_said_at_once(tmp_path: Path) -> None:
    done = cogumi("--version", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert (done.returncode, done.stdout) == (0, f"cogumi {package_version}\n")
    assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE)


def test_each_mistake_is_one_line_on_stderr_and_status_2(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    pl.DataFrame({"source": []}, schema={"source": pl.String}).write_parquet(tmp_path / "empty.parquet")
    (tmp_path / "file").write_text("in the way")
    mistakes = {
        ("train", "tiny.yml"): "did you mean tiny.yaml?",
        ("train", "tiny.yaml", "train.learnin_rate=1"): "did you mean train.learning_rate?",
        ("train", "tiny.yaml", "data.source=gone.parquet"): "gone.parquet",
        ("train", "tiny.yaml", "data.source=empty.parquet"): "empty.parquet",
        ("train", "tiny.yaml", "cogumi.run_dir=file/run"): "file/run: cannot write the run directory",
    }
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    for words, says in mistakes.items():
        status, _, stderr = command_line(*words)
        assert status == 2, stderr
        assert stderr.startswith("cogumi: "), stderr
        assert stderr.count("\n") == 1, stderr
        assert says in stderr
    done = cogumi("train", "tiny.yml", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_command_is_status_2(command_line: Callable[..., tuple[int, str, str]]) -> None:
    assert command_line("trian")[0] == 2


def test_ctrl_c_is_status_130_and_the_run_says_stopped(
    config: Path, tmp_path: Path, for_commands: dict[str, str]
) -> None:
    words = ("train.max_steps=100000", "cogumi.compile=off", "cogumi.run_dir=long")
    command = [*prepared_process.client(for_commands), "train", "tiny.yaml", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    beat = tmp_path / "long" / "heartbeat.json"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if beat.exists() and json.loads(beat.read_text())["step"]:  # it beats from the beginning, steps or none
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert '"stopped"' in (tmp_path / "long" / "status.json").read_text()


@dataclass(frozen=True)
class MergeInputs:
    base: Path
    adapter: Path
    other: Path


@pytest.fixture(scope="module")
def merge_inputs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> MergeInputs:
    """A base and two adapters for it, saved by PEFT."""
    root = tmp_path_factory.mktemp("merge")
    for seed, name in enumerate(("adapter", "other")):
        train_adapter(tiny_model, root / name, seed=seed, target_modules=["q_proj", "down_proj"])
    return MergeInputs(tiny_model, root / "adapter", root / "other")


def shards_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def test_merge_hands_every_option_on(
    merge_inputs: MergeInputs, tmp_path: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    """Each option gives what the same argument of merge_adapter gives, and something else than without it."""
    from cogumi.merge import merge_adapter

    given = merge_inputs
    cases: dict[str, tuple[list[object], Any, dict[str, Any]]] = {
        "plain": ([], given.adapter, {}),
        "weight": (["--weight", "0.5"], [(given.adapter, 0.5)], {}),
        "add": (["--add", f"{given.other}=-0.5"], [(given.adapter, 1.0), (given.other, -0.5)], {}),
        "add twice": (
            ["--add", f"{given.other}=1e-1", "--add", f"{given.other}=2"],
            [(given.adapter, 1.0), (given.other, 0.1), (given.other, 2.0)],
            {},
        ),
        "dtype": (["--dtype", "float32"], given.adapter, {"dtype": "float32"}),
    }
    collected = []
    for name, (words, adapters, options) in cases.items():
        out = tmp_path / name
        status, output, error = command_line(
            "merge", given.adapter, out, "--base", given.base, "--workers", "1", *words
        )
        assert (status, error) == (0, begins(given.adapter, out)), error
        assert output.startswith(f"{out}: {given.base} with 4 tensors merged")
        merge_adapter(adapters, tmp_path / f"{name} again", base=given.base, progress=False, **options)
        collected.append(shards_of(out))
        assert collected[-1] == shards_of(tmp_path / f"{name} again") != {}
    assert all(collected[one] != collected[two] for one in range(len(collected)) for two in range(one))


def test_merge_reports_as_json(
    merge_inputs: MergeInputs, tmp_path: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    given = merge_inputs
    status, output, error = command_line("merge", given.adapter, tmp_path / "a", "--verify", "logits", "--json")
    assert status == 0, error
    report = json.loads(output)
    assert report["out"] == str(tmp_path / "a")
    assert report["tensors_merged"] == 4
    assert report["bytes"] == sum(len(data) for data in shards_of(tmp_path / "a").values())
    assert report["logits"]["measured"] > 0
    assert not list(tmp_path.glob("*.partial-*"))


def test_each_mistake_of_a_merge_is_one_line_and_status_2(
    merge_inputs: MergeInputs, tmp_path: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    adapter, out = merge_inputs.adapter, tmp_path / "merged"
    mistakes: dict[tuple[object, ...], str] = {
        (): "merge needs an ADAPTER directory and an OUT directory, or --check DIR",
        (adapter,): "merge needs an ADAPTER directory and an OUT directory",
        (tmp_path / "nowhere", out): "nowhere",
        (merge_inputs.base, out): "no adapter_config.json",
        (adapter, tmp_path): "exists; choose another name",
        (adapter, out, "--base", "no/such/place"): "no/such/place",
        (adapter, out, "--revision", "main"): "no revisions",
        (adapter, out, "--base-mode", "dequant"): "dequant",
        (adapter, out, "--weight", "0"): "has weight 0.0; give it a number other than 0",
        (adapter, out, "--weight", "nan"): "has weight nan",
        (adapter, out, "--add", str(adapter)): f"--add {adapter} is not a directory and a weight",
        (adapter, out, "--add", "=0.5"): "--add =0.5 is not a directory and a weight",
        (adapter, out, "--add", "x=half"): "--add x=half is not a directory and a weight; write DIRECTORY=WEIGHT",
        (adapter, out, "--add", f"{tmp_path}/x=0.5"): f"{tmp_path}/x",
    }
    for words, says in mistakes.items():
        status, output, error = command_line("merge", *words)
        error = error.removeprefix(begins(*words[:2])) if len(words) > 1 else error
        assert (status, output) == (2, ""), (words, error)
        assert error.startswith("cogumi: "), (words, error)
        assert error.count("\n") == 1, (words, error)
        assert says in error, (words, error)
    for option in (("--workers", 0), ("--weight", "much"), ("--base-mode", "half"), ("--verify", "all"), ("--merge",)):
        words = (adapter, out, *option)
        assert command_line("merge", *words)[0] == 2  # said by Typer, with the usage
    assert list(tmp_path.iterdir()) == []


def test_a_merge_that_is_not_exact_is_one_line_and_status_1(
    merge_inputs: MergeInputs, tmp_path: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    from safetensors.torch import load_file, save_file

    base = Path(shutil.copytree(merge_inputs.base, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = 1e5  # fits bfloat16, not float16
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    out = tmp_path / "merged"
    status, output, error = command_line("merge", merge_inputs.adapter, out, "--base", base, "--dtype", "float16")
    error = error.removeprefix(begins(merge_inputs.adapter, out))
    assert (status, output) == (1, "")
    assert error.startswith("cogumi: model.layers.1.self_attn.q_proj.weight: element (0, 0) becomes ")
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("merged*"))


def test_a_merge_says_what_it_does_before_it_loads_torch(tmp_path: Path) -> None:
    """In a pipe one plain line, and then the mistake in another."""
    for words, line in {("a", "b"): begins("a", "b"), ("--check", "a"): "checking a ...\n"}.items():
        done = cogumi("merge", *words, cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
        said = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("import time:")]
        assert (done.returncode, said[0], len(said)) == (2, line, 2), said
        loaded = re.search(r"^import time:.*\| +torch$", done.stderr, re.MULTILINE)
        assert loaded is not None
        assert done.stderr.index(line) < loaded.start()


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Importing `cogumi.x` sets `x` on the package: `cogumi.x()` would work until somebody does."""
    import cogumi as package

    taken = [name for name in package.__all__ if importlib.util.find_spec(f"cogumi.{name}") is not None]
    assert taken == []


def test_every_public_name_can_be_imported() -> None:
    import cogumi as package

    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError):
        package.nothing  # noqa: B018
