"""Advice that errors give: each is triggered, followed by program, and judged by the logits of the model that was trained."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders import (
    EXPERTS,
    INPUT_IDS,
    NF4,
    SIZES,
    add_tensors,
    all_tensors,
    edit_config,
    edit_tensors,
    load,
    logits,
    rms,
    save_base,
    save_quantized,
    tiny_llama,
    train_adapter,
    without_tensor,
)
from expert_truths.make import config_of
from golden import Golden
from hub_server import HubServer
from peft import LoraConfig, PeftModel, get_peft_model
from qlora_runs import four_bit_copy
from safetensors.torch import load_file, save_file
from test_models_download import train_apart
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Lfm2Config, LlamaConfig, Qwen3Config

import cogumi
from cogumi.core.errors import MergeError, UsageError
from cogumi.merge import merge_adapter
from cogumi.merge.adapter_files import WITH_PEFT
from cogumi.merge.preflight import check_loadable
from cogumi.models.base import RunBase
from cogumi.models.loading import load_model
from cogumi.training import finish

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
Live = tuple[Any, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("advice") / "base"
    tiny_llama(tie_word_embeddings=False).save_pretrained(path)
    return path


def trained(base: Path, config: Any, prepare: Callable[[Any, Any], object] | None = None) -> Any:
    """A live model of a fresh base whose trainable values moved."""
    torch.manual_seed(1)
    model = load(base)
    if prepare is not None:
        prepare(model, config)
    live = get_peft_model(model, config)
    move(live)
    return live


def move(live: Any) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def advice_of(adapter: Path, base: Path | None, out: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as refused:
        merge_adapter(adapter, out, base=base, progress=False, **options)
    return str(refused.value.fix)


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return rms(one - other) < 1e-6


# ------------------------------------------------------------------------------------------------------- "load it with PEFT"

READ_BY_PEFT: dict[str, Callable[[], Any]] = {
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "lokr": lambda: peft.LoKrConfig(r=4, alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "adalora": lambda: peft.AdaLoraConfig(total_step=9, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "pissa": lambda: LoraConfig(**LORA, init_lora_weights="pissa"),
    "olora": lambda: LoraConfig(**LORA, init_lora_weights="olora"),
    "mica": lambda: LoraConfig(**LORA, init_lora_weights="mica"),
    "replication": lambda: LoraConfig(**LORA, layer_replication=[[0, 2], [1, 2]]),
    "qalora": lambda: LoraConfig(**LORA, use_qalora=True),
    "lora-bias": lambda: LoraConfig(**LORA, lora_bias=True),
    "names-of-a-state-dict": lambda: LoraConfig(**LORA, init_lora_weights="pissa"),
}


@pytest.mark.parametrize("kind", READ_BY_PEFT)
def test_peft_reads_what_is_sent_to_it(kind: str, base: Path, tmp_path: Path, golden: Golden) -> None:
    live = trained(base, READ_BY_PEFT[kind]())
    live.save_pretrained(str(tmp_path / "adapter"))
    if kind == "names-of-a-state-dict":
        rename(tmp_path / "adapter", r"\.weight$", ".default.weight")
    with golden.raises("merge", fix=WITH_PEFT) as refused:
        merge_adapter(tmp_path / "adapter", tmp_path / "out", base=base, progress=False)
    assert refused.value.fix == WITH_PEFT
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    torch.manual_seed(99)
    assert is_close(logits(PeftModel.from_pretrained(load(base), str(tmp_path / "adapter"))), logits(live))
    assert rms(logits(live) - logits(load(base))) > 1e-5


def lora_ga(model: Any, config: Any) -> None:
    from peft.tuners.lora.loraga import preprocess_loraga

    tokens = torch.arange(48).reshape(2, 24)
    preprocess_loraga(model, config, lambda: model(input_ids=tokens, labels=tokens).loss.backward())


@pytest.mark.parametrize("init", ["pissa_niter_4", "lora_ga"])
@pytest.mark.parametrize("way", ["merge_and_unload", "path_initial_model_for_weight_conversion"])
def test_a_base_that_nobody_can_rebuild_is_merged_where_it_was_trained(
    init: str, way: str, base: Path, tmp_path: Path, golden: Golden
) -> None:
    torch.manual_seed(1)
    settings = {"lora_ga_config": peft.LoraGAConfig()} if init == "lora_ga" else {}
    config, model = LoraConfig(**LORA, init_lora_weights=init, **settings), load(base)
    if init == "lora_ga":
        lora_ga(model, config)
    live = get_peft_model(model, config)
    live.peft_config["default"].init_lora_weights = True  # as PEFT's own guide of the conversion has it
    live.save_pretrained(str(tmp_path / "initial"))
    live.peft_config["default"].init_lora_weights = init
    move(live)
    live.save_pretrained(str(tmp_path / "adapter"))
    truth = logits(live)
    with golden.raises("merge", message=init, fix=way) as refused:
        merge_adapter(tmp_path / "adapter", tmp_path / "out", base=base, progress=False)
    assert WITH_PEFT not in refused.value.fix
    torch.manual_seed(99)
    assert rms(logits(PeftModel.from_pretrained(load(base), str(tmp_path / "adapter"))) - truth) > 0.01  # why not
    if way == "merge_and_unload":
        live.merge_and_unload().save_pretrained(tmp_path / "merged")
    else:
        live.save_pretrained(
            str(tmp_path / "plain"), path_initial_model_for_weight_conversion=str(tmp_path / "initial")
        )
        merge_adapter(tmp_path / "plain", tmp_path / "merged", base=base, progress=False)
    assert is_close(logits(load(tmp_path / "merged")), truth)


def rename(adapter: Path, pattern: str, replacement: str) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({re.sub(pattern, replacement, key): value for key, value in load_file(file).items()}, file)


def shard(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    weight_map = dict.fromkeys(load_file(file), "adapter_model-00001-of-00001.safetensors")
    file.rename(adapter / "adapter_model-00001-of-00001.safetensors")
    (adapter / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


NOT_READ_BY_PEFT: dict[str, Callable[[Path], None]] = {
    "an-entry-of-tomorrow": lambda adapter: edit_config(
        adapter, use_tomorrow=True, peft_version="0.99.0", init_lora_weights=True
    ),
    "a-type-of-tomorrow": lambda adapter: edit_config(adapter, peft_type="TOMORROW"),
    "no-type": lambda adapter: edit_config(adapter, peft_type=None),
    "no-suffix": lambda adapter: rename(adapter, r"\.weight$", ""),
    "no-prefix": lambda adapter: rename(adapter, r"^base_model\.model\.", ""),
    "compiled": lambda adapter: rename(adapter, "^", "_orig_mod."),
    "shards": shard,
}


@pytest.mark.parametrize("kind", NOT_READ_BY_PEFT)
def test_peft_is_not_advised_where_it_ignores_a_part(kind: str, base: Path, tmp_path: Path) -> None:
    live = trained(base, LoraConfig(**LORA, init_lora_weights="pissa"))
    live.save_pretrained(str(tmp_path / "adapter"))
    NOT_READ_BY_PEFT[kind](tmp_path / "adapter")
    fix = advice_of(tmp_path / "adapter", base, tmp_path / "out")
    assert WITH_PEFT not in fix
    assert "PEFT" in fix
    if kind in ("no-suffix", "no-prefix", "compiled"):  # as the advice says
        assert not is_close(logits(PeftModel.from_pretrained(load(base), str(tmp_path / "adapter"))), logits(live))


def test_peft_is_not_advised_for_factors_that_are_read_otherwise_here(tmp_path: Path) -> None:
    """PEFT has no mark of the order that the adapter of another version has; with a kind that is refused beside it."""
    base = save_base(tmp_path / "base", config_of("qwen3_moe", 12))
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=stacks, r=2)
    edit_config(adapter, lora_B_layout="grouped_by_expert")
    merge_adapter(adapter, tmp_path / "merged", base=base, progress=False)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B"
    add_tensors(adapter, {f"{name}.bias": torch.ones(len(all_tensors(adapter)[f"{name}.weight"]))})
    edit_config(adapter, lora_bias=True)
    fix = advice_of(adapter, base, tmp_path / "out")
    assert WITH_PEFT not in fix


# --------------------------------------------------------------------------- "save it ...", "set ... to", "pass ..."


def run_there(fix: str, place: Path) -> None:
    command = fix.removeprefix("run there: ").replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, cwd=place)


def test_a_pickled_adapter_is_converted_by_the_command(base: Path, tmp_path: Path) -> None:
    live = trained(base, LoraConfig(**LORA))
    live.save_pretrained(str(tmp_path / "adapter"), safe_serialization=False)
    run_there(advice_of(tmp_path / "adapter", base, tmp_path / "out"), tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", base=base, progress=False)
    assert is_close(logits(load(tmp_path / "out")), logits(live))


def test_the_conversion_keeps_the_version_by_which_experts_are_read(tmp_path: Path) -> None:
    """PEFT's save_pretrained, which was advised once, records its own."""
    base = save_base(tmp_path / "base", config_of("qwen3_moe", 12))
    adapter = train_adapter(base, tmp_path / "adapter", target_parameters=["mlp.experts.down_proj"], target_modules=[])
    edit_config(adapter, peft_version="0.18.1")
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    run_there(advice_of(adapter, base, tmp_path / "out"), adapter)
    with pytest.raises(UsageError, match=r"PEFT 0\.18\.1"):  # whose factors are transposed; these are not
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)


