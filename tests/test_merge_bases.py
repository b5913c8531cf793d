"""Quantized bases end to end: found, proven, merged into full precision or into what they decode to, or refused."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from builders import (
    INPUT_IDS,
    LINEARS,
    NF4,
    SIZES,
    edit_config,
    edit_tensors,
    manifest_of,
    rms,
    save_distinct,
    save_quantized,
)
from builders import all_tensors as tensors_of
from golden import Golden
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from cogumi.core.errors import UsageError
from cogumi.merge import merge_adapter
from cogumi.merge.adapter_files import write_base_record
from cogumi.models.quantization import cast_unquantized, reads_4bit_rows

NF4_SINGLE = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
INT8 = BitsAndBytesConfig(load_in_8bit=True)
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": LINEARS}
READS_ROWS = reads_4bit_rows(SIZES["intermediate_size"])  # of itself, before the fixture

pytestmark = pytest.mark.usefixtures("reads_4bit")


def save_sibling(full: Path, path: Path) -> Path:
    """As if fine-tuned from `full` with embeddings, norms and head frozen: 1 % away, in what gets quantized alone."""
    shutil.copytree(full, path)
    torch.manual_seed(7)

    def train(name: str, weight: torch.Tensor) -> torch.Tensor:
        if "_proj" not in name:
            return weight
        return (weight.float() * (1 + 0.01 * torch.randn(weight.shape))).bfloat16()

    return edit_tensors(path, train)


def make_adapter(base: Path | str, path: Path, record: bool = False, lora: dict[str, Any] = LORA, **load: Any) -> Path:
    """A real adapter, saved by PEFT on the base as transformers loads it, with the factors a trained one might have."""
    model = AutoModelForCausalLM.from_pretrained(base, **load)
    adapted = get_peft_model(model, LoraConfig(**lora))
    torch.manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.save_pretrained(str(path))
    if record:
        write_base_record(path, adapted, load.get("revision"))
    return path


def factors_of(adapter: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """2 B and A in float64 by the name of the base's tensor: alpha / r is 2 throughout."""
    factors = load_file(adapter / "adapter_model.safetensors")
    return {
        key.removeprefix("base_model.model.").replace("lora_A.weight", "weight"): (
            2 * factors[key.replace("lora_A", "lora_B")].double(),
            factors[key].double(),
        )
        for key in factors
        if key.endswith(".lora_A.weight")
    }


def seen_in_training(model: Any) -> dict[str, torch.Tensor]:
    """What bitsandbytes itself makes of the weights of a live quantized model: float64 by name."""
    collected = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "quant_state"):
            collected[f"{name}.weight"] = functional.dequantize_4bit(weight.data, weight.quant_state).double()
    assert collected
    return collected


def assert_merged_into(weights: dict[str, torch.Tensor], adapter: Path, out: Path) -> None:
    """The closed form in float64, one rounding to bfloat16 and float32's own error; bytes elsewhere.

    The error of a sum in float32 is a share of the terms' sizes (Higham, Accuracy and Stability, 3.1), not of the sum's:
    where the terms of B @ A cancel it is the larger part of what is left.
    """
    factors, after = factors_of(adapter), tensors_of(out)
    assert after.keys() == weights.keys()
    for name, weight in weights.items():
        if name not in factors:
            assert torch.equal(after[name].view(torch.uint8), weight.view(torch.uint8)), name
            continue
        b, a = factors[name]
        expected = weight.double() + b @ a
        assert after[name].dtype == torch.bfloat16
        half = torch.exp2(expected.abs().log2().floor() - 8)
        slack = (a.shape[0] + 2) * 2**-24 * (weight.double().abs() + b.abs() @ a.abs())
        assert ((after[name].double() - expected).abs() <= half + slack).all(), name
        assert not torch.equal(after[name], weight.bfloat16()), name


