"""Rollouts of the smoke GSPO run by each engine, in pairs with transformers' own `generate`: tokens per second, and which differ.

The run is `configs/smoke/chat-gspo.yaml`, on a model that `configs/smoke/chat-sft.yaml` has trained. At each of its rollouts
the engines write the same prompts from the same seed with the weights of that step, two at a time and in turns. The run goes on
with what transformers wrote.

An engine is a function from a trainer to a function that is called as TRL calls its sampler. vLLM is measured where it is
installed, with the sync of its weights, which each rollout of new weights needs.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import cogumi
from benchmarks.harness import ROOT, Row, quiet, row, values_row
from cogumi.methods import gspo
from cogumi.patches import replaced
from cogumi.patches.trl_internals import GENERATE_TURN
from cogumi.rl import generation

CONFIGS = ROOT / "configs" / "smoke"
QUICK_STEPS = {"sft": 15, "gspo": 2}
BFLOAT16_STEPS = 12
OTHERS, SLOW = 3, 18  # every so many rollouts the candidates that were not chosen are measured, and the slow one
Turn = Callable[..., Any]  # prompt ids, images, multimodal fields, copies -> completion ids, log-probabilities


def transformers_engine(trainer: Any) -> Turn:
    """What TRL calls: `model.generate`."""
    turn: Turn = getattr(trainer, GENERATE_TURN)
    return turn


def cogumi_engine(trainer: Any, rows: Any = generation.RowsInUse) -> Turn:
    """The same without needless rows. rows: in the place of the class that leaves them out."""
    with replaced(trainer, {GENERATE_TURN: getattr(trainer, GENERATE_TURN)}):
        generation.share_prefill_and_drop_finished(trainer)
        turn = getattr(trainer, GENERATE_TURN)
    return within(turn, lambda: mock.patch.object(generation, "RowsInUse", rows))


def within(turn: Turn, surrounding: Callable[[], AbstractContextManager[Any]]) -> Turn:
    def generate(*args: Any) -> Any:
        with surrounding():
            return turn(*args)

    return generate


class PromptsOnce(generation.RowsInUse):
    def decode(self, inputs: dict[str, Any]) -> Any:
        return self.forward(**inputs)


class EndedDropped(generation.RowsInUse):
    def prefill(self, inputs: dict[str, Any]) -> Any:
        return self.forward(**inputs)


class PaddingTrimmed(generation.RowsInUse):
    """Also without the columns of the cache that are padding in every row that is left."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(self.forward_trimmed)
        self.whole, self.cut = forward, 0

    def forward_trimmed(self, **inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] > 1:
            return self.whole(**inputs)
        padding = int(inputs["attention_mask"].argmax(dim=1).min())
        for layer in self.cache.layers if padding > self.cut else ():
            layer.keys, layer.values = (each[:, :, padding - self.cut :] for each in (layer.keys, layer.values))
        self.cut = padding
        return self.whole(**inputs | {"attention_mask": inputs["attention_mask"][:, padding:]})


def static_cache(trainer: Any) -> Turn:
    config = trainer.generation_config
    return within(transformers_engine(trainer), lambda: replaced(config, {"cache_implementation": "static"}))


def merged_adapter(trainer: Any) -> Turn:
    """With the adapter in the weights meanwhile. They are put back from a copy: to subtract it again leaves rounding."""

    @contextmanager
    def merged() -> Iterator[None]:
        held = {name: each for name, each in trainer.model.named_parameters() if "base_layer" in name}
        copies = {name: each.detach().clone() for name, each in held.items()}
        trainer.model.merge_adapter()
        try:
            yield
        finally:
            trainer.model.unmerge_adapter()
            for name, each in held.items():
                each.data.copy_(copies[name])

    return within(transformers_engine(trainer), merged)


def inference_mode(trainer: Any) -> Turn:
    return within(transformers_engine(trainer), torch.inference_mode)


def bare_forward(trainer: Any) -> Turn:
    """Without what TRL puts around the model's forward pass."""
    model = trainer.model.get_base_model()
    return within(
        transformers_engine(trainer), lambda: replaced(model, {"forward": type(model).forward.__get__(model)})
    )


