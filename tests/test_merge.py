"""The merge against three oracles: the live adapter, the closed form in float64, and PEFT's own float32 merge."""

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import builders
import peft
import prepared_process
import pytest
import torch
from blake3 import blake3
from builders import INPUT_IDS, LINEARS
from builders import all_tensors as tensors_of
from disk_mounts import mounting
from golden import Golden
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cogumi.core.errors import DiskFull, UsageError
from cogumi.merge import MergeError, merge_adapter, stream
from cogumi.merge.logits import check_logits
from cogumi.merge.plan import RowRange

SIZES = builders.SIZES | {"head_dim": 16}


def save_base(path: Path, model: Any, dtype: torch.dtype = torch.bfloat16) -> Path:
    model.to(dtype).save_pretrained(path, max_shard_size="60KB")
    (path / "LICENSE").write_text("base licence\n")
    (path / "tokenizer.json").write_text('{"of": "base"}\n')
    (path / "tokenizer_config.json").write_text("{}\n")
    (path / "chat_template.jinja").write_text("base template")
    return path


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"tie_word_embeddings": False} | changes)))


def qwen3(**changes: Any) -> Any:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**(SIZES | {"tie_word_embeddings": True} | changes)))


@pytest.fixture(scope="module")
def llama_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("bases") / "llama", llama())


@pytest.fixture(scope="module")
def qwen_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("bases") / "qwen3", qwen3())


