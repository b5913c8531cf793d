"""Where an adapter lies, how its training began, and what a wrapper left in its names."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    INPUT_IDS,
    LINEARS,
    SIZES,
    add_tensors,
    all_tensors,
    check_close,
    check_merge,
    closed_form,
    distances,
    edit_config,
    edit_tensors,
    load,
    logits,
    rms,
    save_base,
    train,
)
from golden import Golden
from peft import EvaConfig, LoraConfig, PeftModel, get_peft_model, initialize_lora_eva_weights
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    BioGptConfig,
    GPTNeoXConfig,
    LEDConfig,
    LEDForConditionalGeneration,
    LlamaConfig,
    LongcatFlashConfig,
    MambaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.models.inkling import InklingTextConfig, modeling_inkling

from cogumi.core.errors import UsageError
from cogumi.merge import check_merged, merge_adapter
from cogumi.merge.adapter_files import OTHER_NAMES, serving_limits, standard_name
from cogumi.merge.inspection import inspect


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("adapters") / "base", LlamaConfig(**SIZES, tie_word_embeddings=False))


# EVA: A is what the layers' inputs vary along, and the ranks follow that.


@pytest.mark.parametrize("adjusted", [True, False])
def test_eva(adjusted: bool, base: Path, tmp_path: Path) -> None:
    """Ranks are shared out anew, so that layers have more than r, or none; the base stays as it is."""
    model = load(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    eva = EvaConfig(rho=2.0, adjust_scaling_factors=adjusted)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=LINEARS, task_type="CAUSAL_LM", init_lora_weights="eva", eva_config=eva
    )
    adapted = get_peft_model(model, config)
    batches = [{"input_ids": INPUT_IDS, "attention_mask": torch.ones_like(INPUT_IDS)}] * 4
    initialize_lora_eva_weights(adapted, batches, show_progress_bar=False)
    after = {name.replace(".base_layer", ""): tensor for name, tensor in adapted.get_base_model().state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["init_lora_weights"] == "eva"
    assert len(set(saved["rank_pattern"].values()) - {4}) > 1
    assert bool(saved["alpha_pattern"]) == adjusted
    check_merge(base, tmp_path / "adapter", tmp_path / "out")


# An adapter below the directory that is given.


def named_adapters(base: Path, path: Path, *names: str) -> Any:
    """A model with adapters of these names, saved as PEFT does: each in a directory of its name."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(load(base), lora, adapter_name=names[0])
    for name in names[1:]:
        adapted.add_adapter(name, lora)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(str(path))
    return adapted


