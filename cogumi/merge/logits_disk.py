"""The logit check of a merged directory: base + adapter and the merge, loaded from disk one after the other."""

import gc
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, element_count, read_shard
from cogumi.merge.adapter_files import read_json
from cogumi.merge.arithmetic import ieee_matmul
from cogumi.merge.bases import cached_snapshot
from cogumi.merge.logits import Live, LogitCheck, compare, forward, observe

PROMPT_TOKENS = 128  # a row of the built-in prompt

PROMPT = '''The harbour was quiet when the first boats came in. Nobody had expected so much fish in March, and the
buyers, who had slept late, ran down the hill with their coats open. "Forty crates," said the oldest of the skippers,
"and not one of them small." By noon the ice was gone, the price had fallen by a third, and the café had sold out of
bread; by evening, 1 of 3 boats had left again.

def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join the intervals that overlap, in ascending order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged

SELECT city, COUNT(*) AS visits FROM trips WHERE year >= 2019 GROUP BY city ORDER BY visits DESC LIMIT 10;
'''


def check_directory(
    adapter: Path | Sequence[tuple[Path, float]],
    merged: Path,
    base: str | Path,
    revision: str | None = None,
    input_ids: torch.Tensor | None = None,
    *,
    rows: int = 2,
    draws: int = 2,
    seed: int = 0,
) -> LogitCheck:
    """Compare a merged directory with base + adapter as PEFT runs them, on the CPU, one model in memory at a time.

    adapter: a PEFT directory, or several with their weights, which are added. merged: the merged directory. base: the
    full-precision base, as a directory or as a hub id in the local cache at `revision`. input_ids: int64 [batch,
    sequence]; by default `rows` rows of 128 tokens of a short built-in text (prose and code) in merged's tokenizer, or
    seeded random tokens where it has none, in both cases led by the tokens that the adapter trains one by one.

    The check is that of check_logits, with the logits of the base as it is on disk. Memory: 4 bytes per parameter (8
    where merged holds float32), plus the adapter, three of the largest weight and five sets of logits; memory_needed
    counts them. Raises UsageError before loading when the machine has less than that available, when a directory is not
    what it should be, or when the base is quantized; ValueError and RuntimeError of PEFT and transformers come through.
    """
    from transformers import AutoConfig

    adapters = [(adapter, 1.0)] if isinstance(adapter, Path) else list(adapter)
    for path, name in [*((path, "adapter_config.json") for path, _ in adapters), (merged, "config.json")]:
        if not (path / name).is_file():
            raise UsageError(f"{path} has no {name}", fix="pass the directory that save_pretrained or the merge wrote")
    if len(adapters) > 1 and any(
        read_json(path / "adapter_config.json", "adapter").get("use_dora") for path, _ in adapters
    ):
        raise UsageError(
            "the sum of several adapters is not defined where one of them is DoRA", fix="merge it on its own"
        )
    source = Path(base) if Path(base).is_dir() else cached_snapshot(str(base), revision)
    if "quantization_config" in read_json(source / "config.json", "base config"):
        raise UsageError(f"base {base} is quantized", fix="pass the full-precision base that the merge was made from")
    config = AutoConfig.from_pretrained(merged).get_text_config()
    if input_ids is None:
        input_ids = prompt_tokens(merged, config, trained_tokens([path for path, _ in adapters]), rows, seed)
    spans = [span for file in sorted(merged.glob("*.safetensors")) for span in read_shard(file).spans]
    needed = memory_needed([path for path, _ in adapters], spans, input_ids.numel() * config.vocab_size)
    available = psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"verify='logits' of {merged} needs {needed / 1000000000.0:.1f} GB of memory and this "
            f"machine has {available / 1000000000.0:.1f} GB available",
            fix="free some, or run `cogumi merge --check` with logits on a larger machine",
        )
    stored = {span.name: FLOAT_DTYPES[span.dtype] for span in spans if span.dtype in FLOAT_DTYPES}
    with ieee_matmul(), torch.no_grad():
        seen = observe_from_disk(adapters, source, config.vocab_size, input_ids)
        return compare(
            seen, lambda kind: load(merged, kind), lambda name: stored.get(name, config.dtype), input_ids, draws, seed
        )


