"""Bases that are quantized on disk: what the merge needs is found, proven and fetched before the training, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import all_tensors, edit_config, save_quantized
from hub_server import HubServer
from qlora_runs import check, four_bit_copy, logged_weights, qlora
from safetensors.torch import save_file
from test_models_download import train_apart
from test_preflight import line_of, preflight
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import cogumi
from cogumi.core.errors import UsageError
from cogumi.forecast.training_step import forecast_weights
from cogumi.merge.preflight import find_original, prove_original
from cogumi.models.loading import read_base
from cogumi.models.quantization import PackedFormat, read_format, refuse_untrainable

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["lm_head"]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A directory with `model`, and `model-bnb-4bit` made of it."""
    found = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_model, found / "model")
    four_bit_copy(tiny_model, found / "model-bnb-4bit")
    return found


def on_disk(base: Path, code: Path, **ours: Any) -> dict[str, Any]:
    """A run on a base that is quantized on disk."""
    config = qlora(base, code, **ours)
    del config["model"]["quantization_config"]
    return config


def original_of(base: Path, wanted: str | None = None, mode: str = "full") -> Any:
    return find_original(str(base), AutoConfig.from_pretrained(base), wanted, mode)


def config_with(quantization: dict[str, Any], **sizes: Any) -> LlamaConfig:
    config = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **sizes)
    config.quantization_config = quantization
    return config


# ----------------------------------------------------------------------------------------------------------- which model


def test_the_original_is_found_by_its_name_and_proven(home: Path) -> None:
    actual = original_of(home / "model-bnb-4bit")
    assert (actual.name, actual.kind, actual.download) == (str(home / "model"), "bnb-4bit", None)
    prove_original(str(home / "model-bnb-4bit"), None, actual)
    assert original_of(home / "model") is None
    assert original_of(home / "model-bnb-4bit", mode="dequant") is None


def test_a_sibling_is_no_original(home: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.05)
    model.save_pretrained(tmp_path / "sibling")
    actual = original_of(home / "model-bnb-4bit", str(tmp_path / "sibling"))
    with pytest.raises(UsageError, match="was not quantized from") as caught:
        prove_original(str(home / "model-bnb-4bit"), None, actual)
    assert caught.value.key == "cogumi.merge_base"


def test_a_missing_original_is_refused_with_the_ways_out(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "model-bnb-4bit", tmp_path / "alone")
    with pytest.raises(UsageError) as caught:
        original_of(tmp_path / "alone")
    assert caught.value.key == "model.name"
    for way in ("cogumi.merge_base", "cogumi.base_mode: dequant", "cogumi.merge: false"):
        assert way in caught.value.fix


@pytest.mark.parametrize(
    ("base", "wanted", "mode", "key"),
    [
        ("model", "elsewhere", "full", "cogumi.merge_base"),
        ("model", None, "dequant", "cogumi.base_mode"),
        ("model-bnb-4bit", "elsewhere", "dequant", "cogumi.merge_base"),
        ("model-bnb-4bit", "not/there/at/all", "full", "cogumi.merge_base"),
    ],
)
def test_what_would_be_ignored_or_is_not_there_is_refused(
    base: str, wanted: str | None, mode: str, key: str, home: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        original_of(home / base, wanted, mode)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "auto-round", "bits": 4}]
)
def test_what_cannot_be_trained_here_is_refused_with_the_full_model(quantization: dict[str, Any]) -> None:
    """gptqmodel is not installed here, and transformers does not train auto-round."""
    with pytest.raises(UsageError) as caught:
        refuse_untrainable("someone/model-GPTQ-Int4", config_with(quantization), "lora")
    assert caught.value.key == "model.name"
    assert "someone/model" in caught.value.fix
    assert "load_in_4bit" in caught.value.fix


def test_quantized_weights_are_not_trained_whole(home: Path) -> None:
    with pytest.raises(UsageError, match="cannot be trained themselves"):
        refuse_untrainable("m", AutoConfig.from_pretrained(home / "model-bnb-4bit"), "full")
    refuse_untrainable("m", AutoConfig.from_pretrained(home / "model-bnb-4bit"), "lora")
    refuse_untrainable("m", AutoConfig.from_pretrained(home / "model"), "full")


# -------------------------------------------------------------------------------------------------------------- forecast