def test_an_adapter_that_has_a_name_is_found_below(
    base: Path, tmp_path: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    named_adapters(base, tmp_path / "saved", "french")
    assert not (tmp_path / "saved" / "adapter_config.json").exists()
    out = tmp_path / "out"
    status, _, output = command_line("merge", tmp_path / "saved", out, "--base", base, "--dtype", "float32")
    assert status == 0, output
    check_close(*distances(base, tmp_path / "saved" / "french", out))
    assert check_merged(out, progress=False).missing is None
    assert json.loads((out / "cogumi-merge.json").read_text())["adapters"][0]["path"].endswith("saved/french")


def test_several_adapters_below_are_named_and_not_chosen_from(base: Path, tmp_path: Path, golden: Golden) -> None:
    named_adapters(base, tmp_path / "saved", "french", "german")
    with golden.raises("merge", message="french, german", fix="french"):
        merge_adapter(tmp_path / "saved", tmp_path / "out", base=base, progress=False)


def test_the_adapter_that_is_named_comes_before_those_below(base: Path, tmp_path: Path) -> None:
    """PEFT writes the default adapter into the directory itself, and the others below."""
    named_adapters(base, tmp_path / "saved", "default", "german")
    merge_adapter(tmp_path / "saved", tmp_path / "out", base=base, dtype="float32", progress=False)
    check_close(*distances(base, tmp_path / "saved", tmp_path / "out"))


def test_an_adapter_of_the_hub_says_how_it_is_fetched(
    base: Path, tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with golden.raises("merge", message="someone/an-adapter", fix="hf download someone/an-adapter"):
        merge_adapter("someone/an-adapter", tmp_path / "out", base=base, progress=False)


# What wraps a model puts itself into the names of its modules.


class Wrapper(nn.Module):
    """What FSDP and DistributedDataParallel do to a module, without a process group."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


def wrapped(kind: str, model: Any) -> Any:
    """A PEFT model in what wraps it: all of it, its layers, or the base in it."""
    layers = model.get_base_model().model.layers
    if kind in ("compiled-layers", "fsdp"):
        for number, layer in enumerate(layers):
            layers[number] = torch.compile(layer) if kind != "fsdp" else Wrapper("_fsdp_wrapped_module", layer)
    if kind == "ddp-inside":
        model.base_model.model = Wrapper("module", model.base_model.model)
    return {"compiled": torch.compile, "ddp": lambda whole: Wrapper("module", whole)}.get(kind, lambda whole: whole)(
        model
    )


def same_weights(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.glob("*.safetensors"))
    assert names, "a merge writes weights"
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


SPELLINGS: dict[str, Callable[[str], str]] = {
    "named": lambda name: name.replace(".weight", ".default.weight"),
    "bare": lambda name: name.replace(".weight", ""),
    "inner": lambda name: name.removeprefix("base_model.model."),
    "sharded": lambda name: name,
}
WRAPPED = ["compiled", "compiled-layers", "fsdp", "ddp", "ddp-inside", "all-of-it"]


@pytest.mark.parametrize(
    ("form", "dora"),
    [*((form, dora) for form in SPELLINGS for dora in (False, True)), *((form, False) for form in WRAPPED)],
)
def test_other_names_of_an_adapters_tensors_merge_alike(form: str, dora: bool, base: Path, tmp_path: Path) -> None:
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q_proj", "down_proj"], use_dora=dora)
    merge_adapter(adapter, tmp_path / "expected", base=base, progress=False)
    weights = adapter / "adapter_model.safetensors"
    if form in WRAPPED:
        state = wrapped(form, PeftModel.from_pretrained(load(base), str(adapter))).state_dict()
        factors = {
            name.replace(".default", ""): value
            for name, value in state.items()
            if form == "all-of-it" or "lora_" in name
        }
    else:
        factors = {SPELLINGS[form](name): tensor for name, tensor in load_file(weights).items()}
    weights.unlink()
    if form == "sharded":
        names = sorted(factors)
        files = {name: f"adapter_model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: factors[name] for name in names if files[name] == file}, adapter / file)
        (adapter / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(factors, weights)
    merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    assert same_weights(tmp_path / "out", tmp_path / "expected")
    assert check_merged(tmp_path / "out").elements


@pytest.mark.parametrize(
    ("name", "standard"),
    [
        ("lora_A.weight", "lora_A.weight"),
        ("lora_B.default.bias", "lora_B.bias"),
        ("lora_B.bias", "lora_B.bias"),
        ("lora_embedding_A", "lora_embedding_A"),
        ("lora_embedding_B.default", "lora_embedding_B"),
        ("lora_magnitude_vector.default.weight", "lora_magnitude_vector"),
        ("modules_to_save.default.weight", "weight"),
        ("weight", "weight"),
    ],
)
def test_each_kind_of_tensor_has_one_name(name: str, standard: str) -> None:
    module = "base_model.model.model.layers.0.q_proj"
    assert standard_name(f"{module}.{name}") == f"{module}.{standard}"


def test_a_model_whose_own_module_is_called_module_is_no_wrapped_one(base: Path, tmp_path: Path) -> None:
    """Only the outermost `module.` is a wrapper's."""
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q_proj"])
    factors = {name.replace("self_attn", "module"): value for name, value in all_tensors(adapter).items()}
    save_file(factors, adapter / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="belongs to nothing"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"use_rslora": True, "bias": "none", "rank_pattern": {}}, ""),
        ({"modules_to_save": ["lm_head"], "use_dora": True}, "refuses modules_to_save, use_dora: serve"),
        ({"bias": "all", "lora_bias": True}, "refuses lora_bias, bias: serve"),
        (
            {"target_parameters": ["experts.down_proj"], "r": 32},
            "ignore target_parameters and needs --max-lora-rank 32",
        ),
        ({"rank_pattern": {"q_proj": 64}}, "ignore rank_pattern and needs --max-lora-rank 64"),
        ({"trainable_token_indices": [1]}, "may ignore trainable_token_indices: serve the merged model"),
    ],
)
def test_limits_of_a_served_adapter(settings: dict[str, Any], words: str) -> None:
    limits = serving_limits({"r": 16, "bias": "none"} | settings)
    assert (words in limits) if words else limits == ""


