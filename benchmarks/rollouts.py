"""Rollouts of the smoke GSPO run by each engine, in pairs with transformers' own `generate`: tokens per second, equality.

The run is `configs/smoke/chat-gspo.yaml`, on a model that `configs/smoke/chat-sft.yaml` has trained. At each of its rollouts
the engines write the same prompts from the same seed with the weights of that step, two at a time and in turns. The run goes on
with what transformers wrote.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import cogumi
from benchmarks.harness import ROOT, Row, quiet, ratio_row, values_row
from cogumi.methods import gspo
from cogumi.patches import replaced
from cogumi.patches.trl_internals import GENERATE_TURN
from cogumi.rl import generation

CONFIGS = ROOT / "configs" / "smoke"
QUICK_STEPS = {"sft": 15, "gspo": 2}
BFLOAT16_STEPS = 12
Turn = Callable[..., Any]  # prompt ids, images, multimodal fields, copies -> completion ids, log-probabilities


BASELINE, CHOSEN = "transformers", "transformers, needless rows skipped"


class Comparison:
    """Takes the place of a trainer's sampler, and measures the engines at each rollout.

    Attributes:
        speeds: Tokens/s by engine, a figure for each rollout.
        equal: Completions that both engines wrote alike, of `written`.
    """

    def __init__(self, trainer: Any) -> None:
        plain: Turn = getattr(trainer, GENERATE_TURN)  # what TRL calls: `model.generate`
        with replaced(trainer, {GENERATE_TURN: plain}):
            generation.share_prefill_and_drop_finished(trainer)
            self.turns: dict[str, Turn] = {CHOSEN: getattr(trainer, GENERATE_TURN), BASELINE: plain}
        self.speeds: dict[str, list[float]] = {name: [] for name in self.turns}
        self.equal = self.written = 0
        self.wait = torch.cuda.synchronize if torch.cuda.is_available() else nullcontext
        setattr(trainer, GENERATE_TURN, self.generate)

    def generate(self, *args: Any) -> Any:
        rollouts = len(self.speeds[BASELINE])
        if rollouts == 0:
            for name in self.turns:  # warms up
                self.timed(name, args)
        results = {}
        for name in list(self.turns)[:: -1 if rollouts % 2 else 1]:
            results[name], speed = self.timed(name, args)
            self.speeds[name].append(speed)
        completions = [list(map(list, results[name][0])) for name in (BASELINE, CHOSEN)]
        self.equal += sum(one == other for one, other in zip(*completions, strict=True))
        self.written += len(completions[0])
        return self.turns[BASELINE](*args)

    def timed(self, name: str, args: Any) -> tuple[Any, float]:
        """Return what an engine wrote, and its tokens/s. The generators stay as they are."""
        with torch.random.fork_rng():
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


def engine_rows(case: str, compared: Comparison, target: str = "") -> Iterator[Row]:
    """Yield tokens/s, the ratio to transformers over adjacent pairs with its spread, and the share of equal completions."""
    for name in (BASELINE, CHOSEN):
        yield values_row("rollouts", case, name, compared.speeds[name], "tokens/s")
    pairs = len(compared.speeds[BASELINE])
    note = f"{compared.equal} of {compared.written} completions as by {BASELINE}; {pairs} pairs"
    metric = f"tokens/s, {CHOSEN} / {BASELINE}"
    yield ratio_row("rollouts", case, metric, compared.speeds, CHOSEN, BASELINE, target=target, note=note)


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
        yield from engine_rows(case, compared, target=">= 1.5")
        if not quick:
            steps = {"model__dtype": "bfloat16", "train__max_steps": BFLOAT16_STEPS}
            compared = compare(model, home / "bfloat16", **steps)
            yield from engine_rows(f"{case}, weights in bfloat16", compared)
