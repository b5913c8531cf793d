"""Floating-point operations of a token in training, and the share of the card's peak that they come to (MFU).

    FLOP per token = 4 N + 2 N_trained + 12 L d_attn T

N counts the weights that a token is multiplied with: all matrices, the LM head among them (tied or not), without the
embedding table, which is only looked up; of a mixture of experts the share of the experts that are routed to. Each
multiplies and adds once in the forward pass (2 N) and once more in the backward pass for the gradient of its input
(2 N); the gradient of the weights (2 N_trained) is only for those that are trained. So full fine-tuning is 6 N, and LoRA
on a frozen base 4 N plus 6 of the adapter's own. 12 L d_attn T is attention: scores and their product with the values are
2 d_attn T each in the forward pass, and twice that in the backward pass, for L layers, d_attn = heads x head_dim (not the
hidden size, from which it differs in Qwen3 and gpt-oss), and T tokens attended to; no half for causality, as in PaLM. T is
the mean length of the documents weighted by tokens, sum n^2 / sum n; a layer with a sliding window sees min(T, window).
A layer without attention (Mamba, linear attention) counts none.

Sources: Kaplan et al. 2020, arXiv:2001.08361, section 2.1 (2 N forward, 6 N in all); Chowdhery et al. 2022 (PaLM),
arXiv:2204.02311, appendix B (12 L H Q T, MFU); Hu et al. 2021, arXiv:2106.09685 (what is frozen has no gradient).

MFU counts what the model needs, HFU what the hardware does: gradient checkpointing makes the forward pass a second time
(2 N + 4 L d_attn T more), so that a perfect machine shows an MFU of 67 % with LoRA and 75 % without. Not counted, so that
both are lower bounds: norms, softmax and optimizer, dequantizing 4-bit weights, the reference model's forward pass of DPO
and GRPO. TRL's chunked losses multiply the LM head only with tokens that are learned: there both are an upper bound in
the head's share.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from cogumi.stack.cards import card_of

NOT_MULTIPLIED = ("original_module", "lora_embedding_A", "lora_embedding_B")  # PEFT's: replaced by a copy, looked up
EXPERTS_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Work:
    """What a token costs: `weights` and `trained` are N and N_trained, `attention` the windows of the layers that attend.

    attention: for each such layer d_attn and its window, math.inf where it sees everything.
    """

    weights: float
    trained: float
    attention: tuple[tuple[float, float], ...]

    def forward(self, context: float) -> float:
        """FLOP of a token's forward pass among `context` tokens."""
        return 2 * self.weights + sum(4 * width * min(context, window) for width, window in self.attention)

    def model(self, context: float) -> float:
        """FLOP of a token in training, forward and backward, as the formula above has it."""
        attending = sum(12 * width * min(context, window) for width, window in self.attention)
        return 4 * self.weights + 2 * self.trained + attending

    def hardware(self, context: float, recomputed: bool) -> float:
        """The same with the forward pass that gradient checkpointing repeats."""
        return self.model(context) + (self.forward(context) if recomputed else 0.0)


def work_of(model: nn.Module) -> Work:
    """What a token of a loaded model costs in training, adapters included.

    Raises ValueError, naming it, for what it cannot count: an expert layer whose routing the configuration does not
    give, weights stored in a form whose number of elements is not that of the matrix.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no config")
    config = config.get_text_config()
    weights = trained = 0.0
    for elements, learned, share in matrices(model, config):
        weights += elements * share
        trained += elements * share * learned
    return Work(weights, trained, attention_of(config))


def matrices(model: nn.Module, config: Any) -> Iterator[tuple[float, bool, float]]:
    """(elements, trained or not, share of the tokens that meet it) of every matrix. A tied head counts once, as the head."""
    counted = set()
    for name, module in model.named_modules():
        parts = name.split(".")
        if isinstance(module, nn.Embedding) or any(each in parts for each in NOT_MULTIPLIED):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or leaf.endswith("bias") or id(parameter) in counted:
                continue
            counted.add(id(parameter))
            share = routed_share(config, name) if "experts" in parts else 1.0
            yield elements_of(module, f"{name}.{leaf}", parameter), parameter.requires_grad, share


def elements_of(module: nn.Module, name: str, parameter: nn.Parameter) -> float:
    """The elements of the matrix that a parameter stands for; a 4-bit one is stored packed, two to a byte."""
    if isinstance(module, nn.Linear):
        return float(module.in_features * module.out_features)
    if not parameter.is_floating_point():
        raise ValueError(f"{name} is stored as {parameter.dtype}, and its elements are not those of the matrix")
    return float(parameter.numel())


def routed_share(config: Any, name: str) -> float:
    routed = next((getattr(config, key) for key in EXPERTS_ROUTED if getattr(config, key, None)), None)
    among = next((getattr(config, key) for key in EXPERTS if getattr(config, key, None)), None)
    if not isinstance(routed, int) or not isinstance(among, int):
        raise ValueError(f"{name} is a mixture of experts, and its config does not say how many of them a token meets")
    return routed / among


def attention_of(config: Any) -> tuple[tuple[float, float], ...]:
    """(d_attn, window) of every layer that attends."""
    window, kinds = getattr(config, "sliding_window", None) or math.inf, getattr(config, "layer_types", None)
    if kinds is None:  # one kind for all layers: a window where the config has one that is in use
        slides = getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    windows = {"full_attention": math.inf, "sliding_attention": window, "chunked_attention": chunk_of(config)}
    attending = [windows[kind] for kind in kinds if kind in windows]
    return tuple((attention_width(config), limit) for limit in attending)


def chunk_of(config: Any) -> float:
    return float(getattr(config, "attention_chunk_size", None) or math.inf)


def attention_width(config: Any) -> float:
    """d_attn: heads x head_dim; with a latent cache (DeepSeek) keys and values differ, and it is the mean of both."""
    heads = config.num_attention_heads
    if getattr(config, "qk_head_dim", None) and getattr(config, "v_head_dim", None):
        return heads * (config.qk_head_dim + config.v_head_dim) / 2
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def peak_flops(card: str) -> float | None:
    """Dense bf16 FLOP/s of a card by torch's name of it; None for one that is not known, or that has no bf16."""
    known = card_of(card)
    return None if known is None else known.peak
