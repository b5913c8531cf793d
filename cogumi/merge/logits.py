"""Compare the logits of a merged model with those of base + adapter, with one model in memory at a time.

Two models that should be equal still differ by rounding: of the merged weights, once, to the dtype they are stored in,
and of every operation, in the dtype the models run in. The rms difference grows with the square root of the number of
layers. DENSE and MIXTURE bound it above what was measured with 2 to 30 layers (docs/merging.md). A small error in
the scale of the update hides in that, so the merged model also has to move the logits as far from the base as the adapter.
"""

import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_memory, one_line
from cogumi.core.safetensors_file import FLOAT_DTYPES, element_count, read_shard
from cogumi.merge.adapter_files import ADAPTER_WEIGHTS, read_json
from cogumi.merge.arithmetic import ieee_matmul
from cogumi.merge.bases import cached_snapshot
from cogumi.merge.parameter_map import adapted_class, head_classes
from cogumi.patches.trl_internals import experts_of, targets_as_named

# Largest rms difference for each square root of a layer, in units of the logits' standard deviation over the vocabulary:
# where the models run in this dtype, and where the merged weights are stored in it. The larger of the two counts.
DENSE = {
    torch.float64: (1e-5, 1e-5),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (4e-3, 2e-3),
    torch.bfloat16: (3e-2, 1e-2),
}
# A state that is carried along the sequence adds up the rounding of weights (measured up to 0.0106).
RECURRENT = DENSE | {torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 2e-2)}
# Rounding also changes the choice between two experts of nearly equal weight.
MIXTURE = {
    torch.float64: (4e-5, 4e-5),
    torch.float32: (4e-5, 4e-5),
    torch.float16: (1.6e-2, 4e-3),
    torch.bfloat16: (4e-2, 4e-2),
}
SCALE_ERROR = 0.01  # largest error of the update's scale, beside what rounding explains
POSITIONS_AT_ONCE = 16  # in float64: 20 MB a copy for a vocabulary of 150 000
WORKING_BYTES = 1 << 30  # activations and statistics, beside the model and the logits
PROMPT_TOKENS = 128  # in a row of the built-in prompt
PROMPT = Path(__file__).read_text(encoding="utf-8")[:2000]  # prose and code
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


class NotCompared(UsageError):
    """Memory is too small for the comparison, or what was recorded tells nothing; the message has the figures."""


@dataclass(frozen=True)
class Reference:
    """Logits of base + adapter and of the base, [batch, sequence, vocabulary] on the CPU, and the live model's dtype.

    columns: of the vocabulary, where not all are recorded.
    """

    dtype: torch.dtype
    input_ids: torch.Tensor
    live: torch.Tensor
    base: torch.Tensor
    columns: torch.Tensor | None = None

    def followed(self, logits: torch.Tensor, base: torch.Tensor | None = None) -> float:
        """Return the share of the adapter's movement that logits make, from the recorded base's or another's: 1, or less."""
        size = min(self.live.shape[-1], logits.shape[-1])
        live, start, made = (tensor[..., :size].double().flatten() for tensor in (self.live, self.base, logits))
        origin = start if base is None else base[..., :size].double().flatten()
        moved = live - start
        return float((made - origin) @ moved / (moved @ moved).clamp_min(1e-30))


@dataclass(frozen=True)
class LogitCheck:
    """Rms distances between logits, over positions and vocabulary: from live to merged, from the base to live and to merged.

    bound: largest `measured`. scale_bound: largest |base_distance / live_distance - 1|, or None where live_distance is
    below `bound`, so that the update's scale cannot be seen. same_tokens: share of equal next tokens.
    """

    measured: float
    bound: float
    live_distance: float
    base_distance: float
    scale_bound: float | None
    same_tokens: float = 1.0

    @property
    def passed(self) -> bool:
        off = 0.0 if self.scale_bound is None else abs(self.base_distance / self.live_distance - 1)
        return self.measured <= self.bound and off <= (self.scale_bound or 0.0)

    def __str__(self) -> str:
        verdict = "logits agree" if self.passed else "LOGITS DIFFER"
        scale = (
            "no scale, it is within rounding" if self.scale_bound is None else f"equal within {self.scale_bound:.1%}"
        )
        return (
            f"{verdict}: merged is {self.measured:.3g} rms from base + adapter, allowed {self.bound:.3g}; "
            f"{self.base_distance:.4g} from the base, and base + adapter {self.live_distance:.4g}, required: {scale}"
        )


