"""The logits of a merged model against the live, unmerged adapter, with a tolerance that is predicted, not chosen.

Rounding moves each element of a touched weight by at most half an ulp. Moving the merged weights by that much at random
says how far the logits of a right merge may be; LOGIT_GATE times that passes. Measured over predicted, on tiny random
models in bfloat16: 0.80 to 1.16. A wrong share x of the update shows when x * base_distance > bound; for fainter ones
there is the check of every element.
"""

import copy
import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch.overrides import TorchFunctionMode

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, element_count, read_shard
from cogumi.merge.adapter_files import ADAPTER_WEIGHTS, read_json
from cogumi.merge.arithmetic import ieee_matmul
from cogumi.merge.bases import cached_snapshot
from cogumi.merge.element_check import half_ulp
from cogumi.merge.parameter_map import adapted_class, head_classes

SAME_BASE = "is it the merge of the same base?"
# How many times the predicted rounding noise the logits may differ.
LOGIT_GATE = 3.0
# How much of what the adapter does, KL(live || base), may be lost: KL(live || merged) at most this share of it.
KL_SHARE = 0.01
BLOCK_ELEMENTS = 1 << 20  # float64 temporaries of 8 MB each while weights are moved
POSITIONS_AT_ONCE = 64  # float64 statistics of [64, vocabulary] logits: 80 MB a copy where the vocabulary is 150 000
PROMPT_TOKENS = 128  # a row of the built-in prompt
PROMPT = Path(__file__).read_text(encoding="utf-8")[:2000]  # prose and code


@dataclass(frozen=True)
class LogitCheck:
    """How far the merged model's logits are from the live adapter's, and how far rounding may take them.

    measured, measured_max: rms and largest difference, over every position and vocabulary entry. predicted: the rms
    that one rounding of the touched weights should cause. bound: the largest rms that passes. base_distance: the rms
    between merged and base. kl: KL(live || merged) in nats, as the mean over positions. predicted_kl: the KL that
    rounding should cause. kl_bound: the largest KL that passes. base_kl: KL(live || base).
    """

    measured: float
    measured_max: float
    predicted: float
    bound: float
    base_distance: float
    kl: float
    predicted_kl: float
    kl_bound: float
    base_kl: float

    @property
    def passed(self) -> bool:
        return self.measured <= self.bound and self.kl <= self.kl_bound

    def __str__(self) -> str:
        verdict = "logits agree" if self.passed else "LOGITS DIFFER"
        return (
            f"{verdict}: merged is {self.measured:.3g} rms (max {self.measured_max:.3g}) from the live adapter, "
            f"rounding explains {self.predicted:.3g}, allowed {self.bound:.3g}; merged is {self.base_distance:.3g} from the "
            f"base; KL {self.kl:.3g} nats, allowed {self.kl_bound:.3g}, adapter against base {self.base_kl:.3g}"
        )


class LogitDifference(NamedTuple):
    """Between two sets of logits: root mean square, largest, and mean KL(one || other) over positions, in nats."""

    rms: float
    largest: float
    kl: float


@dataclass(frozen=True)
class LiveModel:
    """What is kept of the live model after it has left memory.
    logits, base_logits: float32 [batch, sequence, vocabulary]. choices: the experts that each router chose, in order.
    adapted: merged names of parameters with a low-rank update. rows: row_hashes of all parameters, by merged name."""

    logits: torch.Tensor
    base_logits: torch.Tensor
    choices: list[torch.Tensor]
    adapted: set[str]
    rows: dict[str, torch.Tensor]


