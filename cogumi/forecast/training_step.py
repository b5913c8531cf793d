"""Measure on a CPU what a training step holds in a card's memory, with TRL's own trainer on fake tensors.

The trainer has a model on the meta device; its loss, gradient checkpointing, adapter and optimizer are those of a
training. A rollout takes what two forward passes take with a cache: one over the prompts, and one for the last token.

Fake tensors have shapes and no memory. Real ones are counted as well. Each storage counts once, however many tensors
share it, from the operation that makes it until it is freed. Sizes are rounded up to blocks of 512 bytes, as the CUDA
allocator does (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize). In place of a card's kernels:

* Attention: scaled_dot_product_attention never holds the scores. Forward keeps query, key, value, mask, output and one
  float32 per head and token. Backward makes three gradients, a float32 accumulator as large as the query, and one more
  float32 per head and token. Where query heads share keys and values, backward repeats them for each query head
  (csrc/flash_attn/flash_api.cpp, mha_bwd, in PyTorch's third_party).
* TRL's losses: its own chunked head (trl/kernels/chunked_logprob.py), with its launches of Triton kernels left out. On a
  CPU it is the same head with its arithmetic in torch, which scores masked tokens as well.
"""

import copy
import importlib
import importlib.util
import math
import sys
import tempfile
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedTokenizerFast

from cogumi.config.schema import RunConfig
from cogumi.methods.building import trl_arguments
from cogumi.models.adapters import drop_casts, keep_float32, lora_config
from cogumi.models.base import meta_model
from cogumi.models.quantization import WeightCount, count_weights, place_quantized_weights
from cogumi.patches import replaced
from cogumi.patches.torch_internals import FakeTensorMode, TorchDispatchMode, storage_key, tree_iter
from cogumi.patches.trl_internals import HEAD, HEAD_USES_TRITON, KERNEL_PRODUCT, MOVE_MODEL, cache_name

BLOCK = 512
ACTIVATIONS, LOGITS, WEIGHTS, ADAPTER = "activations", "logits", "weights", "adapter"
aten = torch.ops.aten
DEVICE, ITEM = torch.ops.prim.device.default, aten._local_scalar_dense.default
TILE = 32768  # columns of logits that TRL's head makes at once (trl/trainer/utils.py, _CHUNKED_LOGPROB_CHUNK_SIZE)
GRADIENTS, OPTIMIZER, CACHE = "gradients", "optimizer", "key-value cache"
LOAD, ROLLOUT, FORWARD, BACKWARD, UPDATE = "load", "rollout", "forward", "backward", "update"
# Keys of `train:` that transformers refuses without a GPU, as in the process that forecasts.
MACHINE_KEYS = ("bf16", "fp16", "tf32")
# Keys of services that the machine that plans may lack, and that do not change the step.
SERVICE_KEYS = ("use_vllm", "report_to", "push_to_hub", "resume_from_checkpoint", "model_init_kwargs")
# Keys that make the data; the rows of a planned step are made of their number and length.
DATA_KEYS = ["packing", "padding_free", "max_length", "chat_template_path", "eos_token", "eval_strategy", "eval_steps"]


@dataclass(frozen=True)
class StagePeak:
    """The peak of a stage: bytes in all, and by kind."""

    stage: str
    total: int
    by_kind: dict[str, int]