WRONG_ENTRIES: dict[str, list[Any]] = {
    "r": ["4", 4.5, None, 0, ...],  # ...: the entry is missing
    "lora_alpha": ["16", None, True, float("nan"), float("inf"), ...],
    "rank_pattern": [{"q_proj": "4"}, ["q_proj"]],
    "alpha_pattern": [{"q_proj": float("nan")}, {"q_proj": None}],
    "use_rslora": ["false"],  # which PEFT takes for true
    "use_dora": ["false"],
    "lora_dropout": ["0.1"],
    "bias": [None, "some"],
    "target_modules": [{"q_proj": True}],
    "target_parameters": ["experts"],
    "layers_to_transform": ["0"],
    "base_model_name_or_path": [5],
    "task_type": ["BOGUS", "causal_lm"],
}


@pytest.mark.parametrize(
    ("entry", "value"), [(entry, value) for entry, values in WRONG_ENTRIES.items() for value in values]
)
def test_an_entry_of_another_type_is_named(entry: str, value: Any, base: Path, tmp_path: Path) -> None:
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q_proj"])
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text()) | {entry: value}
    file.write_text(json.dumps({key: part for key, part in config.items() if part is not ...}))
    with pytest.raises(UsageError) as caught:
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    assert (caught.value.place, caught.value.key) == (str(file), entry)
    assert inspect(adapter, base).refusal == str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_empty_factor_is_one_of_zero_3(base: Path, tmp_path: Path) -> None:
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q_proj"])
    edit_tensors(adapter, lambda name, tensor: torch.zeros(0) if "layers.1" in name else tensor)
    with pytest.raises(UsageError, match=r"layers\.1.*lora_A.weight is empty, as ZeRO-3") as caught:
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    assert inspect(adapter, base).refusal == str(caught.value)


def test_an_empty_list_of_trained_tokens_trains_none(base: Path, tmp_path: Path) -> None:
    """PEFT saves it, with a delta of no rows."""
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q_proj"], trainable_token_indices=[])
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", progress=False)
    for name, expected in closed_form(base, adapter).items():
        torch.testing.assert_close(all_tensors(tmp_path / "out")[name], expected.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["non_lora_trainables.bin", "vit.safetensors", "new_embeddings.safetensors"])
def test_weights_that_were_saved_beside_the_adapter_are_not_lost(name: str, base: Path, tmp_path: Path) -> None:
    """PEFT loads the adapter without them, so that the comparison of logits would agree."""
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q_proj"])
    save_file({"model.norm.weight": torch.ones(64)}, adapter / name)
    with pytest.raises(UsageError, match=f"{name} holds more weights") as caught:
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    assert inspect(adapter, base).refusal == str(caught.value)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_an_adapter_is_not_merged_a_second_time(scale: float, base: Path, tmp_path: Path) -> None:
    """A small update would be added twice without a word; a large one would look like PiSSA's raw factors."""
    adapter, merged = train(load(base), tmp_path / "adapter", target_modules=["q_proj"]), tmp_path / "merged"
    edit_config(adapter, lora_alpha=8 * scale)
    merge_adapter(adapter, merged, base=base, dtype="float32", progress=False)
    edit_config(adapter, lora_alpha=4)
    with pytest.raises(UsageError, match=rf"{merged} is merged with it already.*pass base={base}") as caught:
        merge_adapter([(adapter, 0.5)], tmp_path / "again", base=merged, progress=False)
    assert inspect(adapter, merged).refusal == str(caught.value)
    other = train(load(merged), tmp_path / "other", target_modules=["q_proj"], seed=2)
    merge_adapter(other, tmp_path / "on-top", base=merged, progress=False)


def test_an_adapter_of_mlx_is_no_peft_adapter(base: Path, tmp_path: Path) -> None:
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"model.layers.0.self_attn.q_proj.lora_a": torch.ones(64, 4)}, tmp_path / "adapters.safetensors")
    with pytest.raises(UsageError, match=r"r: missing, and PEFT always writes it; .*\(MLX\)"):
        merge_adapter(tmp_path, tmp_path / "out", base=base, progress=False)


@pytest.mark.parametrize(
    "names", [("lora_a", "lora_b"), ("lora.down", "lora.up"), ("lora_down", "lora_up"), ("linear_in", "linear_out"), ()]
)
def test_another_format_is_called_one(names: tuple[str, ...], base: Path, tmp_path: Path) -> None:
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q_proj"])
    file = adapter / "adapter_model.safetensors"
    if names:
        factors = load_file(file)
        renamed = {key.replace("lora_A", names[0]).replace("lora_B", names[1]): factors[key] for key in factors}
        save_file(renamed, file)
    else:
        file.rename(adapter / "adapter.gguf")
    with pytest.raises(UsageError, match=r"llama\.cpp, Kohya or NeMo: convert it to PEFT's format"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)


