"""Tokens per second, the floating-point operations behind them, the seconds of each stage of a run, and what they cost.

FLOP per token = 4 N + 2 N_trained + 12 L d_attn T

N counts the weights that a token is multiplied with: all matrices with the LM head, without the embedding table, and of a
mixture of experts the share that a token is routed to. The forward pass takes 2 N, the gradient of the inputs 2 N, and that
of the weights 2 N_trained (Kaplan et al. 2020, arXiv:2001.08361; Hu et al. 2021, arXiv:2106.09685). Attention takes
12 L d_attn T, for L layers, d_attn = heads x head_dim, and T tokens attended to (PaLM, arXiv:2204.02311, appendix B). It
is not halved for causality, and T = sum n^2 / sum n over the documents also for layers that see a window only.

With gradient checkpointing a perfect machine shows an MFU of 67 % with LoRA and 75 % without. TRL's chunked losses multiply
the LM head only with learned tokens, which MFU does not know. A step that is made again after a kill counts again.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from cogumi.core.liveness import beat
from cogumi.core.run_directory import read_json
from cogumi.data.packing import padding_mask
from cogumi.models.adapters import find_towers
from cogumi.patches.trl_internals import makes_rollouts, observe_rollouts, wrap_method
from cogumi.stack.gpus import find_card
from cogumi.stack.ranks import Ranks

HEARTBEAT = "heartbeat.json"
ROLLOUT, PAUSED_STAGE = "rollout", "paused"
NOT_MULTIPLIED = {"original_module", "lora_embedding_A", "lora_embedding_B"}  # PEFT's: replaced by a copy, looked up
ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
EXPERTS_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class TokenFlops:
    """weights, trained: N, N_trained. attention: the sum of d_attn over the layers that attend."""

    weights: float
    trained: float
    attention: float

    def model(self, context: float) -> float:
        return 4 * self.weights + 2 * self.trained + 12 * self.attention * context

    def forward(self, context: float) -> float:
        """Return the FLOP of a token's forward pass, which gradient checkpointing repeats."""
        return 2 * self.weights + 4 * self.attention * context

    def hardware(self, context: float, recomputed: bool) -> float:
        return self.model(context) + (self.forward(context) if recomputed else 0.0)


