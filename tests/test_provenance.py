"""What is recorded about the base at training time, from real loaded models, and read again later."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from cogumi.core.errors import UsageError
from cogumi.core.output import with_options
from cogumi.merge.adapter_files import BaseRecord, read_base_record, weights_sample, write_base_record
from cogumi.models.quantized_bases import Quantization, quantization_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BNB_NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def trained(base: str | Path, **loading: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, **loading)
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))


def test_a_directory_has_no_commit(tiny_model: Path, tmp_path: Path) -> None:
    model = trained(tiny_model, dtype=torch.bfloat16)
    model.save_pretrained(str(tmp_path))
    record = write_base_record(tmp_path, model)
    assert record == BaseRecord(
        str(tiny_model), None, None, None, "bfloat16", weights_sample(str(tiny_model)), transformers.__version__
    )
    assert read_base_record(tmp_path) == record


def test_a_hub_model_has_the_commit_that_was_loaded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "cache" / "models--someone--tiny"
    shutil.copytree(tiny_model, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = trained("someone/tiny", revision="v2", cache_dir=str(tmp_path / "cache"))
    expected = BaseRecord("someone/tiny", COMMIT, "v2", None, "bfloat16", transformers=transformers.__version__)
    assert write_base_record(tmp_path, model, "v2") == expected
    assert json.loads((tmp_path / "cogumi-base.json").read_text()) == {
        "format": 1,
        "name": "someone/tiny",
        "commit": COMMIT,
        "revision": "v2",
        "quantization": None,
        "dtype": "bfloat16",
        "weights": None,
        "transformers": transformers.__version__,
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BNB_NF4, Quantization("bitsandbytes", 4, "nf4", True)),
        (
            BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
            Quantization("bitsandbytes", 4, "fp4", False),
        ),
        (BitsAndBytesConfig(load_in_8bit=True), Quantization("bitsandbytes", 8)),
    ],
)
def test_what_the_base_was_quantized_to(
    config: BitsAndBytesConfig, expected: Quantization, tiny_model: Path, tmp_path: Path
) -> None:
    model = trained(tiny_model, quantization_config=config, dtype=torch.bfloat16)
    record = write_base_record(tmp_path, model)
    assert record.quantization == expected
    assert record.dtype == "bfloat16"
    assert read_base_record(tmp_path) == record


def test_a_quantized_checkpoint_loaded_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=BNB_NF4, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "four-bit"
    )
    record = write_base_record(tmp_path, trained(tmp_path / "four-bit"))
    assert record.quantization == Quantization("bitsandbytes", 4, "nf4", True)
    assert record.name == str(tmp_path / "four-bit")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Quantization("gptq", 4)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Quantization("fp8")),
        ({"quant_method": "mxfp4"}, Quantization("mxfp4")),
    ],
)
def test_quantizations_of_other_libraries(found: dict[str, Any], expected: Quantization) -> None:
    assert quantization_of(LlamaConfig(quantization_config=found)) == expected
    assert quantization_of(LlamaConfig()) is None


def test_a_model_that_was_not_loaded_has_no_base_to_record(tmp_path: Path) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    )
    with pytest.raises(ValueError, match="does not know its base"):
        write_base_record(tmp_path, model)
    assert not list(tmp_path.iterdir())


def test_an_adapter_from_elsewhere_has_no_record(tmp_path: Path) -> None:
    assert read_base_record(tmp_path) is None


WHOLE = {"format": 1, "name": "a/b", "commit": None, "revision": None, "quantization": None, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('{"format": 1, "na', ""),
        ("[1]", ""),
        (WHOLE | {"format": 2}, "format"),
        (WHOLE | {"name": ""}, "name"),
        (WHOLE | {"dtype": None}, "dtype"),
        (WHOLE | {"commit": 7}, "commit"),
        (WHOLE | {"quantization": "nf4"}, "quantization"),
        (WHOLE | {"quantization": {"bits": 4}}, "quantization.method"),
        (WHOLE | {"quantization": {"method": "bitsandbytes", "bits": "4"}}, "quantization.bits"),
        (WHOLE | {"quantization": {"method": "bitsandbytes", "bits": True}}, "quantization.bits"),
    ],
)
def test_a_damaged_record_is_one_line(content: Any, key: str, tmp_path: Path) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "cogumi-base.json").write_text(text)
    with pytest.raises(UsageError) as error:
        read_base_record(tmp_path)
    assert (error.value.place, error.value.key) == (str(tmp_path / "cogumi-base.json"), key)
    assert "pass base=" in error.value.fix
    assert "pass --base " in with_options(str(error.value), ["merge"])
    kept = "cogumi.base_mode of /models/base=4 stays"
    assert with_options(kept, ["merge"]) == kept
    assert "\n" not in str(error.value)
    (tmp_path / "cogumi-base.json").write_text(json.dumps(WHOLE))
    assert read_base_record(tmp_path) == BaseRecord("a/b", None, None, None, "bfloat16")
