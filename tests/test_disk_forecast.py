"""The forecast of a checkpoint against the checkpoint: real trainers, real optimizers, the bytes of real directories."""

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_llama
from conftest import letters
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    CLIPConfig,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from cogumi.checkpoints.verify import bytes_of
from cogumi.core.errors import UsageError
from cogumi.forecast.disk_forecast import CheckpointBytes, checkpoint_bytes, merged_bytes

LORA = {"r": 64, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
TEXT = ["def add(a, b): return a + b", "class Stack: pass", "for x in range(9): print(x)", "import os, sys"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., Path]:
    """The directory of a random Llama of 1.5 million parameters, made once for each dtype and tying."""
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 256}

    @functools.cache
    def make(dtype: torch.dtype = torch.float32, tied: bool = False) -> Path:
        return save_llama(tmp_path_factory.mktemp("base"), tiny_model, dtype, tie_word_embeddings=tied, **sizes)

    return make


@pytest.fixture(scope="module", autouse=True)
def trainers_that_run_here() -> Iterator[None]:
    """No second a train() for walking through every module that was ever imported."""
    gc.freeze()
    yield
    gc.unfreeze()


def build(kind: str, model: Any, out: Path, lora: dict[str, Any] | None = None, **args: Any) -> Trainer:
    """A trainer that saves once, at its second step."""
    steps = {"max_steps": 2, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    steps |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    args = {"output_dir": str(out), "report_to": "none", "disable_tqdm": True, **steps, **args}
    peft_config = LoraConfig(**{**LORA, **lora}) if lora is not None else None
    if kind == "plain":
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
        rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8, "labels": [[1, 2, 3, 4]] * 8})
        return Trainer(model, TrainingArguments(**args), train_dataset=rows)
    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    options = {"model": model, "processing_class": tokenizer, "peft_config": peft_config}
    if kind == "sft":
        rows = Dataset.from_dict({"text": TEXT * 2})
        return SFTTrainer(args=SFTConfig(max_length=32, **args), train_dataset=rows, **options)
    if kind == "dpo":
        pairs = {"prompt": TEXT * 2, "chosen": [" # yes"] * 8, "rejected": [" # no"] * 8}
        return DPOTrainer(args=DPOConfig(max_length=32, **args), train_dataset=Dataset.from_dict(pairs), **options)
    rows = Dataset.from_dict({"prompt": TEXT * 2})
    config = GRPOConfig(num_generations=2, max_completion_length=4, **args)
    return GRPOTrainer(args=config, reward_funcs=letters, train_dataset=rows, **options)


def check(name: str, trainer: Trainer) -> CheckpointBytes:
    """The forecast before the first step is the checkpoint of the second; `pytest -rP` shows the error."""
    forecast = checkpoint_bytes(trainer)
    assert trainer.optimizer is None or not trainer.optimizer.state
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        trainer.train()
    real = bytes_of(Path(trainer.args.output_dir, "checkpoint-2"))
    error = 100 * (forecast.total / real - 1)
    print(f"{name:32} {real / 1e6:7.2f} MB  {error:+6.3f} %")
    assert abs(error) <= 5
    return forecast


