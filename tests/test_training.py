"""`cogumi.train` with real TRL trainers on a tiny model: what a run leaves behind, and that mistakes leave nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import yaml

import cogumi
from cogumi.errors import UsageError
from cogumi.rundir import read_json, read_jsonl

Config = dict[str, Any]


@pytest.fixture
def sft(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Config:
    return {
        "model": {"name": str(tiny_model)},
        "lora": {"r": 4},
        "data": {"source": str(code_parquet), "eval_rows": 8, "fim": {"max_length": 160, "middle_chars": [8, 32]}},
        "train": {
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "gradient_checkpointing": False,
            "save_strategy": "no",
        },
        "cogumi": {"method": "sft", "run_dir": str(tmp_path / "sft")},
    }


@pytest.fixture
def gspo(sft: Config, tmp_path: Path) -> Config:
    return {
        **sft,
        "train": {
            "loss_type": "gspo",
            "max_steps": 4,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "steps_per_generation": 2,
            "max_completion_length": 8,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "gradient_checkpointing": False,
            "save_strategy": "no",
        },
        "cogumi": {"method": "gspo", "run_dir": str(tmp_path / "gspo"), "rewards": ["edit_similarity", "parses"]},
    }


def test_sft_leaves_a_whole_run_directory(sft: Config) -> None:
    result = cogumi.train(sft)
    assert result.passed, str(result.verdict)
    home = result.run_dir
    assert read_json(home / "status.json")["state"] == "finished"
    assert read_json(home / "heartbeat.json")["step"] == 6
    assert read_json(home / "verdict.json")["passed"] is True
    assert (home / "DONE").exists()
    assert "fused_head" in (home / "run.log").read_text()
    assert yaml.safe_load((home / "config.yaml").read_text())["train"]["max_steps"] == 6
    losses = result.series("loss")
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    samples = read_jsonl(home / "samples.jsonl")
    assert len(samples) == 4
    assert all({"prompt", "middle", "completion"} <= set(sample) for sample in samples)
    assert not [p.name for p in home.iterdir() if p.name.startswith(".")]  # nothing half-written is left


def test_only_the_adapter_is_trained_and_the_base_directory_is_untouched(sft: Config, tiny_model: Path) -> None:
    from safetensors.torch import load_file

    before = {p.name: p.read_bytes() for p in tiny_model.iterdir()}
    result = cogumi.train(sft)
    assert {p.name: p.read_bytes() for p in tiny_model.iterdir()} == before
    saved = load_file(result.adapter / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert result.merged is not None
    base, merged = load_file(tiny_model / "model.safetensors"), load_file(result.merged / "model.safetensors")
    changed = {name for name in base if not base[name].equal(merged[name])}
    assert changed
    assert all("_proj" in name for name in changed)


def test_the_sft_loss_is_the_mean_cross_entropy_of_the_middles(sft: Config, tiny_model: Path) -> None:
    """All rows in one batch: the first logged loss against dense logits, without TRL and without the fused head."""
    from transformers import AutoModelForCausalLM

    from cogumi.config import load_config
    from cogumi.data.prepare import load_rows
    from cogumi.models.load import load_tokenizer
    from cogumi.training.sft import prepare

    config = {**sft, "data": {**sft["data"], "max_rows": 12}}
    first = cogumi.train(config, train__max_steps=1, train__per_device_train_batch_size=12).series("loss")[0]

    run = load_config(config)
    rows, _ = load_rows(run.data)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    losses = []
    for row in prepare(run, rows, load_tokenizer(str(tiny_model)), "rows").dataset:
        ids, learned = torch.tensor(row["input_ids"]), torch.tensor(row["completion_mask"]).bool()
        logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        losses.append(-logps[learned[1:]])
    assert 4 <= len(losses) <= 12
    assert first == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_gspo_trains_on_the_clipped_sequence_ratio(gspo: Config) -> None:
    result = cogumi.train(gspo)
    assert result.passed, str(result.verdict)
    assert len(result.series("reward")) == 2  # four steps, two per rollout
    means = result.series("ratio_new_old/mean")
    assert means[0] == pytest.approx(1, abs=1e-5)  # on-policy: the rollout's own log-probabilities
    assert any(abs(mean - 1) > 1e-4 for mean in means[1::2])  # after one update they differ
    assert max(result.series("clip_ratio/region_mean")) > 0


def test_a_finished_run_directory_is_not_written_over(sft: Config) -> None:
    sft["train"]["max_steps"] = 1
    first = cogumi.train(sft, cogumi__merge=False)
    before = {p: p.stat().st_mtime_ns for p in first.run_dir.rglob("*")}
    with pytest.raises(UsageError, match=r"already holds a run \(finished\)"):
        cogumi.train(sft, cogumi__merge=False)
    assert {p: p.stat().st_mtime_ns for p in first.run_dir.rglob("*")} == before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"data__source": "missing.parquet"}, "missing.parquet"),
        ({"data__column": "text"}, "text"),
        ({"model__name": "no/such/model"}, "no model at 'no/such/model'"),
        ({"data__eval_rows": 100000}, "holds out 100000"),
        ({"train__max_length": 32}, "train.max_length 32 would cut examples"),
        ({"data__fim__max_length": 5}, "longer than 5 tokens"),
        ({"lora__target_modules": ["nothing"]}, "Target modules {'nothing'} not found"),
        ({"lora__use_dora": True}, "cogumi.merge=false trains it without merging"),
        ({"lora__bias": "all"}, "cogumi.merge=false trains it without merging"),
        ({"train__learning_rate": True}, "train.learning_rate = True: not a number"),
        ({"lora__r": 0}, "`r` should be a positive integer"),
        ({"train__learning_rate": -1.0}, "refused before the first step: Invalid learning rate: -1.0"),
        ({"train__report_to": "wandbb"}, "wandbb is not supported"),
        ({"train__per_device_train_batch_size": 0}, "batch_size should be a positive integer"),
        ({"train__resume_from_checkpoint": "x"}, "train.resume_from_checkpoint would be ignored"),
        ({"train__gradient_accumulation_steps": 0}, "train.gradient_accumulation_steps is 0"),
    ],
)
def test_a_mistake_writes_nothing(sft: Config, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        cogumi.train(sft, **overrides)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path(sft["cogumi"]["run_dir"]).exists()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"cogumi__rewards": ["edit_similarty"]}, "edit_similarity"),
        ({"cogumi__rewards": []}, "No reward source"),
        ({"train__epsilon": -1.0}, "train.epsilon is -1.0"),
        ({"train__reward_weights": [1.0]}, "Number of reward weights (1) must match"),
        ({"train__loss_type": "grop"}, "refused before the first step: Unknown loss type: grop"),
        ({"train__max_completion_length": 0}, "`max_new_tokens` must be greater than 0"),
        ({"train__per_device_train_batch_size": 3}, "divisible"),
        ({"train__importance_sampling_level": "token"}, "contradicts loss_type='gspo'"),
    ],
)
def test_a_gspo_mistake_writes_nothing(gspo: Config, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        cogumi.train(gspo, **overrides)
    assert says in str(caught.value)
    assert not Path(gspo["cogumi"]["run_dir"]).exists()


def test_an_empty_parquet_is_one_line(sft: Config, tmp_path: Path) -> None:
    pl.DataFrame({"source": []}, schema={"source": pl.String}).write_parquet(tmp_path / "empty.parquet")
    with pytest.raises(UsageError, match=r"empty\.parquet"):
        cogumi.train(sft, data__source=str(tmp_path / "empty.parquet"))


def test_a_run_directory_that_cannot_be_written_is_one_line(sft: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="cannot write the run directory"):
        cogumi.train(sft, cogumi__run_dir=str(tmp_path / "file" / "run"))


def test_a_model_without_weights_or_tokenizer_is_one_line(sft: Config, tiny_model: Path, tmp_path: Path) -> None:
    for missing, says in (("model.safetensors", "no file named model.safetensors"), ("tokenizer.json", "tokenizer")):
        broken = shutil.copytree(tiny_model, tmp_path / f"without-{missing}")
        (broken / missing).unlink()
        with pytest.raises(UsageError) as caught:
            cogumi.train(sft, model__name=str(broken))
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not Path(sft["cogumi"]["run_dir"]).exists()


def test_a_merge_that_is_refused_after_training_is_a_failed_check(sft: Config) -> None:
    """Nothing is learned at learning rate 0: the merge refuses, and verdict and adapter are still there."""
    result = cogumi.train(sft, train__learning_rate=0.0)
    failed = {check.name: check.figure for check in result.verdict.checks if not check.passed}
    assert set(failed) == {"adapter", "merge"}
    assert "changes nothing" in failed["merge"]
    assert result.merged is None
    assert result.adapter.is_dir()
    assert read_json(result.run_dir / "verdict.json")["passed"] is False
    assert read_json(result.run_dir / "status.json")["state"] == "finished, checks failed"
    assert not (result.run_dir / "DONE").exists()


def test_a_run_shorter_than_the_logging_interval_is_still_judged(sft: Config) -> None:
    result = cogumi.train(sft, train__max_steps=1, train__logging_steps=100, cogumi__merge=False)
    assert result.passed, str(result.verdict)


def test_a_run_that_fails_says_so_in_its_directory(gspo: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from cogumi.rewards import fim

    def broken(**kwargs: Any) -> list[float]:
        raise RuntimeError("the grader is down")

    monkeypatch.setitem(fim.REWARDS, "parses", broken)
    with pytest.raises(RuntimeError, match="the grader is down"):
        cogumi.train(gspo)
    status = json.loads(Path(gspo["cogumi"]["run_dir"], "status.json").read_text())
    assert status["state"] == "failed"
    assert "the grader is down" in status["reason"]
    assert not Path(gspo["cogumi"]["run_dir"], "DONE").exists()
