"""Models of real shapes with random weights: what a step or a merge costs depends on their shapes alone.

In memory, with LoRA, for a step; on disk, as a base in real files or a sparse shard and an adapter saved by PEFT, for a merge.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cogumi.core.durability import drop_from_memory
from cogumi.core.safetensors_file import make_header

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shape:
    """The numbers of a model's config.json that decide its cost. `tied`: the embedding is the head too."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    wide_heads: int = 0  # their size, where it is not hidden / heads
    family: str = "llama"  # or "qwen3"

    @property
    def head_dim(self) -> int:
        return self.wide_heads or self.hidden // self.heads

    @property
    def body_weights(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    def config(self, **more: Any) -> Any:
        from transformers import LlamaConfig, Qwen3Config

        return {"qwen3": Qwen3Config, "llama": LlamaConfig}[self.family](
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            **more,
        )


QWEN3_0_6B = Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 151936, True, wide_heads=128, family="qwen3")
LLAMA_3_1_8B = Shape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128256, False)
# Large enough that a step is arithmetic and not Python, small enough for two CPU cores.
SMALL = Shape("Llama of 5 million weights", 256, 688, 4, 4, 4, 8192, True)


def build(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """Random weights made directly on the device, with LoRA r16 on all linear layers and gradient checkpointing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = shape.config(use_cache=False, max_position_embeddings=40960)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def word_tokenizer(vocabulary: int) -> Any:
    """A tokenizer whose words are the numbers of the tokens; 0 is padding and 1 the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {str(i): i for i in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@dataclass(frozen=True)
class Inputs:
    """A base and an adapter trained on it, on disk; sizes in bytes of their safetensors files."""

    base: Path
    adapter: Path
    base_bytes: int
    adapter_bytes: int


def meta_model(shape: Shape) -> Any:
    from transformers import AutoModelForCausalLM

    config = shape.config(architectures=["LlamaForCausalLM"], dtype="bfloat16")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def write_inputs(shape: Shape, directory: Path, *, shard_bytes: int, targets: str | list[str], rank: int) -> Inputs:
    """Random weights (standard deviation 0.02, norms 1) in shards of at most `shard_bytes`, and an adapter."""
    model = meta_model(shape)
    base = directory / "base"
    base.mkdir(parents=True)
    model.config.save_pretrained(base)
    groups = list(shards(stored_tensors(model), shard_bytes))
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({key: random_weight(dims, generator) for key, dims in group.items()}, base / name, {"format": "pt"})
        weight_map |= dict.fromkeys(group, name)
    if len(groups) > 1:
        total = sum(byte_count(group) for group in groups)
        (base / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return with_adapter(model, base, directory / "adapter", targets, rank)


def write_sparse_inputs(shape: Shape, directory: Path, *, targets: str | list[str], rank: int) -> Inputs:
    """One shard whose weights are a hole in the file: they read as zeros, and take no disk."""
    model = meta_model(shape)
    base = directory / "base"
    base.mkdir(parents=True)
    model.config.save_pretrained(base)
    tensors = stored_tensors(model)
    header = make_header(
        {"format": "pt"}, [(key, "BF16", dims, byte_count({key: dims})) for key, dims in tensors.items()]
    )
    with (base / "model.safetensors").open("xb") as file:
        file.write(header)
        file.truncate(len(header) + byte_count(tensors))
    return with_adapter(model, base, directory / "adapter", targets, rank)


def stored_tensors(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as they are saved: a tied head is not there."""
    tied = set(model.all_tied_weights_keys)
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items() if name not in tied}


def shards(tensors: dict[str, tuple[int, ...]], shard_bytes: int) -> Iterator[dict[str, tuple[int, ...]]]:
    group: dict[str, tuple[int, ...]] = {}
    for name, dims in tensors.items():
        if group and byte_count(group) + byte_count({name: dims}) > shard_bytes:
            yield group
            group = {}
        group[name] = dims
    yield group


def byte_count(tensors: dict[str, tuple[int, ...]]) -> int:
    """In bfloat16."""
    return sum(2 * torch.Size(dims).numel() for dims in tensors.values())


def random_weight(dims: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(dims) == 1:
        return torch.ones(dims, dtype=torch.bfloat16)
    return torch.randn(dims, generator=generator, dtype=torch.bfloat16).mul_(0.02)


def with_adapter(model: Any, base: Path, adapter: Path, targets: str | list[str], rank: int) -> Inputs:
    """An adapter for `model` (on meta) with the float32 factors a trained one might have, saved by PEFT."""
    from peft import LoraConfig, get_peft_model

    model.name_or_path = model.config._name_or_path = str(base)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config, low_cpu_mem_usage=True)
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(weight.shape, generator=generator).mul_(0.02 if "lora_A" in name else 0.005)
        for name, weight in adapted.state_dict().items()
        if "lora_" in name
    }
    adapted.save_pretrained(str(adapter), state_dict=state, save_embedding_layers=False)
    sizes = [sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in (base, adapter)]
    os.sync()
    return Inputs(base, adapter, *sizes)


def forget_cached(*directories: Path) -> None:
    """Drop the files' pages from memory, so that the next reader reads the disk. Only Linux can be asked to."""
    os.sync()  # a page that is not on disk yet is not dropped
    for path in (each for directory in directories for each in directory.rglob("*") if each.is_file()):
        drop_from_memory(path)
