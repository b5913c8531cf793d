"""Rollouts of the smoke GSPO run by each engine, in pairs with transformers' own `generate`: tokens per second, equality.

The run is `configs/smoke/chat-gspo.yaml`, on a model that `configs/smoke/chat-sft.yaml` has trained. At each of its rollouts
the engines write the same prompts from the same seed with the weights of that step, two at a time and in turns. The run goes on
with what transformers wrote.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
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
Turn = Callable[..., Any]  # prompt ids, images, multimodal fields, copies -> completion ids, log-probabilities


def transformers_engine(trainer: Any) -> Turn:
    """Return what TRL calls: `model.generate`."""
    turn: Turn = getattr(trainer, GENERATE_TURN)
    return turn


def cogumi_engine(trainer: Any) -> Turn:
    """Return the same with shared prefill and without finished rows."""
    with replaced(trainer, {GENERATE_TURN: getattr(trainer, GENERATE_TURN)}):
        generation.share_prefill_and_drop_finished(trainer)
        return transformers_engine(trainer)


BASELINE, CHOSEN = "transformers", "transformers, needless rows skipped"
ENGINES: dict[str, Callable[[Any], Turn]] = {BASELINE: transformers_engine, CHOSEN: cogumi_engine}


@dataclass
class Pairs:
    """Tokens/s of one engine and of transformers, rollout by rollout, and how many of the completions are equal."""

    engine: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    equal: int = 0
    written: int = 0


class Comparison:
    """Takes the place of a trainer's sampler, and measures the engines at each rollout."""

    def __init__(self, trainer: Any) -> None:
        self.turns = {name: make(trainer) for name, make in ENGINES.items()}
        self.pairs = {name: Pairs() for name in ENGINES if name != BASELINE}
        self.rollouts = 0
        self.wait = torch.cuda.synchronize if torch.cuda.is_available() else nullcontext
        setattr(trainer, GENERATE_TURN, self.generate)

    def generate(self, *args: Any) -> Any:
        state = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        if self.rollouts == 0:
            for name in self.turns:  # warms up
                self.timed(name, args, state, on_gpu)
        for name, pairs in self.pairs.items():
            order = (BASELINE, name) if self.rollouts % 2 else (name, BASELINE)
            results = {engine: self.timed(engine, args, state, on_gpu) for engine in order}
            pairs.engine.append(results[name][1])
            pairs.baseline.append(results[BASELINE][1])
            completions = list(zip(results[name][0][0], results[BASELINE][0][0], strict=True))
            pairs.equal += sum(list(one) == list(other) for one, other in completions)
            pairs.written += len(completions)
        self.rollouts += 1
        return self.timed(BASELINE, args, state, on_gpu)[0]

    def timed(self, name: str, args: Any, state: Tensor, on_gpu: Tensor | None) -> tuple[Any, float]:
        """Return what an engine wrote, and its tokens/s."""
        torch.set_rng_state(state)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        self.wait()
        start = time.perf_counter()
        written = self.turns[name](*args)
        self.wait()
        return written, sum(map(len, written[0])) / (time.perf_counter() - start)


def compare(model: str, run_dir: Path, **overrides: Any) -> Comparison:
    """Train the smoke GSPO run, and measure the engines on the way."""
    made: list[Comparison] = []
    with mock.patch.object(gspo, "share_prefill_and_drop_finished", lambda trainer: made.append(Comparison(trainer))):
        common = {"data__eval_rows": 0, "cogumi__merge": False}
        cogumi.train(CONFIGS / "chat-gspo.yaml", model__name=model, cogumi__run_dir=run_dir, **common, **overrides)
    return made[0]


def pair_rows(case: str, pairs: dict[str, Pairs], target: str = "") -> Iterator[Row]:
    """Yield tokens/s, the ratio to transformers over adjacent pairs with its spread, and the share of equal completions."""
    for name, pair in pairs.items():
        yield values_row("rollouts", case, BASELINE, pair.baseline, "tokens/s")
        yield values_row("rollouts", case, name, pair.engine, "tokens/s")
        ratios = [engine / baseline for engine, baseline in zip(pair.engine, pair.baseline, strict=True)]
        note = f"{pair.equal} of {pair.written} completions as by {BASELINE}; {len(ratios)} pairs"
        metric, spread = f"tokens/s, {name} / {BASELINE}", (min(ratios), max(ratios))
        limit = target if name == CHOSEN else ""
        middle = statistics.median(ratios)
        yield row("rollouts", case, metric, middle, "ratio", spread=spread, target=limit, note=note)


def run(quick: bool = False) -> Iterator[Row]:
    """`quick`: few steps, without the case in bfloat16."""
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        sft_steps = {"train__max_steps": QUICK_STEPS["sft"]} if quick else {}
        model = str(cogumi.train(CONFIGS / "chat-sft.yaml", cogumi__run_dir=home / "sft", **sft_steps).merged)
        steps: dict[str, Any] = {"train__max_steps": QUICK_STEPS["gspo"]} if quick else {}
        case = f"smoke/chat-gspo, {torch.get_num_threads()} threads"
        compared = compare(model, home / "gspo", **steps)
        yield from pair_rows(case, compared.pairs, target=">= 1.5")
        if not quick:
            steps = {"model__dtype": "bfloat16", "train__max_steps": BFLOAT16_STEPS}
            compared = compare(model, home / "bfloat16", **steps)
            yield from pair_rows(f"{case}, weights in bfloat16", compared.pairs)
