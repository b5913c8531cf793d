"""Whether base and output are whole: transformers' own loading report, on real files, against what the merge says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import (
    EXPERTS,
    LINEARS,
    SIZES,
    all_tensors,
    changed,
    check_close,
    check_loads,
    check_merge,
    found_faults,
    load,
    logits,
    reported_faults,
    rms,
    save_base,
    train,
    train_adapter,
    without_tensor,
)
from golden import Golden
from multimodal_models import save_multimodal
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from cogumi.core.errors import UsageError
from cogumi.merge import merge_adapter
from cogumi.merge.adapter_files import resolve_adapter
from cogumi.merge.bases import read_model
from cogumi.merge.completeness import check_output
from cogumi.merge.parameter_map import read_checkpoint
from cogumi.merge.preflight import expected_base, plan_adapter
from cogumi.models.base import RunBase, build_on_meta

Tensors = dict[str, torch.Tensor]
SMALL = SIZES | {"num_hidden_layers": 1}
FAMILIES: dict[str, Any] = {
    "open": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "tied": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=1, n_head=4),
    "experts": Qwen3MoeConfig(**SMALL, head_dim=16, **EXPERTS),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("whole")
    return {name: save_base(root / name, config) for name, config in FAMILIES.items()}


@pytest.fixture(scope="module")
def adapters(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One on the attention of each base, trained while it was whole."""
    root = tmp_path_factory.mktemp("adapters")
    targets = {"gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True}}
    return {
        name: train_adapter(base, root / name, **targets.get(name, {"target_modules": ["q_proj"]}))
        for name, base in bases.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_that_is_missing_is_found_as_transformers_reports_it(
    family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    assert found_faults(bases[family]) == reported_faults(bases[family]) == set()
    for number, name in enumerate(load_file(bases[family] / "model.safetensors")):
        damaged = without_tensor(bases[family], tmp_path / f"{number}", name)
        if (
            ".experts." in name and "down_proj" not in name
        ):  # two stacks that do not fit each other: transformers raises
            with pytest.raises(RuntimeError, match="conversion of the weights"):
                reported_faults(damaged)
            assert found_faults(damaged)
        else:
            assert found_faults(damaged) == reported_faults(damaged) != set(), name


def cut(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


NORM = "model.layers.0.input_layernorm.weight"
DAMAGES: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "missing": ("open", lambda tensors: tensors.pop(NORM), NORM),
    "head": ("open", lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
    "embedding-of-both": (
        "tied",
        lambda tensors: tensors.pop("model.embed_tokens.weight"),
        "model.embed_tokens.weight",
    ),
    "shape": ("open", cut("model.layers.0.mlp.up_proj.weight"), "[95, 64] where [96, 64]"),
    "embedding-of-another-size": ("tied", cut("model.embed_tokens.weight"), "[255, 64] where [256, 64]"),
    "head-of-another-size": ("open", cut("lm_head.weight"), "[255, 64] where [256, 64]"),
    "dtype": ("open", lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)}), "I8"),
    "an-expert": (
        "experts",
        lambda tensors: tensors.pop("model.layers.0.mlp.experts.2.up_proj.weight"),
        "experts.2.up_proj.weight",
    ),
    "all-of-an-expert": (
        "experts",
        lambda tensors: [tensors.pop(f"model.layers.0.mlp.experts.3.{part}_proj.weight") for part in ("gate", "up")],
        "experts.3.gate_proj.weight",
    ),
    "without-a-prefix": ("gpt2", lambda tensors: tensors.pop("transformer.wpe.weight"), "wpe.weight"),
}


UNLOADABLE = ("shape", "embedding-of-another-size", "head-of-another-size", "dtype")


@pytest.mark.parametrize("damage", UNLOADABLE)
def test_a_base_that_does_not_fit_its_class_is_refused_before_anything_is_written(
    damage: str, bases: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, golden: Golden
) -> None:
    family, change, message = DAMAGES[damage]
    base = changed(bases[family], tmp_path / "base", change)
    with golden.raises("merge", message=message):
        merge_adapter(adapters[family], tmp_path / "out", base=base, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - set(UNLOADABLE)))
def test_a_base_without_a_tensor_merges_to_a_model_without_it(
    damage: str, bases: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, golden: Golden
) -> None:
    family, change, missing = DAMAGES[damage]
    base = changed(bases[family], tmp_path / "base", change)
    report = merge_adapter(adapters[family], tmp_path / "out", base=base, progress=False)
    assert missing in report.notes[-1]
    golden("merge", report.notes[-1])
    assert json.loads((tmp_path / "out" / "cogumi-merge.json").read_text())["notes"] == list(report.notes)
    assert found_faults(tmp_path / "out") == found_faults(base) != set()
    merge_adapter(adapters[family], tmp_path / "whole", base=bases[family], progress=False)
    whole, incomplete = all_tensors(tmp_path / "whole"), all_tensors(tmp_path / "out")
    assert incomplete.keys() == all_tensors(base).keys() < whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in incomplete.items())
    with pytest.raises(UsageError, match="verify='logits' loads base"):
        merge_adapter(adapters[family], tmp_path / "compared", base=base, verify="logits", progress=False)
    assert not (tmp_path / "compared").exists()


def test_an_output_lacks_no_tensor_that_its_base_has(bases: dict[str, Path], adapters: dict[str, Path]) -> None:
    """No plan does that: this is the check of the plan."""
    adapter, base = resolve_adapter(adapters["open"]), read_model(str(bases["open"]), None)
    checkpoint = read_checkpoint(base, adapter)
    targets = [span for span in base.tensors.values() if span.name != NORM]
    with pytest.raises(UsageError, match=NORM):
        check_output(base, checkpoint, adapter, base.config, targets)
    assert check_output(base, checkpoint, adapter, base.config, list(base.tensors.values())) is None


