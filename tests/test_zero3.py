"""DeepSpeed's ZeRO-3 in two processes over gloo. In no lane: they run where DeepSpeed 0.19.8 and g++ are there."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ranks import finish, losses, said, start_ranks
from safetensors.torch import load_file

TWO = pytest.mark.slow("trainings in two processes, each of which imports DeepSpeed")
NO_WHEEL = "DeepSpeed comes without a wheel, and so no lane has it; pip install deepspeed==0.19.8 runs these"
INSTALLED = pytest.mark.skipif(find_spec("deepspeed") is None, reason=NO_WHEEL)


def run(count: int, directory: Path, **how: Any) -> None:
    directory.mkdir(exist_ok=True)
    how = {"protected": False, "dropout": 0.0} | how
    if count == 2:
        how = {"zero3": True, "per_device_train_batch_size": 2} | how
    assert finish(start_ranks(count, directory, **how), directory) == [0] * count, said(directory, 0)[-2000:]


@TWO
@INSTALLED
@pytest.mark.parametrize("method", ["", "sft", "dpo", "gspo"])
def test_two_processes_train_what_one_does(method: str, tiny_model: Path, tmp_path: Path) -> None:
    """Every weight ("") or an adapter, by each method: the losses, and what was trained."""
    how: dict[str, Any] = {"method": method, "model": str(tiny_model)}
    run(1, tmp_path / "1", **how)
    run(2, tmp_path / "2", **how)
    ours, one = losses(tmp_path / "2"), losses(tmp_path / "1")
    assert ours.keys() == one.keys() == set(range(1, 9))
    assert max(abs(ours[step] - one[step]) for step in one) < 1e-5
    weights = [load_file(tmp_path / name) for name in ("1/weights-0.safetensors", "2/weights-0.safetensors")]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((weights[1][name] - each).abs().max()) for name, each in weights[0].items()) < 1e-5
    if method:
        assert max(float(each.abs().max()) for name, each in weights[1].items() if "lora_B" in name) > 1e-3


@TWO
@INSTALLED
def test_a_run_that_stopped_ends_as_if_it_had_not(tiny_model: Path, tmp_path: Path) -> None:
    """By transformers' own checkpoints, which hold the whole adapter beside the shards."""
    how: dict[str, Any] = {"method": "sft", "model": str(tiny_model), "save_steps": 4}
    run(2, tmp_path, **how)
    whole, weights = losses(tmp_path), load_file(tmp_path / "weights-0.safetensors")
    adapter = load_file(tmp_path / "run/checkpoint-8/adapter_model.safetensors")
    assert all(each.equal(adapter[name.replace(".default", "")]) for name, each in weights.items())
    shutil.rmtree(tmp_path / "run/checkpoint-8")
    run(2, tmp_path, **how, resume=str(tmp_path / "run/checkpoint-4"))
    assert losses(tmp_path) == {step: loss for step, loss in whole.items() if step > 4}
    again = load_file(tmp_path / "weights-0.safetensors")
    assert all(again[name].equal(each) for name, each in weights.items())
