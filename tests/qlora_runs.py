"""What the tests of QLoRA runs share: a run's configuration, its trainer, and what a trained model consists of."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from cogumi.training import run as training_run

Config = dict[str, Any]


def qlora(model: Path, code: Path, **ours: Any) -> Config:
    """A short SFT run on four bits."""
    return {
        "model": {"name": str(model), "quantization_config": {"load_in_4bit": True}},
        "lora": {"r": 64},  # 64 x 64 elements: the fewest whose optimizer state bitsandbytes keeps in 8 bits
        "data": {
            "source": str(code),
            "max_rows": 24,
            "fim": {"max_length": 64, "middle_chars": [8, 32], "overlong": "trim"},
        },
        "train": {
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
        },
        "cogumi": {"method": "sft", "compile": "off", **ours},
    }


def watch_trainers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trainers of the runs of a test; when a run is over, as they were when it ended."""
    seen: list[Any] = []
    fit = training_run.fit

    def watched(run: Any, trainer: Any, *rest: Any) -> Any:
        seen.append(trainer)
        return fit(run, trainer, *rest)

    monkeypatch.setattr(training_run, "fit", watched)
    return seen


def four_bit_copy(model: Path, path: Path) -> Path:
    """A checkpoint whose weights are quantized on the disk."""
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    AutoModelForCausalLM.from_pretrained(model, quantization_config=settings).save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    return path


def check(result: Any, name: str) -> Any:
    return next(check for check in result.verdict.checks if check.name == name)


def four_bit_layers(model: Any) -> dict[str, Any]:
    from bitsandbytes.nn import Linear4bit

    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