def continuous_batching(trainer: Any) -> Turn:
    """As TRL calls it with `use_transformers_continuous_batching`."""

    def generate(prompt_ids: list[list[int]], *_: Any) -> Any:
        config = copy.deepcopy(trainer.generation_config)
        with torch.no_grad():
            found = trainer.model.generate_batch(prompt_ids, generation_config=config, progress_bar=False)
        trainer.model.train()
        return [each.generated_tokens for each in found.values()], None

    return generate


def vllm_engine(trainer: Any) -> Turn:
    """vLLM in this process, with the trainer's own settings; each call gives it the weights first."""
    from trl.generation.vllm_generation import VLLMGeneration

    longest = trainer.model.config.max_position_embeddings
    settings = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
    engine = VLLMGeneration(
        trainer.model,
        trainer.accelerator,
        trainer.processing_class,
        gpu_memory_utilization=0.1,
        max_model_length=longest,
        max_num_seqs=trainer.args.generation_batch_size,
        **{name: getattr(trainer, name) for name in settings},
    )

    def generate(prompt_ids: list[list[int]], *_: Any) -> Any:
        engine.sync_weights()
        return engine.generate(prompts=prompt_ids, images=None, num_generations=1)[1], None

    return generate


BASELINE, CHOSEN = "transformers", "transformers, needless rows skipped"
ENGINES: dict[str, Callable[[Any], Turn]] = {BASELINE: transformers_engine, CHOSEN: cogumi_engine}
if find_spec("vllm") is not None:
    ENGINES["vLLM, colocate"] = vllm_engine
CANDIDATES: dict[str, Callable[[Any], Turn]] = {
    "prompts once": partial(cogumi_engine, rows=PromptsOnce),
    "ended rows dropped": partial(cogumi_engine, rows=EndedDropped),
    "both, left padding trimmed": partial(cogumi_engine, rows=PaddingTrimmed),
    "static cache": static_cache,
    "adapter merged": merged_adapter,
    "inference_mode": inference_mode,
    "TRL's forward wrapper off": bare_forward,
}
SLOW_CANDIDATES: dict[str, Callable[[Any], Turn]] = {"continuous batching": continuous_batching}


@dataclass
class Pairs:
    """Of one engine and transformers' own, rollout by rollout: tokens/s of both, and completions that are equal, of all."""

    own: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    equal: int = 0
    written: int = 0


@dataclass
class Shares:
    """Where transformers' own rollouts spend their time: seconds, rows of all forward passes for one token, and tokens."""

    total: float = 0.0
    prompts: float = 0.0
    decoding: float = 0.0
    rows: int = 0
    tokens: int = 0

    def timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **inputs: Any) -> Any:
            start = time.perf_counter()
            found = forward(*args, **inputs)
            seconds, rows = time.perf_counter() - start, len(inputs["input_ids"])
            if inputs["input_ids"].shape[1] > 1:
                self.prompts += seconds
            else:
                self.decoding += seconds
            self.rows += rows  # the pass over the prompts gives a first token to each row
            return found

        return compute