def test_a_version_that_is_none_is_set(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", config_of("qwen3_moe", 12))
    adapter = train_adapter(base, tmp_path / "adapter", target_parameters=["mlp.experts.down_proj"], target_modules=[])
    edit_config(adapter, peft_version="tomorrow")
    assert "set it to that which wrote the adapter" in advice_of(adapter, base, tmp_path / "out")
    edit_config(adapter, peft_version=peft.__version__)
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", progress=False)
    tokens = INPUT_IDS % AutoConfig.from_pretrained(base).vocab_size
    live = logits(PeftModel.from_pretrained(load(base), str(adapter)), tokens)
    assert rms(logits(load(tmp_path / "out"), tokens) - live) < 1e-5


TARGETS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "embedding-whole": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "head-whole": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_vocabulary_merges_into_the_model_of_that_size(target: str, tied: bool, tmp_path: Path) -> None:
    kind = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True) if tied else LlamaConfig(**SIZES)
    base = save_base(tmp_path / "base", kind)
    torch.manual_seed(5)
    model = load(base)
    model.resize_token_embeddings(261, mean_resizing=False)
    model.save_pretrained(tmp_path / "resized")
    live = get_peft_model(model, LoraConfig(**LORA | TARGETS[target]))
    move(live)
    live.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    fix = advice_of(tmp_path / "adapter", base, tmp_path / "refused")
    assert "pass base=<the model of that vocabulary, saved before it got the adapter>" in fix
    merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "resized", dtype="float32", progress=False)
    assert is_close(logits(load(tmp_path / "out")), logits(live))