@dataclass(frozen=True)
class Loader:
    """Settings with which models are loaded. labelled: the merged config of a classifier, whose labels the base may lack."""

    kind: Any
    dtype: torch.dtype
    device: torch.device
    labelled: Any = None

    def load(self, path: Path, device: torch.device) -> Any:
        from transformers import AutoConfig

        options: dict[str, Any] = {"dtype": self.dtype, "device_map": {"": device}}
        if self.labelled is not None:
            config = AutoConfig.from_pretrained(path)
            config.num_labels = self.labelled.num_labels
            padding = self.labelled.get_text_config().pad_token_id
            config.get_text_config().pad_token_id = -1 if padding is None else padding  # no prompt holds -1
            options |= {"config": config, "ignore_mismatched_sizes": True}
        return self.kind.from_pretrained(path, **options)


def record_logits(live: Any, input_ids: torch.Tensor) -> Reference:
    """Run a PEFT model with its adapter and without, where PEFT leaves the biases that bias="all" or "lora_only" trained."""
    logits = run_model(live, input_ids)
    with live.disable_adapter():
        return Reference(live.dtype, input_ids, logits, run_model(live, input_ids))


def run_model(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits [batch, sequence, vocabulary] on the CPU, in eval mode, row by row, by the methods of the model's classes.

    TRL and accelerate set `forward` on instances: one returns no logits, the other autocasts. Autocast is put back only
    where modules that were trained whole are in float32 between 16-bit ones, which cannot be multiplied without it.
    """
    dtypes = {
        parameter.dtype
        for name, parameter in model.named_parameters()
        if "lora_" not in name and parameter.is_floating_point()
    }
    mixed = len(dtypes) > 1 and model.dtype != torch.float32
    modes = [(module, module.training) for module in model.modules()]
    replaced = [(module, vars(module).pop("forward")) for module, _ in modes if "forward" in vars(module)]
    model.eval()
    try:
        with (
            runnable_experts(model),
            ieee_matmul(),
            torch.no_grad(),
            torch.autocast(model.device.type, model.dtype, enabled=mixed),
        ):
            outputs = []
            for row in input_ids.to(model.device).split(1):
                decoded = {"decoder_input_ids": row} if model.config.is_encoder_decoder else {}
                output = model(input_ids=row, use_cache=False, **decoded)
                # A model without a head gives its last hidden state first, one that answers questions the starts.
                outputs.append((output["logits"] if "logits" in output else output[0]).cpu())
            return torch.cat(outputs)
    finally:
        for module, forward in replaced:
            module.forward = forward
        for module, training in modes:
            module.training = training


@contextmanager
def runnable_experts(model: Any) -> Iterator[None]:
    """Run experts one by one where torch has no grouped product: in float64, and for rows that are no multiple of 16 bytes."""
    inner = getattr(model, "get_base_model", lambda: model)()
    stacks = [tensor for name, tensor in inner.named_parameters() if tensor.ndim == 3 and "experts" in name]
    lengths = [size * tensor.itemsize for tensor in stacks for size in tensor.shape[1:]]
    before = experts_of(inner.config)
    if any(length % 16 for length in lengths) or any(tensor.dtype == torch.float64 for tensor in stacks):
        inner.set_experts_implementation("eager")
    try:
        yield
    finally:
        if experts_of(inner.config) != before:
            inner.set_experts_implementation(before)


def compare_logits(reference: Reference, merged: Any, stored: torch.dtype, retained: float | None = None) -> LogitCheck:
    """Run a merged model on the reference's tokens. Raises UsageError where its logits have another shape.

    stored: the dtype that its weights were rounded to. retained: the share of the update in them.
    """
    logits, live = run_model(merged, reference.input_ids), reference.live
    if logits.shape[:-1] != live.shape[:-1]:
        message = f"the merged model's logits are {list(logits.shape)}, the live model's {list(live.shape)}"
        raise UsageError(message, fix="is it the merge of the same base?")
    measured, moved = rms(live, logits), rms(live, reference.base)
    bound = rounding_bound(merged, live, reference.dtype, stored)
    # A difference at right angles to the movement lengthens it by half its square.
    lost = 0.0 if retained is None else max(0.0, 1 - retained)
    scale_bound = SCALE_ERROR + lost + (measured / moved) ** 2 / 2 if moved > bound else None
    size = min(live.shape[-1], logits.shape[-1])
    same = (live[..., :size].argmax(-1) == logits[..., :size].argmax(-1)).double().mean().item()
    return LogitCheck(measured, bound, moved, rms(logits, reference.base), scale_bound, same)


def rounding_bound(model: Any, logits: torch.Tensor, other: torch.dtype, stored: torch.dtype) -> float:
    """Return the largest rms difference by rounding between these logits [..., vocabulary] and those of an equal model.

    other: the dtype that the equal model runs in. stored: the one that the weights are stored in.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 1)
    rounding = RECURRENT if "linear_attention" in (getattr(config, "layer_types", None) or ()) else DENSE
    rounding = MIXTURE if any("experts" in name for name, _ in model.named_modules()) else rounding
    share = max(rounding[other][0], rounding[model.dtype][0], rounding[stored][1])
    centre = logits.mean(dim=-1, keepdim=True, dtype=torch.float32) if logits.shape[-1] > 1 else torch.zeros(())
    return share * math.sqrt(layers) * rms(logits, centre.expand_as(logits))