def flops_of(model: nn.Module) -> TokenFlops:
    """Count what a token costs in the training of a loaded model, adapters included.

    Raises ValueError for experts without a known routing, and for packed weights that are no nn.Linear.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    towers = tuple(f"{name}." for name in find_towers(model))  # a token of a text does not meet them
    weights = trained = 0.0
    counted = set()  # a tied head counts once, as the head
    for name, module in model.named_modules():
        parts = name.split(".")
        outside = not NOT_MULTIPLIED.isdisjoint(parts) or f"{name}.".startswith(towers)
        if isinstance(module, nn.Embedding) or outside:
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or leaf.endswith("bias") or id(parameter) in counted:
                continue
            counted.add(id(parameter))
            elements = count_elements(module, f"{name}.{leaf}", parameter)
            elements *= routed_share(config, name) if "experts" in parts else 1.0
            weights += elements
            trained += elements * parameter.requires_grad
    return TokenFlops(weights, trained, attention_width(config))


def count_elements(module: nn.Module, name: str, parameter: nn.Parameter) -> float:
    """Count the elements of the matrix that a parameter stands for; a 4-bit one is stored packed."""
    if isinstance(module, nn.Linear):
        return float(module.in_features * module.out_features)
    if isinstance(module, ParametrizationList) and hasattr(module[0], "quant_state"):  # experts, by bitsandbytes
        state: Any = module[0].quant_state
        return float(math.prod(state.shape))
    if not parameter.is_floating_point():
        raise ValueError(f"{name} is stored as {parameter.dtype}, and its elements are not those of the matrix")
    return float(parameter.numel())


def routed_share(config: Any, name: str) -> float:
    routed, among = (
        next((getattr(config, key) for key in keys if getattr(config, key, None)), None)
        for keys in (EXPERTS_ROUTED, EXPERTS)
    )
    if not isinstance(routed, int) or not isinstance(among, int):
        raise ValueError(f"{name} is a mixture of experts, and its config does not say how many of them a token meets")
    return routed / among


def attention_width(config: Any) -> float:
    """Return the sum of d_attn over the layers that attend; where keys and values differ (DeepSeek) d_attn is their mean."""
    if getattr(config, "is_heterogeneous", False):  # Gemma 4: heads of two sizes
        return float(sum(layer.num_attention_heads * layer.head_dim for layer in config.per_layer_config))
    kinds = getattr(config, "layer_types", None)
    layers = config.num_hidden_layers if kinds is None else sum(kind in ATTENDING for kind in kinds)
    if not layers:  # and the config has no heads
        return 0.0
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    if getattr(config, "qk_head_dim", None) and getattr(config, "v_head_dim", None):
        width = heads * (config.qk_head_dim + config.v_head_dim) / 2
    return float(layers * width)


class Meter:
    """Counts seconds since it was made; every second belongs to one stage, the innermost.

    price_per_hour: what the machine costs while it is held, None if it was not given.
    """

    def __init__(self, price_per_hour: float | None = None) -> None:
        self.price_per_hour, self.stage = price_per_hour, "data"
        self.started, self.earlier = time.time(), 0.0
        self.spent: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.began = self.since = time.monotonic()

    def resume_from(self, run_dir: Path) -> None:
        """Continue from where the earlier parts of the run in this directory ended, by their heartbeat."""
        if (run_dir / HEARTBEAT).exists():
            beat = read_json(run_dir / HEARTBEAT)
            self.earlier, self.started, self.counts = beat["elapsed_seconds"], beat["started"], beat["counts"]
            for stage, seconds in beat["seconds"].items():
                self.spent[stage] = self.spent.get(stage, 0.0) + seconds

    def enter(self, stage: str) -> None:
        beat()
        self.spent, self.stage, self.since = self.seconds(), stage, time.monotonic()

    @contextmanager
    def stage_inside(self, stage: str) -> Iterator[None]:
        """Count the block as a stage of its own: an evaluation, a rollout, samples."""
        outer = self.stage
        self.enter(stage)
        try:
            yield
        finally:
            self.enter(outer)

    def seconds(self) -> dict[str, float]:
        stage, since, spent = self.stage, self.since, dict(self.spent)
        spent[stage] = spent.get(stage, 0.0) + max(0.0, time.monotonic() - since)
        return spent

    def elapsed(self) -> float:
        return self.earlier + time.monotonic() - self.began

    def cost(self, more_seconds: float = 0.0) -> float | None:
        """Return what the run has cost, or will have after so many more seconds; None without a price."""
        return None if self.price_per_hour is None else (self.elapsed() + more_seconds) / 3600 * self.price_per_hour


@dataclass
class TokenCounts:
    """Sums over the batches of a training. tokens: without padding. squared: of the lengths of the documents.

    step_seconds: with rollouts and reading data, without saving, logging and evaluation, which lie between steps.
    """

    tokens: float = 0.0
    squared: float = 0.0
    step_seconds: float = 0.0
    rollout_seconds: float = 0.0
    rollouts: float = 0.0


class Throughput:
    """Counts what one trainer's loss is computed on, from the batches that its `compute_loss` is given.

    Sums stay on the device until `read`, which waits for it: call it where the trainer has just waited for a loss. ranks: the
    processes of the training, which read together.
    """

    def __init__(self, trainer: Any, meter: Meter, ranks: Ranks) -> None:
        self.trainer = weakref.ref(trainer)  # the heartbeat outlives it, and the merge needs its memory
        self.meter, self.ranks = meter, ranks
        self.total, self.last = TokenCounts(**meter.counts), TokenCounts(**meter.counts)
        self.on_device: Tensor | None = None
        self.work, self.peak, self.no_mfu = flops_and_peak(trainer.model)
        wrap_method(trainer, "compute_loss", self.count)
        if makes_rollouts(trainer):
            observe_rollouts(trainer, self.time_rollout)
            micro_batches = trainer.args.steps_per_generation * trainer.num_iterations
            self.steps_per_rollout = micro_batches / trainer.args.gradient_accumulation_steps

    def time_rollout(self, make: Callable[[Any], Any], inputs: Any) -> Any:
        """Count the seconds of a rollout by the clock: it ends in texts and rewards on the host."""
        trainer = self.trainer()
        if trainer is None or not trainer.model.training:  # an evaluation
            return make(inputs)
        before = self.meter.seconds().get(ROLLOUT, 0.0)
        with self.meter.stage_inside(ROLLOUT):
            batch = make(inputs)
        seconds = self.meter.seconds()[ROLLOUT] - before
        self.total.step_seconds += seconds
        self.total.rollout_seconds += seconds
        self.total.rollouts += 1
        return batch

    def count(self, compute_loss: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if model.training:
            sums = torch.stack(document_lengths(inputs))
            self.on_device = sums if self.on_device is None else self.on_device + sums
        return compute_loss(model, inputs, *args, **kwargs)

    def read(self) -> None:
        """Add what is on the device to the totals, and hand those to the meter."""
        if self.on_device is not None:
            squared, tokens = self.ranks.total(self.on_device.tolist())
            self.total.tokens += tokens
            self.total.squared += squared
            self.on_device = None
        self.meter.counts = asdict(self.total)

    def window(self) -> TokenCounts:
        self.read()
        done = {key: value - getattr(self.last, key) for key, value in asdict(self.total).items()}
        self.last = replace(self.total)
        return TokenCounts(**done)

    def tokens_per_second(self, done: TokenCounts) -> float | None:
        return done.tokens / done.step_seconds if done.tokens and done.step_seconds > 0 else None

    def mfu(self, done: TokenCounts) -> float | None:
        """Return the share of the card's peak, over the seconds of steps without their rollouts, which no formula here counts."""
        seconds = done.step_seconds - done.rollout_seconds
        if not self.work or not self.peak or not done.tokens or seconds <= 0:
            return None
        return done.tokens * self.work.model(done.squared / done.tokens) / seconds / (self.peak * self.ranks.count)


