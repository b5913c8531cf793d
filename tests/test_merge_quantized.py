"""Quantized bases: dequantization against bitsandbytes and PEFT, and which model passes for the full-precision one."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from builders import NF4, save_distinct, save_quantized
from builders import all_tensors as tensors_of
from golden import Golden
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, MixtralConfig, Qwen3Config

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import read_shard
from cogumi.merge.bases import BaseProof, compare_models, read_model
from cogumi.merge.quantized import Bnb4bit, Mismatch, dequantize_rows, quantization, quantized_tensors
from cogumi.models.quantized_bases import full_precision_names

SIZES = builders.SIZES | {"head_dim": 16}
FORMATS = {
    "nf4": NF4,
    "fp4": BitsAndBytesConfig(load_in_4bit=True),
    "nf4-stored-as-bfloat16": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16
    ),
    # What unsloth's dynamic 4-bit checkpoints do: some linear layers stay in 16 bits.
    "nf4-some-kept": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head", "layers.1.mlp.down_proj"]
    ),
}


def config_of(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((path / "config.json").read_text())
    return parsed


def packed_of(path: Path) -> dict[str, Bnb4bit]:
    shards = tuple(read_shard(shard) for shard in sorted(path.glob("*.safetensors")))
    return quantized_tensors(shards, config_of(path))


def prove(quantized: Path, full: Path) -> BaseProof:
    return compare_models(read_model(str(quantized), None), read_model(str(full), None))


def copy_with(path: Path, out: Path, changes: dict[str, torch.Tensor | None], **config: Any) -> Path:
    """A copy of the checkpoint with other tensors (None: without it) and other config fields."""
    changed = {name: tensor for name, tensor in (tensors_of(path) | changes).items() if tensor is not None}
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config_of(path) | config))
    return out


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # there FP4's negative zero is read as a positive one
        left, right = (each + 0 if each.is_floating_point() else each for each in (left, right))
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_distinct(tmp_path_factory.mktemp("bases") / "llama", LlamaConfig(**SIZES, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def quantized(full: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("quantized")
    return {name: save_quantized(full, place / name, how) for name, how in FORMATS.items()}


NAMES: list[tuple[str, str | None, tuple[str, ...]]] = [
    ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "bnb-4bit", ("unsloth/Qwen3-8B",)),
    ("unsloth/Qwen3-8B-bnb-4bit", "bnb-4bit", ("unsloth/Qwen3-8B",)),
    ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "awq", ("hugging-quants/Meta-Llama-3.1-8B-Instruct",)),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "gptq", ("Qwen/Qwen2.5-7B-Instruct",)),
    ("Qwen/Qwen3-4B-Instruct-2507-FP8", "fp8", ("Qwen/Qwen3-4B-Instruct-2507",)),
    ("unsloth/Llama-3.1-8B-Instruct-FP8-Dynamic", "compressed-tensors", ("unsloth/Llama-3.1-8B-Instruct",)),
    (
        "RedHatAI/Llama-3.1-8B-quantized.w4a16",
        "compressed-tensors",
        ("RedHatAI/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    ),
    ("openai/gpt-oss-20b", "mxfp4", ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b-BF16")),
    ("unsloth/gpt-oss-20b-unsloth-bnb-4bit", "bnb-4bit", ("unsloth/gpt-oss-20b-BF16", "unsloth/gpt-oss-20b")),
    ("deepseek-ai/DeepSeek-V3", "fp8", ("unsloth/DeepSeek-V3-BF16", "deepseek-ai/DeepSeek-V3-BF16")),
    ("/models/Llama-3.1-8B-bnb-4bit/", "bnb-4bit", ("/models/Llama-3.1-8B", "meta-llama/Llama-3.1-8B")),
    ("someone/my-model-8bit", "bitsandbytes", ("someone/my-model",)),
    ("someone/my-model", "bnb-4bit", ()),  # nothing to go by
]


@pytest.mark.parametrize(("name", "method", "expected"), NAMES, ids=[name for name, _, _ in NAMES])
def test_names_lead_to_full_precision(
    name: str, method: str | None, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name, and by what the hub's cache holds of it."""
    (tmp_path / "models--meta-llama--Llama-3.1-8B").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert full_precision_names(name, method) == expected


