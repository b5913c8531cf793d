"""LoRA+: A and B learn at their own rates with the optimizer that was asked for, in real trainers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from peft.optimizers import create_loraplus_optimizer
from qlora_runs import watch_trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback

import cogumi
from cogumi.checkpoints import protect
from cogumi.checkpoints.disk_forecast import planned_optimizer
from cogumi.core.errors import UsageError
from cogumi.models.adapters import loraplus_groups, use_loraplus

RATIO = 16.0
Make = Callable[..., Any]


class Recorder(TrainerCallback):
    """Gradients before each step, the learning rates of the groups at it, and the rate that is logged."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.rates: list[list[float]] = []
        self.logged: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])
        self.gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logged += [logs["learning_rate"]] if "learning_rate" in logs else []


@pytest.fixture
def make(tiny_model: Path, sources: list[str], tmp_path: Path) -> Make:
    """A real SFTTrainer on an adapter that is already on; LoRA+ where a ratio is given."""

    def make(
        ratio: float | None = RATIO, lora: dict[str, Any] | None = None, by_hand: Any = None, **options: Any
    ) -> Any:
        cogumi.patch()
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        config = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **(lora or {})})
        model = peft.get_peft_model(base, config)
        args = trl.SFTConfig(
            **{
                "output_dir": str(tmp_path / "trainer"),
                "max_length": 32,
                "max_steps": 4,
                "per_device_train_batch_size": 2,
                "learning_rate": 1e-3,
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": "none",
                "bf16": False,
                "gradient_checkpointing": False,
                "dataloader_pin_memory": False,
            }
            | options
        )
        trainer = trl.SFTTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_dict({"input_ids": tokenizer([text[:80] for text in sources[:8]])["input_ids"]}),
            processing_class=tokenizer,
            optimizers=(by_hand(model, args), None) if by_hand else (None, None),
        )
        if ratio is not None:
            use_loraplus(trainer, ratio)
        return trainer

    return make


def adapter_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def test_one_step_is_adamws_closed_form_for_a_and_b(make: Make) -> None:
    """float64: p - lr (g / (|g| + eps) + decay p), with 16 times the rate for B. (After one step m/v is g/|g|.)"""
    trainer = make(max_steps=1, lr_scheduler_type="constant", weight_decay=0.1, adam_epsilon=1e-6, max_grad_norm=0.0)
    for name, parameter in trainer.model.named_parameters():  # B is zero at first, and decay would not show
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    before = adapter_of(trainer)
    trainer.add_callback(seen := Recorder())
    trainer.train()
    after = adapter_of(trainer)
    assert {"lora_A" in name for name in before} == {True, False}
    for name, start in before.items():
        rate = 1e-3 * (RATIO if "lora_B" in name else 1)
        g, p = seen.gradients[name].double(), start.double()
        expected = p - rate * (g / (g.abs() + 1e-6) + 0.1 * p)
        assert torch.allclose(after[name].double(), expected, rtol=0, atol=2e-6 * rate / 1e-3), name
        assert (after[name] - start).abs().max() > rate / 2


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit", "paged_adamw_8bit", "adafactor"])
def test_it_is_pefts_optimizer_of_the_configured_kind(optim: str, make: Make) -> None:
    """Four steps are, bit for bit, those of a script that hands peft's own LoRA+ optimizer to the same trainer."""

    def by_hand(model: Any, args: Any) -> Any:
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return create_loraplus_optimizer(
            model, cls, loraplus_lr_ratio=RATIO, loraplus_weight_decay=args.weight_decay, **kwargs
        )

    options = {"optim": optim, "weight_decay": 0.05, "adam_beta2": 0.9, "lora": {"r": 64}}  # 64 x 64: kept in 8 bits
    ours, theirs = make(**options), make(ratio=None, by_hand=by_hand, **options)
    ours.train(), theirs.train()
    one, other = adapter_of(ours), adapter_of(theirs)
    assert all(torch.equal(one[name], other[name]) for name in one)
    plain = make(ratio=None, **options)
    plain.train()
    assert not all(torch.equal(one[name], each) for name, each in adapter_of(plain).items())
    inner, reference = (getattr(each.optimizer, "optimizer", each.optimizer) for each in (ours, plain))
    assert type(inner) is type(reference)
    kept = ("betas", "eps", "weight_decay", "optim_bits", "is_paged")
    assert {key: inner.defaults.get(key) for key in kept} == {key: reference.defaults.get(key) for key in kept}
    if optim.endswith("8bit"):
        states = [state["state1"].dtype for state in inner.state.values() if "state1" in state]
        assert torch.uint8 in states