def refused(adapter: Path, out: Path, golden: Golden | None = None, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        merge_adapter(adapter, out, progress=False, **options)
    assert not list(out.parent.glob(f"*{out.name}*"))  # no output, and no partial one
    assert "\n" not in str(caught.value)
    if golden is not None:
        golden("merge", str(caught.value))
    return caught.value


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models in directories with names that lead nowhere; tests lay them out as they need them."""
    place = tmp_path_factory.mktemp("models")
    config = LlamaConfig(**SIZES, tie_word_embeddings=False)
    full = save_distinct(place / "full", config)
    return {
        "full": full,
        "other": save_distinct(place / "other", config, seed=1),
        "sibling": save_sibling(full, place / "sibling"),
        "nf4": save_quantized(full, place / "nf4", NF4),
        "nf4-single": save_quantized(full, place / "nf4-single", NF4_SINGLE),
        "int8": save_quantized(full, place / "int8", INT8),
    }


@pytest.fixture(scope="module")
def adapters(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters by the base that they were trained on, all of whose records say so."""
    place = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(models[name], place / name) for name in ("nf4", "nf4-single", "full")}


@pytest.fixture
def beside(models: dict[str, Path], adapters: dict[str, Path], tmp_path: Path) -> Path:
    """A directory with tiny-bnb-4bit and an adapter that records it as its base, as seen by transformers and PEFT."""
    shutil.copytree(models["nf4"], tmp_path / "tiny-bnb-4bit")
    shutil.copytree(adapters["nf4"], tmp_path / "adapter")
    edit_config(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "tiny-bnb-4bit"))
    return tmp_path


def into_cache(cache: Path, name: str, **models: Path) -> None:
    """Models as the hub's client lays them out, by commit (one repeated hex digit); the last one is main."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for digit, model in models.items():
        shutil.copytree(model, repository / "snapshots" / (digit * 40))
        (repository / "refs" / "main").write_text(digit * 40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # PEFT asks the hub when it saves
    return tmp_path / "cache"


def from_cache(cache: Path) -> dict[str, Any]:
    return {"cache_dir": str(cache), "local_files_only": True}


def test_found_by_name_proven_and_merged_into(beside: Path, models: dict[str, Path]) -> None:
    shutil.copytree(models["full"], beside / "tiny")
    report = merge_adapter(beside / "adapter", beside / "out", progress=False)
    assert report.base == str(beside / "tiny")
    weights = tensors_of(models["full"])
    assert_merged_into(weights, beside / "adapter", beside / "out")
    manifest = manifest_of(beside / "out")
    assert manifest["base"]["trained_on"] == str(beside / "tiny-bnb-4bit")
    proof = manifest["base"]["proof"]
    assert (proof["sampled_tensors"], proof["codes_differing"]) == (14, 0)
    assert proof["tensors_equal"] == len(weights) - 14


@pytest.mark.parametrize("wrong", ["other", "sibling"])
def test_a_wrong_model_of_the_right_name_is_refused(
    wrong: str, beside: Path, models: dict[str, Path], golden: Golden
) -> None:
    shutil.copytree(models[wrong], beside / "tiny")
    error = refused(beside / "adapter", beside / "out", golden)
    assert str(beside / "tiny-bnb-4bit") in error.message
    assert f"{beside / 'tiny'} is not" in error.message
    assert "base_mode='dequant'" in error.fix
    assert ("sibling" in error.message) == (wrong == "sibling")
    # The same when it is passed by hand, wherever it lies.
    error = refused(beside / "adapter", beside / "out", golden, base=models[wrong])
    assert f"base {models[wrong]} is not" in error.message
    # The right one, by hand, is not bothered by what is beside.
    report = merge_adapter(beside / "adapter", beside / "out", base=models["full"], progress=False)
    assert report.base == str(models["full"])


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of the base."""
    records = [record for record in caplog.records if record.name == "cogumi.merge.bases"]
    assert all(record.levelno == logging.WARNING for record in records)
    return [record.getMessage() for record in records]