class Routing(TorchFunctionMode):
    """While active, records the indices of every topk, with which routers choose experts.
    given: the indices of an earlier forward on the same tokens, which topk then returns. The values come from topk's
    own input at these indices, so a router weight that differs still changes the logits."""

    def __init__(self, given: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.given = given
        self.own: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        place = len(self.own)
        self.own.append(result.indices.cpu())
        if self.given is None:
            return result
        if place >= len(self.given) or self.given[place].shape != result.indices.shape:
            raise UsageError("merged model routes to experts where live does not", fix=SAME_BASE)
        values = args[0] if args else kwargs["input"]
        indices = self.given[place].to(values.device)
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return torch.return_types.topk((values.gather(dim, indices), indices))


def check_logits(live: Any, merged: Any, input_ids: torch.Tensor, draws: int = 4) -> LogitCheck:
    """Compare the reloaded merged model with the live, unmerged PEFT model on the same tokens.

    input_ids: int64 [batch, sequence]. The merged weights were rounded to the dtype that each parameter of it is loaded
    in. Base logits are live's with the adapter disabled, in which PEFT leaves the biases that bias="all" or "lora_only"
    trained. Works on copies, one in memory at a time. Raises UsageError when merged is another model.
    """
    with ieee_matmul(), torch.no_grad():
        working = precise_copy(live, torch.float32)
        with working.disable_adapter():
            base_logits = forward(working, input_ids)
        seen = observe_live(working, input_ids, base_logits)
        del working
        loaded = functools.partial(precise_copy, merged)
        return compare_logits(seen, loaded, lambda name: merged.get_parameter(name).dtype, input_ids, draws)


def precise_copy(model: Any, dtype: torch.dtype) -> Any:
    """A copy in `dtype` and eval mode that runs its own weights.
    TRL and accelerate set `forward` on the instance to a closure over the original model. The copy drops it."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        vars(module).pop("forward", None)
    return copied.to(dtype).eval()


def forward(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits [batch, sequence, vocabulary] on the CPU, in the model's dtype."""
    return model(input_ids=input_ids.to(model.device), use_cache=False).logits.cpu()


def observe_live(live: Any, input_ids: torch.Tensor, base_logits: torch.Tensor) -> LiveModel:
    """Run the live model (float32, ours) and note its logits, its choices of experts, and its weights."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    with Routing() as routing:
        logits = forward(live, input_ids)
    adapted, rows = set(), {}
    model = live.get_base_model()
    for name, module in model.named_modules():
        owner = name.replace(".base_layer", "")
        if isinstance(module, ParamWrapper):  # LoRA on a bare parameter: the experts of a mixture
            adapted.add(f"{owner}.{module.parameter_name}")
        elif isinstance(module, LoraLayer):
            adapted.add(f"{owner}.weight")
            if any(module.lora_bias.values()):
                adapted.add(f"{owner}.bias")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        merged_name = name_without_adapter(name, live.active_adapters)
        if merged_name is not None:
            rows[merged_name] = row_hashes(parameter)
    return LiveModel(logits, base_logits, routing.own, adapted, rows)


def name_without_adapter(name: str, active: list[str]) -> str | None:
    """The merged model's name of a parameter of the live model; None for what only the live model has."""
    parts = name.split(".")
    if any(part.startswith("lora_") or part in ("original_module", "trainable_tokens_delta") for part in parts):
        return None
    if "modules_to_save" in parts:
        place = parts.index("modules_to_save")
        if parts[place + 1] not in active:
            return None
        del parts[place : place + 2]
    return ".".join(part for part in parts if part not in ("base_layer", "token_adapter"))


def as_rows(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A view [rows, columns] of a parameter of any shape: experts' matrices one below the other, a vector as a column."""
    if not parameter.is_contiguous():
        parameter.data = parameter.data.contiguous()
    return parameter.data.view(-1, parameter.shape[-1] if parameter.dim() > 1 else 1)


def blocks(matrix: torch.Tensor) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, matrix.shape[1]))
    for first in range(0, len(matrix), step):
        yield slice(first, first + step)


