"""The 4-bit models of the compile tests, which are the benchmark's: one place says what a 4-bit checkpoint looks like."""

from typing import Any

from torch import Tensor, nn

from benchmarks.graph_break_models import (
    LoopedExperts,
    counted_rows,
    gpt_oss,
    gpt_oss_base,
    hidden_rows,
    llama,
    moe_layer,
    quantize,
    quantized,
    straight_line,
    token_ids,
    with_lora,
)

__all__ = [
    "LoopedExperts",
    "counted_rows",
    "gpt_oss",
    "gpt_oss_base",
    "gradients",
    "hidden_rows",
    "llama",
    "moe_layer",
    "quantize",
    "quantized",
    "step",
    "straight_line",
    "tiny_llama",
    "tiny_moe",
    "token_ids",
    "with_lora",
]


def tiny_llama(layers: int = 4) -> Any:
    return llama(hidden=128, layers=layers, vocabulary=256)


def tiny_moe(experts: int = 4) -> Any:
    return moe_layer(hidden=64, intermediate=64, experts=experts)


def step(model: Any, number: int = 0, sequences: int = 2, length: int = 16) -> float:
    """Forward and backward of a language model on the tokens of a step; the loss. Gradients are those of this step."""
    model.zero_grad(set_to_none=True)
    ids: Tensor = token_ids(model.config.vocab_size, sequences, length, number).to(model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients there are, by parameter."""
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