def flops_and_peak(model: Any) -> tuple[TokenFlops | None, float | None, str | None]:
    """Return (what a token costs, the card's peak in dense bf16 FLOP/s, why there is no MFU)."""
    try:
        work = flops_of(model)
    except ValueError as error:
        return None, None, f"{error}"
    if not torch.cuda.is_available():
        return work, None, "no GPU"
    name = torch.cuda.get_device_name()
    card = find_card(name)
    peak = card.peak if card else None
    return work, peak, None if peak else f"the peak of {name} is not known"


def document_lengths(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (sum of the squared lengths of the documents, tokens without padding) of a batch, both on its device.

    inputs: as TRL's trainers make them. GRPO has prompt and completion apart, and SFT and DPO rows with an attention mask. With
    packing the positions of a row start anew at each document: over a document the sum of 2 p + 1 is n^2.
    """
    masks = ("prompt_mask", "completion_mask") if "completion_ids" in inputs else ("attention_mask",)
    if all(inputs.get(name) is not None for name in masks):
        lengths = torch.stack([inputs[name].sum(-1) for name in masks]).sum(0)
        return lengths.square().sum(), lengths.sum()
    ids: Tensor = inputs["input_ids"]
    if inputs.get("position_ids") is not None:
        positions: Tensor = inputs["position_ids"]
        padding = padding_mask(positions).sum()
        return (2 * positions + 1).sum() - padding, ids.numel() - padding
    tokens = torch.tensor(ids.numel(), device=ids.device)
    return tokens * ids.shape[-1], tokens
