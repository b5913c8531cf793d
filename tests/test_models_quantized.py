"""`model.quantization_config`: what a config may say, what it becomes, and the models that are refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit
from builders import save_quantized
from golden import Golden
from qlora_runs import qlora
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import cogumi
from cogumi.cli.app import app
from cogumi.config.schema import dump_config, load_config
from cogumi.core.errors import UsageError
from cogumi.core.formatting import pip_command
from cogumi.models import quantization
from cogumi.models.loading import load_model
from cogumi.models.quantization import quantization_settings, reads_4bit_rows

GOOD = """\
model:
  name: cogumi:small-base
  quantization_config:
    load_in_4bit: true
    bnb_4bit_compute_dtype: bfloat16
data:
  source: cogumi:stdlib
cogumi:
  method: sft
"""
FOUR = {"load_in_4bit": True}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


def test_it_is_bound_and_written_back(config: Path, tmp_path: Path) -> None:
    run = load_config(config)
    assert run.model.quantization_config == {**FOUR, "bnb_4bit_compute_dtype": "bfloat16"}
    (tmp_path / "again.yaml").write_text(dump_config(run))
    assert load_config(tmp_path / "again.yaml").model == run.model


def test_values_come_from_the_call_as_anywhere(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COGUMI_MODEL__QUANTIZATION_CONFIG__BNB_4BIT_QUANT_TYPE", "fp4")
    run = load_config(config, model__quantization_config__bnb_4bit_compute_dtype=torch.float16)
    assert run.model.quantization_config == {
        **FOUR, "bnb_4bit_compute_dtype": "float16", "bnb_4bit_quant_type": "fp4",
    }  # fmt: skip
    assert load_config(config, model__quantization_config=None).model.quantization_config is None
    without = load_config(config, model__quantization_config__bnb_4bit_compute_dtype=None)
    assert without.model.quantization_config == {**FOUR, "bnb_4bit_quant_type": "fp4"}


COMPUTE = "bnb_4bit_compute_dtype: bfloat16"


@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [
        ("load_in_4bit", "load_in_4bits", 4, "load_in_4bits"),
        ("true", "soon", 4, "load_in_4bit"),
        ("bfloat16", "bf16", 5, "bnb_4bit_compute_dtype"),
        (COMPUTE, "bnb_4bit_quant_type: nf5", 5, "bnb_4bit_quant_type"),
        (COMPUTE, "llm_int8_skip_modules: head", 5, "llm_int8_skip_modules"),
        (COMPUTE, "llm_int8_threshold: 5", 5, "llm_int8_threshold"),
        ("load_in_4bit", "load_in_8bit", 5, "bnb_4bit_compute_dtype"),
        (COMPUTE, "load_in_8bit: yes", 3, ""),
        ("load_in_4bit: true\n    ", "", 3, ""),
        (f"\n    load_in_4bit: true\n    {COMPUTE}", " 4", 3, ""),
    ],
)
def test_a_mistake_is_one_line_with_file_line_and_key(
    config: Path, old: str, new: str, line: int, key: str, golden: Golden
) -> None:
    assert old in GOOD
    config.write_text(GOOD.replace(old, new))
    whole = "model.quantization_config" + (f".{key}" if key else "")
    with golden.raises("models", place=f"{config}:{line}", message="") as raised:
        load_config(config)
    assert whole in str(raised.value)
    assert "\n" not in str(raised.value)


def test_four_bits_alone_are_qlora() -> None:
    settings = quantization_settings(FOUR, torch.float16)
    assert settings.quantization_method() == "nf4"
    assert settings.bnb_4bit_use_double_quant
    assert settings.bnb_4bit_compute_dtype == torch.float16
    other = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16"}
    settings = quantization_settings(FOUR | other, torch.float32)
    assert settings.quantization_method() == "fp4"
    assert not settings.bnb_4bit_use_double_quant
    assert settings.bnb_4bit_compute_dtype == torch.bfloat16
    assert (
        quantization_settings({"load_in_8bit": True}, torch.float32).to_dict()
        == BitsAndBytesConfig(load_in_8bit=True).to_dict()
    )


# ------------------------------------------------------------------------------------------------------------ loading


def save_mxfp4_config(model: Path, path: Path) -> None:
    config = LlamaConfig.from_pretrained(model)
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(path)


def refused(golden: Golden, name: Path, **settings: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_model(str(name), quantization=FOUR | settings)
    assert "\n" not in str(caught.value)
    golden("models", str(caught.value))
    return caught.value


def test_a_base_that_is_quantized_already_is_refused(tiny_model: Path, tmp_path: Path, golden: Golden) -> None:
    save_quantized(tiny_model, tmp_path / "eight", BitsAndBytesConfig(load_in_8bit=True))
    error = refused(golden, tmp_path / "eight")
    assert error.key == "model.quantization_config"
    assert str(tmp_path / "eight") in error.message
    save_mxfp4_config(tiny_model, tmp_path / "mxfp4")
    assert "mxfp4" in refused(golden, tmp_path / "mxfp4").message


def test_a_list_of_skipped_modules_without_the_head_is_refused(tiny_model: Path, golden: Golden) -> None:
    error = refused(golden, tiny_model, llm_int8_skip_modules=["down_proj"])
    assert error.key == "model.quantization_config.llm_int8_skip_modules"
    assert "lm_head" in error.fix
    model = load_model(str(tiny_model), quantization={**FOUR, "llm_int8_skip_modules": ["lm_head", "down_proj"]})
    four = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert four == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


def test_a_model_without_linear_layers_is_refused(tiny_model: Path, golden: Golden) -> None:
    error = refused(golden, tiny_model, llm_int8_skip_modules=["lm_head", "_proj"])
    assert error.key == "model.quantization_config"


def test_rows_that_bitsandbytes_misreads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(quantization, "reads_4bit_rows", lambda columns: columns % 64 == 0)
    error = refused(golden, tmp_path)
    assert error.key == "model"
    assert "model.layers.0.mlp.down_proj" in error.message
    assert "llm_int8_skip_modules: [lm_head, down_proj]" in error.fix
    model = load_model(str(tmp_path), quantization={**FOUR, "llm_int8_skip_modules": ["lm_head", "down_proj"]})
    model.save_pretrained(tmp_path / "four")
    load_model(str(tmp_path / "four"))
    save_quantized(tmp_path, tmp_path / "misread", BitsAndBytesConfig(load_in_4bit=True))
    with golden.raises("models", key="model", fix="set model.name"):
        load_model(str(tmp_path / "misread"))


def by_rows(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """What 0.50.2 does on a CPU with AVX512: whole blocks of 64 to a row."""
    rows, columns = state.shape
    values = functional.get_4bit_type("nf4", device="cpu")[
        torch.stack([packed >> 4, packed & 15], dim=-1).flatten().long()
    ]
    block = torch.arange(rows)[:, None] * (columns // 64) + torch.arange(columns) // 64
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return values.view(rows, columns) * scales[block]


def test_the_probe_tells_a_reader_that_counts_blocks_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = reads_4bit_rows.__wrapped__
    assert probe(128)
    monkeypatch.setattr(functional, "dequantize_4bit", by_rows)
    assert probe(128)
    assert not probe(96)
    assert not probe(48)


def test_weights_are_not_repacked_by_a_forward_without_gradients(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    assert Linear4bit(64, 64).support_avx512bf16_for_cpu
    model = load_model(str(tiny_model), quantization=FOUR)
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)


def test_without_bitsandbytes_a_run_is_one_line_and_leaves_nothing(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = quantization.importlib.util.find_spec
    monkeypatch.setattr(
        quantization.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "bitsandbytes" else find_spec(name, *rest),
    )
    run = qlora(tiny_model, code_parquet, run_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=re.escape(pip_command("install bitsandbytes"))):
        cogumi.train(run)
    assert not (tmp_path / "run").exists()


def test_the_disk_is_not_forecast_for_a_base_that_is_quantized_already(tiny_model: Path, tmp_path: Path) -> None:
    save_mxfp4_config(tiny_model, tmp_path / "mxfp4")
    (tmp_path / "run.yaml").write_text(GOOD.replace("cogumi:small-base", str(tmp_path / "mxfp4")))
    result = CliRunner().invoke(app, ["disk", "predict", str(tmp_path / "run.yaml")])
    assert isinstance(result.exception, UsageError)
    assert result.exception.key == "model.quantization_config"
