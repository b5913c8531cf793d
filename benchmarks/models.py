"""Models of real shapes with random weights: in memory with LoRA for a step, on disk with an adapter by PEFT for a merge."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from cogumi.core.durability import drop_from_memory


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

    def model(self, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
        """On torch's current device. more: of transformers' configuration."""
        config = AutoConfig.for_model(
            self.family, hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocabulary,
            head_dim=self.wide_heads or self.hidden // self.heads, tie_word_embeddings=self.tied, **more,
        )  # fmt: skip
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")

    @property
    def bytes(self) -> int:
        """Of the weights in bfloat16."""
        return 2 * sum(parameter.numel() for parameter in random_model(self, "meta").parameters())


QWEN3_0_6B = Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 151936, True, wide_heads=128, family="qwen3")
LLAMA_1B = Shape("Llama of 1.2 billion weights", 2048, 8192, 16, 32, 8, 128256, False)
# Large enough that a step is arithmetic and not Python, small enough for two CPU cores.
SMALL = Shape("Llama of 5 million weights", 256, 688, 4, 4, 4, 8192, True)


def random_model(shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """Weights as transformers initializes them, made on the device from one seed. more: of transformers' configuration."""
    torch.manual_seed(0)
    with torch.device(device):
        return shape.model(dtype, **more)


def build(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """Random weights with LoRA r16 on all linear layers and gradient checkpointing."""
    model = random_model(shape, device, dtype, use_cache=False, max_position_embeddings=40960)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def word_tokenizer(vocabulary: int) -> Any:
    """A tokenizer whose words are the numbers of the tokens; 0 is padding and 1 the end."""
    words = {"<pad>": 0, "<eos>": 1} | {str(i): i for i in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@dataclass(frozen=True)
class Inputs:
    """A base and an adapter trained on it, on disk; base_bytes: of the base's safetensors files."""

    base: Path
    adapter: Path
    base_bytes: int


def write_inputs(shape: Shape, directory: Path, *, shard_bytes: int, rank: int) -> Inputs:
    """A random base in shards of at most `shard_bytes`, and an adapter."""
    base = directory / "base"
    random_model(shape, "cpu").save_pretrained(base, max_shard_size=shard_bytes)
    return with_adapter(shape, base, directory / "adapter", rank)


def with_adapter(shape: Shape, base: Path, adapter: Path, rank: int) -> Inputs:
    """An adapter of every linear layer with the float32 factors a trained one might have, saved by PEFT."""
    model = random_model(shape, "meta")
    model.name_or_path = model.config._name_or_path = str(base)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config, low_cpu_mem_usage=True)
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(weight.shape, generator=generator).mul_(0.02 if "lora_A" in name else 0.005)
        for name, weight in adapted.state_dict().items()
        if "lora_" in name
    }
    adapted.save_pretrained(str(adapter), state_dict=state, save_embedding_layers=False)
    return Inputs(base, adapter, sum(file.stat().st_size for file in base.glob("*.safetensors")))


def forget_cached(*directories: Path) -> None:
    """Drop the files' pages from memory, so that the next reader reads the disk. Only Linux can be asked to."""
    os.sync()  # a page that is not on disk yet is not dropped
    for path in (path for directory in directories for path in directory.rglob("*") if path.is_file()):
        drop_from_memory(path)