def test_an_explicit_base_is_proven_where_that_is_possible(
    beside: Path, models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    merge_adapter(beside / "adapter", beside / "here", base=models["full"], progress=False)
    base = manifest_of(beside / "here")["base"]
    assert base["trained_on"] == str(beside / "tiny-bnb-4bit")
    assert base["proof"]["codes_differing"] == 0
    assert not warnings_in(caplog)
    # A config alone is what reading it by itself leaves in a cache.
    for file in (beside / "tiny-bnb-4bit").glob("*.safetensors*"):
        file.unlink()
    merge_adapter(beside / "adapter", beside / "config-only", base=models["full"], progress=False)
    shutil.rmtree(beside / "tiny-bnb-4bit")
    merge_adapter(beside / "adapter", beside / "gone", base=models["full"], progress=False)
    for warning in warnings_in(caplog):
        assert f"{models['full']} fits the adapter" in warning
        assert f"base {beside}/tiny-bnb-4bit" in warning
    assert len(warnings_in(caplog)) == 2
    for out in ("config-only", "gone"):
        base = manifest_of(beside / out)["base"]
        assert (base["trained_on"], base["proof"]) == (None, None)
        assert_merged_into(tensors_of(models["full"]), beside / "adapter", beside / out)


def test_a_full_precision_base_that_is_not_the_recorded_one_is_said_to_be(
    models: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    merge_adapter(adapters["full"], tmp_path / "one", base=models["other"], progress=False)
    (warning,) = warnings_in(caplog)
    assert str(models["full"]) in warning
    assert f"not proven that {models['other']}" in warning
    caplog.clear()
    merge_adapter(adapters["full"], tmp_path / "two", base=f"{models['full']}/", progress=False)
    assert not warnings_in(caplog)


def test_an_absent_quantized_base_says_what_to_get_and_what_to_pass(beside: Path, cache: Path, golden: Golden) -> None:
    shutil.rmtree(beside / "tiny-bnb-4bit")
    adapter, out = beside / "adapter", beside / "out"
    assert "pass base=" in refused(adapter, out, golden).fix
    edit_config(adapter, base_model_name_or_path="unsloth/Qwen3-tiny-unsloth-bnb-4bit")
    fix = refused(adapter, out, golden).fix
    assert "hf download unsloth/Qwen3-tiny-unsloth-bnb-4bit" in fix
    assert "pass base=unsloth/Qwen3-tiny," in fix


def test_candidates_are_tried_until_one_is_proven(
    beside: Path, models: dict[str, Path], cache: Path, golden: Golden
) -> None:
    into_cache(cache, "unsloth/Qwen3-tiny-unsloth-bnb-4bit", a=models["nf4"])
    into_cache(cache, "unsloth/Qwen3-tiny", b=models["sibling"])
    adapter = edit_config(beside / "adapter", base_model_name_or_path="unsloth/Qwen3-tiny-unsloth-bnb-4bit")
    error = refused(adapter, beside / "out", golden)
    assert "unsloth/Qwen3-tiny is not" in error.message
    assert str(cache) not in str(error)
    into_cache(cache, "Qwen/Qwen3-tiny", c=models["full"])  # of another owner
    report = merge_adapter(adapter, beside / "out", progress=False)
    assert report.base == "Qwen/Qwen3-tiny"
    base = manifest_of(beside / "out")["base"]
    assert (base["commit"], base["trained_on"]) == ("c" * 40, "unsloth/Qwen3-tiny-unsloth-bnb-4bit")
    assert base["proof"]["codes_differing"] == 0


def test_why_each_candidate_is_not_the_one(beside: Path, models: dict[str, Path], cache: Path, golden: Golden) -> None:
    into_cache(cache, "unsloth/gpt-oss-tiny-unsloth-bnb-4bit", a=models["nf4"])
    into_cache(cache, "unsloth/gpt-oss-tiny", b=models["int8"])
    into_cache(cache, "unsloth/gpt-oss-tiny-BF16", c=models["full"])
    shard = sorted((cache / "models--unsloth--gpt-oss-tiny-BF16/snapshots" / ("c" * 40)).glob("*.safetensors"))[0]
    shard.unlink()
    adapter = edit_config(beside / "adapter", base_model_name_or_path="unsloth/gpt-oss-tiny-unsloth-bnb-4bit")
    error = refused(adapter, beside / "out", golden)
    assert shard.name in error.message
    assert "unsloth/gpt-oss-tiny is not the one: it is quantized itself (bitsandbytes)" in error.message
    # Passed by hand, the other one is refused in the name that was passed.
    into_cache(cache, "someone/else", d=models["other"])
    error = refused(adapter, beside / "out", golden, base="someone/else")
    assert "base someone/else is not what unsloth/gpt-oss-tiny-unsloth-bnb-4bit" in error.message
    assert str(cache) not in str(error)


def test_a_damaged_quantized_base_is_not_blamed_on_the_candidates(
    beside: Path, models: dict[str, Path], golden: Golden
) -> None:
    shutil.copytree(models["full"], beside / "tiny")
    [shard] = (beside / "tiny-bnb-4bit").glob("*.safetensors")
    name = "model.layers.0.mlp.up_proj.weight.absmax"
    edit_tensors(beside / "tiny-bnb-4bit", lambda key, value: None if key == name else value)
    error = refused(beside / "adapter", beside / "out", golden)
    assert (error.place, name in error.message) == (str(shard), True)


def test_the_recorded_commit_and_not_the_newest(models: dict[str, Path], cache: Path, tmp_path: Path) -> None:
    """main has moved since training: to another model, where the mistake would be silent."""
    into_cache(cache, "someone/tiny", a=models["full"], b=models["other"])
    adapter = make_adapter("someone/tiny", tmp_path / "adapter", record=True, revision="a" * 40, **from_cache(cache))
    commits = {"a" * 40: tensors_of(models["full"]), "b" * 40: tensors_of(models["other"])}

    def merge(commit: str, out: str, **options: Any) -> None:
        merge_adapter(adapter, tmp_path / out, progress=False, **options)
        assert manifest_of(tmp_path / out)["base"]["commit"] == commit
        assert_merged_into(commits[commit], adapter, tmp_path / out)

    merge("a" * 40, "recorded")
    merge("a" * 40, "named", base="someone/tiny")
    merge("b" * 40, "asked", base_revision="main")
    record = json.loads((adapter / "cogumi-base.json").read_text())
    (adapter / "cogumi-base.json").write_text(json.dumps(record | {"commit": "c" * 40}))
    assert f"hf download someone/tiny --revision {'c' * 40}" in refused(adapter, tmp_path / "gone").fix
    edit_config(adapter, revision="a" * 40)
    (adapter / "cogumi-base.json").write_text(json.dumps(record | {"commit": None, "revision": None}))
    merge("a" * 40, "config-after-record")
    (adapter / "cogumi-base.json").unlink()
    merge("a" * 40, "config")
    edit_config(adapter, revision=None)
    merge("b" * 40, "newest")


def test_the_recorded_commit_of_a_quantized_base(models: dict[str, Path], cache: Path, tmp_path: Path) -> None:
    other = save_quantized(models["other"], tmp_path / "other4", NF4)
    into_cache(cache, "unsloth/tiny-bnb-4bit", a=models["nf4"], b=other)
    into_cache(cache, "unsloth/tiny", c=models["full"])
    options = {"revision": "a" * 40, **from_cache(cache)}
    adapter = make_adapter("unsloth/tiny-bnb-4bit", tmp_path / "adapter", record=True, **options)
    merge_adapter(adapter, tmp_path / "found", progress=False)
    merge_adapter(adapter, tmp_path / "passed", base="unsloth/tiny", progress=False)
    for out in (tmp_path / "found", tmp_path / "passed"):
        assert manifest_of(out)["base"]["proof"]["codes_differing"] == 0
        assert_merged_into(tensors_of(models["full"]), adapter, out)
    (adapter / "cogumi-base.json").unlink()  # without it, main is all there is to go by
    assert "unsloth/tiny is not" in refused(adapter, tmp_path / "out").message


def test_a_revision_that_was_recorded_for_a_directory_is_no_obstacle(
    beside: Path, models: dict[str, Path], adapters: dict[str, Path]
) -> None:
    """Nobody asked for it, and a directory has none."""
    adapter = edit_config(beside / "adapter", revision="main", base_model_name_or_path=str(models["full"]))
    assert merge_adapter(adapter, beside / "full", progress=False).base == str(models["full"])
    shutil.copytree(models["full"], beside / "tiny")
    edit_config(adapter, base_model_name_or_path=str(beside / "tiny-bnb-4bit"))
    assert merge_adapter(adapter, beside / "found", progress=False).base == str(beside / "tiny")
    merge_adapter(adapter, beside / "passed", base=models["full"], progress=False)
    assert manifest_of(beside / "passed")["base"]["proof"] is not None


def test_quantized_in_memory(models: dict[str, Path], tmp_path: Path) -> None:
    """The checkpoint is the full one, and what it was in training is recorded."""
    lora = LORA | {"target_modules": ["q_proj", "down_proj", "lm_head"]}
    adapter = make_adapter(models["full"], tmp_path / "adapter", record=True, lora=lora, quantization_config=NF4)
    # The same directory by another name is still the one that was quantized.
    for out, base in (("out", None), ("again", f"{models['full']}/")):
        merge_adapter(adapter, tmp_path / out, base=base, progress=False)
        assert_merged_into(tensors_of(models["full"]), adapter, tmp_path / out)
        manifest = manifest_of(tmp_path / out)
        assert (manifest["base"]["trained_on"], manifest["base"]["proof"]) == ("nf4", None)
    assert "leave out base_mode" in refused(adapter, tmp_path / "no", base_mode="dequant").fix


@pytest.mark.parametrize("kind", ["nf4", "nf4-single"])
def test_dequant_merges_into_what_the_weights_decode_to(
    kind: str, models: dict[str, Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    adapter, out = adapters[kind], tmp_path / "out"
    report = merge_adapter(adapter, out, base_mode="dequant", progress=False)
    assert report.base == str(models[kind])
    assert report.tensors_merged == 14
    seen = seen_in_training(AutoModelForCausalLM.from_pretrained(models[kind]))
    full = tensors_of(models["full"])
    assert seen.keys() == factors_of(adapter).keys()
    assert_merged_into(full | seen, adapter, out)
    manifest = manifest_of(out)
    assert (manifest["base_mode"], manifest["base"]["proof"]) == ("dequant", None)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())

    # In float32 there is no rounding to speak of, so the reloaded model is transformers' own dequantized one with its
    # adapter, and the live quantized one but for what that rounds: the weights to bfloat16 or not, as the kernel likes it.
    merge_adapter(adapter, tmp_path / "wide", base_mode="dequant", dtype="float32", progress=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    assert not getattr(merged, "is_quantized", False)
    live = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
    cast_unquantized(live, torch.float32)
    decoded = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32).dequantize().float()
    with torch.inference_mode():
        exact = PeftModel.from_pretrained(decoded, adapter).eval()(INPUT_IDS).logits
        got = merged(INPUT_IDS).logits
    assert rms(got - exact) < 1e-5 * rms(exact)
    if not READS_ROWS:
        return  # on this CPU the live one computes with other weights than are in the file
    with torch.inference_mode():
        base = live(INPUT_IDS).logits
        adapted = PeftModel.from_pretrained(live, adapter).eval()(INPUT_IDS).logits
    assert rms(got - adapted) < 2**-8 * rms(adapted)
    assert rms(adapted - base) > 0.1 * rms(adapted)


def test_dequant_refuses_what_it_cannot_decode(
    models: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, golden: Golden
) -> None:
    out = tmp_path / "out"
    error = refused(adapters["nf4"], out, golden, base=models["full"], base_mode="dequant")
    assert "pass base=<a bitsandbytes 4-bit checkpoint>" in error.fix
    for method in ("gptq", "awq", "fp8", "bitsandbytes"):
        base = tmp_path / f"tiny-{method}"
        shutil.copytree(models["full"], base)
        edit_config(base, quantization_config={"quant_method": method, "bits": 4})
        for mode in ("dequant", "full"):
            error = refused(adapters["nf4"], out, golden, base=base, base_mode=mode)
            assert f"base {base} is quantized ({method})" in error.message
            fix = "pass base=<the full-precision model>" if mode == "full" else "pass base=<a bitsandbytes 4-bit"
            assert fix in error.fix
