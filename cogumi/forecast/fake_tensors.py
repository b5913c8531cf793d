"""Counts on a CPU what a step of PyTorch code holds in a card's memory, with fake tensors, by kind and stage.

Fake tensors have shapes and no memory. Real ones are counted as well. Each storage counts once, however many tensors
share it, from the operation that makes it until it is freed. Sizes are rounded up to blocks of 512 bytes, as the CUDA
allocator does (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize). In place of a card's kernels:

* Attention: scaled_dot_product_attention never holds the scores. Forward keeps query, key, value, mask, output and one
  float32 per head and token. Backward makes three gradients, a float32 accumulator as large as the query, and one more
  float32 per head and token. Where query heads share keys and values, backward repeats them for each query head
  (csrc/flash_attn/flash_api.cpp, mha_bwd, in PyTorch's third_party).
* TRL's losses: its own chunked head (trl/kernels/chunked_logprob.py), with its launches of Triton kernels left out.
"""

import importlib
import importlib.util
import math
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cogumi.patches import fused_head, replaced
from cogumi.patches.torch_internals import TorchDispatchMode, storage_key, tree_iter
from cogumi.patches.trl_internals import KERNEL_PRODUCT

BLOCK = 512
ACTIVATIONS, LOGITS, WEIGHTS, ADAPTER = "activations", "logits", "weights", "adapter"
aten = torch.ops.aten
DEVICE, ITEM = torch.ops.prim.device.default, aten._local_scalar_dense.default


@dataclass(frozen=True)
class StagePeak:
    """The peak of a stage: bytes in all, and by kind."""

    stage: str
    total: int
    by_kind: dict[str, int]


