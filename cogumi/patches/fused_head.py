"""PyTorch replacement of TRL 1.15's head, which is a Triton kernel and needs a GPU.

TRL computes every SFT, DPO and GRPO loss by `_ChunkedLogProbFunction.apply`: log-probabilities of the targets without the
logits of all tokens. The head here has the same signature and values. It makes the logits of a few tokens at a time. If
the head is frozen (LoRA), the forward also computes d log p(y)/dh of each token, which the backward scales: two
projections. Otherwise the backward makes the logits again: four projections.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cogumi.patches import PatchStatus

NAME = "fused_head"
KERNEL = "_ChunkedLogProbFunction"  # of trl.trainer.utils
WRITTEN_FOR = "1.15"
OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Logits of a chunk: 12 MiB in fp32, twice with the entropy. With fewer tokens at a time the matrix products get slow.
CHUNK_ELEMENTS = 3 * 2**20
_NOT_REPLACED = object()
_replaced: Any = _NOT_REPLACED  # what stood in TRL before `apply`: TRL's class, or None where triton is not installed


@dataclass
class _Head:
    """The inputs in the dtype of the sums, and a buffer for the logits of a chunk, or two."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    scaling: tuple[float, float | None, float]  # temperature, softcap, scale
    keeps_logits: bool  # beside their exponentials

    def __post_init__(self) -> None:
        dtype = torch.promote_types(torch.promote_types(self.hidden.dtype, self.weight.dtype), torch.float32)
        self.hidden, self.weight = self.hidden.to(dtype), self.weight.to(dtype)
        self.temperature, self.softcap, self.scale = self.scaling
        self.gain = self.scale / self.temperature  # dz/d(projection), up to the softcap's slope
        self.chunks = chunks_of(len(self.hidden), len(self.weight))
        rows = max((chunk.stop - chunk.start for chunk in self.chunks), default=0)
        self.buffers = [self.hidden.new_empty(rows, len(self.weight)) for _ in range(1 + self.keeps_logits)]

    def logits(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        """Compute the logits [n, V] of a chunk of tokens, and the slope of their softcap, 1 - tanh^2."""
        logits = self.buffers[0][: chunk.stop - chunk.start]
        factor = self.gain if self.softcap is None else self.scale / self.softcap
        torch.mm(self.hidden[chunk] * factor, self.weight.t(), out=logits)
        if self.bias is not None:
            logits.add_(self.bias * factor)
        if self.softcap is None:
            return logits, None
        slope = logits.tanh_().square().neg_().add_(1)
        return logits.mul_(self.softcap / self.temperature), slope

    def exponentials(self, shifted: Tensor) -> Tensor:
        """Compute exp of logits less their maximum [n, V], in place unless they are kept."""
        return torch.exp(shifted, out=self.buffers[-1][: len(shifted)])


def chunks_of(tokens: int, vocabulary: int) -> list[slice]:
    """Cut the tokens into chunks with at most CHUNK_ELEMENTS logits."""
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class FusedLogProbFunction:
    """`trl.kernels.ChunkedLogProbFunction` (TRL 1.15) by signature and values. Gradients have the inputs' dtype.

    Sums are in fp32 (fp64 for fp64 inputs), also under autocast. torch.compile breaks the graph before a call and does
    not compile the call.
    """

    @staticmethod
    @torch.compiler.disable
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Compute (log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N]; None if not in `outputs`.

        log_probs and entropy are in nats and differentiable. The others are not: `log_sum_sq_probs = log sum_j p_j^2`,
        `mean_logits = mean_j z_j`, and `is_top1`, whether the target is the first argmax.

        Args:
            hidden: [N, H].
            weight: [V, H].
            bias: [V] or None.
            targets: [N], each in [0, V).
            temperature: Divides the logits.
            chunk_size: Columns of a tile of TRL's kernel; not used here.
            final_logit_softcapping: Softcap of the logits before the temperature.
            logit_scale: Factor of the logits before the softcap.
            outputs: Names of the outputs to compute; log_probs always is.

        Raises:
            ValueError: A target is outside the vocabulary, so filter -100 first, as TRL does.
        """
        if bool(((targets < 0) | (targets >= len(weight))).any()):
            low, high = int(targets.min()), int(targets.max())
            raise ValueError(f"targets lie in [{low}, {high}], outside the vocabulary of {len(weight)}")
        if not torch.is_grad_enabled():
            # needs_input_grad repeats requires_grad: under no_grad the frozen path would compute a gradient for nothing.
            hidden, weight = hidden.detach(), weight.detach()
            bias = None if bias is None else bias.detach()
        scaling = (temperature, final_logit_softcapping, logit_scale)
        return _HeadFunction.apply(hidden, weight, bias, targets, scaling, outputs)


class _HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scaling: tuple[float, float | None, float],
        names: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        # An entropy that is only logged then arrives in the backward as None, not as zeros to multiply with.
        ctx.set_materialize_grads(False)
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Head(hidden, weight, bias, scaling, keeps_logits="entropy" in names)
            per_token = head.hidden.new_empty(len(hidden))
            outputs = {name: torch.empty_like(per_token) if name in names else None for name in OPTIONAL_OUTPUTS}
            # d log p(y)/dh = gain * (slope_y W_y - E_p[slope W]), for each token.
            is_frozen = ctx.needs_input_grad[:3] == (True, False, False)
            gradient = torch.empty_like(head.hidden) if is_frozen else None
            for chunk in head.chunks:
                logits, slope = head.logits(chunk)
                column = targets[chunk].unsqueeze(1)
                if outputs["mean_logits"] is not None:
                    outputs["mean_logits"][chunk] = logits.mean(1)
                if outputs["is_top1"] is not None:
                    outputs["is_top1"][chunk] = (logits.argmax(1) == targets[chunk]).to(logits.dtype)
                # Less the maximum, so that large logits cost no digits.
                shifted = logits.sub_(logits.amax(1, keepdim=True))
                per_token[chunk] = shifted.gather(1, column).squeeze(1)
                e = head.exponentials(shifted)
                total = e.sum(1)
                per_token[chunk] -= total.log()
                if outputs["entropy"] is not None:
                    outputs["entropy"][chunk] = total.log() - shifted.mul_(e).sum(1) / total
                if outputs["log_sum_sq_probs"] is not None:
                    outputs["log_sum_sq_probs"][chunk] = 2 * (torch.linalg.vector_norm(e, dim=1).log() - total.log())
                if gradient is not None:
                    chosen = head.weight[targets[chunk]]
                    if slope is not None:
                        chosen *= slope.gather(1, column)
                        e.mul_(slope)
                    gradient[chunk] = (chosen - e @ head.weight / total.unsqueeze(1)) * head.gain
        if outputs["is_top1"] is not None:
            outputs["is_top1"] = outputs["is_top1"].bool()
        ctx.save_for_backward(hidden, weight, bias, targets, gradient, outputs["entropy"])
        ctx.scaling = scaling
        ctx.mark_non_differentiable(*(outputs[name] for name in OPTIONAL_OUTPUTS[1:] if outputs[name] is not None))
        return per_token, *outputs.values()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, gradient, entropy = ctx.saved_tensors
        unused = (None,) * 3
        if grad_log_probs is None and grad_entropy is None:
            return (None, None, None, *unused)
        # An entropy bonus whose coefficient is 0 (TRL's adaptive one, at rest) sends zeros: not worth a recomputation.
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(entropy)
        elif grad_entropy is not None and not grad_entropy.any():
            grad_entropy = None
        if gradient is not None and grad_entropy is None:
            # Not in place: the graph may be retained for another backward.
            return ((gradient * grad_log_probs.unsqueeze(1)).to(hidden.dtype), None, None, *unused)
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Head(hidden, weight, bias, ctx.scaling, keeps_logits=grad_entropy is not None)
            inputs = (head.hidden, head.weight, bias)
            grads = [
                torch.zeros_like(tensor, dtype=head.hidden.dtype) if needed else None
                for tensor, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True)
            ]
            for chunk in head.chunks:
                logits, slope = head.logits(chunk)
                upstream = grad_log_probs[chunk].unsqueeze(1)
                shifted = logits.sub_(logits.amax(1, keepdim=True))
                # dz = grad_log_probs * (1[target] - p) - grad_entropy * p * (log p + entropy)
                dz = head.exponentials(shifted)
                total = dz.sum(1, keepdim=True)
                if grad_entropy is None:
                    dz.mul_(-upstream / total)
                else:
                    log_p = shifted.sub_(total.log())
                    log_p.add_(entropy[chunk].unsqueeze(1)).mul_(grad_entropy[chunk].unsqueeze(1)).add_(upstream)
                    dz.mul_(log_p).div_(-total)
                dz.scatter_add_(1, targets[chunk].unsqueeze(1), upstream)
                if slope is not None:
                    dz.mul_(slope)
                if grads[0] is not None:
                    grads[0][chunk] = dz @ head.weight * head.gain
                if grads[1] is not None:
                    grads[1].addmm_(dz.t(), head.hidden[chunk], alpha=head.gain)
                if grads[2] is not None:
                    grads[2].add_(dz.sum(0), alpha=head.gain)
        originals = (hidden, weight, bias)
        return (*(None if g is None else g.to(t.dtype) for g, t in zip(grads, originals, strict=True)), *unused)


def apply() -> PatchStatus:
    """Replace TRL's kernel where no GPU runs it. Raises RuntimeError for another TRL or another kernel."""
    global _replaced
    if _replaced is not _NOT_REPLACED:
        return status()
    device = triton_device()
    if device is not None:
        return PatchStatus(NAME, False, f"TRL's Triton kernel runs on this {device} device")
    upstream: Any = importlib.import_module("trl.trainer.utils")
    present = upstream._ChunkedLogProbFunction
    if is_unsloth_kernel(present):
        return status()
    if not version("trl").startswith(WRITTEN_FOR + "."):  # tests/test_fused_head.py compares kernel and call
        raise RuntimeError(f"{NAME} is written for trl {WRITTEN_FOR}.x and this is trl {version('trl')}")
    if present is not None and present.__module__ != "trl.kernels.chunked_logprob":
        raise RuntimeError(f"{NAME}: TRL's head kernel is already replaced by {_name(present)}; undo that first")
    _replaced = present
    upstream._ChunkedLogProbFunction = FusedLogProbFunction
    return status()


def undo() -> PatchStatus:
    """Put back what `apply` found. Raises RuntimeError when another package has replaced the kernel since."""
    global _replaced
    if _replaced is _NOT_REPLACED:
        return status()
    upstream: Any = importlib.import_module("trl.trainer.utils")
    present = upstream._ChunkedLogProbFunction
    if present is not FusedLogProbFunction:
        raise RuntimeError(f"{NAME}: TRL's head kernel was since replaced by {_name(present)}; undo that first")
    upstream._ChunkedLogProbFunction = _replaced
    _replaced = _NOT_REPLACED
    return status()


def status() -> PatchStatus:
    """Return whether TRL's losses go through `FusedLogProbFunction` now, and why."""
    upstream: Any = sys.modules.get("trl.trainer.utils")
    if upstream is not None and is_unsloth_kernel(upstream._ChunkedLogProbFunction):
        return PatchStatus(NAME, False, "unsloth has put a head of its own in this place")
    if _replaced is _NOT_REPLACED:
        return PatchStatus(NAME, False, "not applied: TRL's losses need a GPU that runs Triton")
    present = upstream._ChunkedLogProbFunction
    if present is not FusedLogProbFunction:
        return PatchStatus(NAME, False, f"applied, and since replaced by {_name(present)}")
    why = f"no GPU that runs Triton (trl {version('trl')}, written for {WRITTEN_FOR})"
    return PatchStatus(NAME, True, f"TRL's losses use a PyTorch head: {why}")


def is_unsloth_kernel(kernel: Any) -> bool:
    """Return whether unsloth, which runs with and without a GPU, has replaced TRL's kernel already."""
    return kernel is not None and kernel.__module__.partition(".")[0] in ("unsloth", "unsloth_zoo")


def triton_device() -> str | None:
    """Return the kind of device TRL's Triton kernel would run on; None where triton or such a device is missing."""
    if importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.is_available():
        return "CUDA" if torch.version.hip is None else "ROCm"
    return "XPU" if torch.xpu.is_available() else None


def _name(kernel: Any) -> str:
    return "None" if kernel is None else f"{kernel.__module__}.{kernel.__qualname__}"
