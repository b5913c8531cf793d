"""The command line as a user meets it: real subprocesses, their output and exit status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
import yaml

ROOT = Path(__file__).parents[1]


def cogumi(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cogumi", *words]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def config(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    train = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_checkpointing": False, "logging_steps": 1}
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"name": str(tiny_model)},
                "data": {
                    "source": str(code_parquet),
                    "eval_rows": 8,
                    "fim": {"max_length": 160, "middle_chars": [8, 32]},
                },
                "train": train,
                "cogumi": {"method": "sft"},
            }
        )
    )
    return path


def test_train_then_merge(config: Path, tmp_path: Path) -> None:
    done = cogumi("train", "tiny.yaml", "train.learning_rate=1e-2", "cogumi.merge=false", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pass  adapter: max |B|" in done.stderr
    assert "done: runs/tiny" in done.stdout
    merged = cogumi("merge", "runs/tiny/adapter", "merged", cwd=tmp_path)
    assert merged.returncode == 0, merged.stderr
    assert (tmp_path / "merged" / "model.safetensors").exists()
    again = cogumi("merge", "runs/tiny/adapter", "merged", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "merged" in again.stderr


def test_each_mistake_is_one_line_on_stderr_and_status_2(config: Path, tmp_path: Path) -> None:
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
    for words, says in mistakes.items():
        done = cogumi(*words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("cogumi: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert says in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_command_is_status_2(tmp_path: Path) -> None:
    assert cogumi("trian", cwd=tmp_path).returncode == 2


def test_ctrl_c_is_status_130_and_the_run_says_interrupted(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cogumi", "train", "tiny.yaml", "train.max_steps=100000", "cogumi.run_dir=long"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    beat = tmp_path / "long" / "heartbeat.json"
    deadline = time.monotonic() + 120
    while not beat.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    assert beat.exists()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert '"interrupted"' in (tmp_path / "long" / "status.json").read_text()


def test_importing_cogumi_is_light() -> None:
    heavy = ["torch", "transformers", "trl", "peft", "datasets", "polars", "unsloth"]
    program = f"import sys, cogumi; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    import cogumi as package

    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError):
        package.nothing  # noqa: B018