def test_quantization_is_read_from_the_config(full: Path, quantized: dict[str, Path]) -> None:
    kinds = {name: quantization(config_of(path)) for name, path in quantized.items()}
    assert kinds == dict.fromkeys(FORMATS, "bnb-4bit")
    assert quantization(config_of(full)) is None
    assert quantization({"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}) == "gptq"
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert quantization({"quantization_config": eight}) == "bitsandbytes"
    assert quantization({"quantization_config": {"load_in_4bit": True}}) == "bnb-4bit"  # older files name no method
    assert quantization({"quantization_config": None}) is None


def save_4bit(path: Path, weight: torch.Tensor, **options: Any) -> tuple[Bnb4bit, torch.Tensor]:
    """Write a file with one weight that bitsandbytes quantized; return it, and its values computed in float64 here."""
    packed, state = quantize_4bit(weight, **options)
    tensors = {"w.weight": packed} | {f"w.weight.{key}": part for key, part in state.as_dict(packed=True).items()}
    save_file(tensors, path / "model.safetensors")
    shards = (read_shard(path / "model.safetensors"),)
    tensor = quantized_tensors(shards, {"quantization_config": {"load_in_4bit": True}})["w.weight"]
    assert set(tensor.auxiliary) == tensors.keys() - {"w.weight"}
    absmax = state.absmax
    if state.nested:
        outer = state.state2.absmax.double().repeat_interleave(state.state2.blocksize)[: len(absmax)]
        absmax = state.state2.code.double()[absmax.int()] * outer + state.offset
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten()[: weight.numel()].int()
    scale = absmax.double().repeat_interleave(state.blocksize)[: weight.numel()]
    return tensor, (state.code.double()[codes] * scale).view(weight.shape)


def assert_decoded(rows: torch.Tensor, expected: torch.Tensor) -> None:
    # With double quantization bitsandbytes rounds three times in float32: the scale's product, its sum and the value.
    rtol = max(torch.finfo(rows.dtype).eps, 2 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(rows.double(), expected, rtol=rtol, atol=0)


# 100 columns: rows begin inside blocks of 64. 33 x 7: an odd number of elements, in one block that is not full. From 2048 on
# bitsandbytes compiles its code for the CPU, which takes half a minute.
@pytest.mark.parametrize("shape", [(48, 128), (37, 100), (33, 7)], ids=str)
@pytest.mark.parametrize("blocksize", [64, 128, 1024])
@pytest.mark.parametrize("nested", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_rows_are_decoded(kind: str, nested: bool, blocksize: int, shape: tuple[int, int], tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        torch.manual_seed(1)
        weight = (torch.randn(shape) * 0.02).to(dtype)
        tensor, expected = save_4bit(tmp_path, weight, quant_type=kind, blocksize=blocksize, compress_statistics=nested)
        rows = shape[0]
        for first, last in ((0, rows), (0, 1), (1, 2), (5, 18), (rows - 1, rows), (3, 3)):
            decoded = dequantize_rows(tensor, first, last)
            assert decoded.dtype == dtype
            assert_decoded(decoded, expected[first:last])


def test_many_nested_blocks(tmp_path: Path) -> None:
    """More than 256 blocks, so that the nested scales have several of their own, and rows that begin inside one."""
    torch.manual_seed(2)
    weight = (torch.randn(600, 192) * torch.linspace(0.001, 0.1, 600)[:, None]).bfloat16()
    tensor, expected = save_4bit(tmp_path, weight, quant_type="nf4", compress_statistics=True)
    ranges = [(first, min(600, first + 7)) for first in range(0, 600, 7)]
    with ThreadPoolExecutor(4) as pool:
        pieces = list(pool.map(lambda rows: dequantize_rows(tensor, *rows), ranges))
    assert_decoded(torch.cat(pieces), expected)


def test_without_bitsandbytes_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, _ = save_4bit(tmp_path, torch.randn(8, 64), quant_type="nf4")
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(UsageError, match="bitsandbytes, which is not installed"):
        dequantize_rows(tensor, 0, 8)


@pytest.mark.usefixtures("reads_4bit")
@pytest.mark.parametrize("name", FORMATS)
def test_saved_models_come_back_as_peft_dequantizes_them(name: str, full: Path, quantized: dict[str, Path]) -> None:
    path = quantized[name]
    actual = packed_of(path)
    linears = {key for key in tensors_of(full) if "_proj" in key}
    assert actual.keys() == linears - ({"model.layers.1.mlp.down_proj.weight"} if "kept" in name else set())
    beside = {key for tensor in actual.values() for key in tensor.auxiliary}
    assert tensors_of(path).keys() - beside == tensors_of(full).keys()
    live = AutoModelForCausalLM.from_pretrained(path)
    for key, tensor in actual.items():
        expected = dequantize_module_weight(live.get_submodule(key.removesuffix(".weight"))).data
        assert same_bits(dequantize_rows(tensor, 0, tensor.shape[0]), expected), key


def test_importing_the_merge_imports_no_bitsandbytes() -> None:
    code = "import sys, cogumi.merge; sys.exit('bitsandbytes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", FORMATS)
def test_the_right_base_is_proven(name: str, full: Path, quantized: dict[str, Path]) -> None:
    proof = prove(quantized[name], full)
    path = quantized[name]
    packed = packed_of(path)
    weights = tensors_of(full)
    kept_rows = [key for key in weights if key not in packed]
    assert proof.tensors_equal == len(kept_rows)
    assert proof.sampled_tensors == len(packed)
    assert proof.codes_differing == 0
    # The layers are small enough to be sampled whole, so the closed form over all of them is the oracle.
    off = {key: dequantize_rows(t, 0, t.shape[0]).double() - weights[key].double() for key, t in packed.items()}
    norms = {key: weights[key].double().norm().item() for key in packed}
    overall = sum(o.square().sum().item() for o in off.values()) / sum(norm**2 for norm in norms.values())
    assert proof.nf4_error == pytest.approx(overall**0.5, rel=1e-9)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loaded", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_base_of_another_dtype_is_proven(stored: torch.dtype, loaded: torch.dtype, tmp_path: Path) -> None:
    full = save_distinct(tmp_path / "full", LlamaConfig(**SIZES), dtype=stored)
    path = save_quantized(full, tmp_path / "nf4", NF4, dtype=loaded)
    assert prove(path, full).codes_differing == 0


def test_tied_heads_experts_and_extra_modules_are_proven(tmp_path: Path) -> None:
    tied = save_distinct(tmp_path / "qwen", Qwen3Config(**SIZES, tie_word_embeddings=True))
    path = save_quantized(tied, tmp_path / "qwen4", NF4)
    embedding = tensors_of(tied)["model.embed_tokens.weight"]
    # Full checkpoints may hold the tied head as well, and layers that transformers does not load.
    extra = {"lm_head.weight": embedding.clone(), "mtp.fc.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
    assert prove(path, tied) == prove(path, copy_with(tied, tmp_path / "more", extra))

    # transformers 5 fuses experts into parameters, which bitsandbytes leaves in 16 bits; on disk they are split again.
    moe = save_distinct(tmp_path / "moe", MixtralConfig(**SIZES, num_local_experts=4))
    proof = prove(save_quantized(moe, tmp_path / "moe4", NF4), moe)
    assert proof.sampled_tensors == 2 * 4  # attention only
    assert proof.codes_differing == 0


def refused(quantized: Path, full: Path) -> str:
    with pytest.raises(Mismatch) as caught:
        prove(quantized, full)
    return str(caught.value)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_another_model_and_a_sibling_are_refused(
    name: str, full: Path, quantized: dict[str, Path], tmp_path: Path
) -> None:
    weights = tensors_of(full)
    linears = [key for key in weights if "_proj" in key]
    torch.manual_seed(6)
    # Everything that is stored unquantized is the same: only the quantized weights can tell.
    other = {key: (torch.randn_like(weights[key].float()) * 0.02).bfloat16() for key in linears}
    match = re.search(
        r"other codes for ([\d.]+)%", refused(quantized[name], copy_with(full, tmp_path / "other", other))
    )
    assert match
    assert float(match[1]) > 80
    near = {key: (weights[key].float() + 0.003 * 0.02 * torch.randn(weights[key].shape)).bfloat16() for key in linears}
    assert "a fine-tuned sibling?" in refused(quantized[name], copy_with(full, tmp_path / "near", near))


def test_the_dequantized_checkpoint_is_not_the_base(full: Path, quantized: dict[str, Path], tmp_path: Path) -> None:
    path = quantized["nf4"]
    packed = packed_of(path)
    weights: dict[str, torch.Tensor | None] = {k: dequantize_rows(t, 0, t.shape[0]) for k, t in packed.items()}
    assert "is it the dequantized checkpoint?" in refused(path, copy_with(full, tmp_path / "back", weights))


def test_what_is_not_quantized_must_be_equal(full: Path, quantized: dict[str, Path], tmp_path: Path) -> None:
    weights = tensors_of(full)

    def changed(name: str, row: int) -> dict[str, torch.Tensor | None]:
        tensor = weights[name].clone()
        tensor.view(torch.int16)[row] ^= 1  # the last bit of a row or an element
        return {name: tensor}

    for index, (kind, name) in enumerate(
        [
            ("nf4", "model.norm.weight"),
            ("nf4", "model.embed_tokens.weight"),
            ("fp4", "lm_head.weight"),
            ("nf4-some-kept", "model.layers.1.mlp.down_proj.weight"),
        ]
    ):
        text = refused(quantized[kind], copy_with(full, tmp_path / str(index), changed(name, 63)))
        assert f"{name}, which is stored unquantized" in text
    # The same in float32: the change is smaller than bfloat16 sees, and then large enough.
    norm = weights["model.norm.weight"].float()
    assert prove(quantized["nf4"], copy_with(full, tmp_path / "fine", {"model.norm.weight": norm * (1 + 1e-6)}))
    text = refused(quantized["nf4"], copy_with(full, tmp_path / "off", {"model.norm.weight": norm * 1.01}))
    assert "model.norm.weight, which is stored unquantized, differs in BF16" in text


def test_names_shapes_and_configs_must_agree(full: Path, quantized: dict[str, Path], tmp_path: Path) -> None:
    path, weights = quantized["nf4"], tensors_of(full)
    embedding = weights["model.embed_tokens.weight"]
    projection, bias = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
    changes: dict[str, dict[str, torch.Tensor | None]] = {
        "embed_tokens.weight is [264, 64] where the quantized one has [256, 64]": {
            "model.embed_tokens.weight": torch.cat([embedding, embedding[:8]])
        },
        f"{projection} is [64, 96] where the quantized one has [96, 64]": {projection: weights[projection].T},
        f"it has {bias}, which the quantized one lacks": {bias: torch.zeros(64)},
        f"it has no {projection}": {projection: None},
    }
    for number, (problem, change) in enumerate(changes.items()):
        assert problem in refused(path, copy_with(full, tmp_path / f"{number}", change))
    heads = copy_with(full, tmp_path / "heads", {}, num_attention_heads=2)
    assert "num_attention_heads=2 where the quantized one says 4" in refused(path, heads)


def as_gptq(full: Path, out: Path, method: str, changes: dict[str, torch.Tensor | None] | None = None) -> Path:
    """The names and dtypes of a GPTQ or AWQ checkpoint (float16 beside packed integers); the codes are never read."""
    tensors: dict[str, torch.Tensor | None] = {}
    for name, tensor in tensors_of(full).items():
        if "_proj" in name:
            stem, (rows, columns) = name.removesuffix(".weight"), tensor.shape
            tensors[name] = None
            tensors[f"{stem}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
            tensors[f"{stem}.scales"] = torch.ones(1, rows, dtype=torch.float16)
        else:
            tensors[name] = tensor.half()
    return copy_with(full, out, tensors | (changes or {}), quantization_config={"quant_method": method, "bits": 4})


def test_other_formats_are_proven_by_what_they_leave_alone(full: Path, tmp_path: Path) -> None:
    weights = tensors_of(full)
    proof = prove(as_gptq(full, tmp_path / "gptq", "gptq"), full)
    assert proof == BaseProof(7, 0, None, None)
    norm = "model.layers.0.input_layernorm.weight"
    scaled = {norm: weights[norm].half() / 2}
    assert norm in refused(as_gptq(full, tmp_path / "gptq-other", "gptq", scaled), full)
    # AWQ divides norms by the scales that it gives the weights: there the matrices speak.
    assert prove(as_gptq(full, tmp_path / "awq", "awq", scaled), full).tensors_equal == 2
    head = {"lm_head.weight": weights["lm_head.weight"].half() * 2}
    assert "lm_head.weight" in refused(as_gptq(full, tmp_path / "awq-other", "awq", head), full)
    nothing = {name: None for name in weights if "_proj" not in name}
    assert "nothing can be compared" in refused(as_gptq(full, tmp_path / "nothing", "gptq", nothing), full)


def as_fp8(full: Path, out: Path) -> Path:
    eight = {name: w.to(torch.float8_e4m3fn) for name, w in tensors_of(full).items() if "_proj" in name}
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in eight}
    return copy_with(full, out, {**eight, **scales}, quantization_config={"quant_method": "fp8"})


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bits_are_not_compared_but_what_is_beside_them_is(kind: str, full: Path, tmp_path: Path) -> None:
    int8 = BitsAndBytesConfig(load_in_8bit=True)
    eight = as_fp8(full, tmp_path / "8") if kind == "fp8" else save_quantized(full, tmp_path / "8", int8)
    assert prove(eight, full) == BaseProof(7, 0, None, None)
    moved: dict[str, torch.Tensor | None] = {"model.norm.weight": tensors_of(full)["model.norm.weight"] * 2}
    assert "model.norm.weight" in refused(eight, copy_with(full, tmp_path / "other", moved))


def test_damaged_and_unknown_layouts_are_refused(quantized: dict[str, Path], tmp_path: Path, golden: Golden) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    state = f"{name}.quant_state.bitsandbytes__nf4"
    of_float64 = bytearray(json.dumps({"shape": [96, 64], "dtype": "float64", "blocksize": 64}).encode())
    changes: dict[str, dict[str, torch.Tensor | None]] = {
        "up_proj.weight.absmax": {f"{name}.absmax": None},
        "6144": {name: torch.zeros(8, 1, dtype=torch.uint8)},
        "up_proj.weight.nested_absmax": {f"{name}.nested_absmax": torch.zeros(1, dtype=torch.float16)},
        "bitsandbytes quant state": {state: torch.zeros(9, dtype=torch.uint8)},
        "float64": {state: torch.frombuffer(of_float64, dtype=torch.uint8)},
    }
    for number, (problem, change) in enumerate(changes.items()):
        path = copy_with(quantized["nf4"], tmp_path / f"{number}", change)
        with golden.raises("merge", message=problem):
            packed_of(path)
