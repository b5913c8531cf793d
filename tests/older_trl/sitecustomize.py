"""For `make test-stable`: the head of TRL 1.15, a Triton kernel that needs a GPU, by dense logits in every process.

It is on PYTHONPATH there, so that processes which tests start have it as well.
"""

import sys
from types import ModuleType
from typing import Any


class ChunkedLogProbFunction:
    """`trl.kernels.ChunkedLogProbFunction` by signature and values. hidden: [N, H], weight: [V, H], targets: [N]."""

    @staticmethod
    def apply(
        hidden: Any,
        weight: Any,
        bias: Any,
        targets: Any,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> tuple[Any, ...]:
        import torch

        with torch.autocast(hidden.device.type, enabled=False):
            logits = torch.nn.functional.linear(hidden.float(), weight.float(), bias if bias is None else bias.float())
        logits = logits * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        log_p = logits.log_softmax(-1)
        log_probs = log_p.gather(-1, targets[:, None]).squeeze(-1)
        values = {
            "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
            "log_sum_sq_probs": lambda: (2 * log_p.detach()).logsumexp(-1),
            "mean_logits": lambda: logits.detach().mean(-1),
            "is_top1": lambda: logits.argmax(-1) == targets,
        }
        return log_probs, *(compute() if name in outputs else None for name, compute in values.items())


kernels: Any = ModuleType("trl.kernels")
kernels.ChunkedLogProbFunction = ChunkedLogProbFunction
kernels.selective_log_softmax_and_entropy = None  # TRL computes these values in torch then
sys.modules["trl.kernels"] = kernels
