"""Small 4-bit models with random weights, always from the same seed, for the compile tests.

The layers are bitsandbytes' own, quantized to nf4 with double quantization. Every width is a multiple of 64, as
bitsandbytes 0.50.2 quantizes other rows wrongly on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn

# gpt-oss: the sigmoid's slope and where gate and up are clamped.
ALPHA, LIMIT = 1.702, 7.0


def quantized(linear: nn.Linear) -> Linear4bit:
    """The same layer in 4 bits, on the same device; its bias and what it computes keep the linear's dtype."""
    if linear.in_features % 64:
        raise ValueError(f"{linear.in_features} columns: only multiples of 64 are quantized rightly on a CPU")
    sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
    layer = Linear4bit(*sizes, bias=bias, compute_dtype=linear.weight.dtype, quant_type="nf4")
    layer.load_state_dict(linear.state_dict())
    return layer.to(linear.weight.dtype).to(linear.weight.device)


def quantize(model: nn.Module) -> nn.Module:
    """Every linear layer of the model but its head in 4 bits, in place, as `BitsAndBytesConfig(load_in_4bit=True)` has it."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        if name.rpartition(".")[2] != "lm_head" and not isinstance(linear, Linear4bit):
            model.set_submodule(name, quantized(linear))
    return model.requires_grad_(False)


class LoopedExperts(nn.Module):
    """Experts of gpt-oss as two lists of 4-bit linears, which is how its bitsandbytes checkpoints store them, in place of
    `GptOssExperts` and called like it.

    transformers keeps all experts in one tensor, which bitsandbytes does not quantize. Every expert runs on the rows that
    the router sent it, none of them included.
    """

    def __init__(self, hidden: int, intermediate: int, experts: int) -> None:
        super().__init__()
        self.gate_up_projs = nn.ModuleList(quantized(nn.Linear(hidden, 2 * intermediate)) for _ in range(experts))
        self.down_projs = nn.ModuleList(quantized(nn.Linear(intermediate, hidden)) for _ in range(experts))
        self.requires_grad_(False)

    def forward(
        self, hidden_states: Tensor, router_indices: Tensor | None = None, routing_weights: Tensor | None = None
    ) -> Tensor:
        """hidden_states (tokens, hidden); router_indices and routing_weights (tokens, experts of a token)."""
        assert router_indices is not None
        assert routing_weights is not None
        result = torch.zeros_like(hidden_states)
        for expert, (gate_up_proj, down_proj) in enumerate(zip(self.gate_up_projs, self.down_projs, strict=True)):
            tokens, places = torch.where(router_indices == expert)
            gate_up = gate_up_proj(hidden_states[tokens])
            gate, up = gate_up[..., ::2].clamp(max=LIMIT), gate_up[..., 1::2].clamp(-LIMIT, LIMIT)
            rows = down_proj((up + 1) * gate * torch.sigmoid(ALPHA * gate))
            result = result.index_add(0, tokens, rows * routing_weights[tokens, places, None])
        return result


def straight_line(width: int = 128, layers: int = 4) -> nn.Sequential:
    """4-bit linears one after the other."""
    torch.manual_seed(0)
    return nn.Sequential(*(quantized(nn.Linear(width, width)) for _ in range(layers))).requires_grad_(False)


def moe_layer(hidden: int = 512, intermediate: int = 512, experts: int = 8) -> Any:
    """gpt-oss's MLP (router and experts, two for each token) in 4 bits; the router is trained, and never chooses the last."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=hidden, intermediate_size=64, num_local_experts=experts, num_experts_per_tok=min(2, experts - 1)
    )
    layer: Any = GptOssMLP(config)  # type: ignore[no-untyped-call]
    layer.experts = LoopedExperts(hidden, intermediate, experts)
    nn.init.normal_(layer.router.weight, std=hidden**-0.5)
    starve_the_last_expert(layer.router)
    return layer


def starve_the_last_expert(router: Any) -> None:
    """Zero rows in every step, whatever the tokens."""
    with torch.no_grad():
        router.bias[-1] = -1e4


def llama(hidden: int = 512, layers: int = 4, vocabulary: int = 1024) -> Any:
    """A 4-bit Llama with LoRA on all linear layers and non-reentrant gradient checkpointing, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), max_position_embeddings=2048,
        use_cache=False,
    )  # fmt: skip
    return with_lora(quantize(LlamaForCausalLM(config)))


def gpt_oss(hidden: int = 64, layers: int = 2, vocabulary: int = 256, experts: int = 6) -> Any:
    """A tiny gpt-oss with 4-bit attention and 4-bit looped experts, LoRA on all of them, otherwise as `llama`."""
    return with_lora(gpt_oss_base(hidden, layers, vocabulary, experts))


def gpt_oss_base(hidden: int = 64, layers: int = 2, vocabulary: int = 256, experts: int = 6) -> Any:
    """`gpt_oss` without the adapter. The router, which stays in float32, never chooses the last expert of a layer."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=hidden // 2, num_local_experts=experts,
        num_experts_per_tok=min(2, experts - 1), sliding_window=16, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, use_cache=False,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.experts = LoopedExperts(hidden, hidden, experts)
        nn.init.normal_(layer.mlp.router.weight, std=hidden**-0.5)
        starve_the_last_expert(layer.mlp.router)
    return quantize(model)


def with_lora(model: Any, rank: int = 8) -> Any:
    """PEFT's adapter with no factor at zero, so that each of them has a gradient from the first step; checkpointing on."""
    from peft import LoraConfig, get_peft_model

    model.is_loaded_in_4bit = True  # what a quantizer says when it has loaded a model; PEFT's 4-bit layers go by it
    model.gradient_checkpointing_enable({"use_reentrant": False})
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted.train()


def token_ids(vocabulary: int, sequences: int, length: int, step: int) -> Tensor:
    """Tokens of a step, (sequences, length)."""
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(1000 + step))


def hidden_rows(hidden: int, tokens: int, step: int) -> Tensor:
    """What reaches an MLP in a step, (1, tokens, hidden), with a gradient to take."""
    rows = torch.randn(1, tokens, hidden, generator=torch.Generator().manual_seed(2000 + step))
    return rows.requires_grad_()


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
