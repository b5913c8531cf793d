"""4-bit layers under Dynamo: each rung of cogumi's ladder, and the one it chooses, beside the global disable.

One process and one thread for each mode, all on the CPU: `global disable` is TORCHDYNAMO_DISABLE=1, the others compile with
a rung of `cogumi.patches.graph_break` put in place by name, and `auto` as probed. They make a step each in turn, the order
reversed in every other round, and a mode's ratio is the median over rounds of its step to another's in the same round.
`auto, again` is a second process of the same kind: what the two differ by is this machine's noise, and no rung counts as
faster that is faster by less. A step is a forward and a backward.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from benchmarks.harness import (
    Row,
    attempt,
    interleave,
    one_line,
    prepared_forks,
    ratio,
    ratio_row,
    row,
    values_row,
)
from cogumi.compile.layers import compile_layers, decoder_layers, prepare_four_bit
from cogumi.patches import graph_break
from cogumi.patches.torch_internals import dynamo_counts
from tests import four_bit_models as models

DISABLED, AUTO, AGAIN = "global disable", "auto", "auto, again"
RUNGS = ("none", "branchless", "break_linear")
MODES: dict[str, str | None] = {DISABLED: None} | {name: name for name in RUNGS} | {AUTO: "auto", AGAIN: "auto"}
# Of rows and lengths: one after the other, so that what is guarded on does change.
BATCHES = 4
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "0",
}
IMPORTED = (
    "benchmarks.graph_break",
    "peft.tuners.lora.bnb",
    "torch._inductor.compile_fx",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.llama.modeling_llama",
)
# At ten times as much plain SGD is unstable, and gradients that agree to 1e-6 at equal weights are 1e-3 apart in 20 steps.
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Model:
    """case: "llama", "gpt-oss", "moe" or "straight line"; count: of its layers, or of experts; tokens: of a sequence, or rows."""

    case: str
    hidden: int
    count: int
    tokens: int
    backend: str = "inductor"
    fullgraph: bool = False


class Mode:
    """The process that runs models one way. `choice` is graph_break's; None is the global disable."""

    def __init__(self, name: str, choice: str | None, caches: Path) -> None:
        self.name, self.choice, self.caches = name, choice, caches
        self.process = ProcessPoolExecutor(1, prepared_forks(IMPORTED), initializer=begin, initargs=(choice,))

    def open(self, model: Model, choice: str | None = None) -> None:
        """Build this model in the place of the one before; `choice` is another than the mode's for once."""
        self.process.submit(open_model, model, choice or self.choice, self.caches).result()

    def ask(self, what: str, *arguments: Any) -> Any:
        """What a method of Work returns; RuntimeError with what it raised, in the mode's name."""
        return self.process.submit(ask_model, self.name, what, arguments).result()


@contextmanager
def processes(choices: Mapping[str, str | None], caches: Path) -> Iterator[dict[str, Mode]]:
    with ExitStack() as pools:
        modes = {name: Mode(name, choice, caches) for name, choice in choices.items()}
        for mode in modes.values():
            pools.enter_context(mode.process)
        yield modes


def begin(choice: str | None) -> None:
    os.environ |= ENVIRONMENT
    if choice is None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # which torch reads at each call of torch.compile


opened: list[Work] = []  # in the process of a mode


def open_model(*arguments: Any) -> None:
    opened.clear()  # the one before, whose memory is wanted
    opened.append(Work(*arguments))


def ask_model(mode: str, what: str, arguments: tuple[Any, ...]) -> Any:
    try:
        return getattr(opened[0], what)(*arguments)
    except Exception as error:  # noqa: BLE001 - what it is may not be picklable, and the parent raises it
        raise RuntimeError(f"{mode}: {one_line(error)}") from None


@dataclass(frozen=True)
class Prepared:
    """strategy: what was put in place, "" where nothing was; seconds: of the first steps beyond what later ones take."""

    strategy: str
    reason: str
    seconds: float
    graphs: int
    breaks: int
    recompiles: int

    @property
    def counts(self) -> str:
        return f"{self.graphs} / {self.breaks} / {self.recompiles}"


