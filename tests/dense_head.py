"""TRL's head (trl/kernels/chunked_logprob.py) by dense logits, in float64 where the model is: TRL's own computes in float32."""

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

        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = torch.nn.functional.linear(
                hidden.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
            )
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
