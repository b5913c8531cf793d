"""The head's log-probabilities without the logits, in plain PyTorch, as TRL's `ChunkedLogProbFunction` (Triton) has them.

Let `z_j = softcap(scale * (W_j . h + b_j)) / T` and `p = softmax(z)`. The forward folds tiles of z into a running
maximum and running sums of exp(z - maximum). It rescales them when the maximum moves (Milakov & Gimelshein 2018,
arXiv:1805.02867). There are three cases:

* Frozen head (LoRA): `d log p(y)/dh = gain * (s_y W_y - E_p[s W])`. Here `gain = scale / T`, and s is the softcap's
  slope (1 without one). The expectation is one more running sum, rescaled as in flash attention (Dao et al. 2022,
  arXiv:2205.14135). The backward scales its rows. This takes two projections; computing the logits again takes three.
* Trainable head whose tiles of `exp(z - maximum)` fit into `KEPT_BYTES`: the forward keeps them, in bf16 for bf16
  inputs. The backward scales rows of the hidden states and never writes dz. This takes three projections.
* Trainable head with more tiles, a softcap or a trained bias, or any head with an entropy gradient: the backward
  computes every tile again. Then `dz_j = g_logp * (1[j = y] - p_j) - g_entropy * p_j * (log p_j + entropy)`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# From 512 x 1024 up the time is that of the matrix products (measured on two cores, 2048 x 512 x 32000 in fp32), and
# larger tiles only cost memory: 8 MiB each in fp32, of which at most three live at once.
TOKEN_TILE = 1024
VOCAB_TILE = 2048
KEPT_BYTES = 256 * 2**20  # of tiles kept for the backward of a trainable head


@dataclass(frozen=True)
class _LogitScaling:
    """How a projection x becomes a logit: `softcap * tanh(scale * x / softcap) / T`, or `scale * x / T` without."""

    temperature: float
    softcap: float | None
    scale: float

    @property
    def gain(self) -> float:
        """dz/dx, up to the softcap's slope."""
        return self.scale / self.temperature

    def logits(self, hidden: Tensor, rows: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Fill `out` [n, v] with the logits of `hidden` [n, H] against `rows` [v, H] and `bias` [v]."""
        # The factor rides on the matrix product, which costs nothing; a pass over the tile would.
        factor = self.gain if self.softcap is None else self.scale / self.softcap
        if bias is None:
            out.addmm_(hidden, rows.t(), beta=0, alpha=factor)
        else:
            torch.addmm(bias, hidden, rows.t(), beta=factor, alpha=factor, out=out)
        return out if self.softcap is None else out.tanh_().mul_(self.softcap / self.temperature)

    def slope(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        """The softcap's slope 1 - tanh^2 at logits z, elementwise."""
        assert self.softcap is not None
        return torch.mul(z, self.temperature / self.softcap, out=out).square_().neg_().add_(1)


@dataclass
class _Sums:
    """Statistics of n tokens over the vocabulary seen so far, each [n] but `rows` [n, H]; None where not asked for."""

    maximum: Tensor  # of z
    exp: Tensor  # sum of e = exp(z - maximum)
    target: Tensor  # z of the target
    shifted: Tensor | None  # sum of e * (z - maximum): unlike e * z, it does not cancel when logits are large
    square: Tensor | None  # sum of e^2
    plain: Tensor | None  # sum of z
    best: Tensor | None  # column of the first maximum
    rows: Tensor | None  # sum of e * slope * W

    def of(self, tokens: slice) -> "_Sums":
        views: dict[str, Any] = {name: None if each is None else each[tokens] for name, each in vars(self).items()}
        return _Sums(**views)


def _no_sums(hidden: Tensor, outputs: tuple[str, ...], want_rows: bool) -> _Sums:
    zeros = hidden.new_zeros(len(hidden))
    return _Sums(
        # Not -inf, whose first rescale would multiply it by zero in `shifted`.
        maximum=torch.full_like(zeros, torch.finfo(zeros.dtype).min),
        exp=zeros.clone(),
        target=zeros.clone(),
        shifted=zeros.clone() if "entropy" in outputs else None,
        square=zeros.clone() if "log_sum_sq_probs" in outputs else None,
        plain=zeros.clone() if "mean_logits" in outputs else None,
        best=torch.full_like(zeros, -1, dtype=torch.long) if "is_top1" in outputs else None,
        rows=torch.zeros_like(hidden) if want_rows else None,
    )


class _Tiles:
    """The N x V rectangle cut into tiles, and the tile-sized buffers, each allocated once at its first use."""

    def __init__(self, hidden: Tensor, vocabulary: int, columns: int):
        self.tokens = _cut(len(hidden), TOKEN_TILE)
        self.columns = _cut(vocabulary, min(columns, VOCAB_TILE))
        self._like = hidden
        self._size = min(len(hidden), TOKEN_TILE) * min(vocabulary, columns, VOCAB_TILE)
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, tokens: slice, columns: slice) -> Tensor:
        """An uninitialised [tokens, columns] tensor; the next call with the same name overwrites it."""
        if name not in self._buffers:
            self._buffers[name] = self._like.new_empty(self._size)
        n, v = tokens.stop - tokens.start, columns.stop - columns.start
        return self._buffers[name][: n * v].view(n, v)


