"""Resized vocabularies, tied heads, sums of adapters, odd bases and odd configurations.

Every merge is reloaded through transformers and compared with the live adapter, as in test_merge_kinds.py.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    LINEARS,
    SIZES,
    all_tensors,
    check_close,
    check_loads,
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
    train_adapter,
)
from golden import Golden
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from cogumi.core.errors import UsageError
from cogumi.merge import merge_adapter
from cogumi.merge.adapter_files import weights_sample

# Vocabularies that grew or shrank while the adapter was trained.


@pytest.fixture(scope="module")
def small_bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("small")
    sizes = SIZES | {"num_hidden_layers": 1}
    bases = {
        "open": save_base(root / "open", LlamaConfig(**sizes, tie_word_embeddings=False), max_shard_size="60KB"),
        "tied": save_base(root / "tied", Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)),
    }
    for sharded in (True, False):  # tied, and the head is stored all the same
        both = shutil.copytree(bases["tied"], root / f"both-{sharded}")
        tensors = load_file(both / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        store(both, tensors, 2 if sharded else 1)
        bases["both-sharded" if sharded else "both"] = both
    return bases


def store(directory: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write these tensors as the directory's model, dealt out over shards, the last of which is empty if there are more."""
    for old in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        old.unlink()
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    weight_map = {tensor: names[number % min(shards, 2)] for number, tensor in enumerate(tensors)}
    for name in names:
        part = {tensor: value for tensor, value in tensors.items() if weight_map[tensor] == name}
        save_file(part, directory / name, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


# Beside those of test_merge_completeness.py.
VOCABULARIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "grown-both-stored": ("both", 261, {"target_modules": ["v_proj"]}),
    "grown-dora-on-both": ("open", 261, {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    "grown-tokens": ("open", 261, {"target_modules": ["v_proj"], "trainable_token_indices": [3, 258, 260]}),
    "grown-tokens-tied": ("tied", 261, {"target_modules": ["v_proj"], "trainable_token_indices": [3, 258, 260]}),
    "grown-whole": ("open", 261, {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "grown-whole-tied": ("tied", 261, {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "shrunk": ("open", 250, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "shrunk-tied": ("tied", 250, {"target_modules": ["v_proj"]}),
}
INPUT = torch.arange(40).reshape(2, 20) % 250


@pytest.mark.parametrize("case", VOCABULARIES)
def test_resized_vocabulary(case: str, small_bases: dict[str, Path], tmp_path: Path) -> None:
    name, rows, lora = VOCABULARIES[case]
    base = small_bases[name]

    def resized() -> Any:
        torch.manual_seed(5)
        model = load(base)
        model.resize_token_embeddings(rows, mean_resizing=False)
        return model

    adapter = train(resized(), tmp_path / "adapter", **lora)
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", progress=False)
    inputs = INPUT.clone()
    if rows > 256:
        inputs[:, -3:] = torch.tensor([256, 258, 260])
    live = logits(PeftModel.from_pretrained(resized(), str(adapter)), inputs)
    merged = load(tmp_path / "out")
    assert live.shape[-1] == rows
    assert merged.config.vocab_size == rows
    check_close(rms(logits(merged, inputs) - live), rms(live - logits(resized(), inputs)))
    check_loads(tmp_path / "out")


# A tied head that the checkpoint stores all the same.

HEADS: dict[str, tuple[dict[str, Any], bool]] = {
    "neither": ({"target_modules": ["q_proj"]}, True),
    "embedding": ({"target_modules": ["embed_tokens"]}, False),
    "head": ({"target_modules": ["lm_head", "q_proj"]}, False),
    "both-differently": ({"target_modules": ["embed_tokens", "lm_head"]}, False),
    "both-alike": ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "rows": ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 250]}, True),
    "whole-head": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
}


@pytest.mark.parametrize("stored", ["both", "both-sharded"])
@pytest.mark.parametrize("case", HEADS)
def test_tied_head_that_is_stored(case: str, stored: str, small_bases: dict[str, Path], tmp_path: Path) -> None:
    lora, tied = HEADS[case]
    out = tmp_path / "out"
    check_merge(small_bases[stored], train_adapter(small_bases[stored], tmp_path / "adapter", **lora), out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == tied
    tensors = all_tensors(out)
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]) == tied


@pytest.mark.parametrize("names", [{"target_modules": ["c_attn", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_head_tied_to_an_embedding_that_peft_does_not_know(names: dict[str, list[str]], tmp_path: Path) -> None:
    """PEFT saves both, names the embedding alone, and ties the head again only beside an `embed_tokens`."""
    base = save_base(tmp_path / "base", GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=256, n_positions=64))
    live = load(base)
    adapter = train(live, tmp_path / "adapter", **{"target_modules": ["c_attn"]} | names, ensure_weight_tying=True)
    merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", progress=False)
    expected = logits(live)
    check_close(rms(logits(load(tmp_path / "out")) - expected), rms(expected - logits(load(base))))


@pytest.fixture
def apart(small_bases: dict[str, Path], tmp_path: Path) -> Path:
    """A base whose config ties what its checkpoint holds two different tensors for: transformers loads both."""
    directory = shutil.copytree(small_bases["both"], tmp_path / "apart")
    return edit_tensors(Path(directory), lambda name, tensor: tensor.flip(0) if name == "lm_head.weight" else tensor)


def test_head_that_differs_from_its_embedding_stays_as_it_is(apart: Path, tmp_path: Path) -> None:
    check_merge(apart, train_adapter(apart, tmp_path / "adapter", target_modules=["q_proj"]), tmp_path / "out")
    assert torch.equal(all_tensors(tmp_path / "out")["lm_head.weight"], all_tensors(apart)["lm_head.weight"].float())


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_refuses_to_change_a_head_that_is_tied_in_name_only(
    module: str, apart: Path, tmp_path: Path, golden: Golden
) -> None:
    adapter = train_adapter(apart, tmp_path / "adapter", target_modules=[module])
    with golden.raises("merge", fix="tie_word_embeddings"):
        merge_adapter(adapter, tmp_path / "out", base=apart, progress=False)


# Sums of adapters.


def weights_of(base: Path, *pairs: tuple[Path, float]) -> dict[str, torch.Tensor]:
    """W plus the weighted updates that PEFT itself computes for each adapter (get_delta_weight), float64."""
    expected = {name: weight.double() for name, weight in all_tensors(base).items()}
    for path, weight in pairs:
        model = PeftModel.from_pretrained(load(base), str(path)).get_base_model()
        for name, module in model.named_modules():
            if hasattr(module, "get_delta_weight"):
                expected[f"{name}.weight"] += weight * module.get_delta_weight("default").detach().double()
    return expected


SUMS: dict[str, tuple[dict[str, Any], float, dict[str, Any], float]] = {
    "same-targets": ({"target_modules": ["q_proj"]}, 0.5, {"target_modules": ["q_proj"]}, 0.5),
    "ranks-and-targets": (
        {"target_modules": LINEARS, "r": 3},
        0.7,
        {"target_modules": ["q_proj", "lm_head"], "r": 8},
        1.5,
    ),
    "apart": ({"target_modules": ["q_proj"]}, 1.0, {"target_modules": ["k_proj"]}, 2.0),
    "negative-and-rslora": (
        {"target_modules": ["q_proj"], "use_rslora": True},
        1.0,
        {"target_modules": ["q_proj"]},
        -0.8,
    ),
    "embedding": ({"target_modules": ["embed_tokens"]}, 0.5, {"target_modules": ["embed_tokens", "q_proj"]}, 0.25),
}


@pytest.mark.parametrize("case", SUMS)
def test_weighted_sum(case: str, small_bases: dict[str, Path], tmp_path: Path) -> None:
    first, weight, second, other = SUMS[case]
    base = small_bases["open"]
    pairs = [
        (train_adapter(base, tmp_path / "first", **first), weight),
        (train_adapter(base, tmp_path / "second", seed=2, **second), other),
    ]
    merge_adapter(pairs, tmp_path / "out", base=base, dtype="float32", progress=False)
    expected, merged = weights_of(base, *pairs), all_tensors(tmp_path / "out")
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=1e-6)
    check_loads(tmp_path / "out")


def test_the_same_adapter_twice_is_twice_its_update(small_bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = train_adapter(small_bases["tied"], tmp_path / "adapter", target_modules=["lm_head", "q_proj"])
    for name, pairs in {"twice": [(adapter, 1.0), (adapter, 1.0)], "double": [(adapter, 2.0)]}.items():
        merge_adapter(pairs, tmp_path / name, base=small_bases["tied"], dtype="float32", progress=False)
    twice, double = all_tensors(tmp_path / "twice"), all_tensors(tmp_path / "double")
    assert twice.keys() == double.keys()
    for name, tensor in twice.items():
        torch.testing.assert_close(tensor, double[name], rtol=0, atol=1e-6)
    # The head that leaves its embedding must not take the embedding with it.
    embedding = all_tensors(small_bases["tied"])["model.embed_tokens.weight"].float()
    assert torch.equal(twice["model.embed_tokens.weight"], embedding)
    assert not torch.equal(twice["lm_head.weight"], embedding)


@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True},
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [3]},
        {"target_modules": ["embed_tokens"], "use_dora": True},
    ],
)
def test_refuses_to_weight_what_replaces(
    lora: dict[str, Any], small_bases: dict[str, Path], tmp_path: Path, golden: Golden
) -> None:
    base = small_bases["open"]
    pairs = [
        (train_adapter(base, tmp_path / "plain", target_modules=["q_proj"]), 0.5),
        (train_adapter(base, tmp_path / "other", **{"target_modules": ["q_proj"]} | lora), 0.5),
    ]
    with golden.raises("merge", message="cannot be weighted"):
        merge_adapter(pairs, tmp_path / "out", base=base, progress=False)


def recorded_at(adapter: Path, base: Path | str | None, **record: Any) -> Path:
    """Record another base: in PEFT's configuration, and in cogumi's record where it gets a name or a sample."""
    edit_config(adapter, base_model_name_or_path=base and str(base))
    if record:
        plain = {"name": str(base), "commit": None, "revision": None, "quantization": None, "dtype": "bfloat16"}
        (adapter / "cogumi-base.json").write_text(json.dumps(plain | record))
    return adapter


@pytest.fixture
def of_two_bases(small_bases: dict[str, Path], tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return two bases of equal shapes, and the directory of `first`, of the one, and `second`, of the other."""
    one, other = (shutil.copytree(small_bases["open"], tmp_path / name) for name in ("one", "other"))
    edit_tensors(Path(other), lambda name, tensor: tensor * (name != "lm_head.weight"))
    for name, base in (("first", one), ("second", other)):
        recorded_at(train_adapter(base, tmp_path / name, target_modules=["q_proj"]), base)
    return one, other, tmp_path


def sum_up(place: Path, **options: Any) -> None:
    merge_adapter([(place / "first", 0.5), (place / "second", 0.5)], place / "out", progress=False, **options)


def test_a_sum_of_two_bases_names_the_adapter(of_two_bases: tuple[Path, Path, Path], golden: Golden) -> None:
    one, other, place = of_two_bases
    with golden.raises("merge", message=f"adapter {place / 'second'}: it was trained on {other}") as error:
        sum_up(place)
    assert str(one) in str(error.value)
    assert not (place / "out").exists()
    sum_up(place, base=one)  # both, by the user's word, as for the first alone


def test_a_further_base_that_is_gone_is_known_by_its_weights(of_two_bases: tuple[Path, Path, Path]) -> None:
    one, other, place = of_two_bases
    recorded_at(place / "second", "/gone/base")
    with pytest.raises(UsageError, match=f"adapter {place / 'second'}: base /gone/base"):
        sum_up(place)
    recorded_at(place / "second", "/gone/base", weights=weights_sample(str(other)))
    with pytest.raises(UsageError, match="second"):
        sum_up(place)
    recorded_at(place / "second", "/gone/base", weights=weights_sample(str(one)))
    sum_up(place)


def test_a_further_base_may_be_a_copy_or_unknown(of_two_bases: tuple[Path, Path, Path], tmp_path: Path) -> None:
    one, _, place = of_two_bases
    recorded_at(place / "second", shutil.copytree(one, tmp_path / "copy"))
    sum_up(place)
    shutil.rmtree(place / "out")
    recorded_at(place / "second", None)
    sum_up(place)


# What else a base may hold.


def test_mixed_dtypes_and_tensors_that_no_model_knows(small_bases: dict[str, Path], tmp_path: Path) -> None:
    """Two shards with tensors and one without; float32, float16, integers, no dimension, no element, unknown names."""
    base = shutil.copytree(small_bases["open"], tmp_path / "base")
    tensors = {name: tensor.clone() for name, tensor in all_tensors(base).items()}
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].float()
    tensors["model.layers.0.self_attn.v_proj.weight"] = tensors["model.layers.0.self_attn.v_proj.weight"].half()
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(8) / 7,
        "model.unknown.ids": torch.arange(5),
        "model.unknown.flags": torch.tensor([True, False]),
        "model.unknown.scale": torch.tensor(1.0 / 3),
        "model.unknown.step": torch.tensor(7),
        "model.unknown.nothing": torch.zeros(0, 4, dtype=torch.bfloat16),
        "model.unknown.double": torch.tensor([1.0 / 3], dtype=torch.float64),
    }
    store(base, tensors | extra, shards=3)
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=LINEARS)

    merge_adapter(adapter, tmp_path / "kept", base=base, progress=False)
    kept = all_tensors(tmp_path / "kept")
    assert {name: tensor.dtype for name, tensor in kept.items()} == {
        name: tensor.dtype for name, tensor in (tensors | extra).items()
    }
    assert all(torch.equal(kept[name], tensor) for name, tensor in extra.items())
    expected = closed_form(base, adapter)
    for name, tensor in tensors.items():  # half a unit of the last place, and a little for ties and float32 sums
        torch.testing.assert_close(
            kept[name].double(), expected[name], rtol=0.51 * torch.finfo(tensor.dtype).eps, atol=1e-7
        )

    merge_adapter(adapter, tmp_path / "wide", base=base, dtype="float32", progress=False)
    wide = all_tensors(tmp_path / "wide")
    check_close(*distances(base, adapter, tmp_path / "wide"))
    assert {wide[name].dtype for name in tensors} == {torch.float32}
    assert wide["model.unknown.scale"].dtype == torch.float32
    assert wide["model.unknown.nothing"].shape == (0, 4)
    for name in ("ids", "flags", "step", "double"):
        assert torch.equal(wide[f"model.unknown.{name}"], extra[f"model.unknown.{name}"])
    # The third file holds nothing and is in no index.
    files = sorted(path.name for path in (tmp_path / "wide").glob("*.safetensors"))
    assert files == sorted(path.name for path in base.glob("*.safetensors"))[:2]


def test_refuses_a_base_whose_config_names_other_weights(small_bases: dict[str, Path], tmp_path: Path) -> None:
    """transformers loads the named file, whatever is in model.safetensors."""
    base = Path(shutil.copytree(small_bases["tied"], tmp_path / "base"))
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(UsageError, match=r"names other\.safetensors as transformers_weights"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)


# Configurations.

CONFIGS: dict[str, dict[str, Any]] = {
    "no-init": {"target_modules": ["v_proj"], "init_lora_weights": None},
    "no-task": {"target_modules": ["v_proj"], "task_type": None},
    "excluded": {"target_modules": LINEARS, "exclude_modules": ["up_proj"]},
    "excluded-regex": {"target_modules": "all-linear", "exclude_modules": r".*mlp.*"},
    "some-layers": {"target_modules": ["v_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "a-matrix": {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]},
    "only-a-matrix": {"target_modules": [], "target_parameters": ["gate_proj.weight"]},
    "nothing-to-save": {"target_modules": ["v_proj"], "modules_to_save": ["classifier"]},
    "whole-module": {"target_modules": ["v_proj"], "modules_to_save": ["mlp"]},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configuration(case: str, small_bases: dict[str, Path], tmp_path: Path) -> None:
    base = small_bases["open"]
    report = check_merge(base, train_adapter(base, tmp_path / "adapter", **CONFIGS[case]), tmp_path / "out")
    assert any("modules_to_save" in note for note in report.notes) == (case == "nothing-to-save")


def test_refuses_a_module_trained_whole_in_another(small_bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT trains `mlp` and then saves the other copy of `up_proj`, which no forward pass reaches."""
    base, lora = small_bases["open"], {"target_modules": ["v_proj"], "modules_to_save": ["up_proj", "mlp"]}
    adapter = train_adapter(base, tmp_path / "adapter", **lora)
    with pytest.raises(UsageError, match=r"names model\.layers\.0\.mlp\.up_proj and a module around it"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)


def test_refuses_two_updates_of_one_matrix(small_bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT refuses to train such an adapter, so nothing says what it would mean."""
    base = small_bases["open"]
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    edit_config(adapter, target_parameters=["q_proj.weight"])
    with pytest.raises(UsageError, match=r"does not fit base .*q_proj"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