def test_a_weighted_adapter_of_another_vocabulary_is_merged_alone(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True))
    model = load(base)
    model.resize_token_embeddings(261, mean_resizing=False)
    live = get_peft_model(model, LoraConfig(**LORA, modules_to_save=["embed_tokens"]))
    move(live)
    live.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    with pytest.raises(UsageError) as refused:
        merge_adapter([(tmp_path / "adapter", 0.5)], tmp_path / "out", base=base, progress=False)
    assert refused.value.fix == "merge it alone, with weight 1"
    merge_adapter([(tmp_path / "adapter", 1.0)], tmp_path / "out", base=base, dtype="float32", progress=False)
    assert is_close(logits(load(tmp_path / "out")), logits(live))


def test_a_head_that_is_not_its_embedding_is_untied_by_the_config(tmp_path: Path) -> None:
    """transformers ties no two stored tensors that differ, so the same model is trained before and after."""
    base = save_base(tmp_path / "base", Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True))
    add_tensors(base, {"lm_head.weight": all_tensors(base)["model.embed_tokens.weight"] * 2})
    live = trained(base, LoraConfig(**LORA | {"target_modules": ["embed_tokens"]}))
    live.save_pretrained(str(tmp_path / "adapter"))
    assert "set tie_word_embeddings to false" in advice_of(tmp_path / "adapter", base, tmp_path / "refused")
    edit_config(base, tie_word_embeddings=False)
    merge_adapter(tmp_path / "adapter", tmp_path / "out", base=base, dtype="float32", progress=False)
    assert is_close(logits(load(tmp_path / "out")), logits(live))


