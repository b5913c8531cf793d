"""A PyTorch head in the place of TRL 1.15's, which is a Triton kernel and needs a GPU.

TRL computes every SFT, DPO and GRPO loss by `_ChunkedLogProbFunction.apply`: log-probabilities of the targets without the
logits of all tokens. The head here has the same signature and values. It makes the logits of a few tokens at a time. If
the head is frozen (LoRA), the forward also computes d log p(y)/dh of each token, which the backward scales. Otherwise the
backward makes the logits again.
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
from torch.nn import functional

from cogumi.patches import PatchStatus

NAME = "fused_head"
KERNEL = "_ChunkedLogProbFunction"  # of trl.trainer.utils
WRITTEN_FOR = "1.15"
OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Logits that exist at a time, 4 MiB in fp32. About five tensors of this size live at once.
CHUNK_ELEMENTS = 2**20
_NOT_REPLACED = object()
_replaced: Any = _NOT_REPLACED  # what stood in TRL before `apply`: TRL's class, or None where triton is not installed


@dataclass(frozen=True)
class _Head:
    """The weights, in the dtype of the sums, and how a projection becomes logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]
    temperature: float
    softcap: float | None
    scale: float

    @property
    def factor(self) -> float:
        return self.scale / (self.temperature if self.softcap is None else self.softcap)

    def project(self, hidden: Tensor) -> Tensor:
        """The scaled projection [n, V], a leaf of the graph that `log_softmax` begins."""
        bias = None if self.bias is None else self.bias * self.factor
        return functional.linear(hidden * self.factor, self.weight, bias).requires_grad_()

    def logits(self, projection: Tensor) -> Tensor:
        return projection if self.softcap is None else projection.tanh() * (self.softcap / self.temperature)

    def chosen(self, log_probs: Tensor, tokens: slice) -> Tensor:
        """The targets' entries [n] of all log-probabilities [n, V]."""
        return log_probs.gather(1, self.targets[tokens].unsqueeze(1)).squeeze(1)


def chunks_of(tokens: int, vocabulary: int) -> list[slice]:
    """The tokens in chunks with at most CHUNK_ELEMENTS logits."""
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def entropy_of(log_probs: Tensor) -> Tensor:
    return -torch.linalg.vecdot(log_probs.exp(), log_probs)


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
        outputs: tuple[str, ...],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        # An entropy that is only logged then arrives in the backward as None, not as zeros to multiply with.
        ctx.set_materialize_grads(False)
        is_frozen = ctx.needs_input_grad[:3] == (True, False, False)
        wide, head = _widen(hidden, weight, bias, targets, scaling)
        log_probs = wide.new_empty(len(wide))
        extra = {name: torch.empty_like(log_probs) if name in outputs else None for name in OPTIONAL_OUTPUTS}
        if extra["is_top1"] is not None:
            extra["is_top1"] = torch.empty_like(targets, dtype=torch.bool)
        gradient = torch.empty_like(wide) if is_frozen else None
        with torch.autocast(hidden.device.type, enabled=False):
            for tokens in chunks_of(len(wide), len(weight)):
                projection = head.project(wide[tokens])
                with torch.set_grad_enabled(is_frozen):
                    logits = head.logits(projection)
                    every = logits.log_softmax(-1)
                    chosen = head.chosen(every, tokens)
                log_probs[tokens] = chosen.detach()
                if gradient is not None:
                    (slope,) = torch.autograd.grad(chosen, projection, torch.ones_like(chosen))
                    torch.mm(slope, head.weight, out=gradient[tokens]).mul_(head.factor)
                    del slope
                if (entropy := extra["entropy"]) is not None:
                    entropy[tokens] = entropy_of(every)
                if (log_sum_sq := extra["log_sum_sq_probs"]) is not None:
                    log_sum_sq[tokens] = (2 * every).logsumexp(-1)
                if (mean := extra["mean_logits"]) is not None:
                    mean[tokens] = logits.mean(-1)
                if (is_top1 := extra["is_top1"]) is not None:
                    is_top1[tokens] = logits.argmax(-1) == targets[tokens]
        ctx.save_for_backward(hidden, weight, bias, targets, gradient)
        ctx.scaling = scaling
        plain = [extra[name] for name in OPTIONAL_OUTPUTS[1:]]
        ctx.mark_non_differentiable(*(output for output in plain if output is not None))
        return log_probs, *extra.values()  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, gradient = ctx.saved_tensors
        unused = (None,) * 3
        # An entropy bonus whose coefficient is 0 (TRL's adaptive one, at rest) sends zeros: not worth a recomputation.
        if grad_log_probs is not None and grad_entropy is not None and not grad_entropy.any():
            grad_entropy = None
        if grad_log_probs is None and grad_entropy is None:
            return (None, None, None, *unused)
        if gradient is not None and grad_entropy is None:
            # Not in place: the graph may be retained for another backward.
            return ((gradient * grad_log_probs.unsqueeze(1)).to(hidden.dtype), None, None, *unused)
        wide, head = _widen(hidden, weight, bias, targets, ctx.scaling)
        needs = ctx.needs_input_grad[:3]
        grads = [torch.zeros_like(t) if n else None for t, n in zip((wide, head.weight, head.bias), needs, strict=True)]
        with torch.autocast(hidden.device.type, enabled=False):
            for tokens in chunks_of(len(wide), len(weight)):
                projection = head.project(wide[tokens])
                with torch.enable_grad():
                    every = head.logits(projection).log_softmax(-1)
                    terms = [] if grad_log_probs is None else [grad_log_probs[tokens] * head.chosen(every, tokens)]
                    if grad_entropy is not None:
                        terms.append(grad_entropy[tokens] * entropy_of(every))
                    total = torch.stack(terms).sum()
                (slope,) = torch.autograd.grad(total, projection)
                if grads[0] is not None:
                    grads[0][tokens].addmm_(slope, head.weight, alpha=head.factor)
                if grads[1] is not None:
                    grads[1].addmm_(slope.t(), wide[tokens], alpha=head.factor)
                if grads[2] is not None:
                    grads[2].add_(slope.sum(0), alpha=head.factor)
        inputs = (hidden, weight, bias)
        return (*(None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)), *unused)


def _widen(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scaling: Any) -> tuple[Tensor, _Head]:
    """The hidden states and the head in the dtype of the sums."""
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    head = _Head(weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype), targets, *scaling)
    return hidden.detach().to(dtype), head


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
    check_upstream()
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
    """Whether TRL's losses go through `FusedLogProbFunction` now, and why."""
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
    """Whether unsloth, which runs with and without a GPU, has replaced TRL's kernel already."""
    return kernel is not None and kernel.__module__.partition(".")[0] in ("unsloth", "unsloth_zoo")


def triton_device() -> str | None:
    """The kind of device TRL's Triton kernel would run on; None where triton or such a device is missing."""
    if importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.is_available():
        return "CUDA" if torch.version.hip is None else "ROCm"
    return "XPU" if torch.xpu.is_available() else None


def check_upstream() -> None:
    """Raise RuntimeError unless TRL is the release whose kernel and call this has, as tests/test_fused_head.py checks."""
    if not version("trl").startswith(WRITTEN_FOR + "."):
        raise RuntimeError(f"{NAME} is written for trl {WRITTEN_FOR}.x and this is trl {version('trl')}")


def _name(kernel: Any) -> str:
    return "None" if kernel is None else f"{kernel.__module__}.{kernel.__qualname__}"