def make_adapter(base: Path, path: Path, config: Any = None) -> Path:
    """A real adapter, saved by PEFT, with the factors a trained one might have (B is zero before training)."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(2)
    adapted = get_peft_model(model, config or LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.save_pretrained(str(path))
    return path


def load_live(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.int16), right.view(torch.int16))


def nothing_left(out: Path) -> bool:
    return not list(out.parent.glob(f"{out.name}*"))


PATTERNS = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=LINEARS,
    rank_pattern={"q_proj": 4, "layers.1.mlp.down_proj": 12},
    alpha_pattern={"k_proj": 3, r"layers\.0\.mlp\.up_proj": 40},
)
CASES = {
    "llama-lora": ("llama", LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS)),
    "llama-rslora": ("llama", LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, use_rslora=True)),
    "llama-patterns": ("llama", PATTERNS),
    "llama-head-untied": ("llama", LoraConfig(r=4, target_modules=["q_proj", "lm_head"])),
    "qwen3-tied-some-layers": (
        "qwen",
        LoraConfig(r=8, target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
    ),
    "qwen3-gaussian-all-linear": ("qwen", LoraConfig(r=8, target_modules="all-linear", init_lora_weights="gaussian")),
}


@pytest.mark.parametrize("case", CASES)
def test_merge_agrees_with_three_oracles(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    family, config = CASES[case]
    base: Path = request.getfixturevalue(f"{family}_base")
    adapter = make_adapter(base, tmp_path / "adapter", config)
    out = tmp_path / "merged"
    report = merge_adapter(adapter, out, progress=False)  # the base is the one that the adapter records

    before, after, live = tensors_of(base), tensors_of(out), load_live(base, adapter)
    layers: dict[str, Any] = {
        f"{name}.weight": layer
        for name, layer in live.get_base_model().named_modules()
        if isinstance(layer, peft.tuners.lora.LoraLayer)
    }
    assert report.tensors_merged == len(layers) > 0
    assert report.tensors_copied == len(before) - len(layers)
    assert before.keys() == after.keys()
    # Every untouched tensor, to the bit; every touched one against the closed form in float64, and different.
    deltas = {}
    for name, weight in before.items():
        if name not in layers:
            assert same_bits(weight, after[name]), name
            continue
        a, b = layers[name].lora_A["default"].weight, layers[name].lora_B["default"].weight
        rank = a.shape[0]
        alpha = layers[name].lora_alpha["default"]
        scaling = alpha / (rank**0.5 if config.use_rslora else rank)
        deltas[name] = (scaling * (b.double() @ a.double())).detach()
        expected = weight.double() + deltas[name]
        half = torch.exp2(expected.abs().log2().floor() - 8)
        # Float32's error is a share of the terms of B @ A, not of their sum, in which they may cancel.
        terms = scaling * (b.double().abs() @ a.double().abs())
        slack = (rank + 2) * 2**-24 * (weight.double().abs() + terms)
        assert ((after[name].double() - expected).abs() <= half + slack).all(), name
        assert not same_bits(weight, after[name]), name
    assert report.max_delta == pytest.approx(max(delta.abs().max().item() for delta in deltas.values()), rel=1e-5)
    ratios = [deltas[name].norm() / before[name].double().norm() for name in deltas]
    assert report.max_delta_ratio == pytest.approx(max(ratios).item(), rel=1e-5)
    # PEFT's merge in float32, rounded here: at most a rounding tie apart.
    theirs = load_live(base, adapter).merge_and_unload().state_dict()
    for name in layers:
        ulps = (theirs[name].bfloat16().view(torch.int16).int() - after[name].view(torch.int16).int()).abs()
        assert ulps.max() <= 1, name
        assert (ulps != 0).float().mean() < 0.001, name
    # The reloaded model speaks like the live adapter and not like the base.
    check = check_logits(live, load(out), INPUT_IDS, torch.bfloat16)
    assert check.passed, check
    assert 0 < 10 * check.measured < check.base_distance
    assert check.base_distance > check.bound
    with torch.inference_mode():
        direct = (live(INPUT_IDS).logits - load(out)(INPUT_IDS).logits).square().mean().sqrt().item()
    assert direct == pytest.approx(check.measured, rel=1e-5)


def test_output_is_a_complete_directory(llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    for name, text in {"tokenizer.json": '{"of": "adapter"}', "chat_template.jinja": "adapter template"}.items():
        (adapter / name).write_text(text)
    (adapter / "tokenizer_config.json").write_text("{}")
    out = tmp_path / "merged"
    report = merge_adapter(adapter, out, base=llama_base, progress=False)

    shards = sorted(path.name for path in llama_base.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(path.name for path in out.glob("*.safetensors")) == shards
    assert (out / "tokenizer.json").read_text() == '{"of": "adapter"}'
    assert (out / "chat_template.jinja").read_text() == "adapter template"
    for name in ("config.json", "generation_config.json", "LICENSE"):
        assert (out / name).read_bytes() == (llama_base / name).read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    after = tensors_of(out)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    for name, shard in index["weight_map"].items():
        with safe_open(out / shard, framework="pt") as file:
            assert name in file.keys()  # noqa: SIM118
    assert index["weight_map"].keys() == after.keys()

    manifest = json.loads((out / "cogumi-merge.json").read_text())
    for shard in shards:
        data = (out / shard).read_bytes()
        assert manifest["shards"][shard] == {"bytes": len(data), "blake3": blake3(data).hexdigest()}
    weights = blake3((adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert manifest["adapters"][0]["blake3"]["adapter_model.safetensors"] == weights
    assert manifest["adapters"][0]["weight"] == 1
    hashes = {
        path.name: blake3(path.read_bytes()).hexdigest()
        for path in [llama_base / "config.json", *llama_base.glob("*.safetensors")]
    }
    assert manifest["base"].items() >= {"name": str(llama_base), "commit": None, "blake3": hashes}.items()
    for name, digest in manifest["files"].items():
        assert blake3((out / name).read_bytes()).hexdigest() == digest
    assert len(manifest["tensors"]) == report.tensors_merged == 14
    for entry in manifest["tensors"].values():
        assert entry["elements"] in (64 * 64, 32 * 64, 64 * 96)
        assert entry["delta_retained"] == pytest.approx(1, abs=0.01)
        assert 0 < entry["delta_over_weight"] <= report.max_delta_ratio
    assert report.delta_retained == pytest.approx(1, abs=0.01)
    assert str(out) in str(report)
    assert f"{report.elements:,} computed elements read back and checked" in str(report)
    assert sum(path.stat().st_size for path in out.glob("*.safetensors")) == report.bytes


@pytest.mark.parametrize(("dtype", "kind"), [("float32", torch.float32), ("float16", torch.float16)])
def test_another_dtype(dtype: str, kind: torch.dtype, llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    out = tmp_path / "merged"
    merge_adapter(adapter, out, dtype=dtype, progress=False)
    before, after = tensors_of(llama_base), tensors_of(out)
    assert {tensor.dtype for tensor in after.values()} == {kind}
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"].to(kind))
    total = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in after.values())
    check = check_logits(load_live(llama_base, adapter), load(out), INPUT_IDS, kind)
    assert check.passed, check
    assert check.measured < 1e-3


def test_weights_stored_transposed(tmp_path: Path) -> None:
    """GPT-2 keeps its matrices as [in, out] (Conv1D), in one file without an index; PEFT calls it fan_in_fan_out."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=64))
    base = tmp_path / "gpt2"
    model.bfloat16().save_pretrained(base)
    assert (base / "model.safetensors").exists()
    config = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    adapter = make_adapter(base, tmp_path / "adapter", config)
    out = tmp_path / "merged"
    report = merge_adapter(adapter, out, progress=False)
    assert report.tensors_merged == 4
    assert not (out / "model.safetensors.index.json").exists()
    check = check_logits(load_live(base, adapter), load(out), INPUT_IDS, torch.bfloat16)
    assert check.passed, check
    assert check.base_distance > 3 * check.bound