class StorageCounter(TorchDispatchMode):
    """Count storages while it is active. logits: numbers of columns by which a matrix is one of logits.

    Fake tensors have no data: a mask is assumed to select the share `selected` of the rows, and a condition to be false.
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
        """Count new storages in the block as this kind."""
        return replaced(self, {"kind": kind})

    def note(self) -> None:
        known = self.moments.get(self.stage)
        if known is None or self.total > known.total:
            self.moments[self.stage] = StagePeak(self.stage, self.total, {k: n for k, n in self.by_kind.items() if n})

    def count(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        """Count a tensor. kind: overrides the kind that it was counted as; None leaves a known one as it is."""
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
        result = self._data_dependent_result(func, args) if is_fake else None
        if result is None:
            result = func(*args, **(kwargs or {}))
        before = self.total
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        if self.total > before:
            self.note()
        return result

    def _data_dependent_result(self, func: Any, args: Any) -> Any:
        """Return the result of an operation that depends on data; None for any other."""
        first = args[0]
        if func is ITEM:
            return False if first.dtype == torch.bool else 1.0 if first.dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            return first.new_empty((math.ceil(self.selected * first.numel()), first.dim()), dtype=torch.long)
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
    """Count kernels and the bytes they read and write. unpads: attention first copies keys and values without padding."""

    def __init__(self, unpads: bool) -> None:
        super().__init__()
        self.unpads, self.kernels, self.bytes = unpads, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.name()
        if func.is_view or any(part in name for part in ("view", "empty", "prim::")):
            return result
        # An expanded tensor is read once, and of an embedding's table the rows that are looked up.
        used = tree_iter(result if name == "aten::embedding" else (args, kwargs, result))
        moved = [min(t.nbytes, t.untyped_storage().nbytes()) for t in used if isinstance(t, torch.Tensor)]
        if self.unpads and "attention" in name:  # transformers' _upad_input
            moved += 2 * moved[1:3]
        # Of more rows bitsandbytes dequantizes the weight (0.50, backends/cuda/ops.py; the limit varies with the shape).
        if dequantizes := name.endswith("::gemm_4bit") and args[0].shape[:-1].numel() > 16:
            moved.append(2 * math.prod(args[2]) * args[0].itemsize)
        self.kernels += 1 + dequantizes
        self.bytes += sum(moved)
        return result


def preserve_bitsandbytes_codes() -> AbstractContextManager[None]:
    """Keep the cache in which bitsandbytes holds its 8-bit codes as tensors: in the block they would be fake ones."""
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
    """Return the fake counterpart of a parameter of `module`. trained: the kind that a trained one counts as."""
    # bitsandbytes' parametrization of a stack of experts, in torch's list of parametrizations.
    is_list = isinstance(module, nn.utils.parametrize.ParametrizationList)
    experts: Any = module[0] if is_list and hasattr(module[0], "quant_state") else None
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
        unpacked = torch.empty(experts.quant_state.shape, dtype=experts.quant_state.dtype)
        settings = {"quant_type": experts.quant_state.quant_type, "compress_statistics": experts.compress_statistics}
    else:
        unpacked = torch.empty(module.out_features, module.in_features, dtype=module.compute_dtype or torch.bfloat16)
        settings = {name: getattr(parameter, name) for name in ("blocksize", "compress_statistics", "quant_type")}
    with live.counting_as(WEIGHTS):
        packed, state = quantize_4bit(unpacked, **settings)
    made = nn.Parameter(packed, requires_grad=False)  # a fake tensor cannot be bitsandbytes' subclass as well
    if experts is not None:
        experts.quant_state = state
    else:
        vars(made).update(settings, quant_state=state, bnb_quantized=True)
    return made


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
        made = [torch.empty_like(tensor) for tensor in (query, key, value)]
        if key.shape[1] != query.shape[1]:
            held += [tensor.new_empty((tensor.shape[0], query.shape[1], *tensor.shape[2:])) for tensor in (key, value)]
        del held
        return *made, None


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **_: Any) -> Any:
    return Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


@contextmanager
def emulate_device(on_card: bool) -> Iterator[None]:
    """Run attention and TRL's losses as a card or a CPU does in the block, which has to contain the backward pass too."""
    upstream: Any = importlib.import_module("trl.trainer.utils")
    head = {HEAD: first_tile_head(on_card)}
    if hasattr(upstream, HEAD_USES_TRITON):
        head[HEAD_USES_TRITON] = lambda device: on_card
    # Not a TorchFunctionMode: what gradient checkpointing computes again is computed without it.
    fused = {"scaled_dot_product_attention": attention} if on_card else {}
    with replaced(upstream, head), replaced(functional, fused):
        yield