def test_one_of_several_adapters_is_passed(base: Path, tmp_path: Path) -> None:
    live = trained(base, LoraConfig(**LORA))
    live.add_adapter("other", LoraConfig(**LORA))
    for name in ("one", "two"):
        live.save_pretrained(str(tmp_path / "several" / name), selected_adapters=["default"])
    fix = advice_of(tmp_path / "several", base, tmp_path / "refused")
    merge_adapter(Path(fix.rpartition(" ")[2]), tmp_path / "out", base=base, progress=False)
    assert is_close(logits(load(tmp_path / "out")), logits(live))


def test_a_pickled_base_is_saved_as_safetensors(base: Path, tmp_path: Path) -> None:
    live = trained(base, LoraConfig(**LORA))
    live.save_pretrained(str(tmp_path / "adapter"))
    (tmp_path / "pickled").mkdir()
    torch.save(all_tensors(base), tmp_path / "pickled" / "pytorch_model.bin")
    shutil.copy(base / "config.json", tmp_path / "pickled")
    fix = advice_of(tmp_path / "adapter", tmp_path / "pickled", tmp_path / "refused")
    assert "from_pretrained, save_pretrained" in fix
    AutoModelForCausalLM.from_pretrained(tmp_path / "pickled").save_pretrained(tmp_path / "saved")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "saved", progress=False)
    assert is_close(logits(load(tmp_path / "out")), logits(live))


# ----------------------------------------------------------------------------------------------- runs: "cogumi.merge: false"


def without_a_shard(base: Path, copy: Path) -> None:
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(copy, max_shard_size="100KB")
    next(copy.glob("*.safetensors")).unlink()


def with_config(**entries: Any) -> Callable[[Path, Path], object]:
    def damage(base: Path, copy: Path) -> None:
        shutil.copytree(base, copy)
        edit_config(copy, **entries)

    return damage


def with_a_short_tensor(base: Path, copy: Path) -> None:
    shutil.copytree(base, copy)
    edit_tensors(copy, lambda name, tensor: tensor[:-1] if name == "model.layers.1.mlp.up_proj.weight" else tensor)


def pickled(base: Path, copy: Path) -> None:
    without_tensor(base, copy, "model.norm.weight")
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a-tensor": lambda base, copy: without_tensor(base, copy, "model.layers.0.input_layernorm.weight"),
    "the-head": lambda base, copy: without_tensor(base, copy, "lm_head.weight"),
    "a-shard": without_a_shard,
    "a-shape": with_a_short_tensor,
    "more-layers": with_config(num_hidden_layers=3),
    "other-width": with_config(intermediate_size=192),
    "pickled": pickled,
}
WAYS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"cogumi__tuning": "full"},
    "merged": {"cogumi__merge": True},
}


