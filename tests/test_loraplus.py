"""LoRA+: B learns `cogumi.loraplus_ratio` times as fast as A, with the optimizer, betas, decay and schedule of the run."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from builders import run_config, tiny_llama
from qlora_runs import as_gspo, short_sft, train_until_failure, watch_trainers
from safetensors.torch import load_file

import cogumi
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json
from cogumi.methods.loraplus import use_loraplus

STEP: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-4, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}


def trainer_of(path: Path, lora: dict[str, Any], **arguments: Any) -> transformers.Trainer:
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, **lora))
    arguments |= {"use_cpu": True, "report_to": "none", "learning_rate": 1e-3}
    return transformers.Trainer(model, transformers.TrainingArguments(str(path), **arguments))


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("method", ["sft", "gspo", "dpo"])
def test_the_first_step_of_b_is_the_ratio_times_the_rate(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, method: str
) -> None:
    """The first step of Adam is the learning rate, whatever the gradient."""
    config = short_sft(tiny_model, code_parquet, tmp_path / "run")
    if method == "gspo":
        config = as_gspo(config)
    elif method == "dpo":
        pairs = [{"prompt": f"x{n} = ", "chosen": f"{n}", "rejected": f"{n} + 1"} for n in range(16)]
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        data = {"format": "preference", "eval_rows": 0}
        config = run_config("dpo", tiny_model, tmp_path / "pairs.jsonl", tmp_path / "run", data_section=data)
    config["train"] |= STEP
    config["cogumi"] |= {"loraplus_ratio": 16, "merge": False}
    cogumi.train(config)
    of_b = [tensor.abs().max().item() for name, tensor in weights_of(tmp_path / "run").items() if "lora_B" in name]
    assert max(of_b) == pytest.approx(16e-4, rel=1e-2)
    record = read_json(tmp_path / "run" / "decisions.json")["optimizer"]
    assert record["class"] == "torch.optim.adamw.AdamW"
    assert record["loraplus_ratio"] == 16
    assert [group["lr"] for group in record["groups"]] == pytest.approx([1e-4, 16e-4])


def test_a_resumed_run_is_the_uninterrupted_one(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> None:
    config = short_sft(tiny_model, code_parquet, tmp_path / "whole")
    config["train"] |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    config["train"] |= {"warmup_steps": 2, "weight_decay": 0.1}
    config["cogumi"] |= {"loraplus_ratio": 8, "merge": False}
    cogumi.train(config)
    config["cogumi"]["run_dir"] = str(tmp_path / "broken")
    train_until_failure(config, 2)
    cogumi.train(config)
    whole, broken = weights_of(tmp_path / "whole"), weights_of(tmp_path / "broken")
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_the_optimizer_is_that_of_the_run(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    pytest.importorskip("bitsandbytes")
    trainers = watch_trainers(monkeypatch)
    config = short_sft(tiny_model, code_parquet, tmp_path / "run")
    config["lora"] = {"r": 64}
    config["train"] |= {"optim": optim, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.1}
    config["cogumi"] |= {"merge": False}
    plain = cogumi.train(config)
    ours = cogumi.train(config, cogumi__loraplus_ratio=1, cogumi__run_dir=str(tmp_path / "ours"))
    plain_optimizer, optimizer = (getattr(trainer.optimizer, "optimizer", trainer.optimizer) for trainer in trainers)
    assert type(optimizer) is type(plain_optimizer)
    assert {key: optimizer.defaults[key] for key in ("betas", "eps")} == {"betas": (0.8, 0.9), "eps": 1e-6}
    record = read_json(ours.run_dir / "decisions.json")["optimizer"]
    assert record["bits"] == (8 if "8bit" in optim else 32)
    assert {group["weight_decay"] for group in record["groups"]} == {0.1}
    adapters = [weights_of(result.run_dir) for result in (plain, ours)]
    assert all(torch.equal(adapters[1][name], tensor) for name, tensor in adapters[0].items())  # 1 changes nothing


def test_embeddings_learn_at_the_rate_of_a_while_norms_are_not_decayed(tmp_path: Path) -> None:
    lora = {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["norm"]}
    trainer = trainer_of(tmp_path, lora, weight_decay=0.1)
    use_loraplus(trainer, 4, tmp_path)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    optimizer = trainer.create_optimizer()
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(found) == sum(parameter.requires_grad for parameter in trainer.model.parameters())
    for name, rate in found.items():
        expected = (4e-3, 0.0) if "norm" in name else (4e-3, 0.1) if "lora_B" in name else (1e-3, 0.1)
        assert rate == expected, name


def test_an_optimizer_with_groups_of_its_own_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, {"target_modules": ["q_proj"]})
    trainer.get_optimizer_cls_and_kwargs = lambda args, model: (torch.optim.AdamW, {"lr": 1e-3, "params": []})
    with pytest.raises(UsageError, match="makes groups of its own"):
        use_loraplus(trainer, 4, tmp_path)


def test_full_training_has_no_b(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> None:
    config = short_sft(tiny_model, code_parquet, tmp_path / "run")
    config["cogumi"] |= {"tuning": "full", "loraplus_ratio": 16}
    with pytest.raises(UsageError, match="loraplus_ratio would be ignored"):
        cogumi.train(config)
    assert not (tmp_path / "run").exists()