def emulate_padding(padded: bool) -> AbstractContextManager[None]:
    """Have transformers make the attention masks of padded, or of unpadded, batches in the block."""
    masking: Any = importlib.import_module("transformers.masking_utils")
    return replaced(masking, {"is_tracing": lambda tensor=None: False, "fast_all": lambda mask: not padded})


def first_tile_head(on_card: bool) -> Any:
    """Return TRL's ChunkedLogProbFunction from a copy of its module that computes one tile of logits.

    One tile after another is computed in the same memory: the first is as good as all. A card's kernels do nothing.
    """
    import transformers.utils
    import trl

    path = Path(trl.__file__).parent / "kernels" / "chunked_logprob.py"
    spec = importlib.util.spec_from_file_location("trl.kernels.chunked_logprob_without_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    # A stub of triton, of which no kernel does anything; a kernel is launched as kernel[grid](...).
    stub, language = ModuleType("triton"), ModuleType("triton.language")
    no_launch = defaultdict[Any, Any](lambda: lambda *_, **__: None)
    vars(language).update(constexpr=object)
    vars(stub).update(jit=lambda kernel: no_launch, cdiv=lambda a, b: -(-a // b), language=language)
    stubs = {"triton": stub, "triton.language": language}
    before = {name: sys.modules.pop(name) for name in stubs if name in sys.modules}
    sys.modules.update(stubs)
    try:
        with replaced(transformers.utils, {"is_triton_available": lambda: True}):
            spec.loader.exec_module(module)
    finally:
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(before)
    if on_card or not hasattr(module, HEAD_USES_TRITON):  # TRL before 1.16 knows nothing but cards
        setattr(module, KERNEL_PRODUCT, lambda total, left, right: None)
    setattr(module, HEAD_USES_TRITON, lambda device: on_card)
    module.range = lambda *bounds: range(*bounds)[:1]
    return module.ChunkedLogProbFunction


# ------------------------------------------------------------------------------------------------------ the training step


def planned_trainer(run: RunConfig, config: Any, dtype: torch.dtype, layers: int | None = None) -> Any:
    """Build TRL's trainer for the run's method with its model on the meta device. Nothing is written or downloaded.

    config: the base's. layers: how many of the first are kept, None for all. Raises what TRL, PEFT and transformers raise
    for settings that they refuse.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    # With sdpa where its class has it, which like flash attention never holds the scores.
    model = meta_model(config).to(dtype)
    if run.model.attn_implementation == "eager":
        model.set_attn_implementation("eager")
    model = place_quantized_weights(model, config, run.model.quantization_config)
    run = without_machine(run)
    for key in (*SERVICE_KEYS, *DATA_KEYS):
        run.train.pop(key, None)
    run.cogumi.sampler_weights, run.cogumi.sampler_correction = "merged", None  # of the sampler, as use_vllm is
    run.train |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    method, args = run.cogumi.method, copy.copy(trl_arguments(run))
    disable_progress_bars()  # of two rows that are prepared; this process only forecasts
    with tempfile.TemporaryDirectory(prefix="cogumi-preflight-") as scratch, warnings.catch_warnings(action="ignore"):
        args.output_dir, args.eval_strategy = scratch, type(args.eval_strategy)("no")
        precomputed = method == "dpo" and args.precompute_ref_log_probs
        if precomputed:  # a model of shapes has none; what is different is set on the trainer below
            args.precompute_ref_log_probs = False
        # A tokenizer of three words: the trainer is never given a text.
        words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<pad>": 2}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", eos_token="</s>", pad_token="<pad>")
        # Rows for the trainer to prepare; the step is given others.
        columns: dict[str, Any] = {
            "sft": {"input_ids": [[0] * 4] * 2, "completion_mask": [[1] * 4] * 2},
            "dpo": {"prompt": ["a"] * 2, "chosen": ["a"] * 2, "rejected": ["a"] * 2},
            "gspo": {"prompt": ["a"] * 64},
        }
        rows = Dataset.from_dict(columns[method])
        options = {"model": model, "args": args, "train_dataset": rows, "processing_class": tokenizer}
        if run.cogumi.tuning == "lora":
            options["peft_config"] = lora_config(run.lora, model=model)
        elif method == "dpo":
            options["ref_model"] = copy.deepcopy(model)
        if method == "gspo":
            options["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
        import trl  # looked up here: unsloth puts its own trainers on the module

        trainers = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer, "gspo": trl.GRPOTrainer}
        trainer = keep_on_meta(trainers[method])(**options)
    if precomputed:
        trainer.precompute_ref_logps, trainer.ref_model = True, None
    keep_float32(trainer.model)
    drop_casts(trainer.model)
    return trainer


def without_machine(run: RunConfig) -> RunConfig:
    """Return the run as a machine without a GPU takes it. The forecast is given the dtypes separately."""
    run = run.model_copy(deep=True)
    run.train = {key: value for key, value in run.train.items() if key not in MACHINE_KEYS} | {"bf16": False}
    return run


def keep_on_meta(trainer: Any) -> Any:
    """Return a class of trainer that leaves its model on the meta device: it forecasts, and cannot train."""
    return type(f"Planned{trainer.__name__}", (trainer,), {MOVE_MODEL: lambda *_: None})


def forecast_weights(config: Any, dtype: torch.dtype, quantization: dict[str, Any] | None) -> WeightCount:
    """Count what loading a base will hold, from its config alone. dtype: of what is not quantized."""
    model = place_quantized_weights(meta_model(copy.deepcopy(config)).to(dtype), config, quantization)
    live = StorageCounter()
    with preserve_bitsandbytes_codes(), FakeTensorMode(allow_non_fake_inputs=True), live:
        fake_model(model, live)
        return count_weights(model)


@dataclass(frozen=True)
class StepShape:
    """What goes through at once. rows: examples (pairs, for dpo, documents for gspo), each `prompt + completion` tokens.

    completion: for gspo; 0 elsewhere. rollout: documents that are sampled at once, 0 where vLLM samples them. packed: rows
    of several documents, laid end to end in one sequence where `one_sequence`. padded: rows differ in length, so that
    attention gets a mask. micro_batches: a step.
    """

    method: str
    rows: int
    prompt: int
    completion: int = 0
    rollout: int = 0
    packed: bool = False
    one_sequence: bool = False
    padded: bool = True
    micro_batches: int = 1

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def learned(self) -> float:
        """The share of tokens whose logits are computed: all, of a rollout the completions'."""
        return self.completion / self.length if self.completion else 1.0


def run_step(trainer: Any, work: StepShape, autocast: torch.dtype | None, on_card: bool) -> tuple[StagePeak, ...]:
    """Run a step and return the peak of each stage. The trainer's model is fake from then on; it may be run again.

    trainer: of `planned_trainer`. autocast: its dtype (bf16, fp16), None without. on_card: as a CUDA card computes it.
    """
    model, config = trainer.model, trainer.model.config.get_text_config()
    live = StorageCounter((config.vocab_size, TILE), selected=work.learned)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # of paged optimizers, which this CPU has not
        stack.enter_context(emulate_device(on_card))
        stack.enter_context(emulate_padding(work.padded))
        stack.enter_context(preserve_bitsandbytes_codes())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(live)
        with live.in_stage(LOAD):
            fake_model(model, live)
            if getattr(trainer, "ref_model", None) is not None:
                fake_model(trainer.ref_model, live)
        if work.rollout:
            with live.in_stage(ROLLOUT):
                sample_rollout(model, work, live)
        optimizer, trained = create_optimizer(trainer, live, accumulating=work.micro_batches > 1)
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # as Trainer.train does
        model.train()
        if trainer.args.gradient_checkpointing:
            model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs or {"use_reentrant": False})
        multiplied_in = torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None)
        with live.in_stage(FORWARD), multiplied_in:
            loss = trainer.compute_loss(model, inputs_of(work))
        with live.in_stage(BACKWARD):
            loss.backward()
        del loss
        with live.in_stage(UPDATE), live.counting_as(OPTIMIZER):
            torch.nn.utils.clip_grad_norm_(trained, trainer.args.max_grad_norm or 1.0)
            optimizer.step()
    return tuple(moment for name, moment in live.moments.items() if name)


def create_optimizer(trainer: Any, live: StorageCounter, accumulating: bool) -> tuple[Any, list[Any]]:
    """Create the trainer's optimizer with the states of its first step; return it and the trained parameters."""
    trainer.optimizer = None  # that of an earlier step, which had other stand-ins
    optimizer = trainer.create_optimizer()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with live.counting_as(GRADIENTS):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
    with live.counting_as(OPTIMIZER):
        optimizer.step()
    if not accumulating:
        optimizer.zero_grad()
    live.moments.pop("", None)
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda parameter: live.count(parameter.grad, GRADIENTS))
    return optimizer, trained