def rms(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of a difference, in float64; over the first entries where one vocabulary is longer."""
    size = min(one.shape[-1], other.shape[-1])
    blocks = [tensor.flatten(0, -2)[:, :size].split(POSITIONS_AT_ONCE) for tensor in (one, other)]
    total = sum((a.double() - b.double()).square().sum().item() for a, b in zip(*blocks, strict=True))
    return math.sqrt(total / (one.shape[:-1].numel() * size))


def check_directory(
    adapters: Sequence[tuple[Path, float]],
    merged: Path,
    base: str | Path,
    input_ids: torch.Tensor | None = None,
    retained: float | None = None,
) -> LogitCheck:
    """Compare a merged directory with base + adapters, on the CPU, one model at a time.

    In float32 where memory has room: 16 bits would round each operation, which hides small errors and is slow on many CPUs.
    Otherwise in the dtype that the merged model is stored in.

    adapters: PEFT's directories with their weights. base: the full-precision base, a directory or a hub id in the cache.
    input_ids: int64 [batch, sequence], by default prompt_tokens. retained: the share of the update that the merge stored.
    Raises NotCompared.
    """
    from transformers import AutoConfig

    paths = [path for path, _ in adapters]
    loader = loader_of(paths, merged)
    if input_ids is None:
        # A classifier has logits for the last token of each row alone.
        shape = (2, PROMPT_TOKENS) if loader.labelled is None else (16, PROMPT_TOKENS // 8)
        config = AutoConfig.from_pretrained(merged).get_text_config()
        input_ids = prompt_tokens(tokenizer_of(merged), config, trained_tokens(paths), *shape)
    source = Path(base) if Path(base).is_dir() else cached_snapshot(str(base), None)
    if loader.dtype.itemsize < torch.float32.itemsize:
        exact = replace(loader, dtype=torch.float32)
        with suppress(NotCompared):
            return compare_directory(
                record_directory(adapters, source, merged, input_ids, exact), merged, exact, retained
            )
    return compare_directory(record_directory(adapters, source, merged, input_ids, loader), merged, loader, retained)


def loader_of(adapters: Sequence[Path], merged: Path) -> Loader:
    """Return how a merged directory is loaded on the CPU: in its own dtype, by the class that its adapters were trained on."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(merged)
    names = [span.name for path in adapters for span in read_shard(path / ADAPTER_WEIGHTS).spans]
    kind = adapted_class(config, names)
    if (input_name := getattr(kind, "main_input_name", "input_ids")) != "input_ids":
        raise NotCompared(f"{kind.__name__} takes {input_name}, and a comparison gives tokens alone")
    try:
        config.get_text_config()
    except ValueError as error:
        raise NotCompared(f"{kind.__name__} has several vocabularies: {one_line(error)}") from error
    labelled = config if kind in head_classes(config) else None
    return Loader(kind, measure_directory(merged)[1], torch.device("cpu"), labelled)


def record_directory(
    adapters: Sequence[tuple[Path, float]], base: Path, merged: Path, input_ids: torch.Tensor, loader: Loader
) -> Reference:
    """Load a base with its adapters and run it. Raises NotCompared. merged: what they became, for size and vocabulary."""
    with adapted(adapters, base, merged, input_ids, loader) as model:
        return record_logits(model, input_ids)


def compare_adapters(
    reference: Reference, adapters: Sequence[tuple[Path, float]], base: Path, merged: Path, loader: Loader
) -> LogitCheck:
    """Load a base with its adapters and compare it with what was recorded in the same dtype. Raises NotCompared."""
    with adapted(adapters, base, merged, reference.input_ids, loader) as model:
        return compare_logits(reference, model, loader.dtype)


@contextmanager
def adapted(
    adapters: Sequence[tuple[Path, float]], base: Path, merged: Path, input_ids: torch.Tensor, loader: Loader
) -> Iterator[Any]:
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(merged).get_text_config().vocab_size
    with loaded(base, loader, merged, input_ids.numel() * vocabulary) as model:
        try:
            yield adapted_model(adapters, model, vocabulary)
        except OUT_OF_MEMORY:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            name = type(model).__name__
            raise NotCompared(f"{name} with the adapter does not run on these tokens: {one_line(error)}") from error


def compare_directory(reference: Reference, merged: Path, loader: Loader, retained: float | None = None) -> LogitCheck:
    """Load a merged directory and compare it with what was recorded. Raises NotCompared."""
    with loaded(merged, loader, merged, reference.live.numel()) as model:
        return compare_logits(reference, model, measure_directory(merged)[1], retained)


@contextmanager
def loaded(path: Path, loader: Loader, size: Path, logits: int) -> Iterator[Any]:
    """Load a model where there is room for it and three sets of so many logits: on the loader's device, else the CPU.

    size: the directory whose size is planned with. Raises NotCompared where there is no room, also in the block.
    """
    gc.collect()  # models hold reference cycles: the last one has to go before the next one comes
    needed = loader.dtype.itemsize * (measure_directory(size)[0] + 3 * logits) + WORKING_BYTES
    free = {place: free_memory(place) for place in (loader.device, torch.device("cpu"))}
    figures = " and ".join(f"{format_memory(size)} free on {place.type}" for place, size in free.items())
    figures = f"{format_memory(needed)} needed, {figures}"
    device = next((place for place, size in free.items() if size >= needed), None)
    if device is None:
        raise NotCompared(figures)
    try:
        yield loader.load(path, device)
    except OUT_OF_MEMORY as error:
        raise NotCompared(f"{figures}, and memory ran out: {one_line(error)}") from error


def free_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def measure_directory(merged: Path) -> tuple[int, torch.dtype]:
    """Elements of a model, and the dtype of most; many bfloat16 models keep a few small vectors in float32."""
    sizes: Counter[torch.dtype] = Counter()
    for file in merged.glob("*.safetensors"):
        for span in read_shard(file).spans:
            sizes[FLOAT_DTYPES.get(span.dtype, torch.uint8)] += element_count(span.shape)
    return sizes.total(), sizes.most_common(1)[0][0]


def trained_tokens(adapters: list[Path]) -> list[int]:
    """The tokens that the adapters train one by one (trainable_token_indices), ascending."""
    tokens: set[int] = set()
    for path in adapters:
        chosen = read_json(path / "adapter_config.json").get("trainable_token_indices") or []
        for indices in chosen.values() if isinstance(chosen, dict) else [chosen]:
            tokens |= set(indices)
    return sorted(tokens)


def tokenizer_of(directory: Path) -> Any:
    """Load a directory's tokenizer; None where it has none."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return AutoTokenizer.from_pretrained(directory) if any((directory / name).is_file() for name in names) else None


def prompt_tokens(
    tokenizer: Any, config: Any, trained: list[int], rows: int = 2, columns: int = PROMPT_TOKENS, text: str = PROMPT
) -> torch.Tensor:
    """Return int64 token ids [rows, columns, or fewer where the model has fewer positions].

    They are those of a text, or seeded random ones where there is no tokenizer. The tokens that an adapter trains one by one
    (`trained`) stand at the beginning of the rows, dealt in turns, in at most half of each.
    """
    columns = min(columns, getattr(config, "max_position_embeddings", columns))
    if tokenizer is not None:
        known = [token for token in tokenizer(text, verbose=False)["input_ids"] if token < config.vocab_size]
        tokens = torch.tensor((known * (1 + rows * columns // len(known)))[: rows * columns]).view(rows, columns)
    else:
        tokens = torch.randint(config.vocab_size, (rows, columns), generator=torch.Generator().manual_seed(0))
    for row in range(rows):
        share = trained[row::rows][: columns // 2]
        tokens[row, : len(share)] = torch.tensor(share, dtype=torch.int64)
    return tokens


@targets_as_named()
def adapted_model(adapters: Sequence[tuple[Path, float]], model: Any, vocabulary: int) -> Any:
    """Put adapters on their base, each with its weight."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    if vocabulary != model.get_input_embeddings().weight.shape[0]:  # the adapter brings the new rows
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    dtype, dtypes = model.dtype, {id(parameter): parameter.dtype for parameter in model.parameters()}
    weights = {f"adapter{number}": weight for number, (_, weight) in enumerate(adapters)}
    live: Any = None
    for name, (path, _) in zip(weights, adapters, strict=True):
        # Low memory: PEFT then leaves out an initialisation that the weights replace; DoRA's takes a float32 model more.
        if live is None:
            live = PeftModel.from_pretrained(model, path, adapter_name=name, low_cpu_mem_usage=True)
        else:
            live.load_adapter(path, adapter_name=name, low_cpu_mem_usage=True)
        live.load_adapter(path, adapter_name=name)  # low memory has rounded it to the base's dtype
    live.base_model.set_adapter(list(weights))
    for module in live.modules():
        if isinstance(module, LoraLayer):
            for name, weight in weights.items():
                module.set_scale(name, weight)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:  # what an adapter's file brings of the base (an embedding, biases) may be in float32
            parameter.data = parameter.data.to(dtypes.get(id(parameter), dtype))
    return live