def test_the_schedule_scales_both_and_the_base_rate_is_logged(make: Make) -> None:
    trainer = make(max_steps=6, lr_scheduler_type="cosine", warmup_steps=2)
    trainer.add_callback(seen := Recorder())
    trainer.train()
    assert len({tuple(rates) for rates in seen.rates}) >= 4
    assert all(b == pytest.approx(RATIO * a) for a, b in seen.rates)
    assert seen.logged == pytest.approx([a for a, _ in seen.rates])


def test_every_trained_parameter_is_in_one_group(make: Make) -> None:
    """DoRA's magnitudes go with B, what is trained whole with A, adapters on embeddings at peft's own rate."""
    lora = {
        "use_dora": True,
        "target_modules": ["q_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
        "ensure_weight_tying": False,
    }
    model = make(ratio=None, lora=lora).model
    groups = loraplus_groups(model, 1e-4, 16, 0.1)
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    sorted_into = [{names[p] for p in group["params"]} for group in groups]
    assert sorted(name for group in sorted_into for name in group) == sorted(names.values())
    rates = {name: group["lr"] for group, inside in zip(groups, sorted_into, strict=True) for name in inside}
    for name, rate in rates.items():
        if "lora_embedding" in name:
            assert rate == 1e-6, name
        elif "lora_B" in name or "magnitude" in name:
            assert rate == pytest.approx(1.6e-3), name
        else:
            assert rate == 1e-4, name
    assert groups[0]["lr"] == 1e-4  # transformers logs the first group's


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_resumed_is_uninterrupted(optim: str, make: Make, tmp_path: Path) -> None:
    options = {
        "optim": optim,
        "lora": {"r": 64},
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 4,
        "max_steps": 5,
    }
    whole = make(**options, output_dir=str(tmp_path / "whole"))
    protect(whole).train()
    elsewhere = tmp_path / "again"
    elsewhere.mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(elsewhere / "checkpoint-2")
    again = make(**options, output_dir=str(elsewhere))
    again.add_callback(seen := Recorder())
    protect(again).train()
    assert len(seen.rates) == 3  # and not five
    one, other = adapter_of(whole), adapter_of(again)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_learns_with_it(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `cogumi.train`, whose disk forecast makes an optimizer of its own before the first step."""
    trainers = watch_trainers(monkeypatch)
    result = cogumi.train(
        {
            "model": {"name": str(tiny_model)},
            "lora": {"r": 4},
            "data": {"source": str(code_parquet), "max_rows": 32, "fim": {"max_length": 160, "middle_chars": [8, 32]}},
            "train": {"max_steps": 3, "learning_rate": 1e-3, "save_strategy": "no", "optim": "adamw_torch"},
            "cogumi": {"method": "sft", "run_dir": str(tmp_path / "run"), "loraplus_lr_ratio": 16},
        }
    )
    assert result.passed, str(result.verdict)
    (trainer,) = trainers
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == pytest.approx([1e-3, 1.6e-2])
    said = (result.run_dir / "run.log").read_text()
    assert "LoRA+: B learns 16 times as fast as A" in said
    assert "AdamW: 0.001 for 14 tensors, 0.016 for 14 tensors" in said


def test_an_optimizer_can_be_made_more_than_once(make: Make) -> None:
    trainer = make()
    for _ in range(2):
        assert [group["lr"] for group in planned_optimizer(trainer).param_groups] == pytest.approx([1e-3, 1.6e-2])


def test_what_has_groups_of_its_own_is_refused(make: Make, tiny_model: Path) -> None:
    trainer = make(ratio=None)
    plain = trainer.get_optimizer_cls_and_kwargs
    # GaLore's and APOLLO's handlers in transformers do so, where their packages are installed.
    trainer.get_optimizer_cls_and_kwargs = lambda args, model=None: (plain(args)[0], plain(args)[1] | {"params": []})
    with pytest.raises(UsageError, match="adamw_torch_fused makes parameter groups of its own"):
        use_loraplus(trainer, RATIO)

    there = make(ratio=None, by_hand=lambda model, args: torch.optim.SGD(model.parameters(), lr=1e-3))
    with pytest.raises(UsageError, match="give the trainer no optimizer"):
        use_loraplus(there, RATIO)

    whole = make(ratio=None)
    whole.model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(UsageError, match="trains the whole model"):
        use_loraplus(whole, RATIO)
