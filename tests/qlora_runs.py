"""Short SFT and GSPO runs of tests: configuration, trainer, a failure on the way, and the layers of a trained model."""

from pathlib import Path
from typing import Any

import pytest
from builders import NF4, run_config, save_quantized
from transformers import AutoTokenizer

import cogumi
from cogumi.telemetry.recorder import Telemetry
from cogumi.training import run as training_run

Config = dict[str, Any]
GSPO_TRAIN: Config = {
    "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2,
    "max_completion_length": 8, "learning_rate": 1e-3, "gradient_checkpointing": False, "save_strategy": "no",
}  # fmt: skip


def short_sft(model: Path, code: Path, run_dir: Path, rows: int = 32) -> Config:
    """Three steps of fill in the middle, with a merge."""
    data = {"max_rows": rows, "fim": {"max_length": 160, "middle_chars": [8, 32]}}
    train = {"max_steps": 3, "learning_rate": 1e-3, "save_strategy": "no"}
    ours = {"merge": True, "compile": "off"}
    return run_config("sft", model, code, run_dir, data_section=data, train=train, cogumi=ours) | {"lora": {}}


def as_gspo(config: Config, **train: Any) -> Config:
    """The same model and data trained by GSPO."""
    ours = {"method": "gspo", "rewards": ["edit_similarity", "parses"]}
    return config | {"train": GSPO_TRAIN | train, "cogumi": config["cogumi"] | ours}


def train_until_failure(config: Config, step: int, **overrides: Any) -> None:
    """Start a run that dies behind this step."""
    on_step_end = Telemetry.on_step_end

    def failing(self: Telemetry, args: Any, state: Any, control: Any, **more: Any) -> None:
        on_step_end(self, args, state, control, **more)
        if state.global_step == step:
            raise RuntimeError("the card fell off the bus")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Telemetry, "on_step_end", failing)
        with pytest.raises(RuntimeError, match="fell off"):
            cogumi.train(config, **overrides)


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
    save_quantized(model, path, NF4)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    return path


def check(result: Any, name: str) -> Any:
    return next(check for check in result.verdict.checks if check.name == name)


def four_bit_layers(model: Any) -> dict[str, Any]:
    from bitsandbytes.nn import Linear4bit

    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def logged_weights(run_dir: Path) -> str:
    """The weights that were loaded, as the log has them; the forecast said the same before."""
    text = (run_dir / "run.log").read_text()
    forecast, loaded = (text.partition(before)[2].partition("\n")[0] for before in ("weights: ", "loaded on cpu: "))
    assert forecast == loaded
    assert text.index("weights: ") < text.index("loaded on cpu: ")
    return loaded