def test_attention_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """transformers fuses the experts on load, so disk and module names differ; attention keeps its own tensors."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False)
    base = save_base(tmp_path / "mixtral", MixtralForCausalLM(config))
    adapter = make_adapter(base, tmp_path / "adapter", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    out = tmp_path / "merged"
    assert merge_adapter(adapter, out, progress=False).tensors_merged == 4
    check = check_logits(load_live(base, adapter), load(out), INPUT_IDS, torch.bfloat16)
    assert check.passed, check


def test_matmul_precision_of_the_process_does_not_matter(llama_base: Path, tmp_path: Path) -> None:
    """On a CPU with bfloat16 instructions "medium" makes float32 products wrong by 1 %; elsewhere it does nothing."""
    adapter = make_adapter(llama_base, tmp_path / "adapter", LoraConfig(r=64, target_modules=LINEARS))
    merge_adapter(adapter, tmp_path / "one", progress=False)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        merge_adapter(adapter, tmp_path / "two", progress=False)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    for shard in (tmp_path / "one").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "two" / shard.name).read_bytes()


def test_one_layer_without_training_still_merges(
    llama_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = edit_adapter(
        make_adapter(llama_base, tmp_path / "adapter"),
        lambda name, tensor: tensor * ("layers.0.self_attn.q_proj" not in name),
    )
    report = merge_adapter(adapter, tmp_path / "merged", progress=False)
    assert report.tensors_merged == 14
    assert "1 of 14 updates are zero" in caplog.text
    name = "model.layers.0.self_attn.q_proj.weight"
    assert same_bits(tensors_of(tmp_path / "merged")[name], tensors_of(llama_base)[name])


def edit_adapter(path: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Path:
    weights = path / "adapter_model.safetensors"
    changed = {name: change(name, tensor) for name, tensor in load_file(weights).items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, weights, {"format": "pt"})
    return path


def edit_config(path: Path, **changes: Any) -> Path:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


# Real adapters, saved by PEFT, of kinds that no merged weight on this base can express; and what the refusal has to say.
PISSA_NITER: Any = "pissa_niter_4"
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "pissa": (LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa"), "pissa"),
    "pissa_niter": (LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=PISSA_NITER), "pissa_niter_4"),
    "olora": (LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora"), "olora"),
    "mica": (LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="mica"), "mica"),
    "replication": (
        LoraConfig(r=4, target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)]),
        "layer_replication",
    ),
    "ia3": (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "IA3"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_refuses_what_would_merge_wrongly(kind: str, llama_base: Path, tmp_path: Path, golden: Golden) -> None:
    config, reason = UNSUPPORTED[kind]
    adapter = make_adapter(llama_base, tmp_path / "adapter", config)
    out = tmp_path / "merged"
    with golden.raises("merge", message=reason, fix="PEFT") as caught:
        merge_adapter(adapter, out, base=llama_base, progress=False)
    assert "\n" not in str(caught.value)
    assert nothing_left(out)


EDITED: dict[str, tuple[dict[str, Any], str]] = {
    # Made for real, the first three need data or scipy; the config's word for them is what the refusal reads.
    **{name: ({"init_lora_weights": name}, f"init_lora_weights='{name}'") for name in ("corda", "loftq", "lora_ga")},
    "unknown entry": ({"use_fancy_lora": True}, "use_fancy_lora=True"),
    "another rank": ({"r": 4}, "need (4, "),
}


@pytest.mark.parametrize("case", EDITED)
def test_refuses_configs(case: str, llama_base: Path, tmp_path: Path) -> None:
    changes, text = EDITED[case]
    adapter = edit_config(make_adapter(llama_base, tmp_path / "adapter"), **changes)
    with pytest.raises(UsageError, match=re.escape(text)):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def test_refuses_a_bias_where_the_base_has_none(llama_base: Path, tmp_path: Path, golden: Golden) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter", LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True))
    with golden.raises("merge", message="q_proj", fix="PEFT"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def test_refuses_a_convolution(tmp_path: Path, golden: Golden) -> None:
    torch.manual_seed(0)
    config = Lfm2Config(**(SIZES | {"layer_types": ["conv", "full_attention"]}))
    base = save_base(tmp_path / "lfm2", Lfm2ForCausalLM(config))
    adapter = make_adapter(base, tmp_path / "adapter", LoraConfig(r=64, target_modules=["conv.conv"]))
    with golden.raises("merge", message="conv.conv is a Conv1d"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def test_refuses_embeddings_of_another_base(llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    extra = {f"base_model.model.{name}.weight": torch.zeros(260, 64) for name in ("model.embed_tokens", "lm_head")}
    save_file(load_file(weights) | extra, weights, {"format": "pt"})
    with pytest.raises(UsageError, match=r"\.weight is not the embedding of base"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def spoiled(value: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def spoil(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "layers.1.mlp.up_proj.lora_A" in name:
            tensor[3, 5] = value
        return tensor

    return spoil


# Changes of an adapter's tensors, and a word of the refusal. PEFT stores a head's base weight with its factors, and loads
# it over the base's: it has to be the same one.
HEAD = LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
SPOILED: dict[str, tuple[Any, Callable[[str, torch.Tensor], torch.Tensor | None], str]] = {
    "another head": (HEAD, lambda name, t: t * (1.01 if "base_layer" in name else 1), "lm_head.base_layer.weight"),
    "untrained": (None, lambda name, t: t * ("lora_A" in name), "changes nothing"),
    "half a pair": (None, lambda name, t: None if "1.mlp.up_proj.lora_B" in name else t, "up_proj.lora_A.weight"),
    **{str(number): (None, spoiled(number), "1.mlp.up_proj.lora_A") for number in (math.nan, math.inf, -math.inf)},
}


@pytest.mark.parametrize("case", SPOILED)
def test_refuses_tensors(case: str, llama_base: Path, tmp_path: Path) -> None:
    config, change, text = SPOILED[case]
    adapter = edit_adapter(make_adapter(llama_base, tmp_path / "adapter", config), change)
    with pytest.raises(UsageError, match=re.escape(text)):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def test_refuses_a_wrong_base(llama_base: Path, qwen_base: Path, tmp_path: Path, golden: Golden) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    wide = save_base(tmp_path / "wide", llama(hidden_size=128))
    with golden.raises("merge", message="base_model.model."):
        merge_adapter(adapter, tmp_path / "merged", base=wide, progress=False)
    shallow = save_base(tmp_path / "shallow", llama(num_hidden_layers=1))
    with golden.raises("merge", message="layers.1."):
        merge_adapter(adapter, tmp_path / "merged", base=shallow, progress=False)
    deep = save_base(tmp_path / "deep", llama(num_hidden_layers=3))
    with golden.raises("merge", message="layers.2."):
        merge_adapter(adapter, tmp_path / "merged", base=deep, progress=False)
    other = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256)).save_pretrained(other)
    with pytest.raises(UsageError, match="does not fit base"):
        merge_adapter(adapter, tmp_path / "merged", base=other, progress=False)


def test_refuses_quantized_bases(llama_base: Path, tmp_path: Path, golden: Golden) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    quantized = tmp_path / "quantized"
    shutil.copytree(llama_base, quantized)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config))
    with golden.raises("merge", message="bnb-4bit", fix="base="):
        merge_adapter(adapter, tmp_path / "merged", base=quantized, progress=False)
    for name in ("someone/Llama-3-8B-unsloth-bnb-4bit", "someone/Llama-3-8B-4bit"):
        with golden.raises("merge", fix="base=someone/Llama-3-8B,"):
            merge_adapter(edit_config(adapter, base_model_name_or_path=name), tmp_path / "merged", progress=False)


def test_refuses_what_is_not_there(llama_base: Path, tmp_path: Path, golden: Golden) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    out = tmp_path / "merged"
    with golden.raises("merge", message=str(tmp_path / "nowhere")):
        merge_adapter(tmp_path / "nowhere", out, progress=False)
    with golden.raises("merge", message="adapter_config.json"):
        merge_adapter(llama_base, out, progress=False)
    with golden.raises("merge", fix="hf download nobody/nothing --revision abc"):
        merge_adapter(adapter, out, base="nobody/nothing", base_revision="abc", progress=False)
    with golden.raises("merge", message="no/such/directory"):
        merge_adapter(adapter, out, base="no/such/directory", progress=False)
    with golden.raises("merge", message=str(llama_base)):
        merge_adapter(adapter, out, base=llama_base, base_revision="main", progress=False)
    with golden.raises("merge", message="dtype='bf16'"):
        merge_adapter(adapter, out, dtype="bf16", progress=False)
    with golden.raises("merge", message="verify='all'"):
        merge_adapter(adapter, out, verify="all", progress=False)
    broken = tmp_path / "broken"
    shutil.copytree(llama_base, broken)
    (broken / "config.json").rename(tmp_path / "config.json")
    with golden.raises("merge", message="has no config.json", fix="base="):
        merge_adapter(adapter, out, base=broken, progress=False)
    (tmp_path / "config.json").rename(broken / "config.json")
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with golden.raises("merge", message=shard.name):
        merge_adapter(adapter, out, base=broken, progress=False)
    shard.unlink()
    with golden.raises("merge", message=f"lacks {shard.name}"):
        merge_adapter(adapter, out, base=broken, progress=False)
    assert nothing_left(out)


def test_hub_snapshot_from_the_cache(
    llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """A base by its hub id, at the revision that the adapter recorded, from a cache laid out as the hub client does."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "cache" / "models--someone--tiny"
    shutil.copytree(llama_base, repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    edit_config(adapter, base_model_name_or_path="someone/tiny", revision=commit)
    report = merge_adapter(adapter, tmp_path / "merged", progress=False)
    assert report.base == "someone/tiny"
    assert json.loads((tmp_path / "merged" / "cogumi-merge.json").read_text())["base"]["commit"] == commit
    with golden.raises("merge", fix="hf download someone/tiny --revision v2"):
        merge_adapter(adapter, tmp_path / "again", base_revision="v2", progress=False)


def test_never_overwrites(llama_base: Path, tmp_path: Path, golden: Golden) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    out = tmp_path / "merged"
    out.mkdir()
    (out / "precious").write_text("keep me")
    with golden.raises("merge", message=f"out {out} exists"):
        merge_adapter(adapter, out, progress=False)
    assert [path.name for path in out.iterdir()] == ["precious"]
    below_a_file = out / "precious" / "merged"
    with golden.raises("merge", message=str(below_a_file)):
        merge_adapter(adapter, below_a_file, progress=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with some options. Skips where that is not allowed."""
    with mounting(tmp_path) as mount:
        yield lambda options: mount(options=options)


def test_full_disk_is_refused_with_numbers(
    llama_base: Path, tmp_path: Path, small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    disk = small_disk("size=200k")
    monkeypatch.setattr(
        "cogumi.merge.stream.write_run", lambda *_: pytest.fail("wrote before the disk was known to do")
    )
    with pytest.raises(
        UsageError, match=r"needs [\d.]+ kB and .* has [\d.]+ kB free \(No space left on device\); free [\d.]+ kB"
    ):
        merge_adapter(adapter, disk / "merged", progress=False)
    assert list(disk.iterdir()) == []


def test_a_disk_that_fills_up_during_the_merge(
    llama_base: Path, tmp_path: Path, small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the bytes and the place, and the partial is gone."""
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    disk = small_disk("size=200k")
    monkeypatch.setattr(
        "cogumi.merge.output_directory.allocate",
        lambda partial, shards, small: [(partial / name).touch() for name in shards],
    )
    with pytest.raises(DiskFull, match=rf"{re.escape(str(disk))}.*{os.strerror(errno.ENOSPC)}"):
        merge_adapter(adapter, disk / "merged", progress=False)
    assert list(disk.iterdir()) == []


def test_read_only_place(llama_base: Path, tmp_path: Path, small_disk: Callable[[str], Path], golden: Golden) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    disk = small_disk("size=10m,ro")
    with golden.raises("merge", message=str(disk)):
        merge_adapter(adapter, disk / "merged", progress=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interruption_leaves_nothing(
    error: type[BaseException], llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    original, calls = stream.write_run, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise error("stop")
        return original(*arguments)

    monkeypatch.setattr(stream, "write_run", interrupted)
    with pytest.raises(error, match="stop"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)
    assert nothing_left(tmp_path / "merged")


SLOW_MERGE = """
import os, sys, time
from cogumi.merge import merge_adapter, stream as work
original = work.write_run
def slow(*arguments):
    result = original(*arguments)
    os.write(1, b"wrote one\\n")  # whole, however many threads write
    time.sleep(60)
    return result
work.write_run = slow
merge_adapter(sys.argv[1], sys.argv[2], progress=False)
"""


def test_killed_merge_leaves_no_output(llama_base: Path, tmp_path: Path, for_commands: dict[str, str]) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    out = tmp_path / "merged"
    before = {path.name: path.read_bytes() for path in llama_base.iterdir()}
    words = [*prepared_process.python(for_commands), "-c", SLOW_MERGE, str(adapter), str(out)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, env=for_commands)
    assert child.stdout is not None
    assert child.stdout.readline() == b"wrote one\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()  # until nothing holds its output: what was forked for it has ended, too
    assert child.returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(list(tmp_path.glob("merged.partial-*"))) == 1
    assert {path.name: path.read_bytes() for path in llama_base.iterdir()} == before
    merge_adapter(adapter, out, progress=False)
    assert not list(tmp_path.glob("merged.partial-*"))  # recognised as nobody's, and cleaned


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_one_wrong_element_is_caught(
    tensor: str, llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flip the lowest mantissa bits of one element, touched or not, between writing and verifying."""
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    original = stream.write_run

    def corrupting(run: RowRange, directory: Path, out: torch.Tensor) -> None:
        original(run, directory, out)
        target = run.tensor.target
        if target.name == tensor:
            with (directory / target.path).open("r+b") as file:
                file.seek(target.start + 2 * 1234)
                low = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([low ^ 2]))

    monkeypatch.setattr(stream, "write_run", corrupting)
    with pytest.raises(MergeError, match=tensor):
        merge_adapter(adapter, tmp_path / "merged", progress=False)
    assert nothing_left(tmp_path / "merged")


def test_a_file_of_another_length_is_caught(
    llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    original = stream.verify_header

    def too_much(plan: Any, directory: Path) -> None:
        with (directory / plan.name).open("ab") as file:
            file.write(b"x")
        original(plan, directory)

    monkeypatch.setattr(stream, "verify_header", too_much)
    with pytest.raises(MergeError, match=r"safetensors has \d+ bytes on disk"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def test_overflow_of_bfloat16_is_caught(tmp_path: Path, golden: Golden) -> None:
    """Infinity is the nearest bfloat16 to the largest float32 numbers, and still not what was trained."""
    model = llama()
    with torch.no_grad():
        model.model.norm.weight[3] = torch.finfo(torch.float32).max
    base = save_base(tmp_path / "base", model, torch.float32)
    adapter = make_adapter(base, tmp_path / "adapter")
    with golden.raises("merge", MergeError, message="norm.weight: element (3, 0) becomes"):
        merge_adapter(adapter, tmp_path / "merged", dtype="bfloat16", progress=False)
    assert nothing_left(tmp_path / "merged")


def test_infinity_in_one_block_and_a_wrong_element_in_another(
    llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """Every element of the one is looked at, a few of the other."""
    monkeypatch.setattr("cogumi.merge.arithmetic.BLOCK_ELEMENTS", 1024)
    adapter = make_adapter(llama_base, tmp_path / "adapter")
    original = stream.write_run

    def corrupting(run: RowRange, directory: Path, out: torch.Tensor) -> None:
        original(run, directory, out)
        target = run.tensor.target
        if target.name == "model.layers.0.self_attn.q_proj.weight":
            with (directory / target.path).open("r+b") as file:
                file.seek(target.start)
                file.write(b"\x00\x41")  # 8
                file.seek(target.end - 2)
                file.write(b"\x80\x7f")  # infinity

    monkeypatch.setattr(stream, "write_run", corrupting)
    with golden.raises("merge", MergeError, message="element (0, 0) is 8"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)


def test_overflow_of_a_narrow_dtype_is_caught(tmp_path: Path, golden: Golden) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = 1e5  # fits bfloat16, not float16
    base = save_base(tmp_path / "base", model)
    adapter = make_adapter(base, tmp_path / "adapter")
    with golden.raises("merge", MergeError, message="q_proj.weight: element (0, 0) becomes"):
        merge_adapter(adapter, tmp_path / "merged", dtype="float16", progress=False)
    assert nothing_left(tmp_path / "merged")