def row_hashes(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A 64-bit hash of the bits of each row of a float32 parameter (see as_rows), int64 [rows]."""
    matrix = as_rows(parameter)
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (matrix.shape[1],), generator=generator).mul_(2).add_(1).to(matrix.device)
    bits = matrix.view(torch.int32)
    return torch.cat([(bits[block].long() * odd).sum(dim=1) for block in blocks(matrix)]).cpu()


def touched_rows(live: LiveModel, merged: Any) -> dict[str, torch.Tensor]:
    """Merged name -> bool [rows] of the rows that were rounded. A low-rank update rounds all rows of its parameter.
    Elsewhere these are the rows where merged differs from live, as in trained tokens, biases and modules_to_save."""
    names = {name for name, _ in merged.named_parameters(remove_duplicate=False)}
    if missing := sorted(live.adapted - names):
        raise UsageError(f"merged model has no {missing[0]}, which live's adapter changes", fix=SAME_BASE)
    touched = {}
    for name, parameter in merged.named_parameters():
        rows = row_hashes(parameter)
        before = live.rows.get(name)
        if before is not None and before.shape != rows.shape:
            raise UsageError(f"merged model has {name} in another shape than live", fix=SAME_BASE)
        changed = torch.ones_like(rows, dtype=torch.bool) if before is None or name in live.adapted else rows != before
        if bool(changed.any()):
            touched[name] = changed
    return touched


def compare_logits(
    live: LiveModel,
    load_merged: Callable[[torch.dtype], Any],
    dtype_of: Callable[[str], torch.dtype],
    input_ids: torch.Tensor,
    draws: int,
) -> LogitCheck:
    """Compare merged with live. dtype_of: the dtype that a parameter of merged was rounded to, by its name.

    Both run in float32, so only the one rounding of the touched weights remains. To predict its effect, this adds
    uniform noise of +-half an ulp to these weights, `draws` times. For weights in float32, the order of float32 sums
    matters as much. So the noisy forwards then run in float64. The difference between a float32 and a float64 forward,
    times sqrt(2), is added in quadrature. The sqrt(2) is there because live and merged each have such an error.

    In a mixture of experts, rounding can change a near-tie, which moves the logits by much more. So merged and its
    noisy copies run with the experts that live chose, weighted by their own router.
    """
    model = load_merged(torch.float32)
    touched = touched_rows(live, model)
    dtypes = {name: dtype_of(name) for name in touched}
    with Routing(live.choices):
        logits = forward(model, input_ids)
    found, from_base = difference(live.logits, logits), difference(logits, live.base_logits)
    base_kl = difference(live.logits, live.base_logits).kl
    centre, noise, noise_kl = logits, 0.0, 0.0
    if torch.float32 in dtypes.values():
        del model
        model = load_merged(torch.float64)
        with Routing(live.choices):
            centre = forward(model, input_ids)
        arithmetic = difference(logits, centre)
        noise, noise_kl = math.sqrt(2) * arithmetic.rms, 2 * arithmetic.kl
    # Each draw starts where the last one left the weights: a few half ulps away the effect is the same, and no copy is needed.
    effects = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        for name, rows in touched.items():
            matrix = as_rows(model.get_parameter(name))
            for block in blocks(matrix):
                exact = matrix[block].double()
                unit = torch.rand(exact.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
                unit *= rows[block][:, None]
                matrix[block] = exact + unit.to(exact.device) * half_ulp(exact, dtypes[name])
        with Routing(live.choices):
            moved = forward(model, input_ids)
        effects.append(difference(centre, moved))
        centre = moved
    predicted = math.hypot(math.sqrt(sum(effect.rms**2 for effect in effects) / draws), noise)
    predicted_kl = sum(effect.kl for effect in effects) / draws + noise_kl
    return LogitCheck(
        measured=found.rms,
        measured_max=found.largest,
        predicted=predicted,
        bound=LOGIT_GATE * predicted,
        base_distance=from_base.rms,
        kl=found.kl,
        predicted_kl=predicted_kl,
        kl_bound=max(KL_SHARE * base_kl, LOGIT_GATE**2 * predicted_kl),
        base_kl=base_kl,
    )


def difference(one: torch.Tensor, other: torch.Tensor) -> LogitDifference:
    """Between logits [batch, sequence, vocabulary], in float64; over the first entries where one vocabulary is longer."""
    vocabulary = min(one.shape[-1], other.shape[-1])
    squares, largest, divergence, positions = 0.0, [], 0.0, one.shape[:-1].numel()
    pairs = zip(one.flatten(0, -2).split(POSITIONS_AT_ONCE), other.flatten(0, -2).split(POSITIONS_AT_ONCE), strict=True)
    for ours, theirs in pairs:
        p, q = ours[:, :vocabulary].double(), theirs[:, :vocabulary].double()
        squares += (p - q).square().sum().item()
        largest.append((p - q).abs().max())
        p, q = p.log_softmax(dim=-1), q.log_softmax(dim=-1)
        divergence += (p.exp() * (p - q)).sum().item()
    return LogitDifference(
        math.sqrt(squares / (positions * vocabulary)),
        torch.stack(largest).max().item(),
        max(divergence / positions, 0.0) if math.isfinite(divergence) else divergence,
    )


def check_directory(
    adapter: Path | Sequence[tuple[Path, float]],
    merged: Path,
    base: str | Path,
    revision: str | None = None,
    input_ids: torch.Tensor | None = None,
) -> LogitCheck:
    """check_logits for a merged directory: base + adapter as PEFT runs them, on the CPU, one model in memory at a time.

    adapter: a PEFT directory, or several with their weights. base: the full-precision base, a directory or a hub id in
    the local cache at `revision`. input_ids: int64 [batch, sequence], by default prompt_tokens. Raises UsageError before
    loading when less memory is available than memory_needed counts.
    """
    from transformers import AutoConfig

    adapters = [(adapter, 1.0)] if isinstance(adapter, Path) else list(adapter)
    paths = [path for path, _ in adapters]
    source = Path(base) if Path(base).is_dir() else cached_snapshot(str(base), revision)
    whole = AutoConfig.from_pretrained(merged)
    config = whole.get_text_config()
    keys = [span.name for path in paths for span in read_shard(path / ADAPTER_WEIGHTS).spans]
    kind = adapted_class(whole, keys)
    if input_ids is None:
        shape = (2, PROMPT_TOKENS)
        if kind in head_classes(whole):  # logits for the last token of each row alone
            shape = (16, PROMPT_TOKENS // 8)
        input_ids = prompt_tokens(merged, config, trained_tokens(paths), *shape)
    spans = [span for file in sorted(merged.glob("*.safetensors")) for span in read_shard(file).spans]
    needed = memory_needed(paths, spans, input_ids.numel() * config.vocab_size)
    available = psutil.virtual_memory().available
    if needed > available:
        what = f"needs {needed / 1e9:.1f} GB of memory, of {available / 1e9:.1f} GB available"
        fix = "free some, or merge with verify='logits' on a larger machine"
        raise UsageError(f"verify='logits' of {merged} {what}", fix=fix)
    with ieee_matmul(), torch.no_grad():
        load = functools.partial(load_float, kind, labelled=whole if kind in head_classes(whole) else None)
        seen = observe_from_disk(adapters, functools.partial(load, source), config.vocab_size, input_ids)
        dtypes = {span.name: FLOAT_DTYPES[span.dtype] for span in spans if span.dtype in FLOAT_DTYPES}
        return compare_logits(
            seen,
            functools.partial(load, merged),
            lambda name: dtypes.get(name, whole.dtype or config.dtype),
            input_ids,
            draws=2,
        )


def memory_needed(adapters: list[Path], merged: list[Span], logits: int) -> int:
    """The most bytes that check_directory allocates. It counts a model twice, in float32, or in float64 if it is float32.
    That covers weights, update, sum and allocator: bfloat16 models took 5.4 to 8.0 bytes a parameter. logits: their number."""
    parameters = sum(element_count(span.shape) for span in merged)
    wide = sum(element_count(span.shape) for span in merged if span.dtype == "F32")
    itemsize = 8 if wide > parameters / 100 else 4  # many bfloat16 models keep a few small vectors in float32
    trained = sum(element_count(span.shape) for path in adapters for span in read_shard(path / ADAPTER_WEIGHTS).spans)
    return 2 * itemsize * (parameters + 2 * trained + 3 * logits)


def trained_tokens(adapters: list[Path]) -> list[int]:
    """The tokens that the adapters train one by one (trainable_token_indices), ascending."""
    tokens: set[int] = set()
    for path in adapters:
        chosen = read_json(path / "adapter_config.json").get("trainable_token_indices") or []
        for indices in chosen.values() if isinstance(chosen, dict) else [chosen]:
            tokens |= set(indices)
    return sorted(tokens)


def prompt_tokens(
    merged: Path, config: Any, first: list[int], rows: int = 2, columns: int = PROMPT_TOKENS
) -> torch.Tensor:
    """int64 [rows, columns or what the model has positions for]: a built-in text in merged's tokenizer, or seeded random
    tokens. `first`, the tokens that an adapter trains one by one, leads the rows, in turns, to half of each."""
    from transformers import AutoTokenizer

    columns = min(columns, getattr(config, "max_position_embeddings", columns))
    if any((merged / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        text = AutoTokenizer.from_pretrained(merged)(PROMPT)["input_ids"]
        known = [token for token in text if token < config.vocab_size]
        tokens = torch.tensor((known * (1 + rows * columns // len(known)))[: rows * columns]).view(rows, columns)
    else:
        tokens = torch.randint(config.vocab_size, (rows, columns), generator=torch.Generator().manual_seed(0))
    for row in range(rows):
        share = first[row::rows][: columns // 2]
        tokens[row, : len(share)] = torch.tensor(share, dtype=torch.int64)
    return tokens


def load_float(kind: Any, path: Path, dtype: torch.dtype, labelled: Any = None) -> Any:
    """A model in memory. labelled: the merged config of a classifier, whose labels the base may not have."""
    from transformers import AutoConfig

    gc.collect()  # models hold reference cycles: what was dropped must go before the next one comes
    if labelled is None:
        return kind.from_pretrained(path, dtype=dtype, device_map="cpu").eval()
    config = AutoConfig.from_pretrained(path)
    config.num_labels = labelled.num_labels
    padding = labelled.get_text_config().pad_token_id
    config.get_text_config().pad_token_id = -1 if padding is None else padding  # no prompt holds -1
    return kind.from_pretrained(path, config=config, dtype=dtype, device_map="cpu", ignore_mismatched_sizes=True).eval()


def observe_from_disk(
    adapters: list[tuple[Path, float]],
    load_base: Callable[[torch.dtype], Any],
    vocabulary: int,
    input_ids: torch.Tensor,
) -> LiveModel:
    """Base logits and live logits of base + adapters; the model is gone when this returns."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    model = load_base(torch.float32)
    if vocabulary != model.get_input_embeddings().weight.shape[0]:  # the adapter brings the new rows
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    base_logits = forward(model, input_ids)
    weights = {f"adapter{number}": weight for number, (_, weight) in enumerate(adapters)}
    live: Any = None
    for name, (path, _) in zip(weights, adapters, strict=True):
        # Low memory: PEFT then leaves out an initialisation that the weights replace; DoRA's takes a float32 model more.
        if live is None:
            live = PeftModel.from_pretrained(model, path, adapter_name=name, low_cpu_mem_usage=True)
        else:
            live.load_adapter(path, adapter_name=name, low_cpu_mem_usage=True)
    live.base_model.set_adapter(list(weights))
    for module in live.modules():
        if isinstance(module, LoraLayer):
            for name, weight in weights.items():
                module.set_scale(name, weight)
    return observe_live(live.eval(), input_ids, base_logits)