def test_a_tensor_that_the_adapter_changes_has_to_be_there(
    bases: dict[str, Path], adapters: dict[str, Path], tmp_path: Path, golden: Golden
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    base = without_tensor(bases["open"], tmp_path / "base", name)
    with golden.raises("merge", message=name):
        merge_adapter(adapters["open"], tmp_path / "out", base=base, progress=False)


def test_a_run_is_refused_for_a_base_that_is_not_whole(bases: dict[str, Path], tmp_path: Path) -> None:
    """By the headers alone, which a run reads on the hub before it downloads the weights."""
    base = changed(bases["open"], tmp_path / "base", lambda tensors: tensors.pop(NORM))
    lora = LoraConfig(r=4, target_modules=LINEARS, task_type="CAUSAL_LM")
    for path, whole in ((bases["open"], True), (base, False)):
        config = AutoConfig.from_pretrained(path)
        there = expected_base(str(path), None, config, None)
        assert {span.name for shard in there.shards for span in shard.spans} > {"lm_head.weight"}
        if whole:
            plan_adapter(lora, RunBase(str(path), None, config), read_model(str(path), None))
        else:
            with pytest.raises(UsageError, match="input_layernorm"):
                plan_adapter(lora, RunBase(str(path), None, config), read_model(str(path), None))


ALLOWED: dict[str, tuple[str, Callable[[Tensors], object]]] = {
    "rotary": ("open", lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})),
    "more-predictions": ("open", lambda tensors: tensors.update({"mtp.layers.0.weight": torch.ones(4, 4)})),
    "head-of-a-tied-one": (
        "tied",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    ),
    "head-alone": (
        "tied",
        lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}),
    ),
    "other-floats": ("open", lambda tensors: tensors.update({NORM: tensors[NORM].double()})),
    "masks": ("gpt2", lambda tensors: tensors.update({"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)})),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_transformers_allows_is_merged(
    case: str, bases: dict[str, Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    family, change = ALLOWED[case]
    base = changed(bases[family], tmp_path / "base", change)
    assert reported_faults(base) == set()
    merge_adapter(adapters[family], tmp_path / "out", base=base, progress=False)
    assert reported_faults(tmp_path / "out") == set()
    assert all_tensors(tmp_path / "out").keys() == all_tensors(base).keys()


def test_what_a_class_allows_to_be_missing_is_no_fault(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = without_tensor(bases["open"], tmp_path / "base", NORM)
    assert found_faults(base) == reported_faults(base) == {NORM}
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keys_to_ignore_on_load_missing", [r"layers\.0\.input_layer"])
    build_on_meta.cache_clear()  # a model copies it from its class
    assert found_faults(base) == reported_faults(base) == set()


def test_a_tower_that_no_adapter_reaches_may_be_incomplete(tiny_model: Path, tmp_path: Path) -> None:
    """The class that a run loads leaves it out, and the one that the merged checkpoint names has it."""
    base = save_multimodal("qwen3_5", tiny_model, tmp_path / "base")
    text = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    train(text, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    assert len(merge_adapter(tmp_path / "adapter", tmp_path / "whole", base=base, progress=False).notes) == 1
    file = sorted(base.glob("*.safetensors"))[0]
    with safe_open(file, framework="pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in sorted(shard.keys())}
    lost = next(name for name in tensors if "visual.blocks" in name)
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    if (index := base / "model.safetensors.index.json").is_file():
        entries = json.loads(index.read_text())
        entries["weight_map"].pop(lost)
        index.write_text(json.dumps(entries))
    report = merge_adapter(tmp_path / "adapter", tmp_path / "out", base=base, progress=False)
    assert lost in report.notes[-1]
    assert all_tensors(tmp_path / "out").keys() == all_tensors(base).keys()


# A vocabulary that was resized, of which the adapter brings one side.

TARGETS: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["v_proj"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "embedding-whole": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "head-whole": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
}
# (base, targets, whether PEFT was asked to save both sides): what the merge may not refuse.
RIGHT = {
    ("open", "linear", True),
    ("tied", "linear", True),
    ("open", "both", True),
    ("open", "embedding-whole", True),
    ("tied", "embedding", True),
    ("tied", "embedding-whole", True),
    ("open", "head-whole", True),
    ("tied", "head-whole", True),
    ("tied", "both", True),
}
INPUT = torch.arange(40).reshape(2, 20) % 250


@pytest.mark.parametrize("rows", [261, pytest.param(250, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["open", "tied"])
def test_a_vocabulary_resized_on_one_side_is_right_or_refused(
    family: str, target: str, both: bool, rows: int, bases: dict[str, Path], tmp_path: Path, golden: Golden
) -> None:
    base, out = bases[family], tmp_path / "out"
    torch.manual_seed(5)
    model = load(base)
    model.resize_token_embeddings(rows, mean_resizing=False)
    plain = logits(model, INPUT)
    live = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **TARGETS[target]))
    with torch.no_grad():
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    live.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=both)
    if (family, target, both) in RIGHT:
        merge_adapter(tmp_path / "adapter", out, base=base, dtype="float32", progress=False)
        check_loads(out)
        seen = logits(live, INPUT)
        check_close(rms(logits(load(out), INPUT) - seen), rms(seen - plain))
    elif (target, both) == ("linear", False):  # nothing in the file tells of it
        check_merge(base, tmp_path / "adapter", out)
    else:
        with pytest.raises(UsageError, match=f"resized the vocabulary to {rows}") as refused:
            merge_adapter(tmp_path / "adapter", out, base=base, progress=False)
        assert "save_embedding_layers" in (refused.value.fix or "")
        if family == "open" and target in ("embedding", "head") and both and rows == 261:
            golden("merge", str(refused.value))