def ones_of_shape(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def inputs_of(work: StepShape) -> dict[str, Any]:
    """Make a micro-batch as TRL's collators make it."""
    if work.method == "sft":
        rows, tokens = (1, work.rows * work.length) if work.one_sequence else (work.rows, work.length)
        last = "position_ids" if work.packed else "attention_mask"
        return {name: ones_of_shape(rows, tokens) for name in ("input_ids", "labels", last)}
    if work.method == "dpo":  # chosen and rejected below each other; the reference's where it is precomputed
        names = ("input_ids", "attention_mask", "completion_mask")
        reference = {f"ref_{side}_logps": torch.zeros(work.rows) for side in ("chosen", "rejected")}
        return {name: ones_of_shape(2 * work.rows, work.length) for name in names} | reference
    inputs: dict[str, Any] = {"advantages": torch.zeros(work.rows)}
    for part, length in (("prompt", work.prompt), ("completion", work.completion)):
        inputs |= {f"{part}_{kind}": ones_of_shape(work.rows, length) for kind in ("ids", "mask")}
    for name in ("old", "ref"):
        inputs[f"{name}_per_token_logps"] = torch.zeros(work.rows, work.completion)
    return inputs | {"num_items_in_batch": torch.tensor(float(work.rows * work.completion))}


def count_decoding(trainer: Any, work: StepShape) -> tuple[StagePeak, ...]:
    """Count kernels and bytes of the first and last token of a rollout. The trainer's model is fake from then on."""
    live, lengths = StorageCounter(), (1, work.completion)
    with emulate_padding(work.padded), preserve_bitsandbytes_codes(), FakeTensorMode(allow_non_fake_inputs=True), live:
        fake_model(trainer.model, live)
        return tuple(sample_rollout(trainer.model, replace(work, completion=length), live) for length in lengths)


def sample_rollout(model: Any, work: StepShape, live: StorageCounter) -> StagePeak:
    """Run transformers' generate at its peak: the prompts, then the last token, which is counted, with all before cached."""
    model.eval()
    with torch.no_grad():
        inputs = {"attention_mask": ones_of_shape(work.rollout, work.prompt), "use_cache": True, "logits_to_keep": 1}
        name = cache_name(model)
        cache = model(ones_of_shape(work.rollout, work.prompt), **inputs)[name]
        with live.counting_as(CACHE):
            longer = DynamicCache(config=model.config)
            for number, layer in enumerate(cache.layers):
                shape = [*layer.keys.shape]
                shape[2] += work.completion - 1 if shape[2] == work.prompt else 0  # a sliding window stays as it is
                longer.update(*(layer.keys.new_empty(shape) for _ in range(2)), number)
        del cache
        inputs["attention_mask"] = ones_of_shape(work.rollout, work.length)
        with KernelCounter(unpads=not work.padded) as counter:
            logits = model(ones_of_shape(work.rollout, 1), **inputs, **{name: longer}).logits[:, -1].float()
            torch.softmax(logits, dim=-1)
    return StagePeak(ROLLOUT, 0, {"kernels": counter.kernels, "bytes": counter.bytes})
