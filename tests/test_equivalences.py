"""What must be one and the same training: a YAML and a script by hand, one batch and several accumulated, stopped or not.

To 1e-5 over 20 steps and more, on tiny models. Elsewhere: packed and unpacked (test_data_packing), `start` and `train`
(test_runs), SFT and GSPO resumed (test_training_unfinished).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

import cogumi
from cogumi.config.source import PACKAGE
from cogumi.core.run_directory import read_jsonl
from cogumi.data.stdlib_sample import sample_path

STEPS = 24
TRAIN: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "max_length": 256,
}


@pytest.fixture(scope="module")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cogumi.models.loading import use_chat_template

    path = tmp_path_factory.mktemp("chat") / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype="auto").save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    use_chat_template(tokenizer, "cogumi:tulu")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Short rows of each kind, so that none is dropped or cut by anybody."""
    home = tmp_path_factory.mktemp("data")
    short = pl.read_parquet(sample_path("cogumi:stdlib-chat")).filter(pl.col("answer").str.len_bytes() < 120).head(96)
    pairs = pl.read_parquet(sample_path("cogumi:stdlib-pairs"))
    texts = [pl.col(side).list.get(0).struct.field("content").str.len_bytes() < 160 for side in ("chosen", "rejected")]
    frames = {
        "sft": short.select("messages"),
        "dpo": pairs.filter(*texts).head(96),
        "gspo": short.select("prompt", "answer").head(12),
    }
    for name, frame in frames.items():
        frame.write_parquet(home / f"{name}.parquet")
    return {name: home / f"{name}.parquet" for name in frames}


def config(method: str, model: Path, data: dict[str, Path], run_dir: Path, **train: Any) -> dict[str, Any]:
    formats = {
        "sft": {"format": "chat"},
        "dpo": {"format": "preference"},
        "gspo": {"format": "prompt_completion", "columns": {"answer": "answer"}},
    }
    settings, rewards = {**TRAIN, "save_strategy": "no", **train}, {}
    if method == "gspo":
        settings.pop("max_length")
        rewards = {"rewards": ["answer_similarity"]}
    return {
        "model": {"name": str(model)},
        "data": {"source": str(data[method]), "eval_rows": 0, **formats[method]},
        "train": settings,
        "cogumi": {"method": method, "run_dir": str(run_dir), "merge": False, "compile": "off"} | rewards,
    }


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(run_dir / "metrics.jsonl") if "loss" in row]


def apart(one: Path, other: Path) -> float:
    """The largest difference of two adapters' elements."""
    a, b = (load_file(path / "adapter_model.safetensors") for path in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


GSPO = {
    "max_steps": 20,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "steps_per_generation": 2,
    "max_completion_length": 8,
    "loss_type": "gspo",
}


@pytest.mark.slow("pairs of trainings of 24 steps and more")
@pytest.mark.parametrize("method", ["sft", pytest.param("dpo", marks=pytest.mark.sweep), "gspo"])
def test_a_yaml_is_the_script_written_by_hand(
    method: str, chat_model: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    """recipes/<method>.py is plain TRL, which tokenizes and masks for itself; with TRL's own words on the command line."""
    settings = {**TRAIN, **(GSPO if method == "gspo" else {}), "save_strategy": "no"}
    if method == "gspo":
        settings.pop("max_length")
    cogumi.train(config(method, chat_model, data, tmp_path / "run", **settings))
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    script = PACKAGE / "recipes" / f"{method}.py"
    done = subprocess.run(
        [sys.executable, script, chat_model, data[method], tmp_path / "script", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [float(line.split("'loss': '")[1].split("'")[0]) for line in done.stdout.splitlines() if "'loss': '" in line]
    ours = losses(tmp_path / "run")
    assert len(ours) == len(said) == settings["max_steps"]
    assert ours == pytest.approx(said, rel=2e-3, abs=1e-4)  # what a script prints has four digits
    assert apart(tmp_path / "run" / "adapter", tmp_path / "script" / "adapter") < 1e-5
    assert (tmp_path / "script" / "merged" / "config.json").exists()


@pytest.mark.slow("pairs of trainings of 24 steps and more")
@pytest.mark.parametrize("method", ["sft", pytest.param("dpo", marks=pytest.mark.sweep)])
def test_accumulated_batches_are_one_batch(
    method: str, chat_model: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    """8 x 1 = 4 x 2 = 1 x 8, though rows are of unlike lengths: the loss is that of a step's tokens, or pairs."""
    collected = {}
    for size in (8, 4, 1):
        # A rate and an epsilon at which AdamW does not turn float32's last digit in a small gradient into a step of 1e-5.
        train = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        train |= {"learning_rate": 5e-4, "adam_epsilon": 1e-6}
        result = cogumi.train(config(method, chat_model, data, tmp_path / str(size), **train))
        collected[size] = losses(result.run_dir), result.adapter
    for size in (4, 1):
        assert collected[size][0] == pytest.approx(collected[8][0], abs=1e-5)
        assert apart(collected[size][1], collected[8][1]) < 1e-5


@pytest.mark.slow("pairs of trainings of 24 steps and more")
def test_a_dpo_run_that_stopped_is_one_that_did_not(chat_model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    """Bit for bit, from the checkpoint of a sanity check."""
    saving = {"save_strategy": "steps", "save_steps": 10}
    whole = cogumi.train(config("dpo", chat_model, data, tmp_path / "whole", **saving))
    parts = config("dpo", chat_model, data, tmp_path / "parts", **saving)
    first = cogumi.train(parts, cogumi__sanity=10)
    assert first.verdict.safe_to_scale is not None
    assert first.merged is None
    second = cogumi.train(parts)
    assert losses(second.run_dir) == losses(whole.run_dir)
    assert apart(second.adapter, whole.adapter) == 0


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_the_first_loss_is_the_formula_on_dense_logits(
    method: str, chat_model: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    """Of the first batch, without TRL, PEFT and the fused head: the mean cross-entropy, and ln 2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = cogumi.train(
        config(method, chat_model, data, tmp_path / "run", max_steps=1, per_device_train_batch_size=96)
    )
    if method == "dpo":
        assert losses(result.run_dir)[0] == pytest.approx(0.6931471805599453, abs=1e-6)
        return
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    each = []
    for messages in pl.read_parquet(data["sft"])["messages"].to_list():
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        ids = torch.tensor(tokenizer.apply_chat_template(messages, return_dict=False))
        logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        each.append(-logps[len(prompt) - 1 :])
    assert losses(result.run_dir)[0] == pytest.approx(torch.cat(each).mean().item(), rel=1e-5)
