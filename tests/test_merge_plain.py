"""Plans of plain decoders against those of transformers and PEFT; and what such a merge imports."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from merge_models import LINEARS, SIZES, load, save_base, train, train_adapter
from transformers import AutoConfig

from cogumi.merge.adapter_files import resolve_adapter
from cogumi.merge.bases import resolve_base
from cogumi.merge.parameter_map import meta_model
from cogumi.merge.plain_models import PLAIN_MODELS, plain_changes, plain_parameters
from cogumi.merge.plan import build_mapped_plan, build_plan

# model_type, entries of its config beside SIZES
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-biased": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "some": {"target_modules": ["q_proj", "down_proj"]},
    "all": {"target_modules": LINEARS},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ["o_proj"], "use_rslora": True, "lora_alpha": 3},
    "pattern": {"target_modules": r".*\.0\..*_proj"},
}
# What is left to transformers and PEFT.
OTHERS: dict[str, dict[str, Any]] = {
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5]},
    "ranks": {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2}},
    "some-layers": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "excluded": {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    "bias": {"target_modules": ["q_proj"], "bias": "all"},
    "parameter": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
}


def make_base(name: str, path: Path, **more: Any) -> Path:
    kind, entries = MODELS[name]
    return save_base(path, AutoConfig.for_model(kind, **SIZES | entries | more), max_shard_size="100KB")


def plan_of(adapter: Path, base: Path, build: Any, dtype: str = "keep") -> Any:
    read = resolve_adapter(adapter)
    return build([(read, 1.0)], resolve_base(read, str(base), None, "full"), dtype)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    kind, entries = MODELS[name]
    config = AutoConfig.for_model(
        kind, **SIZES | entries | {"num_hidden_layers": 3, "architectures": [PLAIN_MODELS[kind]]}
    )
    model = meta_model(config, getattr(transformers, PLAIN_MODELS[kind]))
    needed = {
        key: tuple(value.shape) for key, value in model.state_dict().items() if key not in model.all_tied_weights_keys
    }
    assert plain_parameters(config.to_dict()) == needed


@pytest.mark.parametrize("lora", ADAPTERS)
@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3-biased"])
def test_a_plan_is_that_of_transformers_and_peft(name: str, lora: str, tmp_path: Path) -> None:
    base = make_base(name, tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter", **ADAPTERS[lora])
    read = resolve_adapter(adapter)
    assert plain_changes([(read, 1.0)], resolve_base(read, str(base), None, "full")) is not None
    for dtype in ("keep", "float16"):
        assert plan_of(adapter, base, build_plan, dtype) == plan_of(adapter, base, build_mapped_plan, dtype)


@pytest.mark.parametrize("lora", OTHERS)
def test_other_adapters_are_left_to_peft(lora: str, tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base")
    read = resolve_adapter(train_adapter(base, tmp_path / "adapter", **OTHERS[lora]))
    assert plain_changes([(read, 1.0)], resolve_base(read, str(base), None, "full")) is None


@pytest.mark.parametrize("entry", ["architectures", "vocab_size", "num_hidden_layers", "head_dim"])
def test_other_bases_are_left_to_transformers(entry: str, tmp_path: Path) -> None:
    """A class, a size or a tensor that is not as the config says."""
    base = make_base("qwen3", tmp_path / "base")
    read = resolve_adapter(train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"]))
    found = resolve_base(read, str(base), None, "full")
    assert plain_changes([(read, 1.0)], found) is not None
    changed = {"architectures": ["Qwen3ForSequenceClassification"]}.get(entry, found.config[entry] and 7)
    found.config[entry] = changed
    assert plain_changes([(read, 1.0)], found) is None


def test_an_adapter_that_lacks_a_layer_is_left_to_peft(tmp_path: Path) -> None:
    """Its configuration promises more, which PEFT's own account says in words."""
    base = make_base("llama", tmp_path / "base")
    model = load(base)
    adapter = train(model, tmp_path / "adapter", target_modules=["q_proj"], layers_to_transform=[0])
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"layers_to_transform": [\n    0\n  ]', '"layers_to_transform": null'))
    read = resolve_adapter(adapter)
    assert read.config["layers_to_transform"] is None
    assert plain_changes([(read, 1.0)], resolve_base(read, str(base), None, "full")) is None


WHAT_IS_IMPORTED = """
import sys
from cogumi.__main__ import main
sys.argv = ["cogumi", "merge", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end
print([name for name in ("peft", "transformers", "trl", "accelerate", "datasets") if name in sys.modules])
"""


def test_a_plain_merge_imports_neither_transformers_nor_peft(tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=LINEARS)
    words = [sys.executable, "-c", WHAT_IS_IMPORTED, str(adapter), str(tmp_path / "out"), "--base", str(base)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