class StorageCounter(TorchDispatchMode):
    """Counts storages while it is active. logits: numbers of columns by which a matrix is one of logits.

    Fake tensors have no data to ask: a mask that selects rows is taken to select `selected` of them, and a test gives
    false.
    """

    def __init__(self, logits: tuple[int, ...] = (), selected: float = 1.0) -> None:
        super().__init__()
        self.kind, self.stage = ACTIVATIONS, ""
        self.logits, self.selected = logits, selected
        self.moments: dict[str, StagePeak] = {}
        self.total = 0
        self.by_kind: Counter[str] = Counter()
        self._storages: dict[int, tuple[str, int]] = {}

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[None]:
        with replaced(self, {"stage": stage}):
            self.note()
            yield

    def counting_as(self, kind: str) -> AbstractContextManager[None]:
        """New storages in here are of this kind."""
        return replaced(self, {"kind": kind})

    def note(self) -> None:
        known = self.moments.get(self.stage)
        if known is None or self.total > known.total:
            self.moments[self.stage] = StagePeak(self.stage, self.total, {k: n for k, n in self.by_kind.items() if n})

    def count(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        """kind: of the tensor, whatever it was taken for; None leaves a known one as it is."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if (known := self._storages.get(key)) is not None:
            if kind is not None and kind != known[0]:
                self.by_kind[known[0]] -= known[1]
                self.by_kind[kind] += known[1]
                self._storages[key] = (kind, known[1])
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        if kind is None:
            logits = self.kind == ACTIVATIONS and tensor.dim() > 1 and tensor.shape[-1] in self.logits
            kind = LOGITS if logits else self.kind
        self._storages[key] = (kind, size)
        self.by_kind[kind] += size
        self.total += size
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        kind, size = self._storages.pop(key)
        self.by_kind[kind] -= size
        self.total -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = bool(args) and hasattr(args[0], "fake_device")
        if func is DEVICE:
            return args[0].fake_device if is_fake else func(*args)
        made = self._data_dependent_result(func, args) if is_fake else None
        if made is None:
            made = func(*args, **(kwargs or {}))
        before = self.total
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        if self.total > before:
            self.note()
        return made

    def _data_dependent_result(self, func: Any, args: Any) -> Any:
        """What an operation would give that depends on data; None for any other."""
        first = args[0]
        if func is ITEM:
            return False if first.dtype == torch.bool else 1.0 if first.dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            return first.new_empty((math.ceil(self.selected * first.numel()), first.dim()), dtype=torch.long)
        if func is aten.masked_select.default:
            return first.new_empty((math.ceil(self.selected * args[1].numel()),))
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            mask = args[1][0]
            return first.new_empty((math.ceil(self.selected * mask.numel()), *first.shape[mask.dim() :]))
        if func is aten._grouped_mm.default:
            # A product of groups, each in its rows or columns; PyTorch's own rule of its shape takes bfloat16 alone.
            # (tokens, K) and (groups, K, N) make (tokens, N); (M, tokens) and (tokens, N) make (groups, M, N).
            right, offsets = args[1:3]
            if first.dim() == 2 and right.dim() == 2:
                return first.new_empty((offsets.numel(), first.shape[0], right.shape[1]))
            return first.new_empty((*first.shape[:-1], right.shape[-1]))
        return None


class KernelCounter(TorchDispatchMode):
    """Counts kernels and the bytes they read and write. unpads: attention copies keys and values without padding first."""

    def __init__(self, unpads: bool) -> None:
        super().__init__()
        self.unpads, self.kernels, self.bytes = unpads, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = func(*args, **(kwargs or {})), func.name()
        if func.is_view or any(part in name for part in ("view", "empty", "prim::")):
            return made
        # An expanded tensor is read once, and of an embedding's table the rows that are looked up.
        used = tree_iter(made if name == "aten::embedding" else (args, kwargs, made))
        moved = [min(t.nbytes, t.untyped_storage().nbytes()) for t in used if isinstance(t, torch.Tensor)]
        if self.unpads and "attention" in name:  # transformers' _upad_input
            moved += 2 * moved[1:3]
        # Of more rows bitsandbytes dequantizes the weight (0.50, backends/cuda/ops.py; the limit varies with the shape).
        if dequantizes := name.endswith("::gemm_4bit") and args[0].shape[:-1].numel() > 16:
            moved.append(2 * math.prod(args[2]) * args[0].itemsize)
        self.kernels += 1 + dequantizes
        self.bytes += sum(moved)
        return made


def preserve_bitsandbytes_codes() -> AbstractContextManager[None]:
    """Bitsandbytes caches the codes of its 8 bits as a tensor: in the block a fake one, after it what it had before."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return nullcontext()
    return replaced(importlib.import_module("bitsandbytes.functional"), {"name2qmap": {}})


def fake_model(model: nn.Module, live: StorageCounter) -> None:
    """Replace every parameter and buffer of a model on the meta device by a fake one, inside a FakeTensorMode and `live`.

    Frozen parameters are counted as weights and trained ones as adapter; where all are trained, they are the weights.
    A parameter that two modules share stays shared.
    """
    made: dict[int, Any] = {}
    trained = ADAPTER if any(not parameter.requires_grad for parameter in model.parameters()) else WEIGHTS
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = parameter, fake_parameter(module, parameter, live, trained)
            setattr(module, name, made[id(parameter)][1])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            with live.counting_as(WEIGHTS):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def fake_parameter(module: Any, parameter: Any, live: StorageCounter, trained: str) -> nn.Parameter:
    experts = expert_parametrization(module)
    learns = parameter.requires_grad
    with live.counting_as(trained if learns else WEIGHTS):
        if hasattr(parameter, "SCB"):  # bitsandbytes' weight of a linear layer in 8 bits, and the scales of its rows
            made: Any = nn.Parameter(torch.empty(parameter.shape, dtype=torch.int8), requires_grad=False)
            scales = torch.empty(parameter.shape[0], dtype=torch.float32)
            vars(made).update(CB=made.data, SCB=scales, has_fp16_weights=False)
            return made
        if experts is None and not hasattr(parameter, "quant_state"):
            return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=learns)
    # Its weights in 4 bits: two elements to a byte, and the scales of its blocks.
    from bitsandbytes.functional import quantize_4bit

    if experts is not None:
        whole = torch.empty(experts.quant_state.shape, dtype=experts.quant_state.dtype)
        settings = {"quant_type": experts.quant_state.quant_type, "compress_statistics": experts.compress_statistics}
    else:
        whole = torch.empty(module.out_features, module.in_features, dtype=module.compute_dtype or torch.bfloat16)
        settings = {name: getattr(parameter, name) for name in ("blocksize", "compress_statistics", "quant_type")}
    with live.counting_as(WEIGHTS):
        packed, state = quantize_4bit(whole, **settings)
    made = nn.Parameter(packed, requires_grad=False)  # a fake tensor cannot be bitsandbytes' subclass as well
    if experts is not None:
        experts.quant_state = state
    else:
        vars(made).update(settings, quant_state=state, bnb_quantized=True)
    return made