class Comparison:
    """Takes the place of a trainer's sampler, and measures the engines at each rollout."""

    def __init__(self, trainer: Any, every: dict[str, int]) -> None:
        """every: after how many rollouts an engine is measured again."""
        makers = ENGINES | CANDIDATES | SLOW_CANDIDATES
        self.turns = {name: makers[name](trainer) for name in (BASELINE, *every)}
        self.every, self.rollouts = every, 0
        self.pairs, self.shares = {name: Pairs() for name in every}, Shares()
        self.model = trainer.model.get_base_model()
        self.wait = torch.cuda.synchronize if torch.cuda.is_available() else nullcontext
        setattr(trainer, GENERATE_TURN, self.generate)

    def generate(self, *args: Any) -> Any:
        state = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        if self.rollouts == 0:
            for name in self.turns:  # warms up
                self.timed(name, args, state, on_gpu)
        for name, pairs in self.pairs.items():
            if self.rollouts % self.every[name]:
                continue
            first, second = (BASELINE, name) if (self.rollouts // self.every[name]) % 2 else (name, BASELINE)
            found = {each: self.timed(each, args, state, on_gpu) for each in (first, second)}
            pairs.own.append(found[name][1])
            pairs.baseline.append(found[BASELINE][1])
            ids = zip(found[name][0][0], found[BASELINE][0][0], strict=True)
            equal = [list(one) == list(other) for one, other in ids]
            pairs.equal, pairs.written = pairs.equal + sum(equal), pairs.written + len(equal)
        self.rollouts += 1
        with replaced(self.model, {"forward": self.shares.timed(self.model.forward)}):
            written, speed = self.timed(BASELINE, args, state, on_gpu)
        tokens = sum(map(len, written[0]))
        self.shares.tokens, self.shares.total = self.shares.tokens + tokens, self.shares.total + tokens / speed
        return written

    def timed(self, name: str, args: Any, state: Tensor, on_gpu: Tensor | None) -> tuple[Any, float]:
        """(what an engine wrote, its tokens/s)"""
        torch.set_rng_state(state)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        self.wait()
        start = time.perf_counter()
        found = self.turns[name](*args)
        self.wait()
        return found, sum(map(len, found[0])) / (time.perf_counter() - start)


def compare(model: str, run_dir: Path, every: dict[str, int], **overrides: Any) -> Comparison:
    """Train the smoke GSPO run, and measure the engines on the way."""
    made: list[Comparison] = []

    def attach(trainer: Any) -> None:
        made.append(Comparison(trainer, every))

    with mock.patch.object(gspo, "share_prefill_and_drop_finished", attach):
        common = {"data__eval_rows": 0, "cogumi__merge": False}
        cogumi.train(CONFIGS / "chat-gspo.yaml", model__name=model, cogumi__run_dir=run_dir, **common, **overrides)
    return made[0]


def share_rows(case: str, shares: Shares) -> Iterator[Row]:
    """What transformers' own rollouts spend their time on. Not for a GPU, where a pass returns before it has computed."""
    parts = {"forward pass over the prompts": shares.prompts, "forward passes of a token": shares.decoding}
    if not torch.cuda.is_available():
        parts["draw, stopping and all else"] = shares.total - shares.prompts - shares.decoding
        for name, seconds in parts.items():
            yield row("rollouts", case, f"{BASELINE}: {name}", 100 * seconds / shares.total, "% of the time")
    ended = 100 * (1 - shares.tokens / shares.rows)
    yield row("rollouts", case, f"{BASELINE}: computed after the end of a completion", ended, "% of the rows")


def pair_rows(case: str, pairs: dict[str, Pairs], target: str = "") -> Iterator[Row]:
    """Tokens/s, the ratio to transformers' own over adjacent pairs with its spread, and the share of equal completions."""
    for name, each in pairs.items():
        if name == CHOSEN:
            yield values_row("rollouts", case, f"{BASELINE}", each.baseline, "tokens/s")
            yield values_row("rollouts", case, f"{name}", each.own, "tokens/s")
        ratios = [own / baseline for own, baseline in zip(each.own, each.baseline, strict=True)]
        middle, spread = statistics.median(ratios), (min(ratios), max(ratios))
        equal = f"{each.equal} of {each.written} completions as by {BASELINE}; {len(ratios)} pairs"
        wanted = target if name == CHOSEN else ""
        metric = f"tokens/s, {name} / {BASELINE}"
        yield row("rollouts", case, metric, middle, "ratio", spread=spread, target=wanted, note=equal)


def run(quick: bool = False) -> Iterator[Row]:
    """`quick`: few steps, without the slow candidate and the case in bfloat16."""
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        short = {"train__max_steps": QUICK_STEPS["sft"]} if quick else {}
        sft = cogumi.train(CONFIGS / "chat-sft.yaml", cogumi__run_dir=home / "sft", **short)
        model = str(sft.merged)
        more: dict[str, Any] = {"train__max_steps": QUICK_STEPS["gspo"]} if quick else {}
        every = {name: 1 for name in ENGINES if name != BASELINE} | dict.fromkeys(CANDIDATES, OTHERS)
        if not quick:
            every |= dict.fromkeys(SLOW_CANDIDATES, SLOW)
        case = f"smoke/chat-gspo, {torch.get_num_threads()} threads"
        compared = compare(model, home / "gspo", every, **more)
        yield from share_rows(case, compared.shares)
        yield from pair_rows(case, compared.pairs, target=">= 1.5")
        if not quick:
            every = {CHOSEN: 1, "adapter merged": 1}
            more = {"model__dtype": "bfloat16", "train__max_steps": BFLOAT16_STEPS}
            compared = compare(model, home / "bfloat16", every, **more)
            yield from pair_rows(f"{case}, weights in bfloat16", compared.pairs)