def memory_needed(adapters: list[Path], merged: list[Span], logits: int) -> int:
    """Bytes that check_directory allocates at most, from the tensors' headers; `logits` is their number.

    One model in float32, or in float64 for the second half of the check of a float32 one; beside it the adapter (whole
    modules twice: trained and original), a weight with its update and their sum (DoRA, experts), and the logits of
    live, base, merged and two draws. Experts that are stored one by one become one weight. A quarter more, because the
    allocator keeps what it is given back in pieces of up to 32 MB. Measured, in bytes per parameter of a random Llama
    of 201 M in bfloat16 with 256 tokens: 5.4 to 8.0 in several runs, where this counts 8.7.
    """
    sizes: dict[str, int] = {}
    for span in merged:
        name = re.sub(r"\.experts\.\d+\.", ".experts.", span.name)
        sizes[name] = sizes.get(name, 0) + element_count(span.shape)
    parameters = sum(sizes.values())
    wide = sum(element_count(span.shape) for span in merged if span.dtype == "F32")
    itemsize = 8 if wide > parameters / 100 else 4  # many bfloat16 models keep a few small vectors in float32
    files = [file for path in adapters for file in path.glob("adapter_model.safetensors")]
    trained = sum(element_count(span.shape) for file in files for span in read_shard(file).spans)
    return 5 * itemsize // 4 * (parameters + 2 * trained + 3 * max(sizes.values(), default=0) + 5 * logits)


def trained_tokens(adapters: list[Path]) -> list[int]:
    """The tokens that the adapters train one by one (trainable_token_indices), ascending."""
    tokens: set[int] = set()
    for path in adapters:
        chosen = read_json(path / "adapter_config.json", "adapter config").get("trainable_token_indices") or []
        for indices in chosen.values() if isinstance(chosen, dict) else [chosen]:
            tokens |= set(indices)
    return sorted(tokens)


def prompt_tokens(merged: Path, config: Any, first: list[int], rows: int, seed: int) -> torch.Tensor:
    """int64 [rows, 128 or what the model has positions for]; `first` leads the rows, in turns, to half of each."""
    from transformers import AutoTokenizer

    columns = min(PROMPT_TOKENS, getattr(config, "max_position_embeddings", PROMPT_TOKENS))
    if any((merged / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        text = AutoTokenizer.from_pretrained(merged)(PROMPT)["input_ids"]
        known = [token for token in text if token < config.vocab_size]
        tokens = torch.tensor((known * (1 + rows * columns // len(known)))[: rows * columns]).view(rows, columns)
    else:
        tokens = torch.randint(config.vocab_size, (rows, columns), generator=torch.Generator().manual_seed(seed))
    for row in range(rows):
        share = first[row::rows][: columns // 2]
        tokens[row, : len(share)] = torch.tensor(share, dtype=torch.int64)
    return tokens


def load(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    gc.collect()  # models hold reference cycles: what was dropped must go before the next one comes
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map="cpu").eval()


def observe_from_disk(adapters: list[tuple[Path, float]], base: Path, vocabulary: int, input_ids: torch.Tensor) -> Live:
    """Base logits and live logits of base + adapters; the model is gone when this returns."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    model = load(base, torch.float32)
    if vocabulary != model.get_input_embeddings().weight.shape[0]:  # the adapter brings the new rows
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    base_logits = forward(model, input_ids)
    names = ["default", *(f"adapter{place}" for place in range(1, len(adapters)))]
    # Low memory: PEFT then leaves out an initialisation that the weights replace; DoRA's takes a float32 model more.
    live = PeftModel.from_pretrained(model, adapters[0][0], adapter_name=names[0], low_cpu_mem_usage=True)
    for name, (path, _) in zip(names[1:], adapters[1:], strict=True):
        live.load_adapter(path, adapter_name=name, low_cpu_mem_usage=True)
    tuner: Any = live.base_model
    tuner.set_adapter(names if len(names) > 1 else names[0])
    for module in live.modules():
        if isinstance(module, LoraLayer):
            for name, (_, weight) in zip(names, adapters, strict=True):
                module.set_scale(name, weight)
    return observe(live.eval(), input_ids, base_logits)