def test_a_rank_that_the_file_contradicts(base: Path, tmp_path: Path) -> None:
    adapter = edit_config(train(load(base), tmp_path / "adapter", target_modules=["q_proj"]), r=8)
    with pytest.raises(UsageError, match=r"rank is 4, not 8; set r or rank_pattern"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)


def test_a_pattern_that_is_none_is_one_line(base: Path, tmp_path: Path) -> None:
    adapter = edit_config(
        train(load(base), tmp_path / "adapter", target_modules=["q_proj"]), target_modules="(.*q_proj"
    )
    with pytest.raises(UsageError, match=r"does not fit base .*unterminated subpattern"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)


INKLING = InklingTextConfig(
    **SIZES, head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, sliding_window_size=16,
    d_rel=4, rel_extent=16, moe_intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
)  # fmt: skip
LONGCAT = LongcatFlashConfig(
    hidden_size=64, ffn_hidden_size=96, num_layers=1, num_attention_heads=4, vocab_size=256, q_lora_rank=16, kv_lora_rank=16,
    qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, head_dim=16, n_routed_experts=4, moe_topk=2, zero_expert_num=2,
    expert_ffn_hidden_size=48, max_position_embeddings=128,
)  # fmt: skip
BEYOND_WEIGHTS: dict[str, tuple[PreTrainedConfig, dict[str, Any], str]] = {
    "norm-behind-the-embedding": (INKLING, {"target_modules": ["embed_tokens"]}, "InklingNormedEmbedding"),
    "tokens-before-a-norm": (INKLING, {"trainable_token_indices": [5]}, "InklingNormedEmbedding"),
    "positions-with-an-offset": (BioGptConfig(**SIZES), {"target_modules": ["embed_positions"]}, "LearnedPositional"),
    "tokens-of-a-head-with-a-bias": (
        PhiConfig(**SIZES),
        {"trainable_token_indices": {"lm_head": [5]}},
        "without the bias",
    ),
    "a-weight-that-is-read-without-a-call": (
        LONGCAT,
        {"target_modules": ["classifier"]},
        "it changes nothing",
    ),
}


# Up to transformers 5.17 the norm is a layer of its own, behind the embedding.
NORM_IS_APART = pytest.mark.skipif(
    not hasattr(modeling_inkling, "InklingNormedEmbedding"), reason="an older transformers"
)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=NORM_IS_APART if given[0] is INKLING else ()) for kind, given in BEYOND_WEIGHTS.items()],
)
def test_what_peft_trains_beside_a_layers_own_rule_is_refused(kind: str, tmp_path: Path) -> None:
    """The live adapter differs from every weight that a merge could write, which verify="elements" does not see."""
    config, lora, words = BEYOND_WEIGHTS[kind]
    base = save_base(tmp_path / "base", config)
    model = load(base)
    adapted = get_peft_model(model, LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | lora))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    with pytest.raises(UsageError, match=words):
        merge_adapter(tmp_path / "adapter", tmp_path / "out", base=base, progress=False)


def test_layers_beside_a_normed_embedding_merge(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", INKLING)
    lora = {"target_modules": ["q_proj", "o_proj", "lm_head"], "modules_to_save": ["embed_tokens"], "lora_alpha": 64}
    check_merge(base, train(load(base), tmp_path / "adapter", **lora), tmp_path / "out")


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}])
def test_an_update_of_a_layer_that_is_never_called_is_left_out(
    lora: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A router's weight is read by the module around it, so that the live adapter has no effect on it."""
    base = save_base(tmp_path / "base", LONGCAT)
    adapter = train(load(base), tmp_path / "adapter", target_modules=["classifier", "o_proj"], **lora)
    check_merge(base, adapter, tmp_path / "out")
    assert re.search(r"\d updates are left out, the first of model\.layers\.\d\.mlp\.router\.classifier", caplog.text)


def test_an_update_of_a_layer_that_transformers_4_calls_merges(tmp_path: Path) -> None:
    """Mamba's time steps: transformers 5 reads the weight alone, so that no gradient reaches an update."""
    base = save_base(tmp_path / "base", MambaConfig(vocab_size=256, hidden_size=32, state_size=4, num_hidden_layers=1))
    adapter = train(load(base), tmp_path / "adapter", target_modules=["dt_proj"])
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", progress=False)
    merged, expected = all_tensors(tmp_path / "out"), closed_form(base, adapter)
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value.float(), rtol=1e-6, atol=1e-8)


