"""What the machine decides where the config says nothing: asked of machines that are not here, and of this one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import cogumi
from cogumi.config import RunConfig, load_config
from cogumi.rl.planner import ModelShape
from cogumi.rundir import read_json
from cogumi.training.choices import Load, Machine, choose, with_choices

GIB = 2**30
H100 = Machine("H100", (9, 0), 79 * GIB, frozenset({"flash_attention_2", "flash_attention_3", "bitsandbytes"}))
A100_40 = Machine("A100", (8, 0), 39 * GIB, frozenset({"flash_attention_2", "bitsandbytes"}))
T4 = Machine("T4", (7, 5), 15 * GIB, frozenset({"flash_attention_2"}))
CPU = Machine("CPU", None, 8 * GIB)
LLAMA_8B = ModelShape(4096, 14336, 32, 128256)


def load(
    trained: int = 42_000_000, weights: int = 16 * GIB, micro_batch: int = 2, length: int = 2048, **more: Any
) -> Load:
    return Load(
        **{"shape": LLAMA_8B, "element": 2, "attention": frozenset({"sdpa", "flash"})}
        | {"weights": weights, "trained": trained, "micro_batch": micro_batch, "length": length}
        | more
    )


def run_of(method: str = "sft", model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return load_config(
        {"model": {"name": "x", **(model or {})}, "data": {"source": "x"}, "train": train, "cogumi": {"method": method}}
    )


def decided(run: RunConfig, machine: Machine, asked: Load) -> dict[str, Any]:
    return {choice.key: choice.value for choice in choose(run, machine, asked)}


def test_an_h100_with_an_8b_model() -> None:
    assert decided(run_of(), H100, load()) == {
        "model.attn_implementation": "flash_attention_3",
        "train.gradient_checkpointing": True,  # 48.9 GiB were counted without, under fake tensors; the margin is 0.7
        "train.optim": "adamw_torch_fused",
        "train.tf32": True,
    }
    assert decided(run_of(), H100, load(micro_batch=1, length=1024))["train.gradient_checkpointing"] is False
    assert decided(run_of("gspo"), H100, load())["train.tf32"] is False


@pytest.mark.parametrize(
    ("machine", "more", "expected", "because"),
    [
        (A100_40, {}, "flash_attention_2", "installed, and for A100 (compute capability 8.0)"),
        (Machine("A100", (8, 0), 39 * GIB, frozenset({"flash_attention_3"})), {}, "sdpa", "no flash attention is installed"),
        (Machine("A100", (8, 0), 39 * GIB), {}, "sdpa", "no flash attention is installed"),
        (T4, {}, "sdpa", "flash attention needs bfloat16 and compute capability 8.0"),
        (A100_40, {"element": 4}, "sdpa", "flash attention needs bfloat16"),
        (A100_40, {"attention": frozenset({"sdpa"})}, "sdpa", "this model's class has no flash attention"),
        (A100_40, {"attention": frozenset()}, "eager", "its class has no sdpa"),
        (H100, {"attention": frozenset({"flash"}), "own_kernels": ("kernels-community/vllm-flash-attn3",)}, "eager",
         "this model takes only kernels-community/vllm-flash-attn3"),
    ],
)  # fmt: skip
def test_attention_is_what_is_installed_for_the_card_and_the_class(
    machine: Machine, more: dict[str, Any], expected: str, because: str
) -> None:
    (choice,) = (each for each in choose(run_of(), machine, load(**more)) if each.key == "model.attn_implementation")
    assert choice.value == expected
    assert because in choice.reason


@pytest.mark.parametrize(
    ("machine", "trained", "expected"),
    [
        (H100, 42_000_000, "adamw_torch_fused"),
        (H100, 8_000_000_000, "adamw_8bit"),
        (H100, 50_000_000_000, "paged_adamw_8bit"),
        (Machine("H100", (9, 0), 79 * GIB), 8_000_000_000, "adamw_torch_fused"),  # nothing else is installed
    ],
)
def test_moments_take_8_bits_where_32_do_not_fit(machine: Machine, trained: int, expected: str) -> None:
    assert decided(run_of(), machine, load(trained=trained))["train.optim"] == expected


def test_a_cpu_keeps_the_defaults_and_computes_nothing_twice_that_fits() -> None:
    small = load(trained=10_000, weights=10**6, length=160, shape=ModelShape(64, 128, 2, 512), element=4)
    assert decided(run_of(), CPU, small) == {"train.gradient_checkpointing": False}
    assert decided(run_of(), CPU, load(element=4)) == {"train.gradient_checkpointing": True}


def test_what_the_user_says_stays() -> None:
    said = {"gradient_checkpointing": False, "optim": "adafactor", "tf32": False}
    assert decided(run_of(model={"attn_implementation": "eager"}, **said), H100, load()) == {}
    assert "train.gradient_checkpointing" not in decided(
        run_of(gradient_checkpointing_kwargs={"use_reentrant": True}), H100, load(length=8)
    )
    planned = load_config(
        {"model": {"name": "x"}, "data": {"source": "x"}, "cogumi": {"method": "gspo", "docs_per_step": 32}}
    )
    assert "train.gradient_checkpointing" not in decided(planned, H100, load(length=8))


def config_of(model: Path, data: Path, run_dir: Path, **train: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(model)},
        "lora": {"r": 4},
        "data": {"source": str(data), "max_rows": 16, "fim": {"max_length": 160, "middle_chars": [8, 32]}},
        "train": {"max_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no", **train},
        "cogumi": {"method": "sft", "run_dir": str(run_dir), "merge": False},
    }


def test_a_run_says_what_was_chosen_and_why(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> None:
    result = cogumi.train(config_of(tiny_model, code_parquet, tmp_path / "run"))
    (choice,) = (each for each in read_json(result.run_dir / "choices.json") if "checkpointing" in each["key"])
    assert choice["value"] is False
    assert f"chosen: {choice['key']}: False ({choice['reason']})" in (result.run_dir / "run.log").read_text()
    assert (
        "gradient_checkpointing" not in (result.run_dir / "config.yaml").read_text()
    )  # what the user said, and no more


def test_a_run_that_goes_on_keeps_what_was_chosen(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> None:
    from cogumi.rundir import write_json

    run = load_config(config_of(tiny_model, code_parquet, tmp_path))
    write_json(tmp_path / "choices.json", [{"key": "train.gradient_checkpointing", "value": True, "reason": "then"}])
    assert with_choices(run, str(tiny_model)).train["gradient_checkpointing"] is True
    assert "gradient_checkpointing" not in run.train


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_asked_for_is_the_one_that_is_loaded(tiny_model: Path, attention: str) -> None:
    from cogumi.models.load import load_model

    model = load_model(str(tiny_model), attention=attention)
    assert model.config._attn_implementation == attention
    assert model.dtype == torch.float32 or torch.cuda.is_available()