BF16 = torch.bfloat16
CASES: dict[str, dict[str, Any]] = {
    "plain adamw": {"optim": "adamw_torch"},
    "plain adamw fused bf16": {"optim": "adamw_torch_fused", "dtype": BF16},
    "plain adamw tied": {"tied": True},
    "plain adamw_8bit": {"optim": "adamw_8bit"},
    "plain adamw_8bit bf16 tied": {"optim": "adamw_8bit", "dtype": BF16, "tied": True},
    "plain paged_adamw_8bit": {"optim": "paged_adamw_8bit"},
    "plain paged_adamw_32bit": {"optim": "paged_adamw_32bit"},
    "plain lion_8bit": {"optim": "lion_8bit"},
    "plain ademamix_8bit": {"optim": "ademamix_8bit"},
    "plain adafactor": {"optim": "adafactor"},
    "plain adafactor bf16": {"optim": "adafactor", "dtype": BF16},
    "plain sgd": {"optim": "sgd"},
    "plain sgd momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "plain rmsprop": {"optim": "rmsprop"},
    "plain save_only_model": {"save_only_model": True},
    "plain lora": {"lora": {}},
    "sft adamw bf16": {"kind": "sft", "dtype": BF16},
    "sft lora": {"kind": "sft", "lora": {}},
    "sft lora adamw_8bit": {"kind": "sft", "lora": {}, "optim": "adamw_8bit"},
    "sft lora paged_adamw_8bit small": {"kind": "sft", "lora": {"r": 4}, "optim": "paged_adamw_8bit"},
    "sft lora modules_to_save": {"kind": "sft", "lora": {"modules_to_save": ["lm_head"]}},
    "sft lora save_only_model": {"kind": "sft", "lora": {}, "save_only_model": True},
    "sft lora on 4 bits": {"kind": "sft", "lora": {}, "optim": "paged_adamw_8bit", "four_bit": True},
    "dpo adamw": {"kind": "dpo"},
    "dpo lora": {"kind": "dpo", "lora": {}},
    "grpo adamw": {"kind": "grpo"},
    "grpo lora adafactor": {"kind": "grpo", "lora": {}, "optim": "adafactor"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_forecast_is_the_checkpoint(name: str, base: Callable[..., Path], tmp_path: Path) -> None:
    case = dict(CASES[name])
    dtype = case.pop("dtype", torch.float32)
    path = base(dtype, case.pop("tied", False))
    four_bit = BitsAndBytesConfig(load_in_4bit=True) if case.pop("four_bit", False) else None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=four_bit)
    trainer = build(case.pop("kind", "plain"), model, tmp_path, **case)
    check(name, trainer)


def test_dpo_on_a_trained_adapter_saves_the_reference_adapter_too(base: Callable[..., Path], tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base()), LoraConfig(**LORA))
    trainer = build("dpo", model, tmp_path)
    check("dpo on an adapter", trainer)
    assert (tmp_path / "checkpoint-2" / "ref" / "adapter_model.safetensors").exists()


def test_resized_embeddings_are_saved_with_the_adapter(base: Callable[..., Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base())
    model.resize_token_embeddings(model.config.vocab_size + 8)
    trainer = build("sft", model, tmp_path, lora={"r": 8})
    check("sft lora, vocabulary grown", trainer)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit", "adafactor"])
def test_looking_ahead_changes_nothing(optim: str, base: Callable[..., Path], tmp_path: Path) -> None:
    """Weights of a run that was forecast before it trained, and of one that was not."""
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base())
        trainer = build("sft", model, tmp_path / str(watched), optim=optim, max_steps=4, save_strategy="no")
        if watched:
            state = torch.get_rng_state()
            config = model.config.to_dict()
            checkpoint_bytes(trainer)
            assert torch.get_rng_state().equal(state)
            assert trainer.optimizer is None
            assert model.config.to_dict() == config
        trainer.train()
        weights.append((trainer.model.state_dict(), [entry.get("loss") for entry in trainer.state.log_history]))
    assert weights[0][1] == weights[1][1]
    assert all(tensor.equal(weights[1][0][name]) for name, tensor in weights[0][0].items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_merged_size(dtype: str, tied: bool, base: Callable[..., Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base(tied=tied), dtype=dtype)
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(base(tied=tied), dtype=dtype), LoraConfig(**LORA))
    model.save_pretrained(tmp_path)
    real = (tmp_path / "model.safetensors").stat().st_size
    for forecast in (merged_bytes(model.config), merged_bytes(wrapped.config)):
        assert forecast == pytest.approx(real, rel=1e-3)


def test_the_merged_size_of_a_quantized_model_is_that_of_the_whole_one(base: Callable[..., Path]) -> None:
    """A 4-bit model's own weights are a quarter of that, and its file says nothing of what the merge writes."""
    whole = AutoModelForCausalLM.from_pretrained(base(), dtype=BF16)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=BF16)
    small = AutoModelForCausalLM.from_pretrained(base(), dtype=BF16, quantization_config=settings)
    assert sum(p.nbytes for p in small.parameters()) < 0.7 * sum(p.nbytes for p in whole.parameters())
    adapted = get_peft_model(small, LoraConfig(**LORA))
    assert merged_bytes(small.config) == merged_bytes(adapted.config) == merged_bytes(whole.config)
    assert merged_bytes(whole.config) == pytest.approx(sum(p.nbytes for p in whole.parameters()), rel=0.01)


def test_a_model_that_cannot_be_built_has_no_merged_size() -> None:
    with pytest.raises(UsageError, match=r"builds no 'clip' model: [^\n]*CLIPConfig[^\n]*$"):
        merged_bytes(CLIPConfig())