def with_overrides(config: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    config = {section: dict(values) for section, values in config.items()}
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        config.setdefault(section, {})[name] = value
    return config


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_base_that_is_not_whole_is_not_trained(
    damage: str, way: str, sft: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    DAMAGES[damage](tiny_model, tmp_path / "base")
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "base")
    if way == "full":
        del sft["lora"]
    config = with_overrides(sft, model__name=str(tmp_path / "base"), **WAYS[way])
    with pytest.raises(UsageError) as refused:
        cogumi.train(config)
    assert not (tmp_path / "run").exists()
    if (damage, way) == ("pickled", "merged"):
        return
    assert "cogumi.merge" not in refused.value.fix
    shutil.rmtree(tmp_path / "base")  # "download it again, or correct its config.json"
    assert "again" in refused.value.fix
    shutil.copytree(tiny_model, tmp_path / "base")
    if damage in ("a-tensor", "more-layers"):
        assert cogumi.train(with_overrides(config, train__max_steps=1)).run_dir == tmp_path / "run"


@pytest.mark.parametrize("method", ["sft", "dpo", "gspo"])
def test_no_method_begins_with_an_incomplete_base(
    method: str, sft: dict[str, Any], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the data are read, or a second model is made."""
    without_tensor(tiny_model, tmp_path / "base", "model.layers.1.post_attention_layernorm.weight")
    config = with_overrides(sft, model__name=str(tmp_path / "base"), cogumi__method=method)
    if method == "gspo":
        config["cogumi"]["rewards"] = ["parses"]
        config["train"] = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4}
    if method == "dpo":
        config["data"] = {"source": str(tmp_path / "pairs.jsonl"), "format": "preference"}
        pair = {"prompt": "def f(x):", "chosen": " return x", "rejected": " pass"}
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for _ in range(8)))
        config["train"]["precompute_ref_log_probs"] = True

    def prepared(*_: Any) -> None:
        raise AssertionError("the data were prepared")

    monkeypatch.setattr("cogumi.training.run.prepare_examples", prepared)
    with pytest.raises(UsageError, match="not a whole LlamaForCausalLM"):
        cogumi.train(config)


def test_a_run_that_starts_from_an_adapter_needs_the_whole_base(
    sft: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    first = cogumi.train(with_overrides(sft, train__max_steps=1))
    without_tensor(tiny_model, tmp_path / "base", "model.norm.weight")
    assert first.adapter is not None
    record = first.adapter / "cogumi-base.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"name": str(tmp_path / "base"), "weights": None}))
    del sft["lora"]
    config = with_overrides(sft, model__name=str(tmp_path / "base"), model__adapter=str(first.adapter))
    with pytest.raises(UsageError, match=r"not a whole LlamaForCausalLM: model\.norm\.weight"):
        cogumi.train(with_overrides(config, cogumi__run_dir=str(tmp_path / "second")))


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_an_incomplete_base_of_the_hub_is_refused_by_its_headers(
    tuning: str, hub: HubServer, sft: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    without_tensor(tiny_model, tmp_path / "base", "model.norm.weight")
    config = with_overrides(sft, model__name="someone/model", cogumi__tuning=tuning)
    if tuning == "full":
        del config["lora"]

    def run(**more: str) -> str:
        return train_apart(config, hub.environment(tmp_path / "cache") | more)

    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    hub.publish("someone/model", tmp_path / "base")
    assert "REFUSED model.name: base someone/model is not a whole LlamaForCausalLM: model.norm.weight" in run()
    assert sum(hub.sent.values()) < size
    fetch = "import huggingface_hub as hf; hf.snapshot_download('someone/model')"
    environment = os.environ | hub.environment(tmp_path / "cache")
    subprocess.run([sys.executable, "-c", fetch], env=environment, check=True, capture_output=True)
    assert "REFUSED model.name: base someone/model is not a whole" in run(HF_HUB_OFFLINE="1")


# Quantized on the disk. transformers loads some of these without a word.


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("four")
    tiny_llama(intermediate_size=128, tie_word_embeddings=False).save_pretrained(root / "full")
    for name, settings in {"4": NF4, "8": BitsAndBytesConfig(load_in_8bit=True)}.items():
        save_quantized(root / "full", root / name, settings, dtype=torch.float32)
    return root


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("bits", "lost"),
    [
        ("4", rf"{QUERY}\.weight\.absmax"),
        ("4", rf"{QUERY}\.weight\.nested_absmax"),
        ("4", rf"{QUERY}\.weight\.quant_state.*"),
        ("4", r".*\.weight\..*"),  # the scales of all
        ("4", rf"{QUERY}\.weight"),
        ("4", r"model\.norm\.weight"),
        ("8", rf"{QUERY}\.SCB"),
    ],
)
def test_quantized_weights_without_their_scales_are_refused(
    bits: str, lost: str, four_bits: Path, tmp_path: Path
) -> None:
    whole = four_bits / bits
    check_loadable(RunBase(str(whole), None, AutoConfig.from_pretrained(whole)))
    load_model(str(whole), dtype="float32")
    shutil.copytree(whole, tmp_path / "damaged")
    edit_tensors(tmp_path / "damaged", lambda name, tensor: None if re.fullmatch(lost, name) else tensor)
    assert len(all_tensors(tmp_path / "damaged")) < len(all_tensors(whole))
    with pytest.raises(UsageError):
        check_loadable(RunBase(str(tmp_path / "damaged"), None, AutoConfig.from_pretrained(tmp_path / "damaged")))


@pytest.mark.parametrize("lost", [r".*scale_inv", rf"{QUERY}\.weight_scale_inv"])
def test_eight_bit_floats_without_their_scales_are_refused(lost: str, tmp_path: Path) -> None:
    tiny_llama(hidden_size=128, intermediate_size=128, tie_word_embeddings=False).save_pretrained(tmp_path)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if "proj" in name:
            tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.125)
            tensor = (tensor * 8).to(torch.float8_e4m3fn)
        tensors[name] = tensor
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "dequantize": True}
    edit_config(tmp_path, quantization_config=quantization)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.from_pretrained(tmp_path)
    check_loadable(RunBase(str(tmp_path), None, config))
    edit_tensors(tmp_path, lambda name, tensor: None if re.fullmatch(lost, name) else tensor)
    with pytest.raises(UsageError, match="a scale beside it is needed"):
        check_loadable(RunBase(str(tmp_path), None, config))


@pytest.mark.parametrize("part", ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_report_of_what_was_loaded_is_read(part: str, quantized: bool, four_bits: Path, tmp_path: Path) -> None:
    """Where no header was at hand; also where bitsandbytes quantizes what transformers made up."""
    damaged = without_tensor(four_bits / "full", tmp_path / "damaged", part)
    settings = {"load_in_4bit": True} if quantized else None
    load_model(str(four_bits / "full"), dtype="float32", quantization=settings)
    with pytest.raises(UsageError, match=f"not a whole LlamaForCausalLM: {re.escape(part)}") as refused:
        load_model(str(damaged), dtype="float32", quantization=settings)
    assert refused.value.key == "model.name"


@pytest.mark.parametrize(
    ("lora", "way"),
    [
        ({"init_lora_weights": "pissa"}, "cogumi.merge: false"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "cogumi.merge: false"),
        ({"init_lora_weights": "pissa_niter_[number of iters]"}, "drop lora.init_lora_weights"),
    ],
)
def test_a_run_without_a_merge_leaves_an_adapter_that_peft_reads(
    lora: dict[str, Any],
    way: str,
    sft: dict[str, Any],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, live = with_overrides(sft, cogumi__merge=True, train__max_steps=2), []
    config["lora"] |= {"target_modules": ["q_proj", "v_proj"], **lora}
    with pytest.raises(UsageError) as refused:
        cogumi.train(config)
    assert way in refused.value.fix
    if way.startswith("drop"):
        del config["lora"]["init_lora_weights"]
        assert cogumi.train(config).merged is not None
        return
    save = finish.save_adapter

    def saved(model: Any, *rest: Any) -> Path:
        live.append(logits(model))
        return save(model, *rest)

    monkeypatch.setattr(finish, "save_adapter", saved)
    result = cogumi.train(with_overrides(config, cogumi__merge=False))
    assert result.merged is None
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), result.adapter
    )
    assert rms(logits(again) - live[0]) < 1e-5


def test_the_command_for_a_later_merge_names_the_original(
    sft: dict[str, Any], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any
) -> None:
    """By its name alone the quantized base would not lead there."""
    quantized = four_bit_copy(tiny_model, tmp_path / "quantized")
    settings = {"model__name": str(quantized), "cogumi__merge": True, "cogumi__merge_base": str(tiny_model)}

    def fail(*_: Any, **__: Any) -> None:
        raise MergeError("the disk lied")

    with monkeypatch.context() as patch:
        patch.setattr(finish, "merge_adapter", fail)
        result = cogumi.train(with_overrides(sft, train__max_steps=2, **settings))
    fix = next(check.fix for check in result.verdict.checks if check.name == "merge")
    words = shlex.split(fix.partition("then run: ")[2])
    assert command_line(*(tmp_path / "out" if word == "OUT" else word for word in words[1:]))[0] == 0
    live = logits(PeftModel.from_pretrained(load(tiny_model), str(result.adapter)))
    assert rms(logits(load(tmp_path / "out")) - live) < 0.01  # rounded to bfloat16
    assert rms(logits(load(tiny_model)) - live) > 0.02


def test_a_base_that_is_not_trainable_is_not_sent_from_one_refusal_to_the_next(
    sft: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    """To drop `model.quantization_config` or `cogumi.tuning: full` would each end in another refusal."""
    shutil.copytree(tiny_model, tmp_path / "model-GPTQ-Int4")
    edit_config(tmp_path / "model-GPTQ-Int4", quantization_config={"quant_method": "gptq", "bits": 4})
    for more in ({"model__quantization_config": {"load_in_4bit": True}}, {"cogumi__tuning": "full"}):
        config = with_overrides(sft, model__name=str(tmp_path / "model-GPTQ-Int4"), **more)
        if "cogumi__tuning" in more:
            del config["lora"]
        with pytest.raises(UsageError) as refused:
            cogumi.train(config)
        assert f"set model.name to {tmp_path / 'model'}" in refused.value.fix
    shutil.copytree(tiny_model, tmp_path / "model")
    config = with_overrides(sft, model__name=str(tmp_path / "model"), train__max_steps=1)
    assert cogumi.train(config).adapter is not None


def test_layers_that_a_config_cuts_off_are_told(four_bits: Path, tmp_path: Path, caplog: Any) -> None:
    shutil.copytree(four_bits / "full", tmp_path / "base")
    load_model(str(tmp_path / "base"))
    assert "fewer layers" not in caplog.text
    edit_config(tmp_path / "base", num_hidden_layers=1)
    load_model(str(tmp_path / "base"))
    assert "9 tensors" in caplog.text
    assert "model.layers.1.input_layernorm.weight" in caplog.text


def test_experts_that_are_not_all_there_are_named(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    base = save_base(tmp_path / "base", Qwen3MoeConfig(**SIZES | {"num_hidden_layers": 1}, head_dim=16, **EXPERTS))
    expert = "model.layers.0.mlp.experts.2.down_proj.weight"
    damaged = without_tensor(base, tmp_path / "damaged", expert)
    with pytest.raises(UsageError, match=re.escape(expert)):
        check_loadable(RunBase(str(damaged), None, AutoConfig.from_pretrained(damaged)))
    check_loadable(RunBase(str(base), None, AutoConfig.from_pretrained(base)))


def test_peft_computes_a_convolution(tmp_path: Path, golden: Golden) -> None:
    base = save_base(tmp_path / "base", Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]))
    live = trained(base, LoraConfig(**LORA | {"target_modules": ["conv.conv"], "r": 64}))
    adapter = tmp_path / "adapter"
    live.save_pretrained(str(adapter))
    with golden.raises("merge", message="conv.conv is a Conv1d", fix=WITH_PEFT):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    assert is_close(logits(PeftModel.from_pretrained(load(base), str(adapter))), logits(live))
