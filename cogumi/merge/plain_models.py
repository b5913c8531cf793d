"""Plain decoders with plain LoRA, planned without transformers' models and PEFT: importing these takes longer than a merge.

The parameters of these models follow from config.json, and so do the layers that an adapter's configuration names. Where
anything is not exactly as expected, nothing is said, and transformers and PEFT decide (cogumi/merge/parameter_map.py and
changes.py). The tests hold every answer against theirs.
"""

import re
from collections.abc import Sequence
from typing import Any

from cogumi.core.safetensors_file import FLOAT_DTYPES
from cogumi.merge.adapter_files import PREFIX, Adapter
from cogumi.merge.bases import Base
from cogumi.merge.parameter_map import Change, Changes, LowRank

# model_type -> the class whose parameters the checkpoint must have.
PLAIN_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What an adapter's configuration may say, beside r, lora_alpha, use_rslora and target_modules, for its layers and scaling to
# follow from these alone. Any other entry must be empty.
FREE_ENTRIES = frozenset(
    ["auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_dropout", "megatron_core",
     "peft_type", "peft_version", "qalora_group_size", "r", "lora_alpha", "revision", "target_modules", "use_rslora"]
)  # fmt: skip


def plain_changes(adapters: Sequence[tuple[Adapter, float]], base: Base) -> list[Changes] | None:
    """What each adapter does to the base's tensors, which are its parameters. None where the base is not a plain decoder
    with exactly its tensors, or an adapter has other than LoRA on its layers' matrices."""
    shapes, tensors = plain_parameters(base.config), base.tensors
    if base.quantized or shapes is None or shapes != {name: span.shape for name, span in tensors.items()}:
        return None
    if not all(span.dtype in FLOAT_DTYPES for span in tensors.values()):
        return None
    each = [adapter_terms(adapter, shapes) for adapter, _ in adapters]
    return None if None in each else [changes for changes in each if changes is not None]


def plain_parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Parameter -> shape, by config.json; None for another model, or a size that is left to the class. A head that is tied
    to the embedding is none of them."""
    kind = config.get("model_type", "")
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    numbers = [config.get(name) for name in (*needed, "vocab_size")]
    if config.get("architectures") != [PLAIN_MODELS.get(kind)] or not all(type(each) is int for each in numbers):
        return None
    hidden, inner, layers, heads, groups, vocabulary = (int(each or 0) for each in numbers)
    if kind == "qwen3" and not config.get("head_dim"):
        return None
    # Qwen2 has no such entry.
    size = int((kind != "qwen2" and config.get("head_dim")) or hidden // heads)
    matrices = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (groups * size, hidden),
        "self_attn.v_proj": (groups * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    vectors = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    if kind == "qwen3":
        vectors |= {"self_attn.q_norm.weight": size, "self_attn.k_norm.weight": size}
    for module, shape in matrices.items():
        attention = kind in ("llama", "qwen3") and config.get("attention_bias", False)
        if "mlp" in module:
            biased = kind == "llama" and config.get("mlp_bias", False)
        else:
            biased = attention or (kind == "qwen2" and "o_proj" not in module)
        if biased:
            vectors[f"{module}.bias"] = shape[0]
    layer: dict[str, tuple[int, ...]] = {f"{module}.weight": shape for module, shape in matrices.items()}
    layer |= {name: (length,) for name, length in vectors.items()}
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (vocabulary, hidden)
    return found | {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}


def adapter_terms(adapter: Adapter, shapes: dict[str, tuple[int, ...]]) -> Changes | None:
    """The update of each of the base's matrices, where the adapter's tensors are those that PEFT would save."""
    config = adapter.config
    told = {name for name, value in config.items() if value and value != "none"} - FREE_ENTRIES
    if told - {"task_type"} or config.get("task_type") not in (None, "CAUSAL_LM"):
        return None
    targets, rank = config.get("target_modules"), config.get("r")
    modules = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    if isinstance(targets, str):
        chosen = [module for module in modules if re.fullmatch(targets, module)]
    else:
        chosen = [each for each in modules if any(each == end or each.endswith(f".{end}") for end in targets or ())]
    held = {span.name: span.shape for span in adapter.spans}
    expected: dict[str, tuple[int, ...]] = {}
    changes = Changes()
    for module in chosen:
        if ".layers." not in module or type(rank) is not int:  # the embedding and the head have rules of their own
            return None
        rows, columns = shapes[f"{module}.weight"]
        key_a, key_b = (f"{PREFIX}{module}.lora_{side}.weight" for side in "AB")
        expected |= {key_a: (rank, columns), key_b: (rows, rank)}
        scaling = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        term = LowRank(adapter.weights, key_a, key_b, rank, float(scaling))
        changes.parameters[f"{module}.weight"] = Change(terms=(term,))
    return changes if expected and expected == held else None