def stored_bytes(quantization: dict[str, Any], rows: int, columns: int) -> int:
    """The tensors of a layer as the checkpoints of these formats have them, (rows, columns) of 4 bits."""
    groups = columns // 128
    scales = torch.empty(groups, rows, dtype=torch.float16)
    zeros = torch.empty(groups, rows // 8, dtype=torch.int32)
    if quantization is AWQ:
        return sum(each.nbytes for each in (torch.empty(columns, rows // 8, dtype=torch.int32), zeros, scales))
    order = torch.empty(columns, dtype=torch.int32)
    return sum(each.nbytes for each in (torch.empty(columns // 8, rows, dtype=torch.int32), zeros, scales, order))


@pytest.mark.parametrize("quantization", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_the_forecast_of_another_format_is_what_its_checkpoint_holds(quantization: dict[str, Any]) -> None:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    actual = forecast_weights(config_with(quantization, **sizes), torch.bfloat16, None)
    layers = 2 * (4 * stored_bytes(quantization, 256, 256) + 2 * stored_bytes(quantization, 512, 256))
    layers += 2 * stored_bytes(quantization, 256, 512)
    others = 2 * (2 * 64 * 256 + 5 * 256)  # embedding, head and norms in bfloat16
    assert actual.bytes == layers + others
    assert actual.quantized == pytest.approx(2 * (4 * 65536 + 3 * 131072) / sum(actual.elements.values()))


def test_an_8b_in_four_bits_is_forecast_at_five_gib_and_not_at_fifteen() -> None:
    eight = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
           "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}  # fmt: skip
    for quantization in (nf4, GPTQ, AWQ):
        assert forecast_weights(config_with(quantization, **eight), torch.bfloat16, None).bytes == pytest.approx(
            5.3 * 2**30, rel=0.02
        )


def test_formats_are_read_as_their_configs_write_them() -> None:
    packed = {"quant_method": "compressed-tensors", "ignore": ["lm_head"],
              "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}}  # fmt: skip
    assert read_format(packed) == (PackedFormat("compressed-tensors", 4, 128), ["lm_head", "lm_head"])
    assert read_format({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}) == (
        PackedFormat("awq", 4, 64),
        ["lm_head"],
    )
    assert read_format({"quant_method": "mxfp4"}) is None


def test_the_preflight_of_a_quantized_base_names_its_original_and_its_bytes(
    home: Path, code_parquet: Path, tmp_path: Path
) -> None:
    config = on_disk(home / "model-bnb-4bit", code_parquet, run_dir=str(tmp_path / "run"))
    report = preflight(config)
    assert line_of(report, "base").figure.endswith(f"the merge is into {home / 'model'}, which is here")
    assert "in nf4 4-bit" in line_of(report, "weights").figure
    shutil.copytree(home / "model-bnb-4bit", tmp_path / "alone")
    alone = preflight(config, model__name=str(tmp_path / "alone"))
    assert line_of(alone, "base").state == "red"
    assert "cogumi.merge_base" in line_of(alone, "base").fix


# ------------------------------------------------------------------------------------------------------------------- runs


def test_a_base_that_is_quantized_already_is_refused_as_that_and_not_for_its_original(
    home: Path, code_parquet: Path, tmp_path: Path
) -> None:
    shutil.copytree(home / "model-bnb-4bit", tmp_path / "alone")
    with pytest.raises(UsageError, match="is quantized already") as caught:
        cogumi.train(qlora(tmp_path / "alone", code_parquet, run_dir=str(tmp_path / "run")))
    assert caught.value.key == "model.quantization_config"
    assert not (tmp_path / "run").exists()


def test_a_run_merges_into_the_model_that_it_names_or_into_its_own_weights(
    home: Path, code_parquet: Path, tmp_path: Path
) -> None:
    shutil.copytree(home / "model-bnb-4bit", tmp_path / "alone")
    config = on_disk(tmp_path / "alone", code_parquet, run_dir=str(tmp_path / "run"), merge_base=str(home / "model"))
    result = cogumi.train(config, train__max_steps=2)
    assert result.passed, str(result.verdict)
    assert check(result, "merged logits").passed
    assert "in nf4 4-bit" in logged_weights(result.run_dir)
    manifest = json.loads((result.merged / "cogumi-merge.json").read_text())
    assert manifest["base"]["path"] == str(home / "model")
    own = cogumi.train(
        config,
        train__max_steps=2,
        cogumi__run_dir=str(tmp_path / "own"),
        cogumi__merge_base=None,
        cogumi__base_mode="dequant",
    )
    assert own.passed, str(own.verdict)
    assert "cogumi.base_mode: dequant" in (own.run_dir / "run.log").read_text()


def fp8_copy(model: Path, path: Path) -> None:
    """The checkpoint as DeepSeek and Qwen publish theirs: float8_e4m3fn, with a scale for each block of 128 by 128."""
    shutil.copytree(model, path)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in all_tensors(path).items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            scale = weight.float().abs().max() / 448
            tensors[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.expand(*(-(-each // 128) for each in weight.shape)).contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    edit_config(path, quantization_config=settings)


def mxfp4_pair(path: Path) -> Path:
    """A gpt-oss as OpenAI publishes it, blocks of 32 in MXFP4, beside the bfloat16 copy of it."""
    shutil.copytree(read_base("cogumi:random-gpt-oss").name, path.with_name(f"{path.name}-BF16"))
    shutil.copytree(path.with_name(f"{path.name}-BF16"), path)
    full, packed = all_tensors(path), {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in list(full.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = weight
            continue
        experts, rows, columns = weight.shape
        shape = (experts, columns, rows // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 121, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        full[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    save_file(full, path.with_name(f"{path.name}-BF16") / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return edit_config(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left_out})


@pytest.mark.slow("a training")
def test_gpt_oss_in_mxfp4_trains_dequantized_and_merges_into_the_copy_that_its_name_leads_to(
    code_parquet: Path, tmp_path: Path
) -> None:
    config = on_disk(mxfp4_pair(tmp_path / "gpt-oss-tiny"), code_parquet, run_dir=str(tmp_path / "run"))
    result = cogumi.train(config, train__max_steps=2)
    assert result.passed, str(result.verdict)
    assert "(it was trained on mxfp4)" in check(result, "merged logits").figure
    assert f"the merge is into {tmp_path / 'gpt-oss-tiny-BF16'}" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.slow("a training of each")
@pytest.mark.parametrize("kind", ["fp8", "8-bit"])
def test_a_base_in_eight_bits_trains_and_merges_into_its_original(
    kind: str, home: Path, code_parquet: Path, tmp_path: Path
) -> None:
    """FP8 is dequantized by transformers when it is loaded, on a CPU and on cards that lack it."""
    base = tmp_path / ("model-FP8" if kind == "fp8" else "model-8bit")
    if kind == "fp8":
        fp8_copy(home / "model", base)
    else:
        save_quantized(home / "model", base, BitsAndBytesConfig(load_in_8bit=True))
        AutoTokenizer.from_pretrained(home / "model").save_pretrained(base)
    config = on_disk(base, code_parquet, run_dir=str(tmp_path / "run"), merge_base=str(home / "model"))
    result = cogumi.train(config, train__max_steps=2)
    assert result.passed, str(result.verdict)
    assert "full-precision base" in check(result, "merged logits").figure


@pytest.mark.slow("two runs in processes of their own")
def test_on_the_hub_a_missing_original_is_refused_before_the_first_byte_and_one_that_is_there_is_fetched(
    home: Path, hub: HubServer, code_parquet: Path, tmp_path: Path
) -> None:
    config = qlora(home, code_parquet, run_dir=str(tmp_path / "run"))
    config["model"] = {"name": "someone/model-bnb-4bit"}
    config["train"]["max_steps"] = 1
    hub.publish("someone/model-bnb-4bit", home / "model-bnb-4bit")

    def run() -> str:
        return train_apart(config, hub.environment(tmp_path / "cache"))

    output = run()
    assert "REFUSED model.name: someone/model-bnb-4bit is quantized (bnb-4bit)" in output
    assert not any(path.endswith(".safetensors") for path in hub.sent)
    assert not (tmp_path / "run").exists()
    hub.publish("someone/model", home / "model")
    assert "PASSED True someone/model-bnb-4bit" in run()
    sent = [path for path in hub.sent if path.endswith(".safetensors")]
    assert len(sent) == 2
    log = (tmp_path / "run" / "run.log").read_text()
    assert "the merge is into someone/model, of which" in log
    assert log.index("download: someone/model at") < log.index("loaded on cpu")
