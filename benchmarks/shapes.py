"""Models of real shapes with random weights: what a step or a merge costs depends on their shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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
