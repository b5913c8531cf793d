"""Memory of the stage after the training: what has left it when the merge begins, and a check that runs out of it."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import small
from peft import PeftModel
from qlora_runs import Config, check, qlora
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import cogumi
from benchmarks.merge_check import QUICK, measure_stage
from cogumi.checkpoints.verify import inspect
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json
from cogumi.training import finish

GSPO = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8}
MODEL, CARD = (LlamaForCausalLM, "forward"), (AutoModelForCausalLM, "from_pretrained")
# Quantized or not, what runs out of memory, and at which call since the training. Two rows of live
# and of base logits are four calls, and the witness takes one of the merged model, after one of the base where that is quantized.
PLACES: dict[str, tuple[bool, tuple[Any, str], int]] = {
    "live logits": (False, MODEL, 1), "base logits": (False, MODEL, 3),
    "merge": (False, (finish, "merge_adapter"), 1), "loading": (False, CARD, 1), "merged logits": (False, MODEL, 6),
    "comparing adapters": (True, (finish, "differing_tensors"), 1), "loading the base": (True, CARD, 1),
    "loading the adapter": (True, (PeftModel, "from_pretrained"), 1), "full-precision logits": (True, MODEL, 4),
    "loading the merged model": (True, CARD, 2), "merged logits of a quantized run": (True, MODEL, 8),
}  # fmt: skip


@pytest.fixture
def start(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Callable[[bool], Config]:
    def config(quantized: bool) -> Config:
        made = qlora(tiny_model, code_parquet, run_dir=str(tmp_path / "run"))
        made["train"] |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
        made["data"]["eval_rows"] = 0
        if not quantized:
            del made["model"]["quantization_config"]
        return made

    return config


def run_out_of_memory(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """From the moment the training is over, the given call of a function finds the memory full."""
    original, record, calls = getattr(owner, name), finish.record_live, 0

    def full(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(*arguments, **more)

    def begin(*arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, full)
        return record(*arguments)

    monkeypatch.setattr(finish, "record_live", begin)


@pytest.mark.parametrize(
    "place",
    [
        "loading",
        *(pytest.param(place, marks=pytest.mark.slow("a training each")) for place in PLACES if place != "loading"),
    ],
)
def test_a_check_without_memory_ends_with_a_verdict(
    place: str, start: Callable[[bool], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, function, call = PLACES[place]
    config = start(quantized)
    run_out_of_memory(monkeypatch, *function, call)
    result = cogumi.train(config)
    assert result.adapter is not None
    assert load_file(result.adapter / "adapter_model.safetensors")
    assert inspect(result.run_dir / "checkpoints" / "checkpoint-2").state == "verified"
    written = read_json(result.run_dir / "verdict.json")
    if place == "merge":
        assert (result.merged, written["passed"]) == (None, False)
        assert "CUDA out of memory" in check(result, "merge").figure
    else:
        assert result.merged is not None
        assert written["passed"] is True
        figure = check(result, "merged logits").figure
        assert figure.startswith("not compared: ")
        assert figure.endswith(f"cogumi merge {result.adapter} OUT --verify logits")
    state = read_json(result.run_dir / "status.json")["state"]
    assert state == ("finished" if written["passed"] else "finished, checks failed")
    with pytest.raises(UsageError):  # the training is not repeated
        cogumi.train(config)


@pytest.mark.parametrize("method", ["gspo", pytest.param("sft", marks=pytest.mark.slow("gspo keeps more references"))])
def test_the_trained_model_has_left_memory_when_the_merge_begins(
    method: str, tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = (
        GSPO | {"max_steps": 2, "learning_rate": 1e-2} if method == "gspo" else {"max_steps": 2, "learning_rate": 1e-2}
    )
    rewards = {"rewards": ["edit_similarity", "parses"]} if method == "gspo" else {}
    config = small(tiny_model, code_parquet, train, method=method, run_dir=str(tmp_path / "run"), **rewards)
    merge, left = finish.merge_adapter, []

    def alive() -> int:
        return sum(issubclass(type(each), PreTrainedModel | torch.optim.Optimizer) for each in gc.get_objects())

    def watched(*arguments: Any, **more: Any) -> Any:
        left.append(alive())
        return merge(*arguments, **more)

    gc.collect()
    before = alive()
    monkeypatch.setattr(finish, "merge_adapter", watched)
    assert cogumi.train(config).merged is not None
    assert left == [before]


@pytest.mark.slow("writes, merges and runs a model of 94 million weights")
def test_the_stage_never_holds_two_models() -> None:
    actual = measure_stage(QUICK)
    assert not actual["failed"], actual
    # Two bytes a weight for one model; the rest is logits, activations and what the first forward pass imports.
    assert 2 * actual["parameters"] < actual["bytes"] < 3.8 * actual["parameters"]