def test_biases_that_an_older_peft_trained_and_did_not_save(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", Qwen2Config(**SIZES))
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q_proj"], bias="lora_only")
    edit_tensors(adapter, lambda name, tensor: None if name.endswith(".bias") else tensor)
    with pytest.raises(UsageError, match=r"PEFT up to 0\.20 trained these biases and did not save them"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)


def test_a_head_trained_whole_under_its_older_name(tmp_path: Path) -> None:
    """Of GPT-NeoX, whose `embed_out` is `lm_head` in transformers 5."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = save_base(tmp_path / "base", GPTNeoXConfig(**sizes, vocab_size=256, max_position_embeddings=64))
    lora = {"target_modules": ["query_key_value"], "modules_to_save": ["lm_head"]}
    adapter = train(load(base), tmp_path / "adapter", **lora)
    merge_adapter(adapter, tmp_path / "expected", base=base, progress=False)
    tensors = load_file(adapter / "adapter_model.safetensors")
    older = {name.replace("model.lm_head", "model.embed_out"): tensor for name, tensor in tensors.items()}
    save_file(older, adapter / "adapter_model.safetensors")
    edit_config(adapter, modules_to_save=["embed_out"])
    merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    merged, expected = all_tensors(tmp_path / "out"), all_tensors(tmp_path / "expected")
    assert all(torch.equal(merged[name], value) for name, value in expected.items())


@pytest.mark.parametrize("longer", [False, True])
def test_a_config_beside_the_adapter_that_computes_otherwise_is_told(
    longer: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a training that stretched the positions, saved as axolotl does."""
    base = save_base(tmp_path / "base", LlamaConfig(**SIZES))
    model = load(base)
    if longer:
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    adapter = train(model, tmp_path / "adapter", target_modules=["q_proj"])
    model.config.save_pretrained(adapter)
    merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    assert ("config.json has rope_parameters {" in caplog.text) == longer
    assert "'factor': 4.0" in caplog.text or not longer


@pytest.mark.parametrize("lora", [{"target_modules": ["lm_head"]}, {"target_modules": ["lm_head"], "bias": "all"}])
def test_a_head_with_a_bias(lora: dict[str, Any], tmp_path: Path) -> None:
    """PEFT saves the head's bias beside its factors."""
    base = save_base(tmp_path / "base", PhiConfig(**SIZES))
    adapter = train(load(base), tmp_path / "adapter", **lora)
    assert any(
        name.startswith("base_model.model.lm_head.base_layer")
        for name in load_file(adapter / "adapter_model.safetensors")
    )
    check_merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_biases_that_are_saved_three_times(kind: str, tmp_path: Path) -> None:
    """bias="all" saves those of the head's copy and of the untrained head, too: under names with or without `default`."""
    config = CONFIG_MAPPING[kind.lower()](**SIZES, num_labels=3, architectures=[f"{kind}ForSequenceClassification"])
    base = save_base(tmp_path / "base", config)
    live = load(base)
    adapter = train(live, tmp_path / "adapter", target_modules=["query"], task_type="SEQ_CLS", bias="all")
    assert sum("original_module" in name for name in all_tensors(adapter)) == (2 if kind == "Roberta" else 1)
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", progress=False)
    trained = logits(live)
    check_close(rms(logits(load(tmp_path / "out")) - trained), rms(trained - logits(load(base))))


def test_a_bias_of_the_model_itself(tmp_path: Path) -> None:
    """Older PEFT saved buffers, too: final_logits_bias is in no module, and LED has no class for text alone to find it in."""
    half = {"layers": 1, "attention_heads": 4, "ffn_dim": 96}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in half.items()}
    torch.manual_seed(0)
    config = LEDConfig(**sizes, d_model=64, vocab_size=256, max_encoder_position_embeddings=64)
    LEDForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    adapter = train(load(tmp_path / "base"), tmp_path / "adapter", target_modules=["query"], task_type=None, bias="all")
    trained = PeftModel.from_pretrained(load(tmp_path / "base"), str(adapter)).merge_and_unload().state_dict()
    add_tensors(adapter, {"base_model.model.final_logits_bias": torch.zeros(1, 256)})
    merge_adapter(adapter, tmp_path / "out", base=tmp_path / "base", progress=False)
    assert all(torch.allclose(tensor, trained[name]) for name, tensor in all_tensors(tmp_path / "out").items())


def test_a_layer_whose_name_another_format_has_too() -> None:
    assert not OTHER_NAMES.search("base_model.model.model.multi_modal_projector.feed_forward.linear_in.lora_A.weight")
    assert OTHER_NAMES.search("base_model.model.decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight")
