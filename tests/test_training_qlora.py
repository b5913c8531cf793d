"""QLoRA runs with real TRL trainers and real bitsandbytes on a CPU: load, train, go on, forecast the disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from qlora_runs import (
    Config,
    as_gspo,
    check,
    four_bit_copy,
    four_bit_layers,
    qlora,
    train_until_failure,
    watch_trainers,
)
from test_training_unfinished import logged, the_same

import cogumi
from cogumi.checkpoints.verify import bytes_of
from cogumi.config.schema import load_config
from cogumi.forecast.disk_forecast import forecast_disks
from cogumi.merge.adapter_files import BaseRecord, read_base_record, weights_sample
from cogumi.models.quantized_bases import Quantization

BF16 = torch.bfloat16


@pytest.fixture
def sft(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Config:
    return qlora(tiny_model, code_parquet, run_dir=str(tmp_path / "run"))


@pytest.fixture
def gspo(sft: Config) -> Config:
    return as_gspo(sft, max_steps=4, per_device_train_batch_size=4, max_completion_length=6)


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return watch_trainers(monkeypatch)


# ---------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    "optim",
    ["adamw_torch", "adamw_8bit", pytest.param("paged_adamw_8bit", marks=pytest.mark.slow("adamw_8bit on a CPU"))],
)
def test_sft_trains_an_adapter_on_four_bits(optim: str, sft: Config, tiny_model: Path, trainers: list[Any]) -> None:
    result = cogumi.train(sft, train__optim=optim, train__max_steps=2, cogumi__merge=False)
    assert result.passed, str(result.verdict)
    assert "loaded on cpu: " in (result.run_dir / "run.log").read_text()
    nf4 = Quantization("bitsandbytes", 4, "nf4", True)
    assert read_base_record(result.adapter) == BaseRecord(
        str(tiny_model), None, None, nf4, "float32", weights_sample(str(tiny_model)), transformers.__version__
    )

    (trainer,) = trainers
    model = trainer.model
    assert len(four_bit_layers(model)) == 2 * 7
    assert all(not parameter.requires_grad for parameter in model.parameters() if parameter.dtype == torch.uint8)
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert any(torch.is_tensor(value) and value.dtype == torch.uint8 for value in states) == ("8bit" in optim)


def test_gspo_trains_an_adapter_on_four_bits(gspo: Config) -> None:
    result = cogumi.train(gspo, train__max_steps=2, cogumi__merge=False)
    assert result.passed, str(result.verdict)
    assert result.series("policy/ratio_new_old")[0] == pytest.approx(1, abs=1e-5)
    assert "gspo by GRPOTrainer" in check(result, "loss that ran").figure


@pytest.mark.slow("bitsandbytes on a CPU takes seconds a step")
def test_eight_bits_train_too(sft: Config) -> None:
    sft["model"]["quantization_config"] = {"load_in_8bit": True}
    result = cogumi.train(sft)
    assert result.passed, str(result.verdict)
    record = read_base_record(result.adapter)
    assert record is not None
    assert record.quantization == Quantization("bitsandbytes", 8)


@pytest.mark.slow("bitsandbytes on a CPU takes seconds a step")
def test_nothing_but_the_linear_layers_changes_its_dtype(sft: Config, trainers: list[Any]) -> None:
    """PEFT's prepare_model_for_kbit_training would make float32 of all the rest, and TRL bfloat16 of the adapter."""
    cogumi.train(sft, model__dtype="bfloat16", lora__modules_to_save=["lm_head"], cogumi__merge=False)
    model = trainers[0].model
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.uint8}
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "lora_" not in name} == {BF16}
    assert any("modules_to_save" in name for name in dtypes)
    assert {module.compute_dtype for module in four_bit_layers(model).values()} == {BF16}


@pytest.mark.slow("bitsandbytes on a CPU takes seconds a step")
def test_checkpointing_is_not_reentrant(sft: Config, trainers: list[Any]) -> None:
    cogumi.train(sft, train__max_steps=1, train__gradient_checkpointing=True, cogumi__merge=False)
    layers = trainers[0].model.get_base_model().model.layers
    assert all(layer.gradient_checkpointing for layer in layers)
    assert not any(layer._gradient_checkpointing_func.keywords["use_reentrant"] for layer in layers)


@pytest.mark.slow("bitsandbytes on a CPU takes seconds a step")
@pytest.mark.parametrize(("method", "optim"), [("sft", "adamw_8bit"), ("gspo", "adamw_torch")])
def test_a_failed_run_goes_on_as_if_it_had_not(
    method: str, optim: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = request.getfixturevalue(method)
    config["train"] |= {"save_strategy": "steps", "save_steps": 2, "optim": optim}
    config["cogumi"] |= {"merge": False}
    whole = cogumi.train(config, cogumi__run_dir=str(tmp_path / "whole"))
    train_until_failure(config, 3)
    result = cogumi.train(config)
    assert result.passed, str(result.verdict)
    assert "resuming from" in (result.run_dir / "run.log").read_text()
    assert logged(result.run_dir) == logged(whole.run_dir)
    assert the_same(result.run_dir, whole.run_dir)


# ------------------------------------------------------------------------------------------------------------- disks


@pytest.mark.slow("bitsandbytes on a CPU takes seconds a step")
@pytest.mark.parametrize(("method", "on_disk"), [("sft", False), ("gspo", False), ("sft", True)])
def test_a_checkpoint_is_forecast_before_the_run(
    method: str, on_disk: bool, request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path
) -> None:
    """The adapter and what the optimizer keeps of it; no base, in whatever precision, on the disk or in memory."""
    config = request.getfixturevalue(method)
    config["train"] |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_8bit"}
    config["cogumi"] |= {"merge": False}
    if on_disk:
        config["model"] = {"name": str(four_bit_copy(tiny_model, tmp_path / "base"))}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    forecast = forecast_disks(load_config(tmp_path / "run.yaml"))
    result = cogumi.train(tmp_path / "run.yaml")
    (written,) = (result.run_dir / "checkpoints").glob("checkpoint-*")
    assert not forecast.notes
    assert forecast.checkpoint == pytest.approx(bytes_of(written), rel=0.01)