def _cut(total: int, width: int) -> list[slice]:
    return [slice(start, min(start + width, total)) for start in range(0, total, width)]


def _locate_targets(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(is the target in this tile, its column there or some column if not), both [n]; without waiting for a device."""
    local = targets - columns.start
    inside = (local >= 0) & (targets < columns.stop)
    return inside, local.clamp(0, columns.stop - columns.start - 1)


def _fold_tiles(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    law: _LogitScaling,
    tiles: _Tiles,
    all_sums: _Sums,
    keep: torch.dtype | None,
) -> list[Tensor]:
    """Fold every tile into the sums; `hidden` has the accumulation dtype, to which `weight` and `bias` are cast.

    With `keep`, returns exp(z - maximum) [n, v] in that dtype and its maximum [n], in turn.
    """
    kept: list[Tensor] = []
    # Vocabulary outside: a bf16 weight is then cast once, not once per token tile.
    for columns in tiles.columns:
        rows = weight[columns].to(hidden.dtype)
        some_bias = None if bias is None else bias[columns].to(hidden.dtype)
        for tokens in tiles.tokens:
            sums = all_sums.of(tokens)
            z = law.logits(hidden[tokens], rows, some_bias, out=tiles.buffer("logits", tokens, columns))
            inside, local = _locate_targets(targets[tokens], columns)
            sums.target.copy_(torch.where(inside, z.gather(1, local.unsqueeze(1)).squeeze(1), sums.target))
            if sums.plain is not None:
                sums.plain.add_(z.sum(1))
            if sums.best is None:
                highest = z.amax(1)
            else:
                highest, where = z.max(1)
                # Strictly above: among equal maxima the first counts, as in argmax.
                sums.best.copy_(torch.where(highest > sums.maximum, where + columns.start, sums.best))

            capped = sums.rows is not None and law.softcap is not None
            slope = law.slope(z, out=tiles.buffer("slope", tokens, columns)) if capped else None

            maximum = torch.maximum(sums.maximum, highest)
            moved = sums.maximum - maximum
            rescale = moved.exp()
            below = z.sub_(maximum.unsqueeze(1))
            if sums.shifted is None:
                e = below.exp_()
            else:
                e = torch.exp(below, out=tiles.buffer("exp", tokens, columns))
                # Each earlier term e * (z - old) becomes e * rescale * (z - old + old - new).
                sums.shifted.addcmul_(sums.exp, moved).mul_(rescale).add_(below.mul_(e).sum(1))
            sums.exp.mul_(rescale).add_(e.sum(1))
            if sums.square is not None:
                sums.square.mul_(rescale.square()).add_(torch.linalg.vector_norm(e, dim=1).square())
            if sums.rows is not None:
                if slope is not None:
                    e.mul_(slope)
                sums.rows.mul_(rescale.unsqueeze(1)).addmm_(e, rows)
            sums.maximum.copy_(maximum)
            if keep is not None:
                kept += [e.to(keep, copy=True), maximum]
    return kept


def _logp_gradient(sums: _Sums, weight: Tensor, targets: Tensor, law: _LogitScaling, tiles: _Tiles) -> Tensor:
    """d log p(y)/dh [N, H], made in place of `sums.rows`."""
    assert sums.rows is not None
    gradient = sums.rows.div_(sums.exp.unsqueeze(1)).neg_()
    for tokens in tiles.tokens:
        chosen = weight[targets[tokens]].to(gradient.dtype)
        if law.softcap is not None:
            chosen.mul_(law.slope(sums.target[tokens]).unsqueeze(1))
        gradient[tokens].add_(chosen)
    return gradient.mul_(law.gain)


def _backward_of_kept(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    log_z: Tensor,
    kept: tuple[Tensor, ...],
    grad_logp: Tensor,
    law: _LogitScaling,
    tiles: _Tiles,
    need_hidden: bool,
) -> tuple[Tensor | None, Tensor]:
    """Gradients of (hidden, weight) from the tiles that `_fold_tiles` kept; products in their dtype, sums in `hidden`'s."""
    upstream = grad_logp.unsqueeze(1) * law.gain
    grad_hidden = weight[targets].to(hidden.dtype).mul_(upstream) if need_hidden else None
    at_target = hidden * upstream
    grad_weight = torch.empty_like(weight)
    pairs = zip(kept[::2], kept[1::2], strict=True)
    for columns in tiles.columns:
        rows = weight[columns].to(kept[0].dtype)
        sum_weight = torch.zeros_like(rows, dtype=hidden.dtype)
        for tokens in tiles.tokens:
            e, maximum = next(pairs)
            # p = e * exp(maximum - log Z): a factor per token, so no pass over the tile.
            factor = upstream[tokens] * (maximum - log_z[tokens]).exp_().unsqueeze(1)
            if grad_hidden is not None:
                grad_hidden[tokens].addcmul_(_product(e, rows), factor, value=-1)
            sum_weight.sub_(_product(e.t(), (hidden[tokens] * factor).to(e.dtype)))
        inside, local = _locate_targets(targets, columns)
        sum_weight.index_add_(0, local[inside], at_target[inside])
        grad_weight[columns] = sum_weight
    return grad_hidden, grad_weight


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, into `out`, which autocast leaves alone."""
    return torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))


def _recompute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor | None,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    law: _LogitScaling,
    tiles: _Tiles,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of (hidden, weight, bias), each summed in `hidden`'s dtype and None where `needs` says so."""
    grad_hidden = torch.zeros_like(hidden) if needs[0] else None
    grad_weight = torch.empty_like(weight) if needs[1] else None
    grad_bias = torch.empty_like(bias) if needs[2] and bias is not None else None
    for columns in tiles.columns:
        rows = weight[columns].to(hidden.dtype)
        some_bias = None if bias is None else bias[columns].to(hidden.dtype)
        # Vocabulary outside: these rows' gradient is complete, and rounded once, after the inner loop.
        sum_weight = torch.zeros_like(rows) if grad_weight is not None else None
        sum_bias = rows.new_zeros(len(rows)) if grad_bias is not None else None
        for tokens in tiles.tokens:
            z = law.logits(hidden[tokens], rows, some_bias, out=tiles.buffer("logits", tokens, columns))
            capped = law.softcap is not None
            slope = law.slope(z, out=tiles.buffer("slope", tokens, columns)) if capped else None
            log_p = z.sub_(log_z[tokens].unsqueeze(1))
            if grad_entropy is None:
                dz = log_p.exp_()
            else:
                assert entropy is not None
                dz = torch.exp(log_p, out=tiles.buffer("exp", tokens, columns))
                log_p.add_(entropy[tokens].unsqueeze(1)).mul_(grad_entropy[tokens].unsqueeze(1))
            # dz = p so far; times -(g_logp + g_entropy * (log p + entropy)), then g_logp at the target.
            inside, local = _locate_targets(targets[tokens], columns)
            upstream = grad_logp[tokens]
            dz.mul_(-upstream.unsqueeze(1) if grad_entropy is None else log_p.add_(upstream.unsqueeze(1)).neg_())
            dz.scatter_add_(1, local.unsqueeze(1), torch.where(inside, upstream, 0).unsqueeze(1))
            if slope is not None:
                dz.mul_(slope)
            if grad_hidden is not None:
                grad_hidden[tokens].addmm_(dz, rows, alpha=law.gain)
            if sum_weight is not None:
                sum_weight.addmm_(dz.t(), hidden[tokens], alpha=law.gain)
            if sum_bias is not None:
                sum_bias.add_(dz.sum(0), alpha=law.gain)
        if grad_weight is not None and sum_weight is not None:
            grad_weight[columns] = sum_weight
        if grad_bias is not None and sum_bias is not None:
            grad_bias[columns] = sum_bias
    return grad_hidden, grad_weight, grad_bias


class FusedLogProbFunction:
    """`trl.kernels.ChunkedLogProbFunction` (TRL 1.15) by signature and values. Gradients have the inputs' dtype.

    Sums are in fp32 (fp64 for fp64 inputs), also under autocast, which does not cast in-place products or products into
    `out`. torch.compile breaks the graph before a call and does not compile the call.
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
        """(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N]; None where not in `outputs`.

        `hidden` is [N, H], `weight` [V, H], `bias` [V] or None, and `targets` [N] in [0, V). log_probs and entropy are
        in nats and differentiable. The others are not: `log_sum_sq_probs = log sum_j p_j^2`, `mean_logits = mean_j z_j`
        and is_top1, whether the target is the first argmax. `chunk_size` is the largest number of columns of a tile.
        Raises ValueError for a target outside the vocabulary, so filter -100 first, as TRL does.
        """
        if bool(((targets < 0) | (targets >= len(weight))).any()):
            low, high = int(targets.min()), int(targets.max())
            raise ValueError(f"targets lie in [{low}, {high}], outside the vocabulary of {len(weight)}")
        if not torch.is_grad_enabled():
            # needs_input_grad only repeats requires_grad: under no_grad the frozen path would sum rows for no backward.
            hidden, weight = hidden.detach(), weight.detach()
            bias = None if bias is None else bias.detach()
        law = _LogitScaling(temperature, final_logit_softcapping, logit_scale)
        return _HeadFunction.apply(hidden, weight, bias, targets, law, chunk_size, outputs)


class _HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        law: _LogitScaling,
        chunk_size: int,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        # An entropy that is only logged then arrives in the backward as None, not as zeros to multiply with.
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[:3]
        frozen = needs == (True, False, False)
        wide = hidden.to(torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32))
        tiles = _Tiles(wide, len(weight), chunk_size)
        sums = _no_sums(wide, outputs, want_rows=frozen)
        keep = _kept_dtype(hidden, weight, wide.dtype) if needs[1] and not needs[2] and law.softcap is None else None
        kept = _fold_tiles(wide, weight, bias, targets, law, tiles, sums, keep)

        log_sum = sums.exp.log()
        # Not target - (maximum + log_sum): at a maximum of 1e4 the sum in the brackets has lost three digits.
        log_probs = (sums.target - sums.maximum) - log_sum
        entropy = None if sums.shifted is None else log_sum - sums.shifted / sums.exp
        log_sum_sq_probs = None if sums.square is None else sums.square.log() - 2 * log_sum
        mean_logits = None if sums.plain is None else sums.plain / len(weight)
        is_top1 = None if sums.best is None else sums.best == targets

        gradient = _logp_gradient(sums, weight, targets, law, tiles) if frozen else None
        ctx.save_for_backward(hidden, weight, bias, targets, sums.maximum + log_sum, entropy, gradient, *kept)
        ctx.law = law
        ctx.chunk_size = chunk_size
        ctx.mark_non_differentiable(*(each for each in (log_sum_sq_probs, mean_logits, is_top1) if each is not None))
        return log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_z, entropy, gradient, *kept = ctx.saved_tensors
        unused = (None,) * 4
        if grad_logp is None and grad_entropy is None:
            return (None, None, None, *unused)
        # An entropy bonus whose coefficient is 0 (TRL's adaptive one, at rest) sends zeros: not worth two projections.
        if grad_logp is None:
            grad_logp = torch.zeros_like(log_z)
        elif grad_entropy is not None and not grad_entropy.any():
            grad_entropy = None
        if gradient is not None and grad_entropy is None:
            # Not in place: the graph may be retained for another backward.
            return ((gradient * grad_logp.unsqueeze(1)).to(hidden.dtype), None, None, *unused)
        wide = hidden.to(log_z.dtype)
        tiles = _Tiles(wide, len(weight), ctx.chunk_size)
        needs = ctx.needs_input_grad[:3]
        if kept and grad_entropy is None:
            grad_hidden, grad_weight = _backward_of_kept(
                wide, weight, targets, log_z, kept, grad_logp, ctx.law, tiles, needs[0]
            )
            return (None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, *unused)
        grads = _recompute(wide, weight, bias, targets, log_z, entropy, grad_logp, grad_entropy, ctx.law, tiles, needs)
        return (None if grads[0] is None else grads[0].to(hidden.dtype), *grads[1:], *unused)


def _kept_dtype(hidden: Tensor, weight: Tensor, sums: torch.dtype) -> torch.dtype | None:
    """The dtype in which tiles are kept for the backward; None where they take more than `KEPT_BYTES`."""
    both = hidden.dtype == weight.dtype == torch.bfloat16
    # Without such instructions a CPU multiplies bf16 many times slower than fp32.
    native = hidden.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.bfloat16 if both and native else sums
    return dtype if len(hidden) * len(weight) * dtype.itemsize <= KEPT_BYTES else None
