"""Training every weight: what is saved is what was trained, and what cannot fit is refused before it is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cogumi
from cogumi.core.errors import UsageError

Config = dict[str, Any]


@pytest.fixture
def sft(sft: Config) -> Config:
    del sft["lora"], sft["data"]["max_rows"]
    sft["train"] |= {"learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 3}
    sft["cogumi"] |= {"tuning": "full", "merge": True}
    return sft


def test_every_weight_is_trained_and_saved_in_the_dtype_of_the_base(sft: Config, tiny_model: Path) -> None:
    result = cogumi.train(sft)
    assert result.passed, str(result.verdict)
    assert result.adapter is None
    assert result.merged is not None
    before, after = load_file(tiny_model / "model.safetensors"), load_file(result.merged / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(after[name].dtype == before[name].dtype == torch.bfloat16 for name in before)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= set(moved)
    assert not (result.run_dir / "adapter").exists()
    assert {check.name for check in result.verdict.checks} >= {"weights", "saved model"}
    assert "adapter" not in {check.name for check in result.verdict.checks}


def test_the_next_stage_starts_from_it(sft: Config, tmp_path: Path) -> None:
    first = cogumi.train(sft, train__max_steps=2)
    again = cogumi.train(
        sft,
        model__name=str(first.merged),
        cogumi__run_dir=str(tmp_path / "lora"),
        cogumi__tuning="lora",
        train__max_steps=2,
    )
    assert again.passed, str(again.verdict)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("lora__r", 4, r"lora\.r would be ignored"),
        ("model__quantization_config", {"load_in_4bit": True}, "quantized weights cannot be trained"),
    ],
)
def test_settings_of_an_adapter_are_refused(sft: Config, key: str, value: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cogumi.train(sft, **{key: value})
    assert not Path(sft["cogumi"]["run_dir"]).exists()


def test_weights_that_did_not_move_fail_the_verdict(sft: Config) -> None:
    result = cogumi.train(sft, train__learning_rate=0.0, train__max_steps=2)
    (check,) = (check for check in result.verdict.checks if check.name == "weights")
    assert not check.passed
    assert check.figure.startswith("0 of")


@pytest.mark.parametrize(
    ("merge_dtype", "stored", "passes"), [("auto", torch.float32, True), ("base", torch.bfloat16, False)]
)
def test_an_update_that_rounding_would_take_is_saved_in_float32(
    sft: Config, merge_dtype: str, stored: torch.dtype, passes: bool
) -> None:
    result = cogumi.train(sft, train__learning_rate=1e-5, cogumi__merge_dtype=merge_dtype)
    assert result.merged is not None
    saved = load_file(result.merged / "model.safetensors")
    trained = load_file(max((result.run_dir / "checkpoints").glob("checkpoint-*")) / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {stored}
    assert passes == all(torch.equal(saved[name].float(), trained[name]) for name in saved)
    (check,) = (check for check in result.verdict.checks if check.name == "saved update")
    assert (check.passed, result.passed) == (passes, passes), str(result.verdict)