def expert_parametrization(module: Any) -> Any:
    """bitsandbytes' parametrization of a stack of experts, of torch's list of parametrizations; None for other modules."""
    is_list = isinstance(module, nn.utils.parametrize.ParametrizationList)
    return module[0] if is_list and hasattr(module[0], "quant_state") else None


class Attention(torch.autograd.Function):
    """The shapes of fused attention: query (batch, heads, tokens, width), key and value (batch, their heads, tokens, width)."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        batch, heads, tokens, _ = query.shape
        output = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        per_token = query.new_empty((batch, heads, tokens), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, per_token)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:  # type: ignore[override]
        query, key, value, _, _, per_token = ctx.saved_tensors
        held = [torch.empty_like(per_token), torch.empty_like(query, dtype=torch.float32)]
        made = [torch.empty_like(each) for each in (query, key, value)]
        if key.shape[1] != query.shape[1]:
            held += [each.new_empty((each.shape[0], query.shape[1], *each.shape[2:])) for each in (key, value)]
        del held
        return *made, None


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **_: Any) -> Any:
    return Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


@contextmanager
def emulate_cuda() -> Iterator[None]:
    """Attention and TRL's losses are a card's, for the length of a block. Backward passes belong into it."""
    upstream: Any = importlib.import_module("trl.trainer.utils")
    # Not a TorchFunctionMode: what gradient checkpointing computes again is computed without it.
    ours = replaced(upstream, {fused_head.KERNEL: trl_head_without_kernels()})
    with ours, replaced(functional, {"scaled_dot_product_attention": attention}):
        yield


def emulate_padding(padded: bool) -> AbstractContextManager[None]:
    """Transformers makes attention masks as of such batches, for the length of a block."""
    masking: Any = importlib.import_module("transformers.masking_utils")
    return replaced(masking, {"is_tracing": lambda tensor=None: False, "fast_all": lambda mask: not padded})


def trl_head_without_kernels() -> Any:
    """TRL's ChunkedLogProbFunction, from a copy of its module whose kernels do nothing and whose sums are a card's."""
    import trl

    place = Path(trl.__file__).parent / "kernels" / "chunked_logprob.py"
    spec = importlib.util.spec_from_file_location("trl.kernels.chunked_logprob_without_kernels", place)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with without_triton():
        spec.loader.exec_module(module)
    setattr(module, KERNEL_PRODUCT, lambda total, left, right: None)
    # One tile of logits after another is computed in the same memory: the first is as good as all.
    module.range = lambda *bounds: range(*bounds)[:1]
    return module.ChunkedLogProbFunction


@contextmanager
def without_triton() -> Iterator[None]:
    """`import triton` finds a module of which no kernel does anything, for the length of a block."""
    names = ("triton", "triton.language")
    stub, language = map(ModuleType, names)
    vars(language).update(constexpr=object)
    no_launch = defaultdict[Any, Any](lambda: lambda *_, **__: None)  # a kernel is launched as kernel[grid](...)
    vars(stub).update(jit=lambda kernel: no_launch, cdiv=lambda a, b: -(-a // b), language=language)
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(zip(names, (stub, language), strict=True))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)