class Work:
    """A model that makes steps in one mode."""

    def __init__(self, wanted: Model, choice: str | None, caches: Path) -> None:
        torch.set_num_threads(1)
        self.wanted, self.choice = wanted, choice
        self.model = self.build()
        self.steps_made = 0
        # What the model before had put in place.
        graph_break.undo()
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        if choice is not None:
            graph_break.apply(choice, self.model)
            # Of one strategy they hold the same code: what was chosen finds what was forced before.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / wanted.case / self.strategy)
            prepare_four_bit(self.model)
            if self.is_transformer:
                compile_layers(self.model, wanted.backend)
            else:
                self.model.compile(backend=wanted.backend, fullgraph=wanted.fullgraph)
        else:  # asked for, and what the global disable is there to make nothing of
            for part in decoder_layers(self.model) or [self.model]:
                part.compile(backend=wanted.backend)

    def build(self) -> Any:
        hidden, count = self.wanted.hidden, self.wanted.count
        if self.wanted.case == "moe":
            return models.moe_layer(hidden, hidden, count)
        make = {"llama": models.llama, "gpt-oss": models.gpt_oss}.get(self.wanted.case, models.straight_line)
        return make(hidden, count)

    @property
    def is_transformer(self) -> bool:
        return self.wanted.case in ("llama", "gpt-oss")

    @property
    def strategy(self) -> str:
        verdict = graph_break.verdict()
        return "" if verdict is None else verdict.strategy

    def batch(self, number: int) -> Tensor:
        if self.is_transformer:
            return models.token_ids(self.model.config.vocab_size, 2, self.wanted.tokens, number)
        return models.hidden_rows(self.wanted.hidden, self.wanted.tokens, number)

    def loss(self, batch: Tensor) -> Tensor:
        if self.is_transformer:
            return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]
        result = self.model(batch)
        return (result[0] if isinstance(result, tuple) else result).square().mean()

    def step(self) -> float:
        """Seconds of a forward and a backward; the gradients are those of this step alone."""
        self.model.zero_grad(set_to_none=True)
        batch = self.batch(self.steps_made % BATCHES)
        self.steps_made += 1
        begun = time.perf_counter()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - begun

    def prepare(self) -> Prepared:
        """Compile by running every batch twice, which is also the warm-up."""
        seconds = [self.step() for _ in range(2 * BATCHES)]
        counts = dynamo_counts()
        return Prepared(
            strategy=self.strategy,
            reason=graph_break.status().reason,
            seconds=sum(seconds) - len(seconds) * min(seconds),
            graphs=counts["graphs"],
            breaks=sum(counts["breaks"].values()),
            recompiles=counts["recompiles"],
        )

    def train(self, steps: int) -> tuple[list[float], list[Any], dict[str, int]]:
        """Losses and gradients (all in one row) of SGD steps, and how often an expert got no rows, if uncompiled."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        losses, gradients = [], []
        counting: Any = models.counted_rows(self.model) if self.choice is None else nullcontext({})
        with counting as counts:
            for number in range(steps):
                optimizer.zero_grad()
                loss = self.loss(self.batch(number % BATCHES))
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
                taken = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
                gradients.append(torch.cat([each.flatten() for each in taken]).numpy())
                optimizer.step()
        return losses, gradients, dict(counts)


LLAMA, GPT_OSS = Model("llama", 128, 2, 16), Model("gpt-oss", 64, 2, 3)
QUICK_MODES = (DISABLED, "break_linear", AUTO, AGAIN)


# A name, the model whose steps are timed, and the rounds.
Case = tuple[str, Model, int]
FULL: tuple[Case, ...] = (
    ("Llama, 4-bit + LoRA + checkpointing, H=512, 2 x 64 tokens", Model("llama", 512, 4, 64), 30),
    ("MoE layer, 8 Linear4bit experts, H=512, 256 rows", Model("moe", 512, 8, 256), 60),
)
QUICK: tuple[Case, ...] = (
    ("Llama, H=64", Model("llama", 64, 1, 16, backend="aot_eager"), 3),
    ("MoE layer, H=64", Model("moe", 64, 2, 16, backend="aot_eager"), 3),
)


def run(quick: bool = False) -> Iterator[Row]:
    choices = {name: choice for name, choice in MODES.items() if not quick or name in QUICK_MODES}
    with tempfile.TemporaryDirectory(prefix="cogumi-graph-break-") as name, processes(choices, Path(name)) as modes:
        for case in QUICK if quick else FULL:
            yield from attempt("graph_break", case[0], partial(timed_rows, modes, *case, judged=not quick))
        yield from attempt("graph_break", "captured", partial(captured_rows, modes[AUTO]))
        trained = (5, ("aot_eager",)) if quick else (20, ("aot_eager", "inductor"))
        for model in (GPT_OSS,) if quick else (LLAMA, GPT_OSS):
            yield from attempt("graph_break", model.case, partial(equality_rows, modes, model, *trained))


def timed_rows(modes: dict[str, Mode], case: str, model: Model, rounds: int, judged: bool) -> Iterator[Row]:
    """What each mode made of the model and how long a step takes. `judged` is whether a target is to be met."""
    made: dict[str, Prepared] = {}
    for name, mode in modes.items():
        mode.open(model)
        made[name] = found = mode.ask("prepare")
        if name != DISABLED:
            note = f"{found.strategy}: {found.reason}" if name == AUTO else ""
            yield row("graph_break", case, f"graphs / breaks / recompiles, {name}", found.counts, note=note)
            how = "from the cache of the same rung" if name in (AUTO, AGAIN) else "nothing cached"
            yield row("graph_break", case, f"compiling, {name}", found.seconds, "s", note=how)
    times = interleave({name: partial(mode.ask, "step") for name, mode in modes.items()}, rounds, warmup=0)
    for name, seconds in times.items():
        yield values_row("graph_break", case, f"step, {name}", [1e3 * each for each in seconds], "ms")
    for name in modes:
        if name != DISABLED:
            yield compared(case, times, name, DISABLED, "<= 0.90" if judged and name == AUTO else "")
    yield against_the_best(case, times, made, judged)


def compared(case: str, times: dict[str, list[float]], ours: str, theirs: str, target: str = "", note: str = "") -> Row:
    return ratio_row("graph_break", case, f"step, {ours} / {theirs}", times, ours, theirs, target=target, note=note)


def against_the_best(case: str, times: dict[str, list[float]], made: dict[str, Prepared], judged: bool) -> Row:
    """The chosen rung beside the fastest of the others."""
    chosen = made[AUTO].strategy
    others = [name for name in RUNGS if name in times and name != chosen]
    best = min(others, key=lambda name: ratio(times, name, AUTO)[0])
    alike = [AGAIN, *(name for name in RUNGS if name in times and name == chosen)]
    allowed = 1 + max(noise(times, AUTO, name) for name in alike)
    note = f"fastest of the other rungs; {AUTO} differs from {' and '.join(alike)} by up to {allowed - 1:.1%}"
    return compared(case, times, AUTO, best, f"<= {allowed:.3f}" if judged else "", note)


def noise(times: dict[str, list[float]], one: str, other: str) -> float:
    """How far the ratio of two modes that run the same code is from 1, and two standard errors of its median more."""
    pairs = [a / b for a, b in zip(times[one], times[other], strict=True)]
    middle = statistics.median(pairs)
    deviation = 1.4826 * statistics.median(abs(each - middle) for each in pairs)
    return abs(middle - 1) + 2 * 1.2533 * deviation / len(pairs) ** 0.5


def captured_rows(mode: Mode) -> Iterator[Row]:
    cases: dict[str, tuple[Model, str | None]] = {
        "straight line of 4 Linear4bit, fullgraph": (Model("straight line", 128, 4, 32, "aot_eager", True), None),
        "MoE layer, branchless, fullgraph": (Model("moe", 64, 3, 32, "aot_eager", True), "branchless"),
    }
    for case, (model, choice) in cases.items():
        mode.open(model, choice)
        found, wanted = mode.ask("prepare").counts, "1 / 0 / 0"
        yield row("graph_break", case, "graphs / breaks / recompiles", found, target=wanted, ok=found == wanted)


def equality_rows(modes: dict[str, Mode], model: Model, steps: int, backends: tuple[str, ...]) -> Iterator[Row]:
    """Losses and gradients of a training that is compiled and of one that is not, both from the same weights."""
    case = f"{steps} SGD steps, 4-bit {model.case} + LoRA + checkpointing"
    modes[DISABLED].open(model)
    losses, gradients, rows = modes[DISABLED].ask("train", steps)
    if model.case == "gpt-oss":
        note = f"of {rows['calls']} calls of an expert"
        yield row("graph_break", case, "calls of an expert with zero rows", rows["zero rows"], target=">= 1", note=note)
    for backend in backends:
        modes[AUTO].open(replace(model, backend=backend))
        ours, their_gradients, _ = modes[AUTO].ask("train", steps)
        target = "<= 0" if backend == "aot_eager" else "<= 1e-5"
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=True))
        note = f"{losses[0]:.3f} to {losses[-1]:.3f}"
        yield row("graph_break", case, f"loss, {backend} - eager, relative", apart, target=target, note=note)
        apart = max(relative_distance(a, b) for a, b in zip(their_gradients, gradients, strict=True))
        metric = f"gradient, |{backend} - eager| / |eager|"
        yield row("graph_break", case, metric, apart, target=target, note="the worst step")


def relative_distance(ours: Any, theirs: Any) -> float:
    difference = ours.astype("float64") - theirs.astype("float64")
    return float((difference**2).sum() ** 0.5 / (theirs.astype("float64") ** 2).sum() ** 0.5)
